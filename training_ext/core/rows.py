"""The row of every train sample, from where it is read to the loss, through OpenCLIP's unchanged data pipeline.

A row is the sample's number in the data set: the line of a csv, or the offset of its shard plus its place in the tar.
In shards it stands before the caption until that is tokenized. Then it is one more int64 column behind the tokens,
which `RowLoader` takes off the batch before OpenCLIP's loop sees it.
"""

import json
import os
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from open_clip_train import data
from torch import Tensor
from torch.utils.data import Dataset

from open_clip_ext import factory
from open_clip_ext.errors import InputError
from training_ext.core.seam import TRAIN_DATA, VAL_DATA

SEPARATOR = "\x1f"
SIZES = "sizes.json"  # OpenCLIP's file beside shards: samples by file name


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Image and text of a sample or a batch: a pair in OpenCLIP 2 and 3, a dict in 4."""
    return (batch["image"], batch["text"]) if isinstance(batch, dict) else batch


def with_text(batch: Any, text: Tensor) -> Any:
    """The sample or batch with another text."""
    return {**batch, "text": text} if isinstance(batch, dict) else (batch[0], text)


def append_row(tokens: Tensor, row: int) -> Tensor:
    """Append the row to tokens (L,); (L + 1,) int64."""
    return torch.cat([tokens.long(), torch.tensor([row])])


class WithRow(Dataset):
    """A map-style data set of OpenCLIP's whose tokens end in the sample's row."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        sample = self.dataset[row]
        return with_text(sample, append_row(pair_of(sample)[1], row))


