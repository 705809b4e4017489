"""Read a csv, or a folder, of pairs as a table with a line for each."""

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pandas as pd

from open_clip_ext.errors import InputError, one_line
from training_ext.core.plan import world_info
from training_ext.data.keys import key_name
from training_ext.openclip.loading import warn_once

LOOKED_AT = 100  # first images of a table


def is_empty(cell: Any) -> bool:
    """Whether a cell of a csv is empty or white space."""
    return not cell.strip() if isinstance(cell, str) else bool(pd.isna(cell))


def place_of(path: str, row: int) -> str:
    """A row of a csv, whose first line is its header, or of a folder, in words."""
    return f"pair {row + 1} of {path!r}" if os.path.isdir(path) else f"line {row + 2} of {path!r}"


def unusable_line(path: str, row: int, why: str) -> InputError:
    """The error of a row of validation data, all of which metrics must cover."""
    return InputError(f"{place_of(path, row)} cannot be used: {why}; repair or remove it", "--val-data")


def read_table(args: Namespace, path: str, read: Callable[..., Any] = pd.read_csv, **more: Any) -> pd.DataFrame:
    """A csv by pandas' `read_csv`, or the pairs of a folder, indexed by position.

    The columns that flags name are text: as numbers they lose leading zeros, and with an empty cell among them the last
    digits. Images are from the current folder, or else from the csv's. Without --loss both are as OpenCLIP has them.
    `args` are those of any command that reads pairs.
    """
    if os.path.isdir(path):
        from training_ext.data.pair_folders import read_folder

        return read_folder(path, args.csv_img_key, args.csv_caption_key)
    columns = filter(None, (args.csv_img_key, args.csv_caption_key, key_name(args)))
    is_openclips = getattr(args, "loss", "") is None
    as_text = {} if is_openclips else {"dtype": dict.fromkeys(columns, str)}
    # A header with one name fewer than the lines makes labels of the first column.
    table = read(path, **as_text, **more).reset_index(drop=True)
    if not is_openclips and args.csv_img_key in table:
        table[args.csv_img_key] = from_folder_of(path, table[args.csv_img_key])
    if args.csv_caption_key in table:
        _warn_of_joined(table[args.csv_caption_key], path)
    return table


def from_folder_of(path: str, images: pd.Series) -> pd.Series:
    """The images that a table names, joined to its folder if of the first ones some are there and none in the current
    folder."""
    folder = os.path.dirname(path)
    first = [image for image in images.head(LOOKED_AT) if not is_empty(image)]
    if any(map(os.path.exists, first)) or not any(os.path.exists(os.path.join(folder, image)) for image in first):
        return images
    return images.map(lambda image: image if is_empty(image) else os.path.join(folder, image))


def _warn_of_joined(captions: pd.Series, path: str) -> None:
    """Warn of captions over several lines: to pandas, a cell that begins with a quote ends at the next one."""
    breaks = [caption.count("\n") if isinstance(caption, str) else 0 for caption in captions]
    if (most := max(breaks, default=0)) and world_info()[1] == 0:
        joined = [line for line, number in enumerate(breaks) if number]
        warn_once(
            f"{path!r} gives {len(captions)} pairs. {len(joined)} of their captions have line breaks, the first in "
            f"line {joined[0] + 2}, up to {most} in one: if none should have, a quote that begins a caption has "
            "joined the lines up to the next quote; remove such quotes"
        )


def open_csv(args: Namespace, path: str, flag: str | None) -> pd.DataFrame:
    """The csv, or folder, as `read_table` reads it, with the columns of images and captions.

    Raises:
        InputError: it, or a folder in it, cannot be read, or it lacks a column.
    """
    try:
        table = read_table(args, path, sep=args.csv_separator)
    except Exception as error:  # several characters are a pattern to pandas; a path may be a URL, and a file compressed
        if isinstance(error, InputError):
            raise InputError(error.text, flag) from None
        if isinstance(error, FileNotFoundError):
            raise InputError(f"{path!r} does not exist", flag) from None
        problem = f"cannot be read with --csv-separator {args.csv_separator!r}: {one_line(error)}"
        if isinstance(error, UnicodeDecodeError):
            problem = f"is not in UTF-8 ({one_line(error)}); save it as UTF-8"
        raise InputError(f"{path!r} {problem}", flag) from None
    check_columns(args, list(table.columns), path)
    return table


def check_columns(args: Namespace, names: list[str], path: str) -> None:
    """Raise InputError unless the columns of images and captions are among `names`."""
    columns = ", ".join(map(repr, names))
    for key, column in (("--csv-img-key", args.csv_img_key), ("--csv-caption-key", args.csv_caption_key)):
        if column in names:
            continue
        if other := next((other for other in ",\t;|" if len(names) == 1 and other in names[0]), None):
            text = f"{args.csv_separator!r} does not separate {columns}, the first line of {path!r}; give {other!r}"
            raise InputError(text, "--csv-separator")
        separated = "" if path.endswith(".parquet") else f" with --csv-separator {args.csv_separator!r}"
        raise InputError(f"{path!r} has no column {column!r}; its columns{separated} are {columns}", key)
