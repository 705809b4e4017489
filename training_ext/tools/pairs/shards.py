"""Write shards: tars that are complete or absent, whose bytes depend on their samples only."""

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from webdataset import TarWriter

from open_clip_ext.files import whole_file

SIZES = "sizes.json"  # tells OpenCLIP the number of samples in each shard


def write_shard(path: str | os.PathLike, samples: Iterable[dict[str, Any]]) -> int:
    """Write samples, bytes by suffix with their `__key__`, and return how many they are."""
    number = 0
    with whole_file(path) as stream, TarWriter(stream, user="", group="", mode=0o644, mtime=0, encoder=False) as tar:
        for sample in samples:
            tar.write(sample)
            number += 1
    return number


def pattern(folder: Path, split: str, shards: int) -> str:
    """The shards of a split for `--train-data` or `--val-data`, for a shell."""
    numbers = "000000" if shards == 1 else f"{{000000..{shards - 1:06d}}}"
    # Forward slashes on every platform: brace expansion reads a backslash as an escape.
    return shlex.quote((folder / f"{split}-{numbers}.tar").as_posix())


def why_unfit(folder: str) -> str | None:
    """Why shards in this folder could not be named: brace expansion reads such marks, and webdataset takes NAME: for a
    protocol; None if they can."""
    marks = ("{", "}", "::", *["\\"] * (os.sep == "/"))
    if not folder or any(mark in folder for mark in marks) or re.match(r"\w\w+:", folder):
        return f"must be a folder's name without {' '.join(marks)} and 'NAME:' in front, got {folder!r}"
    return None
