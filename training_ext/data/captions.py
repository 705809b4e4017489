"""Draw one of several captions of an image each epoch; the image stays one sample with one row.

The draw depends only on the run's seed, the epoch and the image, so it is the same for any number of processes and
loader workers, and in a resumed run. Images of a csv are identified by their path, those in shards by their sample's
key.
"""

import hashlib
from argparse import Namespace
from bisect import bisect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import Any

import numpy as np
import pandas as pd

from open_clip_ext.errors import InputError
from training_ext.data.seeding import CAPTION, SharedEpoch, seed_of
from training_ext.data.tables import is_empty
from training_ext.data.tars import fields_of


def drawn(
    captions: Sequence[Any], seed: int, epoch: int, picture: int, weights: Sequence[float] | None = None
) -> Any:
    """One of the captions, drawn uniformly, or in proportion to weights, not all of which are 0."""
    number = seed_of(seed, CAPTION, epoch, picture)
    if weights is None:
        return captions[number % len(captions)]
    sums = list(accumulate(weights))
    return captions[bisect(sums, number / 2**63 * sums[-1], hi=len(sums) - 1)]


class Pictures:
    """The lines of a csv grouped by image, in the order of the images' first lines.

    Attributes:
        of: number of each line's image, (lines,) int64.
        first: first line of each of the n images, (n,) int64.
    """

    def __init__(self, images: Sequence[Any]):
        self.of = pd.factorize(pd.Series(images, dtype=object), use_na_sentinel=False)[0]
        self._order = np.argsort(self.of, kind="stable")
        self._starts = np.searchsorted(self.of[self._order], np.arange(self.of.max(initial=-1) + 2))
        self.first = self._order[self._starts[:-1]]

    def __len__(self) -> int:
        return len(self.first)

    def lines(self, picture: int) -> list[int]:
        """The lines of one image."""
        return self._order[self._starts[picture] : self._starts[picture + 1]].tolist()

    def check_alike(self, cells: pd.Series, images: pd.Series, flag: str) -> None:
        """Raise InputError, with the flag, for the first image whose lines differ in the column `cells`."""
        codes = pd.factorize(cells)[0]
        differing_rows = (codes != codes[self.first][self.of]).nonzero()[0]
        if len(differing_rows):
            raise InputError(
                f"the lines of {images[differing_rows[0]]!r} differ in column {cells.name!r}; give them one entry "
                "or leave out --several-captions",
                flag,
            )


@dataclass
class DrawnCaptions:
    """The caption of each image in the present epoch, as a sequence; an empty one only if the image has no other."""

    captions: Sequence[Any]  # of each line of the csv
    pictures: Pictures
    seed: int
    epoch: SharedEpoch

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def iloc(self) -> "DrawnCaptions":
        """Some versions of OpenCLIP read a column of pandas'."""
        return self

    def __getitem__(self, picture: int) -> Any:
        captions = [self.captions[line] for line in self.pictures.lines(picture)]
        usable = [caption for caption in captions if not is_empty(caption)]
        return drawn(usable or captions, self.seed, self.epoch.get_value(), picture)


def draw_from_lines(csv: Any, seed: int, epoch: SharedEpoch) -> Pictures:
    """Change OpenCLIP's data set of lines, by position, into one of images; returns the grouping.

    `first_lines` of it is the first line of each image.
    """
    pictures = Pictures(list(csv.images))
    csv.captions = DrawnCaptions(csv.captions, pictures, seed, epoch)
    csv.first_lines = pictures.first.tolist()
    csv.images = pd.Series([csv.images[line] for line in pictures.first], dtype=object)
    return pictures


@dataclass
class JsonCaptions:
    """Replaces a sample's .txt by one of the captions in its .json.

    Of --captions-field, a list of captions or one, each is as likely. The fields of --json-text-key have one caption
    each: with `weights` one is drawn in proportion to them, and the first in order is taken where none has a weight
    above 0. So does OpenCLIP 4, whose draws depend on the loader's workers. Captions that are empty or not text are
    ignored. If none is left, the sample has no .txt afterwards, and is skipped and counted like any other without one.

    Args:
        named: the flag's value, one field, or of --json-text-key several with semicolons between them.
        weights: of the fields, for --json-text-key alone; those without one have 0.
    """

    named: str
    seed: int
    epoch: SharedEpoch
    weights: Sequence[float] | None = None

    @property
    def missing(self) -> str:
        """What a sample without captions lacks, for messages."""
        flag = "--captions-field" if self.weights is None else "--json-text-key"
        return f"no captions in the field {self.named!r} of a .json ({flag})"

    def __call__(self, sample: dict) -> dict[str, int]:
        """Change the sample, a dict of bytes by suffix with its "__key__", in place; as `Component.raw_sample`."""
        sample.pop("txt", None)
        with suppress(ValueError):
            if caption := self._caption(fields_of(sample), str(sample["__key__"])):
                sample["txt"] = caption.encode(errors="replace")
        return {}

    def _caption(self, fields: dict[str, Any], key: str) -> str | None:
        if self.weights is None:
            value = fields.get(self.named)
            entries = [(caption, 1.0) for caption in (value if isinstance(value, list) else [value])]
        else:
            values = map(fields.get, filter(None, map(str.strip, self.named.split(";"))))
            entries = list(zip(values, chain(self.weights, repeat(0.0)), strict=False))
        usable = [(text, weight) for text, weight in entries if isinstance(text, str) and text.strip()]
        drawable = [(text, weight) for text, weight in usable if weight > 0]
        if not drawable:
            return usable[0][0] if usable else None
        captions, weights = zip(*drawable, strict=True)
        digest = hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=8).digest()
        picture = int.from_bytes(digest, "big")
        return drawn(captions, self.seed, self.epoch.get_value(), picture, None if self.weights is None else weights)


def captions_of_samples(args: Namespace, epoch: SharedEpoch | None = None) -> JsonCaptions | None:
    """The `JsonCaptions` of the command line, by default for epoch 0; None if captions are in .txt."""
    epoch = epoch or SharedEpoch(args.workers)
    if field := getattr(args, "captions_field", None):
        return JsonCaptions(field, args.seed, epoch)
    if key := getattr(args, "json_text_key", None):  # of OpenCLIP 4
        return JsonCaptions(key, args.seed, epoch, args.json_text_key_probs or ())
    return None
