"""Keys of samples: those with the same key are not each other's negatives, with `--positives` each other's positives.

`--same-key NAME` and `--positives NAME` take them from a column of a csv or a field of the .json in shards,
`--same-caption` and `--positives caption` from the captions. A caption's key is a hash of its tokens, so texts that
differ only beyond the context length have the same key.
"""

from argparse import Namespace

CAPTION = "caption"  # what --positives calls the captions


def key_name(args: Namespace) -> str | None:
    """The column of the csv, or field in shards, with the keys; None without. `args` are those of any command."""
    positives = getattr(args, "positives", None)
    return getattr(args, "same_key", None) if positives in (None, CAPTION) else positives


def has_keys(args: Namespace) -> bool:
    of_captions = getattr(args, "same_caption", None) or getattr(args, "positives", None) == CAPTION
    return bool(of_captions) or key_name(args) is not None


def key_flag(args: Namespace) -> str:
    return "--same-key" if getattr(args, "positives", None) is None else "--positives"
