"""Look at the data: draw random samples of a webdataset shard with their captions.

    python examples/sheet.py icons/train-000000.tar --out sheet.png
"""

import argparse
import random
import tarfile
import textwrap
from pathlib import Path

import webdataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shard", help="path or URL of a tar")
    parser.add_argument("--samples", type=int, default=100, help="(default: 100)")
    parser.add_argument("--columns", type=int, default=10, help="(default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="other samples (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("sheet.png"), help="(default: sheet.png)")
    args = parser.parse_args()
    shard = webdataset.WebDataset(args.shard, shardshuffle=False).decode("pil").to_tuple("jpg;png;jpeg;webp", "txt")
    try:
        samples = list(shard)
    except (OSError, tarfile.TarError) as error:
        parser.error(f"{args.shard!r} cannot be read: {error}")
    if not samples:
        parser.error(f"{args.shard!r} has no pictures with captions")
    draw(random.Random(args.seed).sample(samples, min(args.samples, len(samples))), args.columns, args.out)
    print(args.out)


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
        axis.set_title("\n".join(textwrap.wrap(caption, 22, max_lines=4)), fontsize=7)
    figure.tight_layout(pad=0.3, h_pad=0.8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
