"""Keys of samples: those with the same key are not each other's negatives, with `--positives` each other's positives.

`--same-key NAME` and `--positives NAME` take them from a column of a csv or a field of the .json in shards,
`--same-caption` and `--positives caption` from the captions. A caption's key is a hash of its tokens, so texts that
differ only beyond the context length have the same key.
"""

import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from open_clip_ext.errors import InputError
from training_ext.core.plan import world_info
from training_ext.data.captions import Pictures, is_empty
from training_ext.data.pair_folders import read_folder
from training_ext.data.tars import fields_of
from training_ext.openclip.loading import warn_once

_NAMED = 10  # fields in a message
CAPTION = "caption"  # what --positives calls the captions
LOOKED_AT = 100  # first images of a table
Keys = Callable[[Tensor, Tensor | None], Tensor]
"""Maps tokens (b, L) and rows (b,) of a batch to its keys, (b,) int64."""


def key_name(args: Namespace) -> str | None:
    """The column of the csv, or field in shards, with the keys; None without. `args` are those of any command."""
    positives = getattr(args, "positives", None)
    return getattr(args, "same_key", None) if positives in (None, CAPTION) else positives


def has_keys(args: Namespace) -> bool:
    of_captions = getattr(args, "same_caption", None) or getattr(args, "positives", None) == CAPTION
    return bool(of_captions) or key_name(args) is not None


def key_flag(args: Namespace) -> str:
    return "--same-key" if getattr(args, "positives", None) is None else "--positives"


def key_argument(args: Namespace) -> str:
    """What the loss calls the keys."""
    return "key" if args.positives is None else "positive_key"


def check_column(args: Namespace, table: pd.DataFrame) -> None:
    """Raise InputError unless the csv has the column of the keys."""
    name = key_name(args)
    if name is not None and name not in table.columns:
        columns = ", ".join(repr(column) for column in table.columns)
        raise InputError(f"{args.train_data!r} has no column {name!r}; its columns are {columns}", key_flag(args))


def read_table(args: Namespace, path: str, read: Callable[..., Any] = pd.read_csv, **more: Any) -> pd.DataFrame:
    """A csv by pandas' `read_csv`, or the pairs of a folder, indexed by position.

    The columns that flags name are text: as numbers they lose leading zeros, and with an empty cell among them the last
    digits. Images are from the current folder, or else from the csv's. Without --loss both are as OpenCLIP has them.
    `args` are those of any command that reads pairs.
    """
    if os.path.isdir(path):
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
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path!r} cannot be read with --csv-separator {args.csv_separator!r}: {reason}", flag
        ) from None
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


def find_keys(args: Namespace, in_shards: bool) -> Keys | None:
    """The function that finds the keys of a batch; None without keys, or if `JsonKey` finds them as shards are read."""
    name = key_name(args)
    if has_keys(args) and name is None:
        return lambda tokens, rows: keys_of_captions(tokens)
    if name is None or in_shards:
        return None
    columns = [name, args.csv_img_key]
    table = read_table(args, args.train_data, sep=args.csv_separator, usecols=columns)
    cells = table[name]
    if getattr(args, "several_captions", None):
        cells = cells[Pictures(table[args.csv_img_key].tolist()).first]
    of_rows = keys_of_cells(cells)
    return lambda tokens, rows: of_rows[rows]


@dataclass(frozen=True)
class JsonKey:
    """The key of a sample: a 64-bit hash of the value of a field in its .json.

    Different values have equal hashes with a probability of 2^-64. An empty value, null or "", equals no other
    sample's: its hash is that of the shard's and the sample's name.
    """

    field: str
    flag: str = "--same-key"

    def __call__(self, sample: dict) -> int:
        """The key, a signed integer, of a sample: a dict of bytes by suffix, with its "__key__" and "__url__".

        Raises:
            InputError: it has no such field; the message names the shard and the sample.
        """
        try:
            fields = fields_of(sample)
        except ValueError as error:
            raise self._error(sample, f"{error}, where the field {self.field!r} is wanted") from None
        if self.field not in fields:
            names = ", ".join(repr(name) for name in list(fields)[:_NAMED]) or "none"
            raise self._error(sample, f"no field {self.field!r} in its .json; its fields are {names}")
        value = fields[self.field]
        if value is None or value == "" or value != value:  # NaN is some writers' missing value
            value = [sample["__url__"], sample["__key__"], "empty"]
        text = json.dumps(value, sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)

    def _error(self, sample: dict, problem: str) -> InputError:
        return InputError(f"sample {sample['__key__']!r} of shard {sample['__url__']!r} has {problem}", self.flag)


def key_of_samples(args: Namespace) -> JsonKey | None:
    """The function that finds the key of a shard's sample as it is read; None if no field has it."""
    name = key_name(args)
    return None if name is None else JsonKey(name, key_flag(args))


def keys_of_cells(cells: pd.Series) -> Tensor:
    """A key for each cell, (n,) int64, equal for equal cells; an empty cell equals no other."""
    codes = torch.from_numpy(pd.factorize(cells)[0].astype("int64"))
    return torch.where(codes >= 0, codes, -1 - torch.arange(len(codes)))


def keys_of_captions(tokens: Tensor) -> Tensor:
    """A hash of each row of tokens (b, L) int64; different rows have equal hashes with a probability of 2^-63."""
    factors = torch.randint(-(2**62), 2**62, (tokens.shape[1],), generator=torch.Generator().manual_seed(0))
    return (tokens * (2 * factors + 1)).sum(dim=1)
