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
import torch
import torch.distributed as dist
from open_clip_train.distributed import is_master
from torch.utils.data import Dataset

from open_clip_ext.errors import InputError
from training_ext.core.tars import one_line
from training_ext.features.captions import JsonCaptions, is_empty
from training_ext.features.seeding import worker_id
from training_ext.openclip.hosts import host
from training_ext.openclip.loading import PAIR_MEMBERS, missing_of

FILE = "data.jsonl"  # in the experiment's folder: a line for each epoch
SHARDS_IN_A_ROW, SAMPLES_IN_A_ROW = 100, 10_000  # unusable, after which a worker gives up

# Columns of the counts; each worker has a row. PASSES: over all of its shards. SEEN: distinct samples, used or not.
PASSES, SEEN, USED, NO_CAPTION, NO_IMAGE, UNREADABLE, SURPLUS, LOST, MISSING, DAMAGED = range(10)
SKIPPED = {
    NO_CAPTION: "without a caption",
    NO_IMAGE: "without an image",
    UNREADABLE: "whose image or caption cannot be read",
    SURPLUS: "with the name of another up to the first dot",
}
BAD_SHARDS = {MISSING: "shard(s) that cannot be opened", DAMAGED: "damaged shard(s)"}
NAMES = {
    USED: "used", NO_CAPTION: "no_caption", NO_IMAGE: "no_image", UNREADABLE: "unreadable", SURPLUS: "surplus",
    LOST: "lost", MISSING: "shards_missing", DAMAGED: "shards_damaged",
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
        self.num_samples = 0  # n, if an epoch goes over all samples; else 0
        # Each worker writes its own row, so that no lock is needed.
        self._counts = torch.zeros(max(1, workers), 10, dtype=torch.int64).share_memory_()
        self._named = torch.zeros(10, dtype=torch.int64).share_memory_()
        self.of_shards({})
        self._shards_in_a_row = 0
        self._samples_in_a_row = 0
        self._empty_passes = 0
        self._passed_over = 0  # samples of this pass that a resumed epoch has had already
        self.complete = ""  # name of the latest sample with image and caption, for stages that do not know it

    def of_shards(self, numbers: dict[str, int]) -> None:
        """Count bad shards among those of `numbers`, by url; called before the workers start."""
        self._numbers = numbers
        self._bad_shards = torch.zeros(len(numbers), dtype=torch.int64).share_memory_()  # 0 or one of BAD_SHARDS

    @property
    def num_shards(self) -> int:
        return len(self._numbers)

    def begin_epoch(self) -> None:
        self._counts.zero_()
        self._bad_shards.zero_()

    def bad_shards(self) -> dict[int, int]:
        """The kinds of bad shards of this epoch, by number."""
        numbers = self._bad_shards.nonzero()[:, 0].tolist()
        return dict(zip(numbers, self._bad_shards[numbers].tolist(), strict=True))

    def counts(self) -> list[int]:
        """Counts of this epoch so far, over all workers."""
        return with_shards(self._counts.sum(0).tolist(), self.bad_shards())

    def own(self) -> np.ndarray:
        """The row of the calling worker."""
        return self._counts.numpy()[worker_id()]

    def use(self, is_new: bool = True) -> None:
        """Count a used sample.

        Args:
            is_new: whether no other line of a csv stands for it.
        """
        own = self.own()
        own[USED] += 1
        own[SEEN] += is_new and not own[PASSES]
        self._samples_in_a_row = 0

    def skip(self, kind: int, what: str, why: str, is_new: bool = True) -> None:
        """Count a skipped sample, once in an epoch.

        Args:
            kind: one of `SKIPPED`.
            what, why: name of the sample and reason, for messages.
            is_new: as in `use`.

        Raises:
            InputError: too many were skipped.
        """
        self._name(kind, f"{what}: {why}")
        self._samples_in_a_row += 1
        if self._samples_in_a_row >= SAMPLES_IN_A_ROW:
            raise InputError(
                f"{self._samples_in_a_row} samples in a row cannot be used; the last is {what}: {why}", "--train-data"
            )
        own = self.own()
        if not is_new or own[PASSES]:
            return
        own[[kind, SEEN]] += 1
        counts = self.counts()
        bad = sum(counts[kind] for kind in SKIPPED)
        # However good the rest of the epoch is, here and in the other processes, the limit is exceeded.
        if self.max_share is not None and bad / (self.num_samples or bad + self.epoch_samples) > self.max_share:
            self._raise_share(counts, f"{what}: {why}")

    def skip_shard(self, url: str, error: Exception, position: int, size: int | None) -> None:
        """Count a damaged shard and the samples lost in it: those after `position` of its `size`, which may be unknown.

        Raises:
            InputError: too many shards are bad, or too many in a row could not be read.
        """
        kind = DAMAGED if position or not isinstance(error, OSError) else MISSING
        last = f"shard {url!r} after {position} samples: {one_line(error)}"
        self._name(kind, last)
        number = self._numbers[url]
        if not self._bad_shards[number]:
            self._bad_shards[number] = kind
            self.own()[LOST] += max(0, (size or 0) - position)
        if self.max_share is not None and len(self.bad_shards()) / self.num_shards > self.max_share:
            self._raise_share(self.counts(), last)
        self._count_row(position, last)

    def end_shard(self, url: str, samples: int) -> None:
        """Note a shard that was read to its end.

        Raises:
            InputError: too many shards in a row were empty.
        """
        self._count_row(samples, f"shard {url!r}: no samples in it")

    def _count_row(self, samples: int, last: str) -> None:
        self._shards_in_a_row = 0 if samples else self._shards_in_a_row + 1
        if self._shards_in_a_row >= SHARDS_IN_A_ROW:
            raise InputError(f"{SHARDS_IN_A_ROW} shards in a row cannot be read; the last is {last}", "--train-data")

    def pass_over(self) -> None:
        """Count a sample that a resumed epoch has had already, and that is not decoded again."""
        self._passed_over += 1

    def end_pass(self, used: int, batch_size: int) -> None:
        """Count a pass of a worker over all its shards, which it then repeats.

        Raises:
            InputError: two passes in a row gave no full batch, so none ever will.
        """
        self.own()[PASSES] += 1
        is_full = used + self._passed_over >= batch_size
        self._empty_passes = 0 if is_full else self._empty_passes + 1
        self._passed_over = 0
        # After one, storage that failed for a moment may serve the next.
        if self._empty_passes < 2:
            return
        left_out = describe(self.counts())
        raise InputError(
            f"a loader worker's shards have {used} usable samples, but --batch-size is {batch_size}"
            + (f"; left out were {left_out}" if left_out else "; lower one of --batch-size and --workers"),
            "--train-data",
        )

    def check_share(self, counts: list[int], share: float) -> None:
        """Check the counts of all processes at the end of an epoch, and their `share_of`.

        Raises:
            InputError: the share is more than `max_share`.
        """
        if self.max_share is not None and share > self.max_share:
            self._raise_share(counts)

    def _raise_share(self, counts: list[int], last: str = "") -> None:
        last = f"; the last is {last}" if last else ""
        raise InputError(
            f"more than {self.max_share:g} of the train data cannot be used: "
            f"{describe(counts)}{last}; repair the data or give a larger fraction",
            "--max-bad-samples",
        )

    def _name(self, kind: int, text: str) -> None:
        if not self._named[kind]:
            self._named[kind] = 1
            logging.warning(f"Left out of the train data: {text}. Others like it are counted but not logged")


def with_shards(counts: list[int], bad_shards: dict[int, int]) -> list[int]:
    """The counts with those of the bad shards, `Skips.bad_shards` of one or all processes."""
    kinds = list(bad_shards.values())
    return [kinds.count(column) if column in BAD_SHARDS else count for column, count in enumerate(counts)]


def share_of(counts: list[int], num_samples: int, num_shards: int) -> float:
    """Fraction of an epoch's samples, or of its shards if that is larger, that could not be used, from 0 to 1.

    Not their sum: whoever allows the fraction of shards that a refusal names must not end by a single bad sample.
    """
    of_samples = sum(counts[kind] for kind in SKIPPED) / max(1, num_samples)
    of_shards = sum(counts[kind] for kind in BAD_SHARDS) / max(1, num_shards)
    return max(of_samples, of_shards)


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
    every: list[Any] = [(skips.counts(), skips.bad_shards())]
    if dist.is_available() and dist.is_initialized():
        every *= dist.get_world_size()
        dist.all_gather_object(every, (skips.counts(), skips.bad_shards()))
    # Resampled, a shard may be met by several processes.
    bad_shards = {number: kind for _, own in every for number, kind in own.items()}
    counts = with_shards([sum(column) for column in zip(*(own for own, _ in every), strict=True)], bad_shards)
    global_batch = args.batch_size * len(every)
    if not any(counts):  # generated data, of which none is bad
        counts[USED] = loader.num_batches * global_batch
    before = getattr(loader, "first", 0) * global_batch  # in an epoch that is resumed
    share = share_of(counts, max(skips.num_samples, before + counts[SEEN]), skips.num_shards)
    if is_master(args):
        by_process = [sum(own[kind] for kind in SKIPPED) for own, _ in every]
        _write(counts, share, by_process, args, epoch, loader, tb_writer, label or f"Epoch {epoch}")
    skips.check_share(counts, share)


def _write(
    counts: list[int], share: float, by_process: list[int], args: Namespace, epoch: int, loader: Any, tb_writer: Any,
    label: str,
) -> None:
    if text := describe(counts):
        logging.warning(
            f"{label} data: used {counts[USED]} samples, left out {text} ({share:.2%}); "
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


class CountIncomplete:
    """OpenCLIP's filter of samples without image or caption, with a count of those that it drops, of empty captions,
    which it may keep, and of pairs that no one can use, as they share a name with another up to the first dot.

    Args:
        accepts: OpenCLIP's.
        skips: of the train data.
        recaption: as in `ShardRows`, which the captions have been through.
    """

    def __init__(self, accepts: Callable[[dict], bool], skips: Skips, recaption: JsonCaptions | None = None):
        self.accepts = accepts
        self.skips = skips
        self.caption = "txt" if recaption is None else "json"
        self.lacks = () if recaption is None else (recaption.missing,)

    def __call__(self, sample: dict) -> bool:
        name = name_of(sample)
        surplus = [
            stem for stem, _, last in (suffix.rpartition(".") for suffix in sample)
            if last == self.caption and any(f"{stem}.{image}" in sample for image in PAIR_MEMBERS[:-1])
        ]
        for stem in surplus:
            why = f"it has another pair of an image and a .{stem}.{self.caption}, as a name ends at its first dot"
            self.skips.skip(SURPLUS, name, f"{why}; rename them")
        if not self.accepts(sample):
            if not surplus:
                kind = NO_IMAGE if "txt" in sample else NO_CAPTION
                self.skips.skip(kind, name, f"it has {missing_of(sample, *self.lacks)}")
            return False
        try:
            sample["txt"].decode()
        except UnicodeDecodeError:
            self.skips.skip(UNREADABLE, name, "its caption is not UTF-8")
            return False
        if not sample["txt"]:
            self.skips.skip(NO_CAPTION, name, "its caption is empty")
            return False
        self.skips.complete = name
        return True


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
        if self.skips is not None:
            self.skips.use(is_new)
        return item

    def _skip(self, row: int, kind: int, why: str, is_new: bool) -> Any:
        what = f"line {self.line_of[row] + 2} of {self.path!r}"
        if self.skips is None:
            raise InputError(f"{what} cannot be used: {why}; repair or remove it", "--val-data")
        self.skips.skip(kind, what, why, is_new)
        return None
