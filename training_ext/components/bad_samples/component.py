"""Leave out samples that cannot be used, count them in the loader's workers, and report them per epoch.

A run ends with one line if no more samples are usable, or if the fraction that is not exceeds --max-bad-samples.
"""

import json
import logging
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from open_clip_ext.distributed import all_gather_object
from open_clip_ext.errors import InputError, MachineError, reason_of
from open_clip_ext.options import option
from training_ext.components.bad_samples import columns
from training_ext.components.bad_samples.usable import EMPTY, CountIncomplete, Decode, UsableLines
from training_ext.core.component import Component
from training_ext.core.epoch import Epoch
from training_ext.core.hosts import release
from training_ext.core.hosts.both import SHARD_READER
from training_ext.core.rows import has_caption
from training_ext.core.seam import DATA, TRAIN_DATA, VAL_DATA, Seam
from training_ext.data.captions import captions_of_samples
from training_ext.data.rows import kind_of
from training_ext.data.seeding import shared_zeros, worker_id
from training_ext.data.shard_rows import UndamagedParts, leave_out_broken, read_to_damage
from training_ext.data.shards import shard_urls

FILE = "data.jsonl"  # a line for each epoch
SHARDS = f"{DATA}:get_wds_dataset"
HAS_TASKS = release() >= (4, 0)
IN_A_ROW = 10_000  # unusable samples after which a worker gives up
OF_SHARD = 100  # of these, for one that gives none


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


