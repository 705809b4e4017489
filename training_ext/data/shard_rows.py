"""Read the samples of shards to a damage, and detect shards that are not as they were counted.

Each class is a stage from shards, dicts with a "url", to their samples, around another such stage.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from open_clip_ext.errors import InputError
from training_ext.core.rows import RawHook, ShardRows
from training_ext.data.shards import Shards
from training_ext.data.tars import KeyDigest, samples_before
from training_ext.openclip.loading import missing_of

Stage = Callable[[Iterable[dict]], Iterable[dict]]
BROKEN = "__broken__"  # of a sample in which a damage may lie
_RECORDED = "its recorded size of {}: correct --shard-sizes or the sizes.json beside it; without either it is counted"


class DamagedShard(Exception):
    """A shard cannot be read, or not to its end, because of the error that is its argument."""


def read_to_damage(shards: Iterable[dict]) -> Iterator[dict]:
    """Yields samples as OpenCLIP's reader does, marks the one in which a damage may lie, and raises DamagedShard."""
    for shard in shards:
        errors: list[Exception] = []
        for sample in samples_before(shard["url"], errors):
            yield {**sample, BROKEN: True} if errors else sample
        if errors:
            raise DamagedShard(errors[0])


def leave_out_broken(sample: dict) -> dict[str, int] | None:
    """Leave out the sample in which a shard breaks off if it is no pair; as `Component.raw_sample`."""
    if BROKEN in sample and missing_of(sample) is not None:
        return None
    sample.pop(BROKEN, None)
    return {}


@dataclass
class CountedShards:
    """Compares the shards with their counts.

    Iterating raises InputError at a shard that is not among `shards`, or not as it was counted.
    """

    read: Stage
    shards: Shards

    def __call__(self, shards: Iterable[dict]) -> Iterator[dict]:
        for shard in shards:
            url = shard["url"]
            if url not in self.shards.size_of:
                num_shards = len(self.shards.urls)
                raise InputError(f"shard {url!r} is not one of the {num_shards} that have rows", "--train-data")
            size, keys, samples = self.shards.size_of[url], KeyDigest(), 0
            for sample in self.read([shard]):
                if samples >= size:
                    raise InputError(f"shard {url!r} holds more samples than {_RECORDED.format(size)}", "--train-data")
                keys.add(sample["__key__"])
                samples += 1
                yield sample
            if samples < size:
                raise InputError(
                    f"shard {url!r} holds only {samples} samples, fewer than {_RECORDED.format(size)}", "--train-data"
                )
            if self.shards.keys.get(url, keys.value()) != keys.value():
                raise InputError(
                    f"shard {url!r} holds other samples than when it was counted, before the start; keep the "
                    "data as they are while a training runs",
                    "--train-data",
                )


@dataclass
class UndamagedParts:
    """Reads shards one after the other, and goes on with the next one where a shard is damaged.

    Args:
        read: yields the samples of a shard, and raises DamagedShard at the first that cannot be read.
        failed: called for a damaged shard with its url, the error, the number of samples that were read, and its size
            if `sizes` has it.
        ended: called with url and number of samples of a shard that was read to its end.
        sizes: samples in the shards, as far as they are known.
    """

    read: Stage
    failed: Callable[[str, Exception, int, int | None], object]
    ended: Callable[[str, int], object]
    sizes: dict[str, int]

    def __call__(self, shards: Iterable[dict]) -> Iterator[dict]:
        for shard in shards:
            url, position = shard["url"], 0
            try:
                for sample in self.read([shard]):
                    yield sample
                    position += BROKEN not in sample  # `leave_out_broken` takes it off all others
            except DamagedShard as damage:
                self.failed(url, damage.args[0], position, self.sizes.get(url))
            else:
                self.ended(url, position)


def rows_of_shards(
    shards: Shards | None, failed: Callable[[str, Exception, int, int | None], object],
    ended: Callable[[str, int], object] = lambda url, samples: None, hooks: Iterable[RawHook] = (),
) -> ShardRows:
    """The stages together, as in a training: samples with their rows, if `shards` has these.

    Args:
        failed, ended: see `UndamagedParts`.
        hooks: as of `ShardRows`.
    """
    counted = read_to_damage if shards is None else CountedShards(read_to_damage, shards)
    sizes = {} if shards is None else shards.size_of
    return ShardRows(UndamagedParts(counted, failed, ended, sizes), sizes, [*hooks, leave_out_broken])
