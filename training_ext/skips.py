"""Skip samples that cannot be used, count them in the loader's workers, and report them per epoch.

A run ends with one line if no more samples are usable, or if the fraction that is not exceeds --max-bad-samples.
"""

import json
import logging
import os
import random
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from open_clip_train.distributed import is_master
from torch.utils.data import Dataset

from open_clip_ext.errors import InputError
from training_ext.hosts import host
from training_ext.loading import PAIR_MEMBERS
from training_ext.seeding import worker_id
from training_ext.tars import one_line

FILE = "data.jsonl"  # in the experiment's folder: a line for each epoch
SHARDS_IN_A_ROW, SAMPLES_IN_A_ROW = 100, 10_000  # unusable, after which a worker gives up

# Columns of the counts; each worker has a row of them. Skipped samples come last.
READ, LOST, SHARDS, MISSING, DAMAGED, USED, NO_CAPTION, NO_IMAGE, UNREADABLE = range(9)
SKIPPED = {
    NO_CAPTION: "without a caption",
    NO_IMAGE: "without an image",
    UNREADABLE: "whose image or caption cannot be read",
}
BAD_SHARDS = {MISSING: "shard(s) that cannot be opened", DAMAGED: "damaged shard(s)"}
NAMES = {
    USED: "used", NO_CAPTION: "no_caption", NO_IMAGE: "no_image", UNREADABLE: "unreadable", LOST: "lost",
    MISSING: "shards_missing", DAMAGED: "shards_damaged",
}


class Skips:
    """Counts of used and skipped train samples of one process, over all workers of its loader.

    Args:
        max_share: --max-bad-samples, a fraction from 0 to 1, or None for no limit.
        workers: number of workers of the loader.
    """

    def __init__(self, max_share: float | None, workers: int):
        self.max_share = max_share
        self.epoch_samples = 0  # number of samples that all processes together use per epoch
        # Each worker writes its own row, so that no lock is needed.
        self._counts = torch.zeros(max(1, workers), 9, dtype=torch.int64).share_memory_()
        self._named = torch.zeros(9, dtype=torch.int64).share_memory_()
        self._shards_in_a_row = 0
        self._samples_in_a_row = 0
        self._empty_passes = 0
        self._passed_over = 0  # samples of this pass that a resumed epoch has had already
        self.complete = ""  # name of the latest sample with image and caption, for stages that do not know it

    def begin_epoch(self) -> None:
        self._counts.zero_()

    def counts(self) -> list[int]:
        """Counts of this epoch so far, over all workers."""
        return self._counts.sum(0).tolist()

    def own(self) -> np.ndarray:
        """The row of the calling worker."""
        return self._counts.numpy()[worker_id()]

    def use(self) -> None:
        self.own()[USED] += 1
        self._samples_in_a_row = 0

    def skip(self, kind: int, what: str, why: str) -> None:
        """Count a skipped sample.

        Args:
            kind: one of `SKIPPED`.
            what, why: name of the sample and reason, for messages.

        Raises:
            InputError: too many were skipped.
        """
        self.own()[kind] += 1
        self._name(kind, f"{what}: {why}")
        self._samples_in_a_row += 1
        if self._samples_in_a_row >= SAMPLES_IN_A_ROW:
            raise InputError(
                f"--train-data: {self._samples_in_a_row} samples in a row cannot be used; the last is {what}: {why}"
            )
        counts = self.counts()
        bad = sum(counts[kind] for kind in SKIPPED)
        # However good the rest of the epoch is, here and in the other processes, the limit is exceeded.
        if self.max_share is not None and bad > self.max_share * (bad + self.epoch_samples):
            self._raise_share(counts, f"{what}: {why}")

    def skip_shard(self, url: str, error: Exception, position: int, size: int | None) -> None:
        """Count the samples lost in a damaged shard: those after `position` of its `size`, which may be unknown.

        Raises:
            InputError: too many were lost, or too many shards in a row could not be read.
        """
        kind = DAMAGED if position or not isinstance(error, OSError) else MISSING
        own = self.own()
        own[[kind, SHARDS]] += 1
        own[READ] += position
        own[LOST] += max(0, (size or 0) - position)
        last = f"shard {url!r} after {position} samples: {one_line(error)}"
        self._name(kind, last)
        if self.max_share == 0:
            self._raise_share(self.counts(), last)
        self._count_row(position, last)

    def end_shard(self, url: str, samples: int) -> None:
        """Count a shard that was read to its end.

        Raises:
            InputError: too many shards in a row were empty.
        """
        own = self.own()
        own[SHARDS] += 1
        own[READ] += samples
        self._count_row(samples, f"shard {url!r}: no samples in it")

    def _count_row(self, samples: int, last: str) -> None:
        self._shards_in_a_row = 0 if samples else self._shards_in_a_row + 1
        if self._shards_in_a_row >= SHARDS_IN_A_ROW:
            raise InputError(f"--train-data: {SHARDS_IN_A_ROW} shards in a row cannot be read; the last is {last}")

    def pass_over(self) -> None:
        """Count a sample that a resumed epoch has had already, and that is not decoded again."""
        self._passed_over += 1

    def end_pass(self, used: int, batch_size: int) -> None:
        """Count a pass of a worker over all its shards, which it then repeats.

        Raises:
            InputError: two passes in a row gave no full batch, so none ever will.
        """
        is_full = used + self._passed_over >= batch_size
        self._empty_passes = 0 if is_full else self._empty_passes + 1
        self._passed_over = 0
        # After one, storage that failed for a moment may serve the next.
        if self._empty_passes < 2:
            return
        left_out = describe(self.counts())
        raise InputError(
            f"--train-data: a loader worker's shards have {used} usable samples, but --batch-size is {batch_size}"
            + (f"; left out were {left_out}" if left_out else "; lower one of --batch-size and --workers")
        )

    def check_share(self, counts: list[int], samples: int) -> None:
        """Check the counts of all processes at the end of an epoch of `samples`.

        Raises:
            InputError: more than `max_share` of its samples could not be used.
        """
        if self.max_share is not None and share_of(counts, samples) > self.max_share:
            self._raise_share(counts)

    def _raise_share(self, counts: list[int], last: str = "") -> None:
        last = f"; the last is {last}" if last else ""
        raise InputError(
            f"--max-bad-samples: more than {self.max_share:g} of the train data cannot be used: "
            f"{describe(counts)}{last}; repair the data or give a larger fraction"
        )

    def _name(self, kind: int, text: str) -> None:
        if not self._named[kind]:
            self._named[kind] = 1
            logging.warning(f"Left out of the train data: {text}. Others like it are counted but not logged")


