"""Random numbers that depend on (seed, epoch, rank, worker) and on nothing that came before."""

import random
from itertools import islice, product

import numpy as np
import pytest
import torch
from open_clip_train.data import SharedEpoch
from torch.utils.data import DataLoader, IterableDataset

from training_ext.components.exact_resume.order import SampleStream, SeededEpochs, Start, seed_of_shards
from training_ext.data.seeding import kept_random_state, seed_all, seed_host, seed_of


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(1).item()


def test_every_place_has_its_own_seed():
    places = [*product(range(3), repeat=4), *product(range(3), repeat=3)]
    seeds = [seed_of(*place) for place in places]
    assert len(set(seeds)) == len(places) and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [seed_of(*place) for place in places]


def test_host_generators_alone_are_seeded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("a generator of a device"))
    seed_host(1, 2)
    first = draw()
    seed_host(1, 2)
    assert draw() == first
    seed_host(1, 3)
    assert all(x != y for x, y in zip(draw(), first, strict=True))


class Seeds(IterableDataset):
    def __iter__(self):
        yield seed_of_shards(0, 0)


def test_resampled_shards_differ():
    assert len({seed_of_shards(seed, rank) for seed in range(3) for rank in range(3)}) == 9
    assert len(set(DataLoader(Seeds(), batch_size=None, num_workers=2))) == 2


class Shuffle:
    def __init__(self, rng):
        self.rng = rng

    def __call__(self, source):
        buffer = list(source)
        while buffer:
            yield buffer.pop(self.rng.randint(0, len(buffer) - 1))


class Samples(IterableDataset):
    """Batches of two of 10 samples, again and again, each with its numbers and what its augmentation drew."""

    def __init__(self, stream: SampleStream):
        self.stream = stream

    def __iter__(self):
        batch = []
        while True:
            for sample in self.stream({"txt": str(i).encode()} for i in range(10)):
                batch.append((sample["txt"].decode(), draw()))
                if len(batch) == 2:
                    yield batch
                    batch = []


def stream_epochs(start: Start | None, numbers: list[int], workers: int, rank: int = 0) -> list[list]:
    stream = SampleStream(Shuffle, 0, rank)
    dataset = SeededEpochs(Samples(stream), stream)
    dataset.shared_epoch = SharedEpoch(0)
    if start is not None:
        dataset.start_at(start)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    epochs = []
    for number in numbers:
        dataset.shared_epoch.set_value(number)
        batches = islice(loader, None if start is not None and number == start.epoch else 14)
        epochs.append([[(text, tuple(draws)) for text, draws in batch] for batch in batches])
    return epochs


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_anywhere(workers):
    """14 batches of two, also where the data begin anew (each worker has 10 samples)."""
    whole, after = stream_epochs(None, [1, 2], workers)
    ways = max(1, workers)
    numbers = [text.split("\x1f")[0] for batch in whole[::ways] for text, _ in batch]
    assert numbers == [f"number={number + 1}" for number in range(28 // ways)]
    order = [text.split("\x1f")[1] for batch in whole[::ways] for text, _ in batch]
    assert sorted(order[:10]) == [str(i) for i in range(10)] != order[:10] != order[10:20]
    assert len({draws for batch in whole for _, draws in batch}) == 28 and whole != after
    assert not {draws for batch in stream_epochs(None, [1], workers, rank=1)[0] for _, draws in batch} & {
        draws for batch in [*whole, *after] for _, draws in batch
    }
    for done in (1, 5, 14):
        samples = [2 * len(range(worker, done, ways)) for worker in range(ways)]
        rest, again = stream_epochs(Start(1, done, 14, samples), [1, 2], workers)
        assert [batch for batch in rest if batch] == whole[done:]
        assert rest[: done % ways] == [[]] * (done % ways)
        assert again == after


def test_a_block_that_draws_changes_nothing_after_it():
    seed_all(1, 2)
    expected = draw()
    seed_all(1, 2)
    with kept_random_state("cpu"):
        draw()
    assert draw() == expected
