"""Find the pairs of folders, csv and parquet files, in an order by seed; only images in a parquet are read for that."""

import hashlib
import os
import threading
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Any

import pandas as pd

from open_clip_ext.errors import InputError
from training_ext.core.captions import is_empty
from training_ext.core.folder_files import LeftOut
from training_ext.core.keys import check_columns, open_csv
from training_ext.core.pair_folders import find_pairs, place_of

EMPTY_IMAGE, EMPTY_CAPTION = "lines without image", "images without caption"
HELD_OUT = "images to train on that --val has, too"
_reading = threading.Lock()


@dataclass(frozen=True)
class Pair:
    """An image with its captions.

    Args:
        name: of the image in its source.
        captions: one or more, each without line breaks.
        path: file of the image, or a parquet that has it in `column` of line `row`.
    """

    name: str
    captions: list[str]
    path: str
    row: int | None = None
    column: str = ""

    @property
    def place(self) -> tuple[str, int | None]:
        """Equal for two pairs of the same file."""
        return os.path.realpath(self.path), self.row

    def read(self) -> bytes:
        """The image file."""
        if self.row is None:
            with open(self.path, "rb") as file:
                return file.read()
        with _reading:  # once, whatever the number of threads
            cell = _cells(self.path, self.column)[self.row]
        return cell["bytes"] if isinstance(cell, dict) else cell

    def order(self, seed: int) -> tuple[bytes, int]:
        """By which pairs are shuffled; those whose images are in one parquet stay together, since it is read whole."""
        return (drawn(seed, self.name), 0) if self.row is None else (drawn(seed, self.path), self.row)


def drawn(seed: int, name: str) -> bytes:
    """A random number that depends on the seed and the name."""
    return hashlib.blake2b(f"{seed} {name}".encode(errors="replace"), digest_size=8).digest()


def find_sources(paths: Iterable[str], args: Namespace, flag: str | None, left_out: LeftOut) -> list[Pair]:
    """The pairs of all sources; those with files of their own are shuffled by `--seed`, a parquet's keep their order.

    Args:
        left_out: what is no pair is added to it.

    Raises:
        InputError: a source cannot be read, or there is no pair.
    """
    pairs: list[Pair] = []
    for path in paths:
        if os.path.isdir(path):
            found = find_pairs(path, flag)
            pairs += [Pair(PurePath(os.path.relpath(one, path)).as_posix(), texts, one) for one, texts in found.pairs]
            for why, names in found.left_out.items():
                left_out.setdefault(why, []).extend(names)
        elif path.endswith(".parquet"):
            pairs += _of_parquet(path, args, flag, left_out)
        elif path.endswith((".csv", ".tsv")):
            table = open_csv(args, path, flag, partial(pd.read_csv, path, sep=args.csv_separator, dtype=str))
            pairs += _of_table(table, path, args, left_out)
        else:
            what = "is no folder, .csv, .tsv or .parquet" if os.path.exists(path) else "does not exist"
            raise InputError(f"{path!r} {what}", flag)
    if not pairs:
        told = ", ".join(f"{len(names)} {why}" for why, names in left_out.items()) or "no image with a .txt beside it"
        raise InputError(f"there are no pairs: {told}", flag)
    by_place: dict[tuple[str, int | None], Pair] = {}
    for pair in pairs:
        first = by_place.setdefault(pair.place, pair)
        first.captions.extend(text for text in pair.captions if text not in first.captions)
    return sorted(by_place.values(), key=lambda pair: pair.order(args.seed))


def _of_table(table: pd.DataFrame, path: str, args: Namespace, left_out: LeftOut) -> list[Pair]:
    """Pairs of a table with paths of images, relative to the working directory as in OpenCLIP, or to the table."""
    captions: dict[str, list[str]] = {}
    for line, (image, cell) in enumerate(zip(table[args.csv_img_key], table[args.csv_caption_key], strict=True)):
        if is_empty(image):
            left_out.setdefault(EMPTY_IMAGE, []).append(place_of(path, line))
        else:
            captions.setdefault(str(image), []).extend(_texts(cell))
    beside = os.path.dirname(path)
    if any(os.path.exists(image) for image in list(captions)[:100]):
        beside = ""
    for image in [image for image, texts in captions.items() if not texts]:
        left_out.setdefault(EMPTY_CAPTION, []).append(image)
        del captions[image]
    return [Pair(image, texts, os.path.join(beside, image)) for image, texts in captions.items()]


def _of_parquet(path: str, args: Namespace, flag: str | None, left_out: LeftOut) -> list[Pair]:
    try:
        from pyarrow import parquet, types
    except ImportError:
        raise InputError(f"{path!r} needs pyarrow; pip install pyarrow, or give a csv", flag) from None
    names = [args.csv_img_key, args.csv_caption_key]
    try:
        schema = parquet.read_schema(path)
        check_columns(args, schema.names, path)
        kind = schema.field(args.csv_img_key).type
        holds_images = types.is_binary(kind) or types.is_large_binary(kind) or types.is_struct(kind)
        table = pd.read_parquet(path, columns=names[1:] if holds_images else names)
    except InputError:
        raise
    except Exception as error:  # pyarrow's own kinds
        raise InputError(f"{path!r} cannot be read: {' '.join(str(error).split())[:200]}", flag) from None
    if not holds_images:
        return _of_table(table, path, args, left_out)
    pairs: dict[bytes, Pair] = {}  # by image
    for row, (image, cell) in enumerate(zip(_cells(path, args.csv_img_key), table[args.csv_caption_key], strict=True)):
        if texts := _texts(cell):
            content = image["bytes"] if isinstance(image, dict) else image
            key = hashlib.sha256(content or str(row).encode()).digest()
            pair = Pair(f"{os.path.basename(path)}:{row}", [], path, row, args.csv_img_key)
            pairs.setdefault(key, pair).captions.extend(texts)
        else:
            left_out.setdefault(EMPTY_CAPTION, []).append(f"{path}:{row}")
    return list(pairs.values())


def _texts(cell: Any) -> list[str]:
    """The captions in a cell, which is one or, in a parquet, a list of them."""
    cells = [cell] if isinstance(cell, str) or pd.api.types.is_scalar(cell) else list(cell)
    return [" ".join(str(text).split("\n")).strip() for text in cells if not is_empty(text)]


@lru_cache(maxsize=1)
def _cells(path: str, column: str) -> list[Any]:
    return pd.read_parquet(path, columns=[column])[column].tolist()
