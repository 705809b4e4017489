"""Leave out samples that cannot be used, count them in the loader's workers, and report them per epoch.

A run ends with one line if no more samples are usable, or if the fraction that is not exceeds --max-bad-samples.
"""

import json
import logging
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from open_clip_train import train as open_clip_train

from open_clip_ext.errors import InputError, reason_of
from open_clip_ext.options import option
from training_ext.components.bad_samples.usable import (
    EMPTY,
    NO_CAPTION,
    NO_IMAGE,
    SURPLUS,
    UNREADABLE,
    CountIncomplete,
    Decode,
    DecodeImages,
    UsableLines,
)
from training_ext.core.component import Component
from training_ext.core.epoch import Epoch
from training_ext.core.hosts import release
from training_ext.core.rows import has_caption
from training_ext.core.seam import TRAIN_DATA, VAL_DATA, Seam
from training_ext.data.captions import captions_of_samples
from training_ext.data.rows import kind_of
from training_ext.data.seeding import worker_id
from training_ext.data.shard_rows import UndamagedParts, leave_out_broken, read_to_damage
from training_ext.data.shards import shard_urls

FILE = "data.jsonl"  # a line for each epoch
DATA = "open_clip_train.data"
SHARDS = f"{DATA}:get_wds_dataset"
HAS_TASKS = release() >= (4, 0)
SHARDS_IN_A_ROW, SAMPLES_IN_A_ROW = 100, 10_000  # unusable, after which a worker gives up

# Columns of the counts after those of `usable`. PASSES: over all shards of a worker. SEEN: distinct, used or not.
PASSES, SEEN, USED, LOST, MISSING, DAMAGED = range(4, 10)
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
}  # fmt: skip


def lines(scope: str) -> Seam:
    return Seam(
        DATA, "CsvDataset",
        why="one image that cannot be read would end the run",
        contract="get_csv_dataset builds CsvDataset(path, ...), whose items are (image, tokens) by line, with the "
        "cells in images and captions",
        replacement=lambda original, component: partial(component.usable_lines, original, scope == TRAIN_DATA),
        used_by=f"{DATA}:get_csv_dataset",
        scopes=(scope,),
        layer=2,
    )  # fmt: skip


def reader(layer: int, replacement: Callable, why: str) -> Seam:
    return Seam(
        DATA, "tarfile_to_samples_nothrow",
        why=why,
        contract="get_wds_dataset uses it for train data as the stage from shards, dicts with url, to raw samples",
        replacement=replacement,
        used_by=SHARDS,
        scopes=(TRAIN_DATA,),
        layer=layer,
    )  # fmt: skip


