"""The row of every train sample, from where it is read to the loss, through OpenCLIP's unchanged data pipeline.

A row is the sample's number in the data set: the line of a csv, or the offset of its shard plus its place in the tar.
It travels as one of `Tags`, which components may add to.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from open_clip_train import data
from torch import Tensor
from torch.utils.data import Dataset

from open_clip_ext import factory
from open_clip_ext.errors import InputError
from training_ext.core.patching import StandIn
from training_ext.core.seam import TRAIN_DATA, VAL_DATA, in_place
from training_ext.core.tags import ROW, Tags, TagsTokenizer

if TYPE_CHECKING:
    from training_ext.core.run import Run

SIZES = "sizes.json"  # OpenCLIP's file beside shards: samples by file name
RawHook = Callable[[dict[str, Any]], dict[str, int] | None]
"""See `Component.raw_sample`."""


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Image and text of a sample or a batch: a pair in OpenCLIP 2 and 3, a dict in 4."""
    return (batch["image"], batch["text"]) if isinstance(batch, dict) else batch


def with_text(batch: Any, text: Tensor) -> Any:
    """The sample or batch with another text."""
    return {**batch, "text": text} if isinstance(batch, dict) else (batch[0], text)


class Wrapped(StandIn, Dataset):
    """A map-style data set in the place of another, whose other attributes it has."""

    stands_for = "dataset"

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)


class WithRow(Wrapped):
    """A data set of OpenCLIP's whose tokens end in the sample's row."""

    def __getitem__(self, row: int) -> Any:
        sample = self.dataset[row]
        return with_text(sample, Tags((ROW,)).append(pair_of(sample)[1], row))


def has_caption(sample: dict[str, Any]) -> bool:
    """Whether a raw sample has a caption with more than white space."""
    return bool(sample.get("txt", b"").decode(errors="replace").strip())


class ShardRows:
    """Replaces OpenCLIP's reader of shards: writes each sample's numbers before its caption.

    A sample with an empty caption has none afterwards, so that OpenCLIP leaves it out.

    Args:
        read: OpenCLIP's reader, from an iterable of shards to samples.
        sizes: samples in each shard, in order of the rows; {}: samples have no rows.
        hooks: `raw_sample` of components.

    Iterating raises InputError at a shard with more samples than its size.
    """

    def __init__(
        self, read: Callable[[Iterable[dict]], Iterable[dict]], sizes: dict[str, int], hooks: Sequence[RawHook] = ()
    ):
        self.read = read
        self.sizes = sizes
        self.first = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        self.hooks = hooks

    def __call__(self, shards: Iterable[dict]) -> Iterator[dict]:
        for shard in shards:
            url = shard["url"]
            for position, sample in enumerate(self.read([shard])):
                if (numbers := self._numbers(sample)) is None:
                    continue
                if self.sizes:
                    if position >= (size := self.sizes[url]):
                        text = f"shard {url!r} has more than the {size} samples that {SIZES} says; correct it"
                        raise InputError(text, "--train-data")
                    numbers[ROW] = self.first[url] + position
                if has_caption(sample):
                    sample["txt"] = Tags.write(sample["txt"], **numbers)
                else:
                    sample.pop("txt", None)
                yield sample

    def _numbers(self, sample: dict) -> dict[str, int] | None:
        numbers: dict[str, int] = {}
        for hook in self.hooks:
            if (more := hook(sample)) is None:
                return None
            numbers |= more
        return numbers


