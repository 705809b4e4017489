"""The rows of the train data: what a sample is, how many there are, and whether they are the same as in another run."""

import hashlib
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field

import pandas as pd

from open_clip_ext import factory
from open_clip_ext.errors import InputError
from training_ext.data.captions import Pictures, SeenCaptions, captions_of_samples, is_empty, see
from training_ext.data.first_look import look_at_lines, look_at_shards
from training_ext.data.keys import check_column, key_flag, key_name, key_of_samples, open_csv
from training_ext.data.pair_folders import is_folder
from training_ext.data.shards import Shards, check_missing, digest_of_list, find_shards, shard_urls


@dataclass(frozen=True)
class DataRows:
    """The rows of the train data.

    Args:
        kind: webdataset, csv, synthetic or shapes.
        num_rows: n.
        digest: equal for two runs if their rows are the same samples.
        shards: offsets and sizes, for a webdataset whose samples were counted; else n is --train-num-samples.
        listing: of a webdataset, equal for two runs if their shards have the same names.
        captions: of a csv, the digest in checkpoints of earlier versions, which does not cover the images.
        seen: captions of a csv or of local shards.
    """

    kind: str
    num_rows: int
    digest: str
    shards: Shards | None = None
    listing: str | None = None
    captions: str | None = None
    seen: SeenCaptions | None = field(default=None, compare=False)

    @property
    def counted(self) -> bool:
        """Whether n is the number of samples."""
        return self.listing is None or self.shards is not None


def needs_index(args: Namespace) -> bool:
    """Whether the chosen loss keeps state per sample."""
    return args.uses_ext_loss and any(part.needs_index for part in factory.parts_of(args.loss, vars(args)))


def check_usable(args: Namespace) -> SeenCaptions | None:
    """Check that the train data exist and that the first samples have usable pairs.

    Returns:
        The captions of the first samples of local shards.

    Raises:
        InputError: more shards or lines are missing than --max-bad-samples allows, or nothing is usable.
    """
    kind = kind_of(args, args.train_data)
    if kind == "csv":
        read_csv(args, args.train_data, max_bad=tolerated(args))
    elif kind == "webdataset":
        urls = shard_urls(args.train_data)
        missing = check_missing(urls, max_bad=tolerated(args))
        urls = [url for url in urls if url not in missing]
        return look_at_shards(urls, key_of_samples(args), captions_of_samples(args))
    return None


def find_rows(args: Namespace) -> DataRows:
    """Find the rows of `--train-data`; reads headers and captions, writes nothing but the cache of shard sizes.

    Shards are not read if the number of samples is given and the loss has no state per sample.

    Raises:
        InputError: the data cannot be read, or their rows cannot be counted; the message says what to provide.
    """
    kind, shard_sizes = kind_of(args, args.train_data), getattr(args, "shard_sizes", None)
    several_captions = getattr(args, "several_captions", None)
    if kind == "webdataset":
        if args.train_num_samples is not None and not needs_index(args):
            if shard_sizes:
                raise InputError(f"--loss {args.loss} with --train-num-samples does not use it", "--shard-sizes")
            caption_summary = check_usable(args)
            listing = digest_of_list(args.train_data)
            return DataRows(kind, args.train_num_samples, listing, listing=listing, seen=caption_summary)
        shards = find_shards(args.train_data, shard_sizes, max_bad=tolerated(args))
        urls = [url for url in shards.urls if shards.size_of[url]]
        caption_summary = look_at_shards(urls, key_of_samples(args), captions_of_samples(args))
        listing = digest_of_list(args.train_data)
        return DataRows(kind, shards.num_rows, shards.digest, shards, listing, seen=caption_summary)
    if shard_sizes:
        raise InputError(f"--dataset-type {kind} has no shards and does not use it", "--shard-sizes")
    if kind == "csv":
        table = read_csv(args, args.train_data, max_bad=tolerated(args))
        check_column(args, table)
        captions = table[args.csv_caption_key]
        if len(captions) == 0:
            raise InputError(f"{args.train_data!r} has no rows below its header", "--train-data")
        lines = hashlib.sha256()
        for number, caption in enumerate(captions):
            lines.update(b"\x1f" * bool(number) + str(caption).encode())
        num_rows = len(captions)
        if several_captions:
            pictures = Pictures(table[args.csv_img_key].tolist())
            if (name := key_name(args)) is not None:
                pictures.check_alike(table[name], table[args.csv_img_key], key_flag(args))
            num_rows = len(pictures)
            lines.update(pictures.of.astype("<i8").tobytes())
        by_captions = lines.hexdigest()
        for path in below_common_folder(table[args.csv_img_key]):
            lines.update(b"\x1f" + path.encode(errors="surrogateescape"))
        images = table[args.csv_img_key] if several_captions else None
        caption_summary = see(captions, images, "the {} captions")
        return DataRows(kind, num_rows, lines.hexdigest(), captions=by_captions, seen=caption_summary)
    if not args.train_num_samples or args.train_num_samples < 1:
        raise InputError(f"{args.train_num_samples} with --dataset-type {kind}; give at least 1", "--train-num-samples")
    seed = args.shapes_seed if kind == "shapes" else None
    shifted = " shifted" if getattr(args, "shapes_shifted", None) else ""
    digest = hashlib.sha256(f"{kind} {args.train_num_samples} {seed}{shifted}".encode()).hexdigest()
    return DataRows(kind, args.train_num_samples, digest)


def tolerated(args: Namespace) -> float | None:
    """The share of the data that may be unusable, where a component has a flag for it."""
    return getattr(args, "max_bad_samples", None)


def below_common_folder(images: pd.Series) -> Iterator[str]:
    """Each path without the longest folder that all have, since moved images are the same data; "" of an empty cell."""
    paths = images.dropna()
    folder = os.path.commonprefix([paths.min(), paths.max()]).rpartition("/")[0] if len(paths) else ""
    return (path[len(folder):] for path in images.fillna(""))


def kind_of(args: Namespace, path: str, flag: str = "--train-data") -> str:
    """The kind of the data at `path`, by OpenCLIP's own rule; a folder is read as a csv."""
    if is_folder(path, args.dataset_type):
        return "csv"
    if args.dataset_type != "auto":
        return args.dataset_type
    kind = {"tar": "webdataset", "csv": "csv", "tsv": "csv"}.get(path.rpartition(".")[2])
    if kind is None:
        raise InputError(f"{path!r} is no folder, .csv, .tsv or .tar; give --dataset-type", flag)
    return kind


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
