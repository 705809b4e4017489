"""Draw samples, images with their captions, as one picture."""

import io
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from PIL import Image


def opened(key: str, data: bytes) -> Image.Image:
    """The image of a sample; an empty one, and a line on stderr, if it cannot be decoded."""
    try:
        return Image.open(io.BytesIO(data)).convert("RGB")
    except Exception as error:  # image libraries may raise anything
        print(f"sample {key!r} has an image that cannot be decoded: {error}", file=sys.stderr)
        return Image.new("RGB", (8, 8), "red")


def draw(samples: Sequence[tuple[Image.Image, str]], columns: int, path: Path) -> None:
    from matplotlib.figure import Figure  # here because it is slow

    rows = -(-len(samples) // columns)
    figure = Figure(figsize=(1.6 * columns, 2.2 * rows))
    axes = figure.subplots(rows, columns, squeeze=False)
    # Room for four lines above each image; matplotlib's own layouts take many seconds.
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=1 - 0.6 / (2.2 * rows), wspace=0.08, hspace=0.42)
    for axis in axes.flat:
        axis.axis("off")
    for axis, (image, caption) in zip(axes.flat, samples, strict=False):
        axis.imshow(image)
        axis.set_title("\n".join(textwrap.wrap(caption, 22, max_lines=4)), fontsize=7, parse_math=False)
    figure.savefig(path, dpi=110)
