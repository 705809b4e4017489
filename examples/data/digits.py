"""Image-caption pairs from the 1,797 scans of handwritten digits that come with scikit-learn."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import numpy as np
from PIL import Image

from open_clip_ext.data.scenes import MAX_IMAGE_SIZE, MIN_IMAGE_SIZE, check_whole

NUM_DIGITS = 1797

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WEIGHTS = ("thin", "regular", "bold")
LEANS = ("leaning left", "upright", "leaning right")
TEMPLATES = (
    "a {weight} handwritten {digit}, {lean}",
    "a scan of a {weight} {digit} written by hand, {lean}",
    "the digit {digit} in {weight} handwriting, {lean}",
    "a handwritten {digit} with {weight} strokes, {lean}",
)
_LEAN_EXCESS = 0.05


def _weights(scans: np.ndarray, labels: np.ndarray) -> list[str]:
    """Weight of each scan's strokes: its ink is in the lower, middle or upper third of the scans of that digit."""
    ink = scans.sum(axis=(1, 2))
    steps = np.ones(len(scans), dtype=int)
    for digit in range(10):
        same = labels == digit
        ordered = np.sort(ink[same])
        steps[same & (ink < ordered[len(ordered) // 3])] = 0
        steps[same & (ink > ordered[-1 - len(ordered) // 3])] = 2
    return [WEIGHTS[step] for step in steps]


def _leans(scans: np.ndarray, labels: np.ndarray) -> list[str]:
    """Lean of each scan: its slant relative to the median of that digit, since a 7 or a 6 is slanted by itself."""
    y, x = np.mgrid[: scans.shape[1], : scans.shape[2]]
    ink, ink_x, ink_y, ink_xy, ink_yy = (
        (scans * weight).sum(axis=(1, 2)) for weight in (np.ones_like(x), x, y, x * y, y * y)
    )
    # Integers up to the division, so that slants and captions are the same on every platform.
    slant = (ink_x * ink_y - ink * ink_xy) / (ink * ink_yy - ink_y * ink_y)
    steps = np.ones(len(scans), dtype=int)
    for digit in range(10):
        same = labels == digit
        excess = slant - np.median(slant[same])
        steps[same & (excess < -_LEAN_EXCESS)] = 0
        steps[same & (excess > _LEAN_EXCESS)] = 2
    return [LEANS[step] for step in steps]


def _caption(row: int, label: int, weight: str, lean: str) -> str:
    draw = random.Random(row).random
    template = TEMPLATES[int(draw() * len(TEMPLATES))]
    digit = WORDS[label] if draw() < 0.5 else str(label)
    return template.format(digit=digit, weight=weight, lean=lean)


def digit_pairs(
    image_size: int = 64, rows: Iterable[int] | None = None
) -> Iterator[tuple[Image.Image, str, int]]:
    """Scans as `(image, caption, label)`, dark ink on white, in scikit-learn's order.

    The image is RGB, `image_size` x `image_size` pixels (16 to 512), enlarged from 8 x 8 pixels and a margin; the label
    is the digit, 0 to 9. The caption names the digit as a word or numeral, its weight (ink in the lower, middle or
    upper third of the scans of that digit) and its lean (slant relative to the median of that digit). The pairs are
    always the same, whatever the global random state.

    Args:
        rows: which scans, each 0 to 1796, in this order; None: all.

    Raises:
        ValueError: an argument is out of range.
        ImportError: scikit-learn is not installed.
    """
    image_size = check_whole("image_size", image_size, MIN_IMAGE_SIZE, MAX_IMAGE_SIZE)
    rows = range(NUM_DIGITS) if rows is None else [check_whole("rows", r, 0, NUM_DIGITS - 1) for r in rows]
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("scikit-learn is missing: pip install open-clip-ext[data]") from error
    digits = load_digits()
    scans, labels = digits.images.astype(np.int64), digits.target
    weights, leans = _weights(scans, labels), _leans(scans, labels)
    papers = (255 - scans * 255 // 16).astype(np.uint8)
    # The strokes touch the scans' borders; a margin keeps them whole, also in crops.
    papers = np.pad(papers, ((0, 0), (1, 1), (1, 1)), constant_values=255)

    def pairs() -> Iterator[tuple[Image.Image, str, int]]:
        for row in rows:
            image = Image.fromarray(papers[row]).resize((image_size, image_size), Image.Resampling.BICUBIC)
            label = int(labels[row])
            yield image.convert("RGB"), _caption(row, label, weights[row], leans[row]), label

    return pairs()
