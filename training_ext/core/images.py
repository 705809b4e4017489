"""Warn of images that reach the model otherwise than they look."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from PIL import Image

from training_ext.openclip.loading import warn_once

COMPARED = 20  # images
ORIENTATION = 0x0112  # EXIF's number of it


def warn_of_images(images: Iterable[tuple[str, Any]], path: str, flag: str) -> None:
    """Warn once of each kind of change between the first images of `path`, names and files, and what the model sees."""
    found: dict[str, list[str]] = {}
    looked_at = 0
    with suppress(Exception):  # a cut shard
        for name, file in islice(images, COMPARED):
            looked_at += 1
            with suppress(Exception), Image.open(file) as image:  # the run counts images that cannot be read
                for change in _changes(image):
                    found.setdefault(change, []).append(name)
    for change, names in found.items():
        some = f"{flag}: {len(names)} of the first {looked_at} images of {path!r}"
        warn_once(f"{some} {change}. The first is {names[0]!r}")


def _changes(image: Image.Image) -> Iterator[str]:
    """What OpenCLIP, which converts images to RGB, changes in this one."""
    if image.mode.startswith(("I", "F")):
        # Pillow has no extrema of big-endian numbers.
        extrema: Any = (image if image.mode == "F" else image.convert("I")).getextrema()
        low, high = extrema
        if low < high and not 1 < high <= 255:
            yield "lose values in RGB, which keeps 0 to 255 and makes others black or white; scale them"
    elif image.has_transparency_data and image.getcolors(1) is None and image.convert("RGB").getcolors(1) is not None:
        yield "become one colour in RGB, which leaves out transparency; put them on a background"
    if image.format != "TIFF" and image.getexif().get(ORIENTATION, 1) > 1:  # Pillow itself applies that of TIFF
        yield "are turned by their EXIF orientation, which OpenCLIP does not apply; turn their pixels"
