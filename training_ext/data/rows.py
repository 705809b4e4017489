"""The rows of the train data: what a sample is, how many there are, and whether they are the same as in another run."""

import hashlib
import os
from argparse import Namespace
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from open_clip_ext import factory
from open_clip_ext.errors import InputError

if TYPE_CHECKING:
    from training_ext.data.seen_captions import SeenCaptions
    from training_ext.data.shards import Shards


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
    shards: "Shards | None" = None
    listing: str | None = None
    captions: str | None = None
    seen: "SeenCaptions | None" = field(default=None, compare=False)

    @property
    def counted(self) -> bool:
        """Whether n is the number of samples."""
        return self.listing is None or self.shards is not None


def needs_index(args: Namespace) -> bool:
    """Whether the chosen loss keeps state per sample."""
    return args.uses_ext_loss and any(part.needs_index for part in factory.parts_of(args.loss, vars(args)))


def counts_an_epoch(args: Namespace) -> bool:
    """Whether n is --train-num-samples, the length of an epoch, since a loss without rows leaves shards uncounted."""
    is_given = "train_num_samples" in args.given_flags
    return is_given and kind_of(args, args.train_data or "") == "webdataset" and not needs_index(args)


def find_rows(args: Namespace) -> DataRows:
    """Find the rows of `--train-data`; reads headers and captions, writes nothing but the cache of shard sizes.

    Shards are not read if the number of samples is given and the loss has no state per sample.

    Raises:
        InputError: the data cannot be read, more of them are missing than --max-bad-samples allows, nothing is usable,
            or their rows cannot be counted; the message says what to provide.
    """
    kind = kind_of(args, args.train_data)
    if kind == "webdataset":
        from training_ext.data import counting

        return counting.find(args)
    if getattr(args, "shard_sizes", None):
        raise InputError(f"--dataset-type {kind} has no shards and does not use it", "--shard-sizes")
    if kind == "csv":
        from training_ext.data import csv_rows

        return csv_rows.find(args)
    if not args.train_num_samples or args.train_num_samples < 1:
        raise InputError(f"{args.train_num_samples} with --dataset-type {kind}; give at least 1", "--train-num-samples")
    seed = args.shapes_seed if kind == "shapes" else None
    shifted = " shifted" if getattr(args, "shapes_shifted", None) else ""
    digest = hashlib.sha256(f"{kind} {args.train_num_samples} {seed}{shifted}".encode()).hexdigest()
    return DataRows(kind, args.train_num_samples, digest)


def tolerated(args: Namespace) -> float | None:
    """The share of the data that may be unusable, where a component has a flag for it."""
    return getattr(args, "max_bad_samples", None)


def is_folder(path: str | None, dataset_type: str) -> bool:
    """Whether `--dataset-type` and the path of the data mean such a folder."""
    return dataset_type == "folder" or (dataset_type == "auto" and os.path.isdir(path or ""))


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
