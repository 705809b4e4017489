"""Seed all random numbers by where they are used, so that a run resumed at any step equals an uninterrupted one.

The order of the data depends on (seed, epoch, rank, worker); the augmentation of a sample also on its row or its number
in the worker's stream; dropout on (seed, epoch, rank, batch). OpenCLIP itself seeds once at the start, seeds its
webdataset shuffle buffer by time and process id, and keeps the loader workers' generators from epoch to epoch.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

# The first number after the seed tells the uses apart, so that no two draw the same numbers.
AT_EPOCH, AT_BATCH, IN_WORKER, SHARDS, SHUFFLE, IN_SAMPLE, CAPTION = 1, 2, 3, 4, 5, 6, 7


def seed_of(seed: int, *coordinates: int) -> int:
    """A 63-bit seed that differs for every (seed, *coordinates), all non-negative."""
    # The length comes first, since SeedSequence does not tell (1,) from (1, 0).
    sequence = np.random.SeedSequence([len(coordinates), seed, *coordinates])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_all(seed: int, *coordinates: int) -> None:
    """Seed Python's and NumPy's global generators, and torch's on every device."""
    seed_host(seed, *coordinates)
    torch.manual_seed(seed_of(seed, *coordinates))


def seed_host(seed: int, *coordinates: int) -> None:
    """Seed Python's, NumPy's and torch's generators of the host only, which is faster."""
    value = seed_of(seed, *coordinates)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)


def worker_id() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


def shared_zeros(workers: int, *size: int) -> Tensor:
    """Integers that this process shares with loader workers; without workers they need no /dev/shm."""
    zeros = torch.zeros(size, dtype=torch.int64)
    return zeros.share_memory_() if workers else zeros


class SharedEpoch:
    """As OpenCLIP's SharedEpoch, which needs /dev/shm without workers, too."""

    def __init__(self, workers: int):
        self._epoch = shared_zeros(workers)

    def set_value(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def get_value(self) -> int:
        return int(self._epoch)


@contextmanager
def kept_random_state(device: str) -> Iterator[None]:
    """Restore the random state of the host and of `device` after the block."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if str(device).startswith("cuda") else []):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
