"""Find the pairs of folders, csv and parquet files, in an order by seed; only images in a parquet are read for that."""

import hashlib
import os
import threading
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import pandas as pd

from open_clip_ext.errors import InputError, one_line
from training_ext.data.folder_files import LeftOut
from training_ext.data.pair_folders import find_pairs
from training_ext.data.tables import check_columns, from_folder_of, is_empty, open_csv, place_of

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
            content = _contents(_images(self.path, self.column)[self.row])
        assert content is not None  # lines without an image are no pairs
        return content

    def file_size(self) -> int:
        """Bytes of the file that has the image; 0 if there is none."""
        try:
            return os.path.getsize(self.path)
        except OSError:
            return 0

    def order(self, seed: int) -> tuple[bytes, bytes]:
        """By which pairs are shuffled; those whose images are in one parquet stay together, since it is read whole."""
        return drawn(seed, self.name if self.row is None else self.path), drawn(seed, self.name)


def drawn(seed: int, name: str) -> bytes:
    """A random number that depends on the seed and the name."""
    return hashlib.blake2b(f"{seed} {name}".encode(errors="replace"), digest_size=8).digest()


def find_sources(paths: Iterable[str], args: Namespace, flag: str | None, left_out: LeftOut) -> list[Pair]:
    """The pairs of all sources, shuffled by `--seed`; those of a parquet among themselves.

    Args:
        left_out: what is no pair is added to it.

    Raises:
        InputError: a source cannot be read, or there is no pair.
    """
    pairs: list[Pair] = []
    for path in paths:
        if os.path.isdir(path):
            in_folder, no_pairs = find_pairs(path, flag)
            for image, texts in in_folder:
                pairs.append(Pair(PurePath(os.path.relpath(image, path)).as_posix(), texts, image))
            for why, names in no_pairs.items():
                left_out.setdefault(why, []).extend(names)
        elif path.lower().endswith(".parquet"):
            pairs += _of_parquet(path, args, flag, left_out)
        elif path.lower().endswith((".csv", ".tsv")):
            table = open_csv(args, path, flag)
            captions = ([cell] for cell in table[args.csv_caption_key])
            pairs += _of_table(table[args.csv_img_key], captions, path, left_out)
        else:
            problem = "is no folder, .csv, .tsv or .parquet" if os.path.exists(path) else "does not exist"
            raise InputError(f"{path!r} {problem}", flag)
    if not pairs:
        reasons = ", ".join(f"{len(names)} {why}" for why, names in left_out.items())
        raise InputError(f"there are no pairs: {reasons or 'no image with a .txt beside it'}", flag)
    by_place: dict[tuple[str, int | None], Pair] = {}
    for pair in pairs:
        merged_pair = by_place.setdefault(pair.place, pair)
        merged_pair.captions.extend(text for text in pair.captions if text not in merged_pair.captions)
    return sorted(by_place.values(), key=lambda pair: pair.order(args.seed))


def _of_table(
    images: Iterable[Any], captions_of_lines: Iterable[Iterable[Any]], path: str, left_out: LeftOut
) -> list[Pair]:
    """Pairs of lines with paths of images, which are named from the table's folder if they are below it."""
    captions: dict[str, list[str]] = {}
    for line, (image, cells) in enumerate(zip(images, captions_of_lines, strict=True)):
        if is_empty(image):
            left_out.setdefault(EMPTY_IMAGE, []).append(place_of(path, line))
        else:
            captions.setdefault(str(image), []).extend(_texts(cells))
    folder = os.path.join(os.path.dirname(path), "")
    for image in [image for image, texts in captions.items() if not texts]:
        left_out.setdefault(EMPTY_CAPTION, []).append(image)
        del captions[image]
    return [Pair(image.removeprefix(folder), texts, image) for image, texts in captions.items()]


