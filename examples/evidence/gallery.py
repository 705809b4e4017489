"""Make the gallery of the cell `isolation`, of icons that no run and no choice has used.

    python examples/evidence/gallery.py --data icons

Takes samples in order, which is random, from the shards after those of the cell `large`. Left out are captions that the
gallery has already, and near duplicates: images that equal one of the cell's training rows, or one of the gallery, when
reduced to 8 x 8 pixels in 8 shades. Writes `fresh/gallery-000000.tar` and its sizes.json in the folder of the data.
"""

import argparse
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from grid import HERE, Grid, told
from webdataset import TarWriter

sys.path.append(str(HERE.parent / "data"))
from icon_pairs import reduced

SAMPLES = 5000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the icons")
    parser.add_argument("--grid", type=Path, default=HERE / "grid.yaml", help="(default: beside this file)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"(default: {SAMPLES})")
    args = parser.parse_args()
    with told(parser):
        cells = Grid(args.grid).cells
        shards = sorted(args.data.glob("train-*.tar"))
        unused = shards[max(cell["shards"] for cell in cells.values()) :]
        taken = gallery(shards[: cells["isolation"]["shards"]], unused, args.samples)
        if len(taken) < args.samples:
            raise ValueError(f"--samples: {args.samples} where {len(unused)} unused shards have {len(taken)}")
        path = args.data / f"{cells['isolation']['gallery']}-000000.tar"
        path.parent.mkdir(exist_ok=True)
        with TarWriter(str(path), user="", group="", mtime=0, encoder=False) as tar:
            for sample in taken:
                tar.write(sample)
        (path.parent / "sizes.json").write_text(json.dumps({path.name: len(taken)}))


def gallery(trained: list[Path], unused: list[Path], size: int) -> list[dict]:
    """The first `size` samples of the unused shards that are neither near duplicates nor have another's caption."""
    images = {reduced(sample["png"]) for path in trained for sample in samples(path)}
    captions: set[bytes] = set()
    taken: list[dict] = []
    for path in unused:
        for sample in samples(path):
            image, caption = reduced(sample["png"]), sample["txt"]
            if len(taken) < size and image not in images and caption not in captions:
                images.add(image)
                captions.add(caption)
                taken.append(sample)
    return taken


def samples(path: Path) -> Iterator[dict]:
    """The samples of a shard: `__key__`, and the contents `png` and `txt`, which follow each other."""
    sample: dict = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, _, extension = member.name.rpartition(".")
            if sample.get("__key__") != key:
                sample = {"__key__": key}
            sample[extension] = tar.extractfile(member).read()
            if len(sample) == 3:
                yield sample


if __name__ == "__main__":
    main()
