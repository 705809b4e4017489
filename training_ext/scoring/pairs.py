"""Read the user's own pairs for `--val-data`: a csv, shards or a folder of a training, or that of a retrieval task."""

import hashlib
import os
import re
from argparse import Namespace
from dataclasses import replace
from typing import Any

import numpy as np

from open_clip_ext.errors import InputError
from training_ext.data.shards import local_path, shard_urls
from training_ext.data.tables import is_empty, open_csv
from training_ext.scoring.folders import Sample, Shards, Source

FLAG = "--val-data"
CSV = re.compile(r"\.(csv|tsv|txt)(\.(gz|bz2|xz|zip))?$", re.IGNORECASE)
SHARDS = re.compile(r"\.(tar(\.(gz|bz2|xz))?|tgz|tbz2|txz)$", re.IGNORECASE)


class TablePairs(Source):
    """A csv as OpenCLIP reads it, or a folder of images with a .txt of the same name; the lines with the same image are
    its captions."""

    def __init__(self, args: Namespace):
        super().__init__(FLAG, args.val_data)
        self.type = "retrieval"
        columns = [args.csv_img_key, args.csv_caption_key]
        table = open_csv(args, self.folder, FLAG)
        for column in columns:
            empty = table[column].map(is_empty)
            if empty.any():
                raise self.wrong(f"{self.folder!r} has no {column} in line {int(empty.argmax()) + 2}")
        captions_of: dict[str, list[str]] = {}  # pandas' groups have no names that are not UTF-8
        for image, caption in zip(*(table[column] for column in columns), strict=True):
            captions_of.setdefault(image, []).append(caption)
        self.images = list(captions_of.items())
        if not self.images and os.path.isdir(self.folder):
            raise self.wrong(f"{self.folder!r} has neither images with a .txt of the same name nor test/nshards.txt")

    def digest(self) -> str:
        captions = [captions for _, captions in self.images]
        return hashlib.sha256(f"{super().digest()} {captions}".encode()).hexdigest()[:16]


class PairShards(Shards):
    """Shards as for a training, of local files; captions are the lines of a `.txt`, and those of other samples with the
    same image file."""

    def __init__(self, data: str):
        Source.__init__(self, FLAG, data)
        self.type = "retrieval"
        self.shards = []
        for url in shard_urls(data, FLAG):
            path = local_path(url)
            if path is None or not os.path.isfile(path):
                raise self.wrong(f"{url!r} is not a file on this machine")
            self.shards.append(path)

    def _sample(self, *arguments: Any) -> Sample:
        sample = super()._sample(*arguments)
        return replace(sample, fields=np.frombuffer(hashlib.sha256(sample.image).digest(), np.int64))


def open_pairs(args: Namespace) -> Source:
    """Open the pairs of `--val-data`.

    Raises:
        InputError: there are none.
    """
    if os.path.exists(os.path.join(args.val_data, "test", "nshards.txt")):
        source = Shards(FLAG, args.val_data)
        if source.type != "retrieval":
            raise source.wrong(f"{args.val_data!r} is of type {source.type}; give images with captions")
        return source
    if os.path.isdir(args.val_data) or CSV.search(args.val_data):
        return TablePairs(args)
    if SHARDS.search(args.val_data):
        return PairShards(args.val_data)
    raise InputError(
        f"{args.val_data!r} is neither a folder, a .csv, .tsv or .txt nor a .tar, which may be compressed, as .tar.gz; "
        "make_shards writes shards of a .parquet",
        FLAG,
    )
