"""Look at the data: draw random samples of a webdataset shard with their captions.

    python examples/sheet.py icons/train-000000.tar --out sheet.png
"""

import argparse
import io
import random
import sys
import tarfile
import textwrap
from pathlib import Path
from typing import Any

import webdataset
from command import image_file, positive
from PIL import Image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shard", help="path or URL of a tar")
    parser.add_argument("--samples", type=positive, default=100, help="(default: 100)")
    parser.add_argument("--columns", type=positive, default=10, help="(default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="other samples (default: 0)")
    parser.add_argument("--out", type=image_file, default=Path("sheet.png"), help="(default: sheet.png)")
    args = parser.parse_args()
    shard = webdataset.WebDataset(args.shard, shardshuffle=False).to_tuple(
        "__key__", "jpg;png;jpeg;webp", "txt", handler=webdataset.ignore_and_continue
    )
    try:
        samples = list(shard)
    except (OSError, tarfile.TarError) as error:
        parser.error(f"{args.shard!r} cannot be read: {error}")
    if not samples:
        parser.error(f"{args.shard!r} has no pictures with captions")
    chosen = random.Random(args.seed).sample(samples, min(args.samples, len(samples)))
    pairs = [(opened(key, image), caption.decode(errors="replace")) for key, image, caption in chosen]
    draw(pairs, args.columns, args.out)
    print(args.out)


def opened(key: str, data: bytes) -> Any:
    """The image of a sample; an empty one, and a line on stderr, if it cannot be decoded."""
    try:
        return Image.open(io.BytesIO(data)).convert("RGB")
    except Exception as error:  # image libraries may raise anything
        print(f"sample {key!r} has an image that cannot be decoded: {error}", file=sys.stderr)
        return Image.new("RGB", (8, 8), "red")


def draw(samples: list[tuple], columns: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = -(-len(samples) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(1.6 * columns, 2.1 * rows), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, (image, caption) in zip(axes.flat, samples, strict=False):
        axis.imshow(image)
        axis.set_title("\n".join(textwrap.wrap(caption, 22, max_lines=4)), fontsize=7, parse_math=False)
    figure.tight_layout(pad=0.3, h_pad=0.8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