class BadSamples(Component):
    """Counts of used and skipped train samples of one process, over all workers of its loader."""

    name = "bad_samples"
    topic = "data"
    may_be_off = False
    latest = ""  # name of the sample that is decoded, in its worker
    seams = (
        lines(TRAIN_DATA),
        lines(VAL_DATA),
        reader(-3, lambda original, component: read_to_damage, "takes a damaged header for the end of a shard"),
        reader(
            -1, lambda original, component: component.undamaged(original),
            "the rest of a damaged shard is lost, which must be counted",
        ),
        Seam(
            DATA, "FilterValidSample" if HAS_TASKS else "filter_no_caption_or_no_image",
            why="counts what it leaves out",
            contract="get_wds_dataset selects the samples that have a caption and an image by this function, or by "
            "what this class builds",
            replacement=lambda original, component: component.complete(original),
            used_by=SHARDS,
            scopes=(TRAIN_DATA,),
        ),
        Seam(
            DATA, "wds.map_dict" if HAS_TASKS else "wds.decode",
            why="counts what cannot be decoded",
            contract="get_wds_dataset decodes samples by wds.decode(..., handler=), then takes image and caption by "
            "name; from 4.0 on the images of renamed samples by wds.map_dict(image=..., handler=), the only such stage "
            "with a handler",
            replacement=lambda original, component: (DecodeImages if HAS_TASKS else Decode)(
                original, component, component.args.batch_size
            ),
            used_by=SHARDS,
            scopes=(TRAIN_DATA,),
            layer=1,
        ),
    )  # fmt: skip
    max_bad_samples: float | None = option(
        None,
        "fraction of the shards, and of the samples in the others, that may be missing or unusable, 0 to 1; above it "
        "the run ends (default: 0 for what is missing at the start, no limit for what is found later)",
        valid=lambda share: 0 <= share <= 1, expected="from 0 to 1", metavar="SHARE",
    )  # fmt: skip

    def undamaged(self, original: Any) -> UndamagedParts:
        """Replaces the reader of shards by one that tells what is lost."""
        return UndamagedParts(original, self.skip_shard, self.end_shard, self.training.data.sizes)

    def __init__(self, args: Namespace):
        super().__init__(args)
        # Each worker writes its own row, so that no lock is needed.
        self._counts = torch.zeros(max(1, args.workers), 10, dtype=torch.int64).share_memory_()
        self._named = torch.zeros(10, dtype=torch.int64).share_memory_()
        self.expect(0, 0)
        self.of_shards({})
        self._shards_in_a_row = self._samples_in_a_row = self._empty_passes = self._read = self._met = 0

    # Before the loader's workers start

    def expect(self, of_epoch: int, of_data: int) -> None:
        """Set how many samples all processes use in an epoch, and n, if an epoch goes over all samples, else 0."""
        self._of_epoch, self._of_data = of_epoch, of_data

    def of_shards(self, numbers: dict[str, int]) -> None:
        """Set the numbers of the shards, by url."""
        self._numbers = numbers
        self._bad_shards = torch.zeros(len(numbers), dtype=torch.int64).share_memory_()  # 0 or one of BAD_SHARDS

    def data_built(self, data: dict[str, Any]) -> None:
        if "train" not in data:
            return
        args, training = self.args, self.training
        of_epoch, of_data = data["train"].dataloader.num_batches * args.batch_size * args.world_size, 0
        kind = kind_of(args, args.train_data)
        if kind == "csv":
            of_data = training.data.num_rows
        elif kind == "webdataset":
            self.of_shards({url: number for number, url in enumerate(shard_urls(args.train_data))})
            shards = getattr(training.data.rows, "shards", None)
            if shards is not None and not args.dataset_resampled:
                listed = shards.num_listed(args.train_data)
                of_data = listed if listed <= of_epoch else 0
        self.expect(of_epoch, of_data)

    def usable_lines(self, original: Callable, is_train: bool, path: str, *args: Any, **kwargs: Any) -> UsableLines:
        """Replaces OpenCLIP's data set of a csv."""
        return UsableLines(original(path, *args, **kwargs), path, self if is_train else None)

    def complete(self, original: Callable) -> Callable:
        """Replaces OpenCLIP's filter of samples, or its class."""
        recaption = captions_of_samples(self.args)
        if HAS_TASKS:
            return lambda **keys: CountIncomplete(original(**keys), self, recaption)
        return CountIncomplete(original, self, recaption)

    # In the loader's workers

    def raw_sample(self, sample: dict[str, Any]) -> dict[str, int] | None:
        if "txt" in sample and not has_caption(sample):
            sample[EMPTY] = True
        numbers = leave_out_broken(sample)
        self._read += numbers is not None
        return numbers

    def begin_pass(self) -> None:
        self._read = self._met = 0

    def meet(self) -> None:
        self._met += 1

    def use(self, is_new: bool = True) -> None:
        own = self._own()
        own[USED] += 1
        own[SEEN] += is_new and not own[PASSES]
        self._samples_in_a_row = 0

    def skip(self, kind: int, what: str, why: str, is_new: bool = True) -> None:
        """Count a sample that is left out, once in an epoch.

        Raises:
            InputError: too many were left out.
        """
        self._name(kind, f"{what}: {why}")
        self._samples_in_a_row += 1
        if self._samples_in_a_row >= SAMPLES_IN_A_ROW:
            raise InputError(
                f"{self._samples_in_a_row} samples in a row cannot be used; the last is {what}: {why}", "--train-data"
            )
        own = self._own()
        if not is_new or own[PASSES]:
            return
        own[[kind, SEEN]] += 1
        counts = self.counts()
        bad = sum(counts[kind] for kind in SKIPPED)
        # However good the rest of the epoch is, here and in the other processes, the limit is exceeded.
        self._limit(bad / (self._of_data or bad + self._of_epoch), counts, f"{what}: {why}")

    def skip_shard(self, url: str, error: Exception, position: int, size: int | None) -> None:
        """Count a damaged shard and the samples lost in it.

        Raises:
            InputError: too many shards are bad, or too many in a row could not be read.
        """
        kind = DAMAGED if position or not isinstance(error, OSError) else MISSING
        last = f"shard {url!r} after {position} samples: {reason_of(error)}"
        self._name(kind, last)
        number = self._numbers[url]
        if not self._bad_shards[number]:
            self._bad_shards[number] = kind
            self._own()[LOST] += max(0, (size or 0) - position)
        self._limit(len(self._bad()) / len(self._numbers), self.counts(), last)
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

    def end_pass(self, used: int, batch_size: int) -> None:
        """Count a pass of a worker over all its shards, which it then repeats.

        Raises:
            InputError: two passes in a row gave no full batch, so none ever will.
        """
        self._own()[PASSES] += 1
        passed_over = self._read - self._met  # before they are decoded, by an epoch that is resumed
        self._empty_passes = 0 if used + passed_over >= batch_size else self._empty_passes + 1
        # After one, storage that failed for a moment may serve the next.
        if self._empty_passes < 2:
            return
        left_out = describe(self.counts())
        raise InputError(
            f"a loader worker's shards have {used} usable samples, but --batch-size is {batch_size}"
            + (f"; left out were {left_out}" if left_out else "; lower one of --batch-size and --workers"),
            "--train-data",
        )

    def _own(self) -> np.ndarray:
        """The counts of the calling worker."""
        return self._counts.numpy()[worker_id()]

    def _bad(self) -> dict[int, int]:
        """The kinds of the bad shards of this epoch, by number."""
        return {int(number): int(self._bad_shards[number]) for number in self._bad_shards.nonzero()[:, 0]}

    def counts(self) -> list[int]:
        """Counts of this epoch so far, over all workers."""
        return _with_shards(self._counts.sum(0).tolist(), self._bad())

    def _limit(self, share: float, counts: list[int], last: str = "") -> None:
        if self.max_bad_samples is None or share <= self.max_bad_samples:
            return
        last = f"; the last is {last}" if last else ""
        raise InputError(
            f"more than {self.max_bad_samples:g} of the train data cannot be used: {describe(counts)}{last}; repair "
            "the data or give a larger fraction",
            "--max-bad-samples",
        )

    def _name(self, kind: int, text: str) -> None:
        if not self._named[kind]:
            self._named[kind] = 1
            logging.warning(f"Left out of the train data: {text}. Others like it are counted but not logged")

    # In the main process

    def epoch(self, epoch: Epoch, train: Callable[[Epoch], None]) -> None:
        """Count an epoch, and write what it skipped to the log, TensorBoard, W&B and data.jsonl.

        Raises:
            InputError: the fraction exceeds --max-bad-samples.
        """
        self._counts.zero_()
        self._bad_shards.zero_()
        train(epoch)
        every = [(self.counts(), self._bad())]
        if dist.is_available() and dist.is_initialized():
            own = every[0]
            every *= dist.get_world_size()
            dist.all_gather_object(every, own)
        # Resampled, a shard may be met by several processes.
        bad_shards = {number: kind for _, own in every for number, kind in own.items()}
        counts = _with_shards([sum(column) for column in zip(*(own for own, _ in every), strict=True)], bad_shards)
        global_batch = self.args.batch_size * len(every)
        if not any(counts):  # generated data, of which none is bad
            counts[USED] = epoch.batches * global_batch
        before = epoch.first_batch * global_batch  # in an epoch that is resumed
        share = share_of(counts, max(self._of_data, before + counts[SEEN]), len(self._numbers))
        if self.plan.is_first:
            self._write(epoch, counts, share, [sum(own[kind] for kind in SKIPPED) for own, _ in every])
        self._limit(share, counts)

    def _write(self, epoch: Epoch, counts: list[int], share: float, by_process: list[int]) -> None:
        if text := describe(counts):
            logging.warning(
                f"{epoch.title} data: used {counts[USED]} samples, left out {text} ({share:.2%}); "
                f"samples skipped by process: {' '.join(map(str, by_process))}"
            )
        metrics = {name: counts[kind] for kind, name in NAMES.items()}
        step = self.plan.steps(epoch.batches) * (epoch.number + 1)
        if epoch.writer is not None:
            for name, value in metrics.items():
                epoch.writer.add_scalar(f"data/{name}", value, step)
        if self.args.wandb and epoch.is_training:
            shown = {f"data/{name}": value for name, value in metrics.items()}
            open_clip_train.wandb.log({**shown, "step": step}, step=step)
        if (path := self.plan.file(FILE)) and epoch.is_training:
            try:
                with open(path, "a") as file:
                    file.write(json.dumps({"epoch": epoch.number, **metrics, "skipped_by_process": by_process}) + "\n")
            except OSError as error:  # do not lose the training for a log
                logging.warning(f"No line was added to {path}: {error.strerror}")


def _with_shards(counts: list[int], bad_shards: dict[int, int]) -> list[int]:
    """The counts with those of the bad shards, of one or all processes."""
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
