"""The rows of a csv, or of a folder of pairs, and a look at its first images."""

import hashlib
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

import pandas as pd
from PIL import Image

from open_clip_ext.errors import InputError, reason_of
from training_ext.core.plan import world_info
from training_ext.data.images import spread, warn_of_images
from training_ext.data.keys import key_flag, key_name
from training_ext.data.rows import DataRows, kind_of, tolerated
from training_ext.data.seen_captions import see
from training_ext.data.tables import LOOKED_AT, is_empty, open_csv, place_of, read_table
from training_ext.openclip.loading import warn_once


def find(args: Namespace) -> DataRows:
    """The rows of --train-data; raises InputError as `rows.find_rows`."""
    table = read_csv(args, args.train_data, max_bad=tolerated(args))
    name = key_name(args)
    if name is not None and name not in table.columns:
        columns = ", ".join(map(repr, table.columns))
        raise InputError(f"{args.train_data!r} has no column {name!r}; its columns are {columns}", key_flag(args))
    captions = table[args.csv_caption_key]
    if len(captions) == 0:
        raise InputError(f"{args.train_data!r} has no rows below its header", "--train-data")
    check_held_out(args, table[args.csv_img_key])
    lines = hashlib.sha256()
    for number, caption in enumerate(captions):
        lines.update(b"\x1f" * bool(number) + str(caption).encode())
    num_rows = len(captions)
    images = None
    if getattr(args, "several_captions", None):
        from training_ext.data.captions import Pictures

        pictures = Pictures(table[args.csv_img_key].tolist())
        if name is not None:
            pictures.check_alike(table[name], table[args.csv_img_key], key_flag(args))
        num_rows = len(pictures)
        lines.update(pictures.of.astype("<i8").tobytes())
        images = table[args.csv_img_key]
    by_captions = lines.hexdigest()
    for path in below_common_folder(table[args.csv_img_key]):
        lines.update(b"\x1f" + path.encode(errors="surrogateescape"))
    seen = see(captions, images, "the {} captions")
    if images is None:
        seen = replace(seen, images=int(table[args.csv_img_key].dropna().duplicated(keep=False).sum()))
    return DataRows("csv", num_rows, lines.hexdigest(), captions=by_captions, seen=seen)


def check_held_out(args: Namespace, trained: pd.Series) -> None:
    """Warn of images of --val-data among those that are trained on."""
    if not args.val_data or kind_of(args, args.val_data, "--val-data") != "csv":
        return
    try:
        table = read_table(args, args.val_data, sep=args.csv_separator)
        images = {os.path.abspath(image) for image in table[args.csv_img_key].dropna()}
    except Exception:  # `flags.val_data` tells it
        return
    names = set(map(os.path.basename, images))  # since all of the paths take seconds a million
    candidates = (image for image in trained.dropna() if os.path.basename(image) in names)
    shared = images.intersection(map(os.path.abspath, candidates))
    if shared and world_info()[1] == 0:
        warn_once(
            f"--val-data: {len(shared)} of {len(images)} images of {args.val_data!r} are trained on, too, such as "
            f"{min(shared)!r}, so that its metrics are too good; split by image, with all of its captions on one side"
        )


def below_common_folder(images: pd.Series) -> Iterator[str]:
    """Each path without the longest folder that all have, since moved images are the same data; "" of an empty cell."""
    paths = images.dropna()
    folder = os.path.commonprefix([paths.min(), paths.max()]).rpartition("/")[0] if len(paths) else ""
    return (path[len(folder):] for path in images.fillna(""))


def read_csv(
    args: Namespace, path: str, flag: str = "--train-data", max_bad: float | None = None
) -> pd.DataFrame:
    """The csv as OpenCLIP reads it, or a folder, with images and captions as text.

    Raises:
        InputError: it cannot be read, lacks the named columns, has empty cells in them in more than a share of
            `max_bad` of its lines (none by default), or none of its first images can be read.
    """
    table = open_csv(args, path, flag)
    if os.path.isdir(path) and table.empty:
        shards = " (for shards give their files, such as '{00000..00099}.tar')"
        raise InputError(f"{path!r} has no image with a caption in a .txt of the same name{shards}", flag)
    cells = table[[args.csv_img_key, args.csv_caption_key]].apply(lambda column: column.map(is_empty))
    empty = cells.any(axis=1).to_numpy().nonzero()[0]
    if len(empty) and len(empty) / len(table) > (max_bad or 0):
        column = cells.columns[cells.iloc[empty[0]]][0]
        remedy = "fill or remove it" + ("" if flag == "--val-data" else ", or skip such lines by --max-bad-samples")
        raise InputError(
            f"{len(empty)} of {len(table)} lines of {path!r} have an empty cell, the first line {empty[0] + 2} "
            f"in column {column!r} (words such as NA and null count as empty); {remedy}",
            flag,
        )
    look_at_lines(table, args.csv_img_key, path, flag)
    return table


def look_at_lines(table: pd.DataFrame, image_key: str, path: str, flag: str = "--train-data") -> None:
    """Open the first images of a csv up to the first readable one, and warn of some.

    Raises:
        InputError: none of them can be read.
    """
    first_problem = None
    images = table[image_key].dropna()
    first_images = images.head(LOOKED_AT)
    for row, image in first_images.items():
        try:
            Image.open(str(image)).load()
            warn_of_images(((str(image), str(image)) for image in spread(images.tolist())), flag)
            return
        except Exception as error:
            first_problem = first_problem or f"{place_of(path, row)} names {str(image)!r}: {reason_of(error)}"
    if first_problem is not None:
        raise InputError(f"none of the first {len(first_images)} images of {path!r} can be read; {first_problem}", flag)
