"""Stages of a loader's workers that leave out samples without a usable image or caption, and count them."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from open_clip_ext.errors import reason_of
from training_ext.components.bad_samples.columns import NO_CAPTION, NO_IMAGE, SURPLUS, UNREADABLE
from training_ext.core.rows import Wrapped
from training_ext.data.captions import JsonCaptions
from training_ext.data.tables import is_empty, place_of, unusable_line
from training_ext.openclip.loading import PAIR_MEMBERS, missing_of

if TYPE_CHECKING:
    from training_ext.components.bad_samples.component import BadSamples

EMPTY = "__empty__"  # of a sample whose caption is white space


@dataclass
class CountIncomplete:
    """OpenCLIP's filter of samples without image or caption, with a count of those that it drops, of empty captions,
    which it may keep, and of pairs that no one can use, as they share a name with another up to the first dot.

    Args:
        accepts: OpenCLIP's filter.
        recaption: what has put the captions in their place.
    """

    accepts: Callable[[dict], bool]
    counts: "BadSamples"
    recaption: JsonCaptions | None = None

    def __call__(self, sample: dict) -> bool:
        self.counts.meet()
        caption, lacks = ("txt", ()) if self.recaption is None else ("json", (self.recaption.missing,))
        name = f"sample {sample['__key__']!r} of shard {sample['__url__']!r}"
        surplus = [
            stem for stem, _, last in (suffix.rpartition(".") for suffix in sample)
            if last == caption and any(f"{stem}.{image}" in sample for image in PAIR_MEMBERS[:-1])
        ]
        for stem in surplus:
            why = f"it has another pair of an image and a .{stem}.{caption}, as a name ends at its first dot"
            self.counts.skip(SURPLUS, name, f"{why}; rename them")
        if not self.accepts(sample):
            if not surplus and EMPTY in sample:
                self.counts.skip(NO_CAPTION, name, "its caption is empty")
            elif not surplus:
                kind = NO_IMAGE if "txt" in sample else NO_CAPTION
                self.counts.skip(kind, name, f"it has {missing_of(sample, *lacks)}")
            return False
        try:
            sample["txt"].decode()
        except UnicodeDecodeError:
            self.counts.skip(UNREADABLE, name, "its caption is not UTF-8")
            return False
        self.counts.latest = name
        return True


@dataclass
class Decode:
    """webdataset's `decode` or `map_dict` for OpenCLIP's pairs, with a count of what cannot be decoded.

    Only the stage with an error handler decodes, whose place the count takes.
    """

    decode: Callable
    counts: "BadSamples"
    batch_size: int

    def __call__(self, *handlers: Any, handler: Callable | None = None, **functions: Callable) -> Callable:
        stage = partial(self.decode, *handlers, **functions)
        return stage() if handler is None else partial(self._run, stage)

    def _run(self, decode: Callable, samples: Iterator[dict]) -> Iterator[dict]:
        def skip(error: Exception) -> bool:
            self.counts.skip(UNREADABLE, self.counts.latest, reason_of(error))
            return True

        self.counts.begin_pass()
        used = 0
        for sample in decode(handler=skip)(samples):
            used += 1
            self.counts.use()
            yield sample
        self.counts.end_pass(used, self.batch_size)


class UsableLines(Wrapped):
    """The lines of a csv, with each unusable line replaced by another.

    Args:
        dataset: with OpenCLIP's cells as `images` and `captions`, by position; where a sample is not a line,
            `first_lines` are those of the samples.
        counts: of the train data; None for validation data, where a bad line raises InputError, since metrics
            must cover all lines.
    """

    def __init__(self, dataset: Any, path: str, counts: "BadSamples | None"):
        super().__init__(dataset)
        self.path = path
        self.counts = counts
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
        if self.counts is not None:
            self.counts.use(is_new)
        return item

    def _skip(self, row: int, kind: int, why: str, is_new: bool) -> Any:
        what = place_of(self.path, self._lines[row])
        if self.counts is None:
            raise unusable_line(self.path, row, why)
        self.counts.skip(kind, what, why, is_new)
        return None
