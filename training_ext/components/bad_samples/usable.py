"""Leave unusable samples out of shards and csv files, in the loader's workers, and tell a `Watch`."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from open_clip_ext.errors import reason_of
from training_ext.core.rows import Wrapped
from training_ext.data.captions import JsonCaptions
from training_ext.data.tables import is_empty, place_of, unusable_line
from training_ext.openclip.loading import PAIR_MEMBERS, missing_of

NO_CAPTION, NO_IMAGE, UNREADABLE, SURPLUS = range(4)
"""Why a sample is left out."""
EMPTY = "__empty__"  # of a sample whose caption is white space


class Watch(Protocol):
    """What is told of the train samples in each loader worker.

    Attributes:
        latest: name of the latest sample with image and caption, which is the one that is decoded.
    """

    latest: str

    def begin_pass(self) -> None:
        """A worker begins with its shards."""

    def meet(self) -> None:
        """A sample has come to the filter."""

    def use(self, is_new: bool = True) -> None:
        """A sample is used; `is_new`: False if it replaces an unreadable sample."""

    def skip(self, kind: int, what: str, why: str, is_new: bool = True) -> None:
        """A sample is left out."""

    def end_pass(self, used: int, batch_size: int) -> None:
        """A worker has been through all its shards."""


@dataclass
class CountIncomplete:
    """OpenCLIP's filter of samples without image or caption, with a count of those that it drops, of empty captions,
    which it may keep, and of pairs that no one can use, as they share a name with another up to the first dot.

    Args:
        accepts: OpenCLIP's filter.
        recaption: what has put the captions in their place.
    """

    accepts: Callable[[dict], bool]
    watch: Watch
    recaption: JsonCaptions | None = None

    def __call__(self, sample: dict) -> bool:
        self.watch.meet()
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
            if not surplus and EMPTY in sample:
                self.watch.skip(NO_CAPTION, name, "its caption is empty")
            elif not surplus:
                kind = NO_IMAGE if "txt" in sample else NO_CAPTION
                self.watch.skip(kind, name, f"it has {missing_of(sample, *lacks)}")
            return False
        try:
            sample["txt"].decode()
        except UnicodeDecodeError:
            self.watch.skip(UNREADABLE, name, "its caption is not UTF-8")
            return False
        self.watch.latest = name
        return True


@dataclass
class Decode:
    """webdataset's `decode` for the members of OpenCLIP's pairs, with a count of what cannot be decoded."""

    decode: Callable
    watch: Watch
    batch_size: int

    def __call__(self, *handlers: Any, handler: Callable | None = None) -> Callable:
        """As webdataset's `decode`; the given error handler is replaced by the count."""
        return partial(self._run, partial(self.decode, *handlers))

    def _run(self, decode: Callable, samples: Iterator[dict]) -> Iterator[dict]:
        def skip(error: Exception) -> bool:
            self.watch.skip(UNREADABLE, self.watch.latest, reason_of(error))
            return True

        self.watch.begin_pass()
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


class UsableLines(Wrapped):
    """The lines of a csv, with each unusable line replaced by another.

    Args:
        dataset: with OpenCLIP's cells as `images` and `captions`, by position; where a sample is not a line,
            `first_lines` are those of the samples.
        watch: is told of the train data; None for validation data, where a bad line raises InputError, since metrics
            must cover all lines.
    """

    def __init__(self, dataset: Any, path: str, watch: Watch | None):
        super().__init__(dataset)
        self.path = path
        self.watch = watch
        self._lines: Sequence[int] = getattr(dataset, "first_lines", range(len(dataset)))

    def __getitem__(self, row: int) -> Any:
        item = self._read(row)
        # Seeded by the row, so that a resumed run takes the same replacement.
        draws = random.Random(row)
        while item is None:
            item = self._read(draws.randrange(len(self)), is_new=False)
        return item

    def _read(self, row: int, is_new: bool = True) -> Any:
        if is_empty(self.captions[row]):
            return self._skip(row, NO_CAPTION, "its caption is empty", is_new)
        if is_empty(self.images[row]):
            return self._skip(row, NO_IMAGE, "its image is empty", is_new)
        try:
            item = self.dataset[row]
        except Exception as error:  # image libraries may raise anything
            return self._skip(row, UNREADABLE, f"{self.images[row]!r}: {reason_of(error)}", is_new)
        if self.watch is not None:
            self.watch.use(is_new)
        return item

    def _skip(self, row: int, kind: int, why: str, is_new: bool) -> Any:
        what = place_of(self.path, self._lines[row])
        if self.watch is None:
            raise unusable_line(self.path, row, why)
        self.watch.skip(kind, what, why, is_new)
        return None
