"""Look at the data: draw random samples of a webdataset shard with their captions.

    python examples/sheet.py icons/train-000000.tar --out sheet.png
"""

import argparse
import random
import tarfile
from pathlib import Path

import webdataset
from command import image_file, positive

from training_ext.tools.pairs.sheet import draw, opened


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


if __name__ == "__main__":
    main()
