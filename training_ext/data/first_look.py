"""Check the first samples of shards before a run starts: refuse data in which none of them is usable."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

import pandas as pd
from PIL import Image

from open_clip_ext.errors import InputError, reason_of
from training_ext.data.captions import JsonCaptions
from training_ext.data.images import COMPARED, spread, warn_of_images
from training_ext.data.seen_captions import SeenCaptions, see
from training_ext.data.shards import local_path
from training_ext.data.tars import read_samples, stored_samples
from training_ext.openclip.loading import PAIR_MEMBERS, missing_of

LOOKED_AT = 100  # at most: shards, samples per shard
SHARDS, PASSED = 20, 1000  # over which the images that are looked at are spread: shards, and samples in all of these


def look_at_shards(
    urls: list[str], key: Callable[[dict], object] | None = None, recaption: JsonCaptions | None = None,
    flag: str = "--train-data",
) -> SeenCaptions | None:
    """Check that local shards have a usable pair, which is normally the first sample, and warn of some images.

    Args:
        key: called with that sample, a dict of bytes.
        recaption: puts the captions of samples in their place first.

    Returns:
        The captions of the first samples of its shard; None if the shards are not local.

    Raises:
        InputError: none of the first samples of the first shards is usable, or `key` raises it.
    """
    if None in map(local_path, urls):
        return None
    reasons = []
    for url in urls[:LOOKED_AT]:
        try:
            samples = _first_samples(url, recaption)
            for sample in samples:
                reason = _reason(sample, "no caption .txt" if recaption is None else recaption.missing)
                if reason is None:
                    if key is not None:
                        key(sample)
                    warn_of_images(images_of_shards(urls), flag)
                    return _captions_of(url, recaption)
                reasons.append(f"in {url!r} {reason}")
        except InputError:
            raise
        except Exception as error:  # such shards are skipped and counted in the run; find_shards refuses what must be
            reasons.append(f"{url!r} cannot be read: {reason_of(error)}")
    if reasons:
        raise InputError(f"none of the first {len(reasons)} samples can be used, as {reasons[0]}", flag)
    return None


def _first_samples(url: str, recaption: JsonCaptions | None) -> Iterator[dict]:
    for sample in islice(read_samples(url), LOOKED_AT):
        if recaption is not None:
            recaption(sample)
        yield sample


def _captions_of(url: str, recaption: JsonCaptions | None) -> SeenCaptions:
    """The captions of a shard's first samples."""
    captions = []
    with suppress(Exception):  # it may be damaged further down
        for sample in _first_samples(url, recaption):
            captions.append(sample.get("txt", b"").decode(errors="replace"))
    return see(pd.Series(captions, dtype=object), None, f"the first {{}} captions of {url!r}")


def _reason(sample: dict, missing: str) -> str | None:
    """Why a sample is not a usable pair of an image and a caption; None if it is."""
    if (lacks := missing_of(sample, missing)) is not None:
        return f"a sample has {lacks}"
    *images, text = PAIR_MEMBERS
    image_suffixes = [name for name in images if name in sample]
    try:
        if not sample[text].decode().strip():
            return f"a caption .{text} is empty"
        Image.open(io.BytesIO(sample[image_suffixes[0]])).load()
    except Exception as error:  # image libraries may raise anything
        return f"a .{image_suffixes[0]} or .{text} cannot be decoded ({reason_of(error)})"
    return None


def images_of_shards(urls: Sequence[str]) -> Iterator[tuple[str, io.BytesIO]]:
    """Names and contents of some images of local shards, spread over the shards and over the beginning of each."""
    shards = spread(urls, SHARDS)
    for url in shards:
        with suppress(Exception):  # it may be damaged
            samples = list(islice(stored_samples(local_path(url) or url), PASSED // len(shards)))
            for read, sample in spread(samples, COMPARED // len(shards)):
                for name in PAIR_MEMBERS[:-1]:
                    if name in sample:
                        yield f"{url}: {sample['__key__']}.{name}", io.BytesIO(read(sample[name]))
