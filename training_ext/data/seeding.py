"""Seed all random numbers by where they are used, so that a run resumed at any step equals an uninterrupted one.

The order of the data depends on (seed, epoch, rank, worker); the augmentation of a sample also on its row or its number
in the worker's stream; dropout on (seed, epoch, rank, batch). OpenCLIP itself seeds once at the start, seeds its
webdataset shuffle buffer by time and process id, and keeps the loader workers' generators from epoch to epoch.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from training_ext.data.tags import Tags

# The first number after the seed tells the uses apart, so that no two draw the same numbers.
AT_EPOCH, AT_BATCH, IN_WORKER, SHARDS, SHUFFLE, IN_SAMPLE, CAPTION = 1, 2, 3, 4, 5, 6, 7


def seed_of(seed: int, *place: int) -> int:
    """A 63-bit seed that differs for every (seed, *place), all non-negative."""
    # The length comes first, since SeedSequence does not tell (1,) from (1, 0).
    sequence = np.random.SeedSequence([len(place), seed, *place])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_all(seed: int, *place: int) -> None:
    """Seed Python's and NumPy's global generators, and torch's on every device."""
    seed_host(seed, *place)
    torch.manual_seed(seed_of(seed, *place))


def seed_host(seed: int, *place: int) -> None:
    """Seed Python's, NumPy's and torch's generators of the host only, which is faster."""
    value = seed_of(seed, *place)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)


def worker_id() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


@dataclass(frozen=True)
class Start:
    """Where a process resumes an interrupted epoch.

    Args:
        epoch: number of the epoch.
        batches: number of completed batches, of all loader workers together.
        of: number of batches of the whole epoch.
        samples: per worker, the number of samples that have left its shuffle buffer.
    """

    epoch: int
    batches: int
    of: int
    samples: list[int]


class SampleStream:
    """Shuffles the samples of one loader worker, numbers them from 1 in each epoch, and seeds each by its number.

    A stage of the pipeline in place of webdataset's shuffle buffer. The number is put in front of the caption.

    Args:
        pass_over: called for each sample that is dropped before it is decoded.
    """

    def __init__(self, seed: int, rank: int, pass_over: Callable[[], None] | None = None):
        self.seed = seed
        self.rank = rank
        self.pass_over = pass_over
        self.rng = random.Random()
        self._epoch = self._number = self._skipped = 0
        self._shuffle: Callable[[Iterable[dict]], Iterator[dict]]

    def shuffled_by(self, shuffle: Callable[[Iterable[dict]], Iterator[dict]]) -> "SampleStream":
        """Set the shuffle buffer, which must draw from `rng`; returns self."""
        self._shuffle = shuffle
        return self

    def begin(self, epoch: int, skipped: int = 0) -> None:
        """Start an epoch; its first `skipped` samples are dropped before they are decoded."""
        self._epoch, self._number, self._skipped = epoch, 0, skipped
        self.rng.seed(seed_of(self.seed, SHUFFLE, epoch, self.rank, worker_id()))

    def __call__(self, source: Iterable[dict]) -> Iterator[dict]:
        """Yield the samples; called again if an epoch takes several passes over the data."""
        for sample in self._shuffle(source):
            self._number += 1
            if self._number <= self._skipped:
                if self.pass_over is not None:
                    self.pass_over()
                continue
            # Enough, since the following stages handle one sample at a time.
            seed_host(self.seed, IN_SAMPLE, self._epoch, self.rank, worker_id(), self._number)
            if sample.get("txt"):  # an empty caption stays empty, so that it can be counted
                sample["txt"] = Tags.write(sample["txt"], self._number)
            yield sample


class SeededEpochs(IterableDataset):
    """Iterates over `dataset` after seeding this worker's generators for the epoch.

    Args:
        dataset: an iterable data set of batches, whose augmentations draw from the global generators.
        stream: the stage of `dataset` that numbers its samples.

    `shared_epoch` (OpenCLIP's SharedEpoch) must be set before the first iteration.
    """

    def __init__(self, dataset: IterableDataset, seed: int, rank: int, stream: SampleStream):
        super().__init__()
        self.dataset = dataset
        self.seed = seed
        self.rank = rank
        self.stream = stream
        self.shared_epoch: Any = None
        self._start: Start | None = None

    def start_at(self, start: Start) -> None:
        """Resume at `start`; called before the first iteration, which copies this object into the workers."""
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        epoch, worker = self.shared_epoch.get_value(), worker_id()
        seed_all(self.seed, IN_WORKER, epoch, self.rank, worker)
        start = self._start
        if start is None or start.epoch != epoch:
            self.stream.begin(epoch)
            return iter(self.dataset)
        self.stream.begin(epoch, start.samples[worker])
        workers = len(start.samples)
        done = len(range(worker, start.batches, workers))
        left = len(range(worker, start.of, workers)) - done
        # The loader asks worker 0 first, so a worker that is a batch ahead first yields an empty one, which `RowLoader`
        # drops.
        ahead = [()] if worker < start.batches % workers else []
        return chain(ahead, islice(iter(self.dataset), left))


@dataclass
class LateSampler(Sampler[int]):
    """A sampler whose next epoch can start at a later batch."""

    sampler: Sampler[int]
    batch_size: int
    _skipped: int = 0

    def start_at(self, start: Start) -> None:
        self._skipped = start.batches * self.batch_size

    def __iter__(self) -> Iterator[int]:
        skipped, self._skipped = self._skipped, 0
        return islice(iter(self.sampler), skipped, None)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # torch's class does not declare the length


@contextmanager
def kept_random_state(device: str) -> Iterator[None]:
    """Restore the random state of the host and of `device` after the block."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if str(device).startswith("cuda") else []):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def seed_of_shards(seed: int, rank: int) -> int:
    """The worker's seed for OpenCLIP's resampled shard list, which adds the epoch."""
    return seed_of(seed, SHARDS, rank, worker_id())