def share_of(counts: list[int], samples: int) -> float:
    """Fraction of an epoch's samples that could not be used, from 0 to 1.

    Losses in shards and skipped samples are fractions of different totals, since a loader reads ahead of what it uses.

    Args:
        samples: of the whole epoch; if it was resumed, fewer are counted.
    """
    bad = sum(counts[kind] for kind in SKIPPED)
    bad_shards = sum(counts[kind] for kind in BAD_SHARDS)
    # If the sizes of shards are unknown, the fraction of shards must do.
    of_shards = counts[LOST] / (counts[LOST] + counts[READ]) if counts[LOST] else bad_shards / max(1, counts[SHARDS])
    of_samples = bad / max(1, bad + max(counts[USED], samples))
    return 1 - (1 - of_shards) * (1 - of_samples)


def describe(counts: list[int]) -> str:
    """What was skipped and why, such as '3 sample(s) without a caption'; '' if nothing was."""
    parts = [f"{counts[kind]} sample(s) {text}" for kind, text in SKIPPED.items() if counts[kind]]
    parts += [f"{counts[kind]} {text}" for kind, text in BAD_SHARDS.items() if counts[kind]]
    if counts[LOST]:
        parts.append(f"{counts[LOST]} sample(s) in them")
    return ", ".join(parts)


def report_epoch(
    skips: Skips, args: Namespace, epoch: int, loader: Any, tb_writer: Any, label: str | None = None
) -> None:
    """Log what an epoch skipped, and write it to TensorBoard, W&B and data.jsonl; every process calls this.

    Args:
        label: the epoch's name in the log, if it is not one of the training.

    Raises:
        InputError: the fraction exceeds --max-bad-samples.
    """
    every: list[Any] = [skips.counts()]
    if dist.is_available() and dist.is_initialized():
        every *= dist.get_world_size()
        dist.all_gather_object(every, skips.counts())
    counts = [sum(column) for column in zip(*every, strict=True)]
    samples = loader.num_batches * args.batch_size * len(every)
    if not any(counts):  # generated data, of which none is bad
        counts[USED] = samples
    if is_master(args):
        _write(counts, samples, every, args, epoch, loader, tb_writer, label or f"Epoch {epoch}")
    skips.check_share(counts, samples)


def _write(
    counts: list[int], samples: int, every: list, args: Namespace, epoch: int, loader: Any, tb_writer: Any, label: str
) -> None:
    by_process = [sum(own[kind] for kind in SKIPPED) for own in every]
    if text := describe(counts):
        logging.warning(
            f"{label} data: used {counts[USED]} samples, left out {text} ({share_of(counts, samples):.2%}); "
            f"samples skipped by process: {' '.join(map(str, by_process))}"
        )
    metrics = {name: counts[kind] for kind, name in NAMES.items()}
    step = loader.num_batches // args.accum_freq * (epoch + 1)
    if tb_writer is not None:
        for name, value in metrics.items():
            tb_writer.add_scalar(f"data/{name}", value, step)
    if args.wandb:
        shown = {f"data/{name}": value for name, value in metrics.items()}
        host().train_module.wandb.log({**shown, "step": step}, step=step)
    if args.save_logs:
        path = os.path.join(args.logs, args.name, FILE)
        try:
            with open(path, "a") as file:
                file.write(json.dumps({"epoch": epoch, **metrics, "skipped_by_process": by_process}) + "\n")
        except OSError as error:  # do not lose the training for a log
            logging.warning(f"No line was added to {path}: {error.strerror}")


