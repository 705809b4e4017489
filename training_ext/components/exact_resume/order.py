"""The order of the train data as a function of the epoch, which can be resumed at any batch."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from torch.utils.data import IterableDataset, Sampler

from training_ext.core.patching import StandIn
from training_ext.core.rows import Wrapped, pair_of
from training_ext.core.tags import Tags
from training_ext.data import seeding
from training_ext.data.seeding import SharedEpoch, seed_host, seed_of, worker_id

NUMBER = "number"  # name of the column: how many samples the loader worker had read by then


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
        shuffle: builds webdataset's buffer, which draws from its `rng`.
        seed, rank: of the run.
    """

    def __init__(self, shuffle: Callable[..., Callable], seed: int, rank: int):
        self.seed = seed
        self.rank = rank
        self._rng = random.Random()
        self._shuffle: Callable[[Iterable[dict]], Iterator[dict]] = shuffle(rng=self._rng)
        self._epoch = self._number = self._skipped = 0

    def begin(self, epoch: int, skipped: int = 0) -> None:
        """Start an epoch; its first `skipped` samples are dropped before they are decoded."""
        self._epoch, self._number, self._skipped = epoch, 0, skipped
        self._rng.seed(seed_of(self.seed, seeding.SHUFFLE, epoch, self.rank, worker_id()))

    def __call__(self, source: Iterable[dict]) -> Iterator[dict]:
        """Yield the samples; called again if an epoch takes several passes over the data."""
        for sample in self._shuffle(source):
            self._number += 1
            if self._number <= self._skipped:
                continue
            # Enough, since the following stages handle one sample at a time.
            seed_host(self.seed, seeding.IN_SAMPLE, self._epoch, self.rank, worker_id(), self._number)
            if sample.get("txt"):  # an empty caption stays empty, so that it can be counted
                sample["txt"] = Tags.write(sample["txt"], **{NUMBER: self._number})
            yield sample


class SeededEpochs(IterableDataset):
    """Iterates over `dataset` after seeding this worker's generators for the epoch.

    Args:
        dataset: an iterable data set of batches, whose augmentations draw from the global generators.
        stream: the stage of `dataset` that numbers its samples.

    `shared_epoch` must be set before the first iteration.
    """

    def __init__(self, dataset: IterableDataset, stream: SampleStream):
        super().__init__()
        self.dataset = dataset
        self.stream = stream
        self.shared_epoch: Any = None
        self._start: Start | None = None

    def start_at(self, start: Start | None) -> None:
        """Resume at `start`; called before the first iteration, which copies this object into the workers."""
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        epoch, worker, start = self.shared_epoch.get_value(), worker_id(), self._start
        seeding.seed_all(self.stream.seed, seeding.IN_WORKER, epoch, self.stream.rank, worker)
        if start is None or start.epoch != epoch:
            self.stream.begin(epoch)
            return iter(self.dataset)
        self.stream.begin(epoch, start.samples[worker])
        workers = len(start.samples)
        done = len(range(worker, start.batches, workers))
        left = len(range(worker, start.of, workers)) - done
        # The loader asks worker 0 first, so a worker that is a batch ahead first yields an empty one, which
        # `ResumableLoader` drops.
        ahead = [()] if worker < start.batches % workers else []
        return chain(ahead, islice(iter(self.dataset), left))


@dataclass
class LateSampler(Sampler[int]):
    """A sampler whose next epoch can start at a later batch."""

    sampler: Sampler[int]
    batch_size: int
    _skipped: int = 0

    def start_at(self, start: Start | None) -> None:
        self._skipped = 0 if start is None else start.batches * self.batch_size

    def __iter__(self) -> Iterator[int]:
        skipped, self._skipped = self._skipped, 0
        return islice(iter(self.sampler), skipped, None)

class SeededItems(Wrapped):
    """A map-style data set of OpenCLIP's, whose augmentations draw from the global generators, seeded by row.

    Args:
        epoch: the current one.
    """

    def __init__(self, dataset: Any, seed: int, epoch: SharedEpoch):
        super().__init__(dataset)
        self.seed = seed
        self.epoch = epoch

    def __getitem__(self, row: int) -> Any:
        seed_host(self.seed, seeding.IN_SAMPLE, self.epoch.get_value(), row)
        return self.dataset[row]


@dataclass
class ResumableLoader(StandIn):
    """A train loader whose epochs can start at any batch, and which seeds this process before each.

    Args:
        loader: OpenCLIP's, with its `num_batches` and `num_samples`.
        restart: makes the next iteration of `loader` begin at a `Start`, or at its first batch.
        streams: loader workers that number their samples; 0 for map-style data.
        tags: the numbers that the samples carry.
        seed: seeds this process's generators for a use (of `seeding`) and a place in this epoch.

    Attributes:
        first: number of batches of the epoch that an earlier run completed.
        numbers: number of the latest sample of each stream.
    """

    stands_for = "loader"

    loader: Any
    restart: Callable[[Start | None], None]
    streams: int
    tags: Tags
    seed: Callable[..., None]
    first: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.numbers = [0] * self.streams

    def start_at(self, start: Start | None) -> None:
        """Start the next epoch at `start`; None: at its first batch."""
        self.first = 0 if start is None else start.batches
        self.numbers = [0] * self.streams if start is None else list(start.samples)
        self.restart(start)

    def __iter__(self) -> Iterator[Any]:
        self.seed(seeding.AT_EPOCH)
        empty = self.first % self.streams if self.streams else 0  # see `SeededEpochs`
        for done, batch in enumerate(islice(self.loader, empty, None), self.first + 1):
            # So that the model's random numbers do not depend on what the loader draws in this process.
            self.seed(seeding.AT_BATCH, done)
            if self.streams:
                numbers = self.tags.column(pair_of(batch)[1], NUMBER)
                self.numbers[(done - 1) % self.streams] = int(numbers[-1])
            yield batch


def seed_of_shards(seed: int, rank: int) -> int:
    """The worker's seed for OpenCLIP's resampled shard list, which adds the epoch."""
    return seed_of(seed, seeding.SHARDS, rank, worker_id())
