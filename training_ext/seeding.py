"""Random numbers that depend on (seed, epoch, rank, worker) alone, so that a resumed run equals an uninterrupted one.

OpenCLIP seeds once at start, its webdataset shuffle buffer by time and process number, and keeps loader workers, with
their generators, from epoch to epoch.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

# First number after the seed: no two uses draw the same numbers.
AT_EPOCH, AFTER_FIRST_BATCH, IN_WORKER, SHARDS = 1, 2, 3, 4


def seed_of(seed: int, *place: int) -> int:
    """A 63-bit seed that differs for every (seed, *place), all non-negative."""
    # SeedSequence takes (1,) and (1, 0) for the same, so the length comes first.
    sequence = np.random.SeedSequence([len(place), seed, *place])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_all(seed: int, *place: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    value = seed_of(seed, *place)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def worker_id() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


class SeededEpochs(IterableDataset):
    """Iterates over `dataset` after seeding this worker's generators for the epoch.

    Args:
        dataset: an iterable data set, whose augmentations draw from the global generators.
        seed: the run's seed.
        rank: this process.

    `shared_epoch` (OpenCLIP's SharedEpoch) must be set before the first iteration.
    """

    def __init__(self, dataset: IterableDataset, seed: int, rank: int):
        super().__init__()
        self.dataset = dataset
        self.seed = seed
        self.rank = rank
        self.shared_epoch: Any = None

    def __iter__(self) -> Iterator[Any]:
        seed_all(self.seed, IN_WORKER, self.shared_epoch.get_value(), self.rank, worker_id())
        return iter(self.dataset)


class GlobalRandom:
    """The `random` module as a picklable generator for webdataset's shuffle buffer."""

    def randint(self, low: int, high: int) -> int:
        return random.randint(low, high)


class WorkerSeed:
    """Called for the seed of OpenCLIP's resampled shard list, which adds the epoch."""

    def __init__(self, seed: int, rank: int):
        self.seed = seed
        self.rank = rank

    def __call__(self) -> int:
        return seed_of(self.seed, SHARDS, self.rank, worker_id())