class RowTokenizer:
    """OpenCLIP's tokenizer for texts 'row, separator, caption'; (1, L + 1)."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def __call__(self, text: str, **options: Any) -> Tensor:
        row, caption = text.split(SEPARATOR, 1)
        return append_row(self.tokenizer(caption, **options)[0], int(row))[None]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # while a copy or a pickle is being made
            raise AttributeError(name)
        return getattr(vars(self)["tokenizer"], name)


class ShardRows:
    """Replaces OpenCLIP's reader of shards: writes each sample's row before its caption.

    Args:
        read: OpenCLIP's reader, from an iterable of shards to samples.
        urls: of the shards, each of which has a number of samples in the sizes.json beside it.

    Raises:
        InputError: a shard has no size.
    """

    def __init__(self, read: Callable[[Iterable[dict]], Iterable[dict]], urls: Iterable[str]):
        self.read = read
        self.sizes = {url: _size(url) for url in dict.fromkeys(urls)}
        self.first = dict(zip(self.sizes, accumulate(self.sizes.values(), initial=0), strict=False))
        self.num_rows = sum(self.sizes.values())

    def __call__(self, shards: Iterable[dict]) -> Iterator[dict]:
        for shard in shards:
            url = shard["url"]
            for position, sample in enumerate(self.read([shard])):
                if position >= (size := self.sizes[url]):
                    raise InputError(f"shard {url!r} has more than the {size} samples that {SIZES} says; correct it")
                if sample.get("txt", b"").strip():  # OpenCLIP 4 leaves out empty captions
                    row = self.first[url] + position
                    sample["txt"] = f"{row}{SEPARATOR}".encode() + sample["txt"]
                    yield sample


def _size(url: str) -> int:
    try:
        with open(os.path.join(os.path.dirname(url), SIZES), encoding="utf-8") as file:
            return int(json.load(file)[os.path.basename(url)])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{url!r} has no number of samples in a {SIZES} beside it, such as {{\"{os.path.basename(url)}\": 1000}}",
            "--train-data",
        ) from None


class RowLoader:
    """OpenCLIP's train loader, which takes the rows off each batch and tells when a step and an epoch are done.

    OpenCLIP's loop asks for a batch when the step before is done. It computes a learning rate for batches that are too
    few for a step, too, which after the last step may divide by zero; they are read, but not passed on.

    Args:
        keep: batches per optimizer step.
        has_rows: whether the samples carry rows.
        at_step: called with the number of steps of the epoch that are done.
        at_end: called on every process after the last step.
    """

    def __init__(self, loader: Any, keep: int, has_rows: bool, at_step: Callable[[int], None], at_end: Callable):
        self.loader = loader
        self.keep = keep
        self.has_rows = has_rows
        self._rows: deque[Tensor] = deque(maxlen=keep)
        self._at_step, self._at_end = at_step, at_end

    def __iter__(self) -> Iterator[Any]:
        last = self.loader.num_batches // self.keep * self.keep
        for done, batch in enumerate(self.loader, getattr(self.loader, "first", 0) + 1):
            if done > last:
                continue
            if self.has_rows:
                text = pair_of(batch)[1]
                self._rows.append(text[:, -1].contiguous())
                batch = with_text(batch, text[:, :-1].contiguous())
            yield batch
            if done % self.keep == 0:
                self._at_step(done // self.keep)
        self._at_end()

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["loader"], name)

    def rows(self) -> Tensor | None:
        """Rows of the batches since the last step, int64 on the CPU; None without rows."""
        return torch.cat(tuple(self._rows)) if self.has_rows else None


class TrainData:
    """OpenCLIP's train data set, built with the rows of its samples.

    Attributes:
        num_rows: n, once the data set is built; of shards without rows the samples of an epoch.
        samples_per_epoch: of OpenCLIP's epochs, before it rounds them to whole batches.
        rows: what those who counted the rows know of them.
    """

    rows: Any = None

    def __init__(self, args: Namespace):
        parts = factory.parts_of(args.loss, vars(args)) if args.uses_ext_loss else ()
        self.needs_rows = any(part.needs_index for part in parts)
        self.num_rows = self.samples_per_epoch = 0
        self.loader: RowLoader
        self._urls: list[str] = []

    def attend(self, in_place: Callable, at_epoch: Callable, at_step: Callable, at_end: Callable) -> None:
        """Name whom to tell.

        Args:
            in_place: returns a context in which the seams of a scope are in place.
            at_epoch: called with the epoch's number when OpenCLIP's loop begins it.
            at_step, at_end: see `RowLoader`.
        """
        self._in_place, self._at_epoch, self._at_step, self._at_end = in_place, at_epoch, at_step, at_end

    def of_last_step(self) -> dict[str, Tensor | None]:
        """What a loss gets of the samples since the last step besides the model's output."""
        return {"index": self.loader.rows()}

    def dataset_fn(self, original: Callable, path: str, kind: str) -> Callable:
        """Replaces OpenCLIP's `get_dataset_fn`, which returns the function that builds the data set."""
        return partial(self._build, original(path, kind))

    def _build(
        self, build: Callable, args: Any, transform: Any, is_train: bool, tokenizer: Any = None, **more: Any
    ) -> Any:
        if not is_train:
            with self._in_place(VAL_DATA):
                return build(args, transform, is_train, tokenizer=tokenizer, **more)
        if build is data.get_wds_dataset:
            self.num_rows = self.samples_per_epoch = args.train_num_samples or data.get_dataset_size(args.train_data)[0]
            if self.needs_rows:
                self._urls, tokenizer = data.expand_urls(args.train_data)[0], RowTokenizer(tokenizer)
        with self._in_place(TRAIN_DATA):
            info = build(args, transform, is_train, tokenizer=tokenizer, **more)
        self.samples_per_epoch = self.samples_per_epoch or self.num_rows
        return self.followed(info, args.accum_freq, self.needs_rows)

    def followed(self, info: Any, keep: int, has_rows: bool) -> Any:
        """OpenCLIP's DataInfo of the train data, whose epochs and steps are followed."""
        self.loader = RowLoader(info.dataloader, keep, has_rows, self._at_step, self._at_end)
        info.dataloader, info.set_epoch = self.loader, partial(self._begin, info.set_epoch)
        return info

    def _begin(self, original: Callable[[int], None], epoch: int) -> None:
        original(epoch)
        self._at_epoch(epoch)

    def map_style(self, original: Callable, *args: Any, **kwargs: Any) -> Dataset:
        """Replaces a class of OpenCLIP's data sets."""
        dataset = original(*args, **kwargs)
        self.num_rows = len(dataset)
        return WithRow(dataset) if self.needs_rows else dataset

    def shards(self, original: Callable) -> Callable:
        """Replaces OpenCLIP's reader of shards."""
        if not self._urls:
            return original
        reader = ShardRows(original, self._urls)
        self.num_rows = reader.num_rows
        return reader
