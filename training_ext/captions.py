"""Several captions a picture, of which one is drawn each epoch: the picture stays one sample with one row.

The draw depends on the run's seed, the epoch and the picture alone, so that it is the same for any number of processes
and loader workers, and in a run that is resumed. The pictures of a csv are told by their path, those of shards by their
sample's name.
"""

import hashlib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from open_clip_train.data import SharedEpoch

from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of
from training_ext.sample_json import fields_of
from training_ext.seeding import CAPTION, seed_of

FLAGS = {"several_captions": "csv", "captions_field": "webdataset"}  # with the kind of data that each is for


def check_captions(args: Namespace, kind: str) -> None:
    """Raise InputError unless the flags of this module are for the kind of the train data, as `data.kind_of` says."""
    for name, of_kind in FLAGS.items():
        if getattr(args, name) and kind != of_kind:
            other = {"csv": "; give --several-captions", "webdataset": "; give --captions-field"}.get(kind, "")
            raise InputError(f"{flag_of(name)}: is for {of_kind}, and the train data are {kind}{other}")


def drawn(captions: Sequence[Any], seed: int, epoch: int, picture: int) -> Any:
    """One of them, each with the same probability."""
    return captions[seed_of(seed, CAPTION, epoch, picture) % len(captions)]


class Pictures:
    """The lines of a csv by picture, in the order of the pictures' first lines.

    Args:
        images: the path in each line.

    Attributes:
        of: the picture of each line, int64.
        first: the first line of each picture, (n,) int64.
    """

    def __init__(self, images: Sequence[Any]):
        self.of = pd.factorize(pd.Series(images, dtype=object), use_na_sentinel=False)[0]
        self._order = np.argsort(self.of, kind="stable")
        self._starts = np.searchsorted(self.of[self._order], np.arange(self.of.max(initial=-1) + 2))
        self.first = self._order[self._starts[:-1]]

    def __len__(self) -> int:
        return len(self.first)

    def lines(self, picture: int) -> list[int]:
        """Those of one picture."""
        return self._order[self._starts[picture] : self._starts[picture + 1]].tolist()

    def check_alike(self, cells: pd.Series, images: pd.Series) -> None:
        """Raise InputError for the first picture whose lines differ in this column."""
        codes = pd.factorize(cells)[0]
        others = (codes != codes[self.first][self.of]).nonzero()[0]
        if len(others):
            raise InputError(
                f"--same-key: the lines of {images[others[0]]!r} differ in column {cells.name!r}; give them one entry "
                "or leave out --several-captions"
            )


class DrawnCaptions:
    """The caption of each picture in the present epoch.

    Args:
        captions: of every line of the csv.
        pictures: its lines by picture.
        seed: the run's seed.
        epoch: by which they are drawn.
    """

    def __init__(self, captions: Sequence[Any], pictures: Pictures, seed: int, epoch: SharedEpoch):
        self.captions = captions
        self.pictures = pictures
        self.seed = seed
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, picture: int) -> Any:
        return self.captions[drawn(self.pictures.lines(picture), self.seed, self.epoch.get_value(), picture)]


def draw_from_lines(csv: Any, seed: int, epoch: SharedEpoch) -> Pictures:
    """Make OpenCLIP's data set of lines, `csv`, one of pictures."""
    pictures = Pictures(csv.images)
    csv.captions = DrawnCaptions(csv.captions, pictures, seed, epoch)
    csv.images = [csv.images[line] for line in pictures.first]
    return pictures


class JsonCaptions:
    """Puts one of the captions in a field of a sample's .json in the place of its .txt.

    The field holds a list, or one caption; what is no text in it, or an empty one, is passed over. Where there is no
    caption the sample has no .txt afterwards, and is left out and counted like any other without a caption.

    Args:
        field: its name.
        seed: the run's seed.
        epoch: by which they are drawn.

    Attributes:
        missing: what a sample without captions lacks, in words.
    """

    def __init__(self, field: str, seed: int, epoch: SharedEpoch):
        self.field = field
        self.seed = seed
        self.epoch = epoch
        self.missing = f"no captions in the field {field!r} of a .json"

    def __call__(self, sample: dict) -> None:
        """Change a sample of bytes by suffix, with its "__key__"."""
        sample.pop("txt", None)
        try:
            value = fields_of(sample).get(self.field)
        except ValueError:
            return
        captions = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text]
        if captions:
            name = hashlib.blake2b(str(sample["__key__"]).encode(errors="surrogateescape"), digest_size=8).digest()
            picture = int.from_bytes(name, "big")
            sample["txt"] = drawn(captions, self.seed, self.epoch.get_value(), picture).encode(errors="replace")


def captions_of_samples(args: Namespace, epoch: SharedEpoch | None = None) -> JsonCaptions | None:
    """What tells the captions of shards, by default those of epoch 0; None where they stand in .txt."""
    return JsonCaptions(args.captions_field, args.seed, epoch or SharedEpoch()) if args.captions_field else None
