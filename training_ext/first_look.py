"""Check the first samples before a run starts, and refuse data in which none of them is usable."""

import io
from collections import Counter
from collections.abc import Callable
from itertools import islice

import pandas as pd
from PIL import Image

from open_clip_ext.errors import InputError
from training_ext.captions import JsonCaptions
from training_ext.loading import PAIR_MEMBERS, missing_of
from training_ext.shards import is_local
from training_ext.tars import one_line, read_samples

LOOKED_AT = 100  # at most: shards, samples per shard, lines of a csv


def look_at_shards(
    urls: list[str], key: Callable[[dict], object] | None = None, recaption: JsonCaptions | None = None,
    flag: str = "--train-data",
) -> None:
    """Read local shards up to the first usable pair, which is normally the first sample.

    Args:
        key: called with that sample, a dict of bytes.
        recaption: puts the captions of samples in their place first.

    Raises:
        InputError: none of the first samples of the first shards is usable, or `key` raises it.
    """
    if not all(map(is_local, urls)):
        return
    reasons: Counter[str] = Counter()
    for url in urls[:LOOKED_AT]:
        try:
            for sample in islice(read_samples(url), LOOKED_AT):
                if recaption is not None:
                    recaption(sample)
                reason = _reason(sample, "no caption .txt" if recaption is None else recaption.missing)
                if reason is None:
                    if key is not None:
                        key(sample)
                    return
                reasons[f"in {url!r} {reason}"] += 1
        except InputError:
            raise
        except Exception as error:  # such shards are skipped and counted in the run; find_shards refuses what must be
            reasons[f"{url!r} cannot be read: {one_line(error)}"] += 1
    if reasons:
        (first, _), *_ = reasons.items()
        raise InputError(f"{flag}: none of the first {reasons.total()} samples can be used, as {first}")


def _reason(sample: dict, missing: str) -> str | None:
    """Why a sample is not a usable pair of an image and a caption; None if it is."""
    if (lacks := missing_of(sample, missing)) is not None:
        return f"a sample has {lacks}"
    *images, text = PAIR_MEMBERS
    found = [name for name in images if name in sample]
    try:
        if not sample[text].decode().strip():
            return f"a caption .{text} is empty"
        Image.open(io.BytesIO(sample[found[0]])).load()
    except Exception as error:  # image libraries may raise anything
        return f"a .{found[0]} or .{text} cannot be decoded ({one_line(error)})"
    return None


def look_at_lines(table: pd.DataFrame, image_key: str, path: str, flag: str = "--train-data") -> None:
    """Open the first images of a csv up to the first readable one.

    Raises:
        InputError: none of them can be read.
    """
    first = None
    images = table[image_key].dropna().head(LOOKED_AT)
    for row, image in images.items():
        try:
            Image.open(str(image)).load()
            return
        except Exception as error:
            first = first or f"line {row + 2} names {str(image)!r}: {one_line(error)}"
    if first is not None:
        raise InputError(f"{flag}: none of the first {len(images)} images of {path!r} can be read; {first}")