class Complete:
    """OpenCLIP's filter of samples without image or caption, with a count of those that it drops.

    Args:
        accepts: OpenCLIP's.
        skips: of the train data.
        missing: what a sample without a caption lacks, in words.
    """

    def __init__(self, accepts: Callable[[dict], bool], skips: Skips, missing: str = "no .txt"):
        self.accepts = accepts
        self.skips = skips
        self.missing = missing

    def __call__(self, sample: dict) -> bool:
        if self.accepts(sample):
            self.skips.complete = name_of(sample)
            return True
        suffixes = ", ".join(f".{name}" for name in sample if not name.startswith("__"))
        if "txt" not in sample:
            self.skips.skip(NO_CAPTION, name_of(sample), f"it has {self.missing} but {suffixes}")
        else:
            self.skips.skip(NO_IMAGE, name_of(sample), f"it has no .png, .jpg, .jpeg or .webp but {suffixes}")
        return False


def name_of(sample: dict) -> str:
    return f"sample {sample['__key__']!r} of shard {sample['__url__']!r}"


class Decode:
    """webdataset's `decode` for the members of OpenCLIP's pairs, with a count of what cannot be decoded.

    Args:
        decode: webdataset's function.
        skips: counts of the train data.
        batch_size: samples per batch.
    """

    def __init__(self, decode: Callable, skips: Skips, batch_size: int):
        self.decode = decode
        self.skips = skips
        self.batch_size = batch_size

    def __call__(self, *handlers: Any, handler: Callable | None = None) -> Callable:
        """As webdataset's `decode`; the given error handler is replaced by the count."""
        return partial(self._run, partial(self.decode, *handlers, only=PAIR_MEMBERS))

    def _run(self, decode: Callable, samples: Iterator[dict]) -> Iterator[dict]:
        current: dict = {}

        def remembered() -> Iterator[dict]:
            nonlocal current
            for sample in samples:
                current = sample
                yield sample

        def skip(error: Exception) -> bool:
            name = name_of(current) if "__key__" in current else self.skips.complete
            self.skips.skip(UNREADABLE, name, one_line(error))
            return True

        used = 0
        for sample in decode(handler=skip)(remembered()):
            used += 1
            self.skips.use()
            yield sample
        self.skips.end_pass(used, self.batch_size)


class DecodeImages(Decode):
    """As `Decode`, for webdataset's `map_dict`; only the stage with an error handler is changed."""

    def __call__(self, handler: Callable | None = None, **functions: Callable) -> Callable:  # type: ignore[override]
        if handler is None:
            return self.decode(**functions)
        return partial(self._run, partial(self.decode, **functions))


class Worded:
    """OpenCLIP's filter of empty captions, with a count of those that it drops; a stage after `Complete`."""

    def __init__(self, accepts: Callable[[dict], bool], skips: Skips):
        self.accepts = accepts
        self.skips = skips

    def __call__(self, sample: dict) -> bool:
        if self.accepts(sample):
            return True
        is_empty = not sample["text"].strip()
        kind, why = (NO_CAPTION, "its caption is empty") if is_empty else (UNREADABLE, "its caption is not UTF-8")
        self.skips.skip(kind, self.skips.complete, why)
        return False


class UsableLines(Dataset):
    """The lines of a csv, with each unusable line replaced by another.

    Args:
        csv: OpenCLIP's data set, with the cells as `images` and `captions`, by position.
        dataset: the same lines, as they reach the loader.
        path: path of the file.
        skips: counts of the train data; None for validation data, where a bad line raises InputError, since metrics
            must cover all lines.
        line_of: the first line of each sample, (n,), where a sample is not a line.
    """

    def __init__(
        self, csv: Any, dataset: Dataset, path: str, skips: Skips | None, line_of: Sequence[int] | None = None
    ):
        self.csv = csv
        self.line_of = range(len(csv)) if line_of is None else line_of
        self.dataset = dataset
        self.path = path
        self.skips = skips

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # torch's class does not declare the length

    def __getitem__(self, row: int) -> Any:
        item = self._read(row)
        # Seeded by the row, so that a resumed run takes the same replacement.
        draws = random.Random(row)
        while item is None:
            item = self._read(draws.randrange(len(self)))
        return item

    def _read(self, row: int) -> Any:
        if pd.isna(self.csv.captions[row]):
            return self._skip(row, NO_CAPTION, "its caption is empty")
        if pd.isna(self.csv.images[row]):
            return self._skip(row, NO_IMAGE, "its image is empty")
        try:
            item = self.dataset[row]
        except Exception as error:  # image libraries may raise anything
            return self._skip(row, UNREADABLE, f"{self.csv.images[row]!r}: {one_line(error)}")
        if self.skips is not None:
            self.skips.use()
        return item

    def _skip(self, row: int, kind: int, why: str) -> Any:
        what = f"line {self.line_of[row] + 2} of {self.path!r}"
        if self.skips is None:
            raise InputError(f"--val-data: {what} cannot be used: {why}; repair or remove it")
        self.skips.skip(kind, what, why)
        return None
