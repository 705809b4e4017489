"""`ShardRows`: read the samples of shards with their rows, and detect shards that are not as they were counted."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from open_clip_ext.errors import InputError
from training_ext.data.shards import Shards
from training_ext.data.tags import Tags
from training_ext.data.tars import KeyDigest, samples_before
from training_ext.openclip.loading import missing_of

_RECORDED = "its recorded size of {}: correct --shard-sizes or the sizes.json beside it; without either it is counted"


@dataclass
class ShardRows:
    """Pipeline stage that reads tars as OpenCLIP does and writes each sample's row in front of its caption.

    It replaces OpenCLIP's `tarfile_to_samples_nothrow`. Samples without "txt", which OpenCLIP drops later,
    are counted but not changed; an empty caption gets no row, and white space becomes one. The sample in which a shard
    breaks off is left out if it is no pair. `Tags` reads it back.

    Args:
        shards: the shards that have rows; None: read without rows.
        failed: called with url, error, number of samples before it and recorded size, if any, for a shard that cannot
            be read, or not to its end.
        ended: called with url and number of samples of a shard that was read to its end.
        key: tells the key of a sample, which then stands between the row, if any, and the caption.
        recaption: puts the caption of a sample in the place of its "txt", before all else.

    Iterating raises InputError at a shard that is not among `shards`, at one that is not as it was counted, and what
    `key` raises.
    """

    shards: Shards | None
    failed: Callable[[str, Exception, int, int | None], object]
    ended: Callable[[str, int], object] | None = None
    key: Callable[[dict], int] | None = None
    recaption: Callable[[dict], object] | None = None

    def __call__(self, src: Iterable[dict]) -> Iterator[dict]:
        """Yields the samples of `src`, dicts with a "url"."""
        for source in src:
            url = source["url"]
            offset, size = self._place(url)
            position, keys = 0, KeyDigest()
            errors: list[Exception] = []
            for sample in samples_before(url, errors):
                if size is not None and position >= size:
                    raise InputError(f"shard {url!r} holds more samples than {_RECORDED.format(size)}", "--train-data")
                keys.add(sample["__key__"])
                if self.recaption is not None:
                    self.recaption(sample)
                if errors and missing_of(sample):
                    break
                if "txt" in sample:
                    sample["txt"] = self._with_numbers(sample, offset + position)
                yield sample
                position += 1
            if errors:
                self.failed(url, errors[0], position, size)
                continue
            self._check_whole(url, size, position, keys)
            if self.ended is not None:
                self.ended(url, position)

    def _with_numbers(self, sample: dict, row: int) -> bytes:
        """The caption after its numbers; an empty one without, so that it can be counted."""
        caption = sample["txt"]
        if not caption.decode(errors="replace").strip():
            return b""
        if self.key is not None:
            caption = Tags.write(caption, self.key(sample))
        return caption if self.shards is None else Tags.write(caption, row)

    def _place(self, url: str) -> tuple[int, int | None]:
        if self.shards is None:
            return 0, None
        if url not in self.shards.offsets:
            known = len(self.shards.urls)
            raise InputError(f"shard {url!r} is not one of the {known} that have rows", "--train-data")
        return self.shards.offsets[url], self.shards.size_of[url]

    def _check_whole(self, url: str, size: int | None, samples: int, keys: KeyDigest) -> None:
        if self.shards is None or size is None:
            return
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
