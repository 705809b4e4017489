"""`RowLoader`: OpenCLIP's train loader, whose batches come with their rows, and whose epochs can start at any batch."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from training_ext.data.keys import Keys
from training_ext.data.seeding import AT_BATCH, AT_EPOCH, IN_SAMPLE, LateSampler, SeededEpochs, Start, seed_host
from training_ext.data.tags import KEY, NUMBER, ROW, Tags
from training_ext.openclip.hosts import host


@dataclass
class WithRow(Dataset):
    """A map-style data set of the host's images and tokens, with the row added to each sample.

    Args:
        dataset: OpenCLIP's, whose augmentations draw from the global generators.
        epoch: OpenCLIP's SharedEpoch; the augmentation is seeded by seed, epoch and row.
    """

    dataset: Dataset
    seed: int
    epoch: Any

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # torch's class does not declare the length

    def __getitem__(self, row: int) -> Any:
        seed_host(self.seed, IN_SAMPLE, self.epoch.get_value(), row)
        image, tokens = host().pair(self.dataset[row])
        return host().batch(image, Tags((ROW,)).append(tokens, row))


@dataclass
class RowLoader:
    """A train loader that takes the numbers off each batch, and keeps those of the last `keep` batches.

    Args:
        loader: OpenCLIP's, with its `num_batches` and `num_samples`.
        keep: batches per optimizer step.
        tags: the numbers that the samples carry.
        streams: loader workers that number their samples; 0 for map-style data.
        seed: seeds this process's generators for a use (of `seeding`) and a place in this epoch.
        order: a LateSampler or SeededEpochs, which determines the loader's order.
        keys: finds the keys of a batch; None without keys, or if its samples carry them.

    Attributes:
        first: number of batches of the epoch that an earlier run completed.
        numbers: number of the latest sample of each stream.
    """

    loader: Any
    keep: int
    tags: Tags
    streams: int
    seed: Callable[..., None]
    order: LateSampler | SeededEpochs | None = None
    keys: Keys | None = None
    first: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.numbers = [0] * self.streams
        self._latest: deque[dict[str, Tensor]] = deque(maxlen=self.keep)

    def start_at(self, start: Start | None) -> None:
        """Start the next epoch at `start`; None: at its first batch."""
        self.first = 0 if start is None else start.batches
        self.numbers = [0] * self.streams if start is None else list(start.samples)
        if start is not None:
            assert self.order is not None
            self.order.start_at(start)

    def __iter__(self) -> Iterator[Any]:
        self._latest.clear()
        self.seed(AT_EPOCH)
        empty = self.first % self.streams if self.streams else 0  # see `SeededEpochs`
        for done, batch in enumerate(islice(self.loader, empty, None), self.first + 1):
            # So that the model's random numbers do not depend on what the loader draws in this process.
            self.seed(AT_BATCH, done)
            images, tokens = host().pair(batch)
            tokens, numbers = self.tags.take(tokens)
            if self.streams:
                self.numbers[(done - 1) % self.streams] = int(numbers[NUMBER][-1])
            if self.keys is not None:
                numbers[KEY] = self.keys(tokens, numbers.get(ROW))
            self._latest.append(numbers)
            yield host().batch(images, tokens)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        # Not `self.loader`, which would come here again: it is absent while a copy or a pickle is being made.
        return getattr(object.__getattribute__(self, "loader"), name)

    def latest(self, name: str) -> Tensor | None:
        """Rows or keys of the last `keep` batches, one after the other, int64 on the CPU; None if there are none."""
        return torch.cat([numbers[name] for numbers in self._latest]) if name in self._latest[-1] else None