class BadSamples(Component):
    """Counts the train samples that one process uses and leaves out, over all workers of its loader."""

    name = "bad_samples"
    topic = "data"
    may_be_off = False
    latest = ""  # name of the sample that is decoded, in its worker
    seams = (
        lines(TRAIN_DATA),
        lines(VAL_DATA),
        replace(
            SHARD_READER,
            why="takes a damaged header for the end of a shard",
            replacement=lambda original, component: read_to_damage,
            layer=-3,
        ),
        replace(
            SHARD_READER,
            why="the rest of a damaged shard is lost, which must be counted",
            replacement=lambda original, component: UndamagedParts(
                original, component.skip_shard, component.end_shard, component.training.data.sizes
            ),
            layer=-1,
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
            replacement=lambda original, component: Decode(original, component, component.args.batch_size),
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

    def __init__(self, args: Namespace):
        super().__init__(args)
        # Each worker writes its own row, so that no lock is needed.
        self._counts = shared_zeros(args.workers, max(1, args.workers), columns.TOTAL)
        self._named = shared_zeros(args.workers, columns.TOTAL)
        self.set_sizes(0, 0)
        self._in_a_row = self._empty_passes = self._read = self._met = 0

    # Before the loader's workers start

    def set_sizes(self, samples_per_epoch: int, dataset_size: int, shards: Sequence[str] = ()) -> None:
        """Set the sizes that the limit is a fraction of.

        Args:
            samples_per_epoch: of all processes.
            dataset_size: n, where an epoch reads every sample, else 0.
            shards: their urls.
        """
        self._samples_per_epoch, self._dataset_size = samples_per_epoch, dataset_size
        self._numbers = {url: number for number, url in enumerate(shards)}
        self._bad_shards = shared_zeros(self.args.workers, len(shards))  # 0 or one of columns.BAD_SHARDS

    def data_built(self, data: dict[str, Any]) -> None:
        if "train" not in data:
            return
        args, rows = self.args, self.training.data
        per_epoch = data["train"].dataloader.num_batches * args.batch_size * args.world_size
        kind, size, urls = kind_of(args, args.train_data), 0, []
        if kind == "csv":
            size = rows.num_rows
        elif kind == "webdataset":
            urls = shard_urls(args.train_data)
            counted = getattr(rows.rows, "shards", None)
            if counted is not None and not args.dataset_resampled:
                listed = counted.num_listed(args.train_data)
                size = listed if listed <= per_epoch else 0
        self.set_sizes(per_epoch, size, urls)

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
        """A worker begins with its shards."""
        self._read = self._met = 0

    def meet(self) -> None:
        """A sample comes to the filter; those that a resumed epoch drops do not."""
        self._met += 1

    def use(self, is_new: bool = True) -> None:
        """A sample is used; `is_new`: False if it replaces an unreadable sample."""
        own = self._own()
        own[columns.USED] += 1
        own[columns.SEEN] += is_new and not own[columns.PASSES]
        self._in_a_row = 0

    def skip(self, kind: int, what: str, why: str, is_new: bool = True) -> None:
        """Count a sample that is left out, once in an epoch.

        Raises:
            InputError: too many were left out.
        """
        self._name(kind, f"{what}: {why}")
        self._count_in_a_row(1, f"{what}: {why}")
        own = self._own()
        if not is_new or own[columns.PASSES]:
            return
        own[[kind, columns.SEEN]] += 1
        counts = self.totals()
        bad = columns.skipped(counts)
        # However good the rest of the epoch is, here and in the other processes, the limit is exceeded.
        self._limit(bad / (self._dataset_size or bad + self._samples_per_epoch), counts, f"{what}: {why}")

    def skip_shard(self, url: str, error: Exception, position: int, size: int | None) -> None:
        """Count a damaged shard and the samples lost in it.

        Raises:
            InputError: too many shards are bad, or too many in a row could not be read.
        """
        kind = columns.DAMAGED if position or not isinstance(error, OSError) else columns.MISSING
        last = f"shard {url!r} after {position} samples: {reason_of(error)}"
        self._name(kind, last)
        number = self._numbers[url]
        if not self._bad_shards[number]:
            self._bad_shards[number] = kind
            self._own()[columns.LOST] += max(0, (size or 0) - position)
        self._limit(len(self._bad()) / len(self._numbers), self.totals(), last)
        if not position:
            self._count_in_a_row(OF_SHARD, last)

    def end_shard(self, url: str, samples: int) -> None:
        """Note a shard that was read to its end.

        Raises:
            InputError: too many shards in a row were empty.
        """
        if not samples:
            self._count_in_a_row(OF_SHARD, f"shard {url!r}: no samples in it")

    def _count_in_a_row(self, samples: int, last: str) -> None:
        self._in_a_row += samples
        if self._in_a_row >= IN_A_ROW:
            unusable = f"{IN_A_ROW} samples, or {IN_A_ROW // OF_SHARD} shards, in a row cannot be used"
            raise MachineError(f"{unusable}; the last is {last}", "--train-data")

    def end_pass(self, used: int, batch_size: int) -> None:
        """Count a pass of a worker over all its shards, which it then repeats.

        Raises:
            InputError: two passes in a row gave no full batch, so none ever will.
        """
        self._own()[columns.PASSES] += 1
        passed_over = self._read - self._met  # before they are decoded, by an epoch that is resumed
        self._empty_passes = 0 if used + passed_over >= batch_size else self._empty_passes + 1
        # After one, storage that failed for a moment may serve the next.
        if self._empty_passes < 2:
            return
        left_out = columns.describe(self.totals())
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
        kinds = self._bad_shards.clone()  # nonzero() counts before it writes, and another worker may add one meanwhile
        return {int(number): int(kinds[number]) for number in kinds.nonzero()[:, 0]}

    def totals(self) -> list[int]:
        """Counts of this epoch so far, over all workers."""
        return columns.with_shards(self._counts.sum(0).tolist(), self._bad())

    def _limit(self, share: float, counts: list[int], last: str = "") -> None:
        if self.max_bad_samples is None or share <= self.max_bad_samples:
            return
        last = f"; the last is {last}" if last else ""
        raise InputError(
            f"more than {self.max_bad_samples:g} of the train data cannot be used: {columns.describe(counts)}{last}; "
            "repair the data or give a larger fraction",
            "--max-bad-samples",
        )

    def _name(self, kind: int, text: str) -> None:
        if not self._named[kind]:
            self._named[kind] = 1
            logging.warning(f"Left out of the train data: {text}. Others like it are counted but not logged")

    # In the main process

    def epoch(self, epoch: Epoch, train: Callable[[Epoch], None]) -> None:
        """Count an epoch, and write what it skipped to the log and data.jsonl.

        Raises:
            InputError: the fraction exceeds --max-bad-samples.
        """
        self._counts.zero_()
        self._bad_shards.zero_()
        train(epoch)
        every = all_gather_object((self.totals(), self._bad()))
        # Resampled, a shard may be met by several processes.
        bad_shards = {number: kind for _, own in every for number, kind in own.items()}
        sums = [sum(column) for column in zip(*(own for own, _ in every), strict=True)]
        counts = columns.with_shards(sums, bad_shards)
        global_batch = self.args.batch_size * len(every)
        if not any(counts):  # generated data, of which none is bad
            counts[columns.USED] = epoch.batches * global_batch
        before = epoch.first_batch * global_batch  # in an epoch that is resumed
        of_samples = columns.skipped(counts) / max(1, self._dataset_size, before + counts[columns.SEEN])
        of_shards = sum(counts[kind] for kind in columns.BAD_SHARDS) / max(1, len(self._numbers))
        share = max(of_samples, of_shards)  # no sum: bad shards that are allowed must not make one bad sample fatal
        if self.plan.is_first:
            self._write(epoch, counts, share, [columns.skipped(own) for own, _ in every])
        self._limit(share, counts)

    def _write(self, epoch: Epoch, counts: list[int], share: float, by_process: list[int]) -> None:
        if text := columns.describe(counts):
            logging.warning(
                f"{epoch.title} data: used {counts[columns.USED]} samples, left out {text} ({share:.2%}); "
                f"samples skipped by process: {' '.join(map(str, by_process))}"
            )
        metrics = {name: counts[kind] for kind, name in columns.NAMES.items()}
        if (path := self.plan.file(FILE)) and epoch.is_training:
            try:
                with open(path, "a") as file:
                    file.write(json.dumps({"epoch": epoch.number, **metrics, "skipped_by_process": by_process}) + "\n")
            except OSError as error:  # do not lose the training for a log
                logging.warning(f"No line was added to {path}: {error.strerror}")
