"""Images that reach the model otherwise than they look: warn of them, and mend them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from training_ext.openclip.loading import warn_once

COMPARED = 100  # images
ORIENTATION = 0x0112  # EXIF's number of it


def spread(items: Sequence, number: int = COMPARED) -> Sequence:
    """At most `number` of the items, evenly spread over all."""
    return items[:: -(-len(items) // number) or 1]


def warn_of_images(images: Iterable[tuple[str, Any]], flag: str) -> None:
    """Warn once of each kind of change between some images, names and files, and what the model sees."""
    names_by_change: dict[str, list[str]] = {}
    looked_at = 0
    with suppress(Exception):  # a cut shard
        for name, file in images:
            with suppress(Exception), Image.open(file) as image:  # the run counts images that cannot be read
                looked_at += 1
                for change in changes(image):
                    names_by_change.setdefault(change, []).append(name)
    for change, names in names_by_change.items():
        some = f"{flag}: {len(names)} of {looked_at} images that were looked at"
        warn_once(f"{some} {change}. The first is {names[0]!r}")


def changes(image: Image.Image) -> Iterator[str]:
    """What OpenCLIP, which converts images to RGB, changes in this one."""
    if _beyond_rgb(image) is not None:
        yield "lose values in RGB, which keeps 0 to 255 and makes others black or white; scale them"
    elif image.has_transparency_data and image.getcolors(1) is None and image.convert("RGB").getcolors(1) is not None:
        yield "become one colour in RGB, which leaves out transparency; put them on a background"
    if image.format != "TIFF" and image.getexif().get(ORIENTATION, 1) > 1:  # Pillow itself applies that of TIFF
        yield "are turned by their EXIF orientation, which OpenCLIP does not apply; turn their pixels"


def _beyond_rgb(image: Image.Image) -> NDArray | None:
    """The values of a gray image that RGB does not keep, with finite ones for others; None if it keeps them."""
    if not image.mode.startswith(("I", "F")):
        return None
    values = np.asarray(image, np.float64)
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    if low == high or (low >= 0 and 1 < high <= 255):
        return None
    return np.nan_to_num(values, nan=low, posinf=high, neginf=low)


def as_it_looks(image: Image.Image) -> Image.Image:
    """The image in RGB without what `changes` names: turned, on white where it was transparent, and with the values
    that RGB does not keep scaled, from the lowest to the highest of this image, to 0 to 255."""
    image = ImageOps.exif_transpose(image)
    if (values := _beyond_rgb(image)) is not None:
        return Image.fromarray(np.uint8(255 * (values - values.min()) / np.ptp(values) + 0.5)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