def _size(url: str) -> int:
    try:
        with open(os.path.join(os.path.dirname(url), SIZES), encoding="utf-8") as file:
            return int(json.load(file)[os.path.basename(url)])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{url!r} has no number of samples in a {SIZES} beside it, such as {{\"{os.path.basename(url)}\": 1000}}",
            "--train-data",
        ) from None


class RowLoader(StandIn):
    """OpenCLIP's train loader, which takes the numbers off each batch and tells when a step and an epoch are done.

    OpenCLIP's loop asks for a batch when the step before is done. It computes a learning rate for batches that are too
    few for a step, too, which after the last step may divide by zero; they are read, but not passed on.

    Args:
        loader: OpenCLIP's, or a component's around it; `first` of it, if there is one, batches of the epoch are done.
        keep: batches per optimizer step.
        tags: the numbers that the samples carry.
        for_loss: from tokens and numbers of a batch to what the loss gets of its samples, by argument, (b,) each;
            None: the loss is OpenCLIP's.
        at_step: called with the number of steps of the epoch that are done.
        at_end: called on every process after the last step.
    """

    stands_for = "loader"

    def __init__(
        self, loader: Any, keep: int, tags: Tags, for_loss: Callable[[Tensor, dict], dict[str, Tensor]] | None,
        at_step: Callable[[int], None], at_end: Callable[[], None],
    ):
        self.loader = loader
        self.keep = keep
        self.tags = tags
        self._for_loss = for_loss
        self._latest: deque[dict[str, Tensor]] = deque(maxlen=keep)
        self._at_step, self._at_end = at_step, at_end

    def __iter__(self) -> Iterator[Any]:
        self._latest.clear()
        last = self.loader.num_batches // self.keep * self.keep
        for done, batch in enumerate(self.loader, getattr(self.loader, "first", 0) + 1):
            if done > last:
                continue
            if self._for_loss is not None:
                tokens, numbers = self.tags.take(pair_of(batch)[1])
                self._latest.append(self._for_loss(tokens, numbers))
                batch = with_text(batch, tokens)
            yield batch
            if done % self.keep == 0:
                self._at_step(done // self.keep)
        self._at_end()

    def latest(self) -> dict[str, Tensor]:
        """What the loss gets of the samples of the last `keep` batches, int64 on the CPU."""
        return {name: torch.cat([given[name] for given in self._latest]) for name in self._latest[-1]}


class TrainData:
    """OpenCLIP's train data set, built with the rows of its samples.

    Attributes:
        num_rows: n, once the data set is built; of shards without rows the samples of an epoch.
        samples_per_epoch: of OpenCLIP's epochs, before it rounds them to whole batches.
        sizes: samples in each shard by url, in order of the rows; {}: samples of shards have no rows.
        rows: what a component that counted the rows knows of them.
        worker_init: what loader workers call first, if a component asks for it.
    """

    rows: Any = None
    worker_init: Any = None

    def __init__(self, run: "Run"):
        args = run.args
        self._run = run
        self._has_loss = args.uses_ext_loss
        parts = factory.parts_of(args.loss, vars(args)) if args.uses_ext_loss else ()
        self._needs_rows = any(part.needs_index for part in parts)
        self.num_rows = self.samples_per_epoch = 0
        self.sizes: dict[str, int] = {}
        self.tags = Tags()
        self.loader: RowLoader

    def build(
        self, original: Callable, args: Any, transform: Any, is_train: bool, tokenizer: Any = None, **more: Any
    ) -> Any:
        """Replaces what OpenCLIP's `get_dataset_fn` returns: builds a data set with rows."""
        if not is_train:
            with in_place(self._run.seams(), VAL_DATA):
                return original(args, transform, is_train, tokenizer=tokenizer, **more)
        self.tags = Tags((ROW,)) if self._has_loss else Tags()
        if original is data.get_wds_dataset:
            self._prepare_shards(args)
            tokenizer = TagsTokenizer(tokenizer, self.tags) if self.tags.names else tokenizer
        with in_place(self._run.seams(), TRAIN_DATA):
            info = original(args, transform, is_train, tokenizer=tokenizer, **more)
        self.samples_per_epoch = self.samples_per_epoch or self.num_rows
        for_loss = self._for_loss if self._has_loss else None
        notified = self._run.end_step, self._run.end_epoch
        self.loader = RowLoader(info.dataloader, args.accum_freq, self.tags, for_loss, *notified)
        info.dataloader, info.set_epoch = self.loader, partial(self._begin, info.set_epoch)
        return info

    def _prepare_shards(self, args: Any) -> None:
        self.num_rows = self.samples_per_epoch = args.train_num_samples or data.get_dataset_size(args.train_data)[0]
        if self._needs_rows and not self.sizes:
            self.sizes = {url: _size(url) for url in dict.fromkeys(data.expand_urls(args.train_data)[0])}
        self.num_rows = sum(self.sizes.values()) or self.num_rows
        added = (name for component in self._run.components for name in component.columns())
        self.tags = Tags((*added, *((ROW,) if self.sizes else ())))

    def _begin(self, original: Callable[[int], None], epoch: int) -> None:
        original(epoch)
        self._run.begin_epoch(epoch)

    def _for_loss(self, tokens: Tensor, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        given = {"index": numbers[ROW]} if ROW in numbers else {}
        for component in self._run.components:
            given |= component.for_loss(tokens, numbers)
        return given

    def map_style(self, original: Callable, *args: Any, **kwargs: Any) -> Dataset:
        """Replaces a class of OpenCLIP's data sets."""
        dataset = original(*args, **kwargs)
        self.num_rows = len(dataset)
        return WithRow(dataset) if self._has_loss else dataset

    def shards(self, original: Callable) -> Callable:
        """Replaces OpenCLIP's reader of shards."""
        hooks = [one.raw_sample for one in self._run.components if one.answers("raw_sample")]
        return ShardRows(original, self.sizes, hooks) if hooks or self.tags.names else original
