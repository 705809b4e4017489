"""Random numbers that depend on (seed, epoch, rank, worker) and on nothing that came before."""

import pickle
import random
from itertools import product

import numpy as np
import pytest
import torch
from open_clip_train.data import SharedEpoch
from torch.utils.data import DataLoader, IterableDataset

from training_ext.seeding import GlobalRandom, SeededEpochs, WorkerSeed, seed_all, seed_of


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(1).item()


class Draws(IterableDataset):
    def __iter__(self):
        for _ in range(3):
            yield draw()


def test_every_place_has_its_own_seed():
    places = [*product(range(3), repeat=4), *product(range(3), repeat=3)]
    seeds = [seed_of(*place) for place in places]
    assert len(set(seeds)) == len(places) and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [seed_of(*place) for place in places]


def test_all_generators_are_seeded():
    seed_all(1, 2)
    first = draw()
    draw()
    seed_all(1, 2)
    assert draw() == first
    seed_all(1, 3)
    assert all(x != y for x, y in zip(draw(), first, strict=True))


def epochs(numbers: list[int], workers: int, seed: int = 0, rank: int = 0) -> dict[int, list]:
    """What each epoch draws, in a loader whose workers stay."""
    dataset = SeededEpochs(Draws(), seed, rank)
    dataset.shared_epoch = SharedEpoch(0)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    drawn = {}
    for number in numbers:
        dataset.shared_epoch.set_value(number)
        drawn[number] = [tuple(item) for item in loader]
    return drawn


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_draws_the_same_whatever_came_before(workers):
    whole = epochs([0, 1, 2], workers)
    random.seed()  # another process
    assert epochs([2], workers)[2] == whole[2]
    assert len({item for items in whole.values() for item in items}) == 3 * 3 * max(1, workers)
    for other in (epochs([2], workers, seed=1), epochs([2], workers, rank=1)):
        assert not set(other[2]) & set(whole[2])


def test_the_shuffle_buffer_draws_from_the_seeded_generator():
    rng = pickle.loads(pickle.dumps(GlobalRandom()))
    random.seed(5)
    drawn = [rng.randint(0, 10**6) for _ in range(5)]
    random.seed(5)
    assert drawn == [random.randint(0, 10**6) for _ in range(5)] and len(set(drawn)) > 1


def test_resampled_shards_differ_by_seed_and_rank():
    assert len({WorkerSeed(seed, rank)() for seed in range(3) for rank in range(3)}) == 9
    assert pickle.loads(pickle.dumps(WorkerSeed(1, 2)))() == WorkerSeed(1, 2)()


class Seeds(IterableDataset):
    def __iter__(self):
        yield WorkerSeed(0, 0)()


def test_resampled_shards_differ_by_worker():
    assert len(set(DataLoader(Seeds(), batch_size=None, num_workers=2))) == 2