def _of_parquet(path: str, args: Namespace, flag: str | None, left_out: LeftOut) -> list[Pair]:
    try:
        from pyarrow import parquet, types
    except ImportError:
        raise InputError(f"{path!r} needs pyarrow; pip install pyarrow, or give a csv", flag) from None
    try:
        schema = parquet.read_schema(path)
        check_columns(args, schema.names, path)
        of_images, of_captions = (schema.field(name).type for name in (args.csv_img_key, args.csv_caption_key))
        steps = place_of_text(of_captions)
        if steps is None and not (types.is_integer(of_captions) or types.is_floating(of_captions)):
            problem = f"{path!r} has {str(of_captions)[:100]} in column {args.csv_caption_key!r}"
            raise InputError(f"{problem}; give one of texts, or of lists or structs with one text", "--csv-caption-key")
        is_struct = types.is_struct(of_images) and of_images.get_field_index("bytes") >= 0
        holds_images = is_struct or types.is_binary(of_images) or types.is_large_binary(of_images)
        if not holds_images and place_of_text(of_images) != ():
            problem = f"{path!r} has {str(of_images)[:100]} in column {args.csv_img_key!r}"
            expected = "paths, of files' bytes, or of structs with `bytes`"
            raise InputError(f"{problem}; give one of {expected}", "--csv-img-key")
        captions = [_at(cell, steps or ()) for cell in _cells(path, args.csv_caption_key)]
        images = _images(path, args.csv_img_key)
    except InputError:
        raise
    except Exception as error:  # pyarrow's own kinds
        raise InputError(f"{path!r} cannot be read: {one_line(error)}", flag) from None
    if is_struct and not any(map(_contents, images)):
        images, holds_images = [cell and cell.get("path") for cell in images], False
    if not holds_images:
        return _of_table(from_folder_of(path, pd.Series(images, dtype=object)), captions, path, left_out)
    pairs: dict[bytes, Pair] = {}  # by image
    for row, (image, cells) in enumerate(zip(images, captions, strict=True)):
        content = _contents(image)
        if not content:
            left_out.setdefault(EMPTY_IMAGE, []).append(place_of(path, row))
        elif texts := _texts(cells):
            key = hashlib.sha256(content).digest()
            pair = Pair(f"{os.path.basename(path)}:{row}", [], path, row, args.csv_img_key)
            pairs.setdefault(key, pair).captions.extend(texts)
        else:
            left_out.setdefault(EMPTY_CAPTION, []).append(f"{path}:{row}")
    return list(pairs.values())


Steps = tuple[str | None, ...]
"""The way from a cell to its texts: the name of a struct's field, or None for all elements of a list."""


def place_of_text(kind: Any) -> Steps | None:
    """Where cells of an Arrow type have their text; of several places that in the fewest lists, None if there are more.

    So of COCO's and Flickr's structs it is the caption `raw`, not the `tokens`, which are a list.
    """
    places = sorted(_places_of_text(kind), key=lambda steps: steps.count(None))
    if not places or [steps.count(None) for steps in places].count(places[0].count(None)) > 1:
        return None
    return places[0]


def _places_of_text(kind: Any) -> Iterator[Steps]:
    from pyarrow import types

    if types.is_struct(kind):
        for field in kind:
            yield from ((field.name, *steps) for steps in _places_of_text(field.type))
    elif types.is_dictionary(kind):  # a categorical column, whose cells are its values
        yield from _places_of_text(kind.value_type)
    elif hasattr(kind, "value_type"):
        yield from ((None, *steps) for steps in _places_of_text(kind.value_type))
    elif str(kind) in ("string", "large_string", "string_view", "null"):
        yield ()


def _at(cell: Any, steps: Steps) -> Iterator[Any]:
    if not steps:
        yield cell
    elif cell is not None:
        for one in cell if steps[0] is None else [cell[steps[0]]]:
            yield from _at(one, steps[1:])


def _contents(cell: Any) -> bytes | None:
    """The image file in a cell of a parquet, which may be a struct with `bytes`; None if it has none."""
    return cell["bytes"] if isinstance(cell, dict) else cell


def _texts(cells: Iterable[Any]) -> list[str]:
    return [" ".join(str(text).split("\n")).strip() for text in cells if not is_empty(text)]


def _cells(path: str, column: str) -> list[Any]:
    """The cells as Python's values; pandas would make 1.0 of an integer 1 if another is missing."""
    from pyarrow import parquet

    return parquet.ParquetFile(path).read([column]).column(column).to_pylist()


_images = lru_cache(maxsize=1)(_cells)
