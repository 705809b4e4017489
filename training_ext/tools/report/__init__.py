"""The report on how good a checkpoint's normalizers are: `python -m open_clip_ext.normalizers_report`."""
