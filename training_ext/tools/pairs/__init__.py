"""The user's own pairs as shards: `python -m open_clip_ext.make_shards`."""
