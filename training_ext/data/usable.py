"""Leave unusable samples out of shards and csv files, in the loader's workers, and tell a `SampleWatch`."""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from open_clip_ext.errors import InputError
from training_ext.components.safe_reading import PAIR_MEMBERS
from training_ext.data.captions import JsonCaptions, is_empty
from training_ext.data.pair_folders import place_of
from training_ext.data.tars import one_line
from training_ext.openclip.loading import missing_of

NO_CAPTION, NO_IMAGE, UNREADABLE, SURPLUS = range(4)
"""Why a sample is left out."""


class SampleWatch:
    """Is told of the train samples in each loader worker; this one logs what is left out, as OpenCLIP does.

    Attributes:
        latest: name of the latest sample with image and caption, which is the one that is decoded.
    """

    latest = ""

    def expect(self, of_epoch: int, of_data: int) -> None:
        """Samples that all processes use in an epoch; n, if an epoch goes over all samples, else 0."""

    def of_shards(self, numbers: dict[str, int]) -> None:
        """The numbers of the shards, by url; called before the workers start."""

    def use(self, is_new: bool = True) -> None:
        """A sample is used; `is_new`: no other line of a csv stands for it."""

    def skip(self, kind: int, what: str, why: str, is_new: bool = True) -> None:
        logging.warning(f"Left out of the train data: {what}: {why}")

    def skip_shard(self, url: str, error: Exception, position: int, size: int | None) -> None:
        """A shard is damaged after `position` of its `size` samples, which may be unknown."""
        logging.warning(f"Left out of the train data: shard {url!r} after {position} samples: {one_line(error)}")

    def end_shard(self, url: str, samples: int) -> None:
        """A shard was read to its end."""

    def pass_over(self) -> None:
        """A resumed epoch has had this sample; it is not decoded again."""

    def end_pass(self, used: int, batch_size: int) -> None:
        """A worker has been through all its shards, and begins again."""


@dataclass
class CountIncomplete:
    """OpenCLIP's filter of samples without image or caption, with a count of those that it drops, of empty captions,
    which it may keep, and of pairs that no one can use, as they share a name with another up to the first dot.

    Args:
        accepts: OpenCLIP's filter.
        recaption: as in `ShardRows`, which the captions have been through.
    """

    accepts: Callable[[dict], bool]
    watch: SampleWatch
    recaption: JsonCaptions | None = None

    def __call__(self, sample: dict) -> bool:
        caption, lacks = ("txt", ()) if self.recaption is None else ("json", (self.recaption.missing,))
        name = f"sample {sample['__key__']!r} of shard {sample['__url__']!r}"
        surplus = [
            stem for stem, _, last in (suffix.rpartition(".") for suffix in sample)
            if last == caption and any(f"{stem}.{image}" in sample for image in PAIR_MEMBERS[:-1])
        ]
        for stem in surplus:
            why = f"it has another pair of an image and a .{stem}.{caption}, as a name ends at its first dot"
            self.watch.skip(SURPLUS, name, f"{why}; rename them")
        if not self.accepts(sample):
            if not surplus:
                kind = NO_IMAGE if "txt" in sample else NO_CAPTION
                self.watch.skip(kind, name, f"it has {missing_of(sample, *lacks)}")
            return False
        try:
            sample["txt"].decode()
        except UnicodeDecodeError:
            self.watch.skip(UNREADABLE, name, "its caption is not UTF-8")
            return False
        if not sample["txt"]:
            self.watch.skip(NO_CAPTION, name, "its caption is empty")
            return False
        self.watch.latest = name
        return True


@dataclass
class Decode:
    """webdataset's `decode` for the members of OpenCLIP's pairs, with a count of what cannot be decoded."""

    decode: Callable
    watch: SampleWatch
    batch_size: int

    def __call__(self, *handlers: Any, handler: Callable | None = None) -> Callable:
        """As webdataset's `decode`; the given error handler is replaced by the count."""
        return partial(self._run, partial(self.decode, *handlers))

    def _run(self, decode: Callable, samples: Iterator[dict]) -> Iterator[dict]:
        def skip(error: Exception) -> bool:
            self.watch.skip(UNREADABLE, self.watch.latest, one_line(error))
            return True

        used = 0
        for sample in decode(handler=skip)(samples):
            used += 1
            self.watch.use()
            yield sample
        self.watch.end_pass(used, self.batch_size)


class DecodeImages(Decode):
    """As `Decode`, for webdataset's `map_dict`; only the stage with an error handler is changed."""

    def __call__(self, handler: Callable | None = None, **functions: Callable) -> Callable:  # type: ignore[override]
        if handler is None:
            return self.decode(**functions)
        return partial(self._run, partial(self.decode, **functions))


def unusable_line(path: str, row: int, why: str) -> InputError:
    """The error of a row of validation data, all of which metrics must cover."""
    return InputError(f"{place_of(path, row)} cannot be used: {why}; repair or remove it", "--val-data")


@dataclass
class UsableLines(Dataset):
    """The lines of a csv, with each unusable line replaced by another.

    Args:
        csv: OpenCLIP's data set, with the cells as `images` and `captions`, by position.
        dataset: the same lines, as they reach the loader.
        watch: is told of the train data; None for validation data, where a bad line raises InputError, since metrics
            must cover all lines.
        line_of: the first line of each sample, (n,), where a sample is not a line.
    """

    csv: Any
    dataset: Dataset
    path: str
    watch: SampleWatch | None
    line_of: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # torch's class does not declare the length

    def __getitem__(self, row: int) -> Any:
        item = self._read(row)
        # Seeded by the row, so that a resumed run takes the same replacement.
        draws = random.Random(row)
        while item is None:
            item = self._read(draws.randrange(len(self)), is_new=False)
        return item

    def _read(self, row: int, is_new: bool = True) -> Any:
        if is_empty(self.csv.captions[row]):
            return self._skip(row, NO_CAPTION, "its caption is empty", is_new)
        if is_empty(self.csv.images[row]):
            return self._skip(row, NO_IMAGE, "its image is empty", is_new)
        try:
            item = self.dataset[row]
        except Exception as error:  # image libraries may raise anything
            return self._skip(row, UNREADABLE, f"{self.csv.images[row]!r}: {one_line(error)}", is_new)
        if self.watch is not None:
            self.watch.use(is_new)
        return item

    def _skip(self, row: int, kind: int, why: str, is_new: bool) -> Any:
        what = place_of(self.path, row if self.line_of is None else self.line_of[row])
        if self.watch is None:
            raise unusable_line(self.path, row, why)
        self.watch.skip(kind, what, why, is_new)
        return None
