"""Write generated scenes or scanned digits as webdataset shards that OpenCLIP trains on.

    python -m open_clip_ext.data.make_shards shapes --out DIR
    python -m open_clip_ext.data.make_shards digits --out DIR

DIR gets `train-000000.tar`, ..., `val-000000.tar`, ... and `sizes.json`, which OpenCLIP reads to learn
how many samples each shard holds. The same arguments give the same bytes with the same Pillow. A file is
complete or absent, and `sizes.json` comes last, so where it is present all shards are.

`shapes --shifted` writes data to fine-tune on: the training scenes are shifted (other colours, short and partly wrong
captions), the validation scenes are those that the same command writes without it.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from PIL import Image
from tqdm import tqdm
from webdataset import TarWriter

from ..files import whole_file
from .digits import NUM_DIGITS, digit_pairs
from .scenes import MAX_IMAGE_SIZE, MIN_IMAGE_SIZE, render_scene, scene_caption, shifted_caption

SHAPES_NUM_SAMPLES = 10_000
SHAPES_VAL_SAMPLES = 1_000
DIGITS_VAL_SAMPLES = 297
SIZES_FILE = "sizes.json"

_OWN_FILE = re.compile(r"(train|val)-\d{6}\.tar(\.partial)?|sizes\.json(\.partial)?")
_MAX_SAMPLES = 1_000_000_000
_MAX_SEED = 2**63 - 1

Sample = tuple[int, Image.Image, str, int | None]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"make_shards: {message}\n")


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, got {text!r}")
        return value

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m open_clip_ext.data.make_shards",
        description="Write generated scenes (shapes) or scanned digits as webdataset shards for OpenCLIP.",
        allow_abbrev=False,
    )
    parser.add_argument("source", choices=("shapes", "digits"), help="what the pairs are made from")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the shards, made if need be")
    parser.add_argument(
        "--num-samples",
        type=_whole(1, _MAX_SAMPLES),
        metavar="N",
        help=f"training samples (default: {SHAPES_NUM_SAMPLES} shapes, or all digits not in validation)",
    )
    parser.add_argument(
        "--val-samples",
        type=_whole(0, _MAX_SAMPLES),
        metavar="M",
        help=f"validation samples (default: {SHAPES_VAL_SAMPLES} shapes or {DIGITS_VAL_SAMPLES} digits)",
    )
    parser.add_argument(
        "--samples-per-shard",
        type=_whole(1, _MAX_SAMPLES),
        default=1000,
        metavar="K",
        help="samples in every shard but a split's last (default: 1000)",
    )
    parser.add_argument(
        "--seed",
        type=_whole(0, _MAX_SEED),
        default=0,
        help="which scenes, or which split of the digits (default: 0)",
    )
    parser.add_argument(
        "--image-size",
        type=_whole(MIN_IMAGE_SIZE, MAX_IMAGE_SIZE),
        default=64,
        metavar="PIXELS",
        help=f"side of the images, {MIN_IMAGE_SIZE} to {MAX_IMAGE_SIZE} (default: 64)",
    )
    parser.add_argument(
        "--image-format", choices=("png", "jpg"), default="png", help="how images are stored (default: png)"
    )
    parser.add_argument(
        "--shifted",
        action="store_true",
        help="shapes: training scenes in other colours with noisy, short captions; validation stays normal",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the shards that DIR already holds")
    return parser


def _shapes(rows: Iterable[int], seed: int, image_size: int, shifted: bool = False) -> Iterator[Sample]:
    caption = shifted_caption if shifted else scene_caption
    for row in rows:
        yield row, render_scene(seed, row, image_size, shifted), caption(seed, row), None


def _digits(rows: list[int], image_size: int) -> Iterator[Sample]:
    for row, (image, caption, label) in zip(rows, digit_pairs(image_size, rows), strict=True):
        yield row, image, caption, label


def _shuffled(count: int, seed: int) -> list[int]:
    # shuffle() may change between Python versions; random() may not.
    draw = random.Random(seed).random
    keys = [draw() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def _splits(args: argparse.Namespace) -> dict[str, tuple[int, Iterator[Sample]]]:
    """Each split's number of samples and the samples; ValueError or ImportError if it cannot be."""
    if args.source == "shapes":
        train = SHAPES_NUM_SAMPLES if args.num_samples is None else args.num_samples
        val = SHAPES_VAL_SAMPLES if args.val_samples is None else args.val_samples
        return {
            "train": (train, _shapes(range(train), args.seed, args.image_size, args.shifted)),
            "val": (val, _shapes(range(train, train + val), args.seed, args.image_size)),
        }
    if args.shifted:
        raise ValueError("argument --shifted: must come with shapes, got digits")
    val = DIGITS_VAL_SAMPLES if args.val_samples is None else args.val_samples
    if val >= NUM_DIGITS:
        raise ValueError(
            f"argument --val-samples: must leave some of the {NUM_DIGITS} digits for training, got {val}"
        )
    train = NUM_DIGITS - val if args.num_samples is None else args.num_samples
    if train + val > NUM_DIGITS:
        raise ValueError(
            f"argument --num-samples: must be at most {NUM_DIGITS - val} ({NUM_DIGITS} digits less {val} for"
            f" validation), got {train}"
        )
    order = _shuffled(NUM_DIGITS, args.seed)
    digit_pairs(args.image_size, [])
    return {
        "train": (train, _digits(order[:train], args.image_size)),
        "val": (val, _digits(order[NUM_DIGITS - val :], args.image_size)),
    }


def _check_out(out: str, overwrite: bool) -> Path:
    if not out or any(mark in out for mark in ("{", "}", "::")):
        raise ValueError(f"argument --out: must be a folder's name without '{{', '}}' or '::', got {out!r}")
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"argument --out: must be a folder, got the file {out!r}")
    held = sorted(folder.glob("*.tar")) + sorted(folder.glob(SIZES_FILE))
    if held and not overwrite:
        raise ValueError(
            f"argument --out: {out!r} already holds {held[0].name}; name another folder or add --overwrite"
        )
    return folder


def _encode(image: Image.Image, image_format: str) -> bytes:
    stream = io.BytesIO()
    if image_format == "png":
        image.save(stream, "PNG")
    else:
        image.save(stream, "JPEG", quality=95, subsampling=0)
    return stream.getvalue()


def _write_shard(path: Path, samples: Iterator[Sample], count: int, image_format: str, bar: tqdm) -> None:
    with whole_file(path) as stream:
        # A fixed time and no owner, so that the bytes depend on the samples alone.
        tar = TarWriter(stream, user="", group="", mode=0o644, mtime=0, encoder=False)
        for _ in range(count):
            row, image, caption, label = next(samples)
            sample = {"__key__": f"{row:09d}", image_format: _encode(image, image_format)}
            sample["txt"] = caption.encode()
            if label is not None:
                sample["cls"] = str(label).encode()
            tar.write(sample)
            bar.update()
        tar.close()


def _write_all(
    folder: Path, splits: dict[str, tuple[int, Iterator[Sample]]], per_shard: int, image_format: str
) -> dict[str, int]:
    own = [path for path in folder.iterdir() if _OWN_FILE.fullmatch(path.name)]
    # sizes.json goes first: without it nothing left half-way is mistaken for a complete set.
    for path in sorted(own, key=lambda path: path.name != SIZES_FILE):
        path.unlink()
    sizes: dict[str, int] = {}
    for split, (total, samples) in splits.items():
        with tqdm(total=total, desc=split, unit="sample", disable=not total) as bar:
            for shard, start in enumerate(range(0, total, per_shard)):
                count = min(per_shard, total - start)
                path = folder / f"{split}-{shard:06d}.tar"
                _write_shard(path, samples, count, image_format, bar)
                sizes[path.name] = count
    text = json.dumps(sizes, indent=2) + "\n"
    with whole_file(folder / SIZES_FILE, text=True) as file:
        file.write(text)
    return sizes


def _pattern(folder: Path, split: str, shards: int) -> str:
    numbers = "000000" if shards == 1 else f"{{000000..{shards - 1:06d}}}"
    # Forward slashes everywhere: brace expansion takes a backslash for an escape.
    return shlex.quote((folder / f"{split}-{numbers}.tar").as_posix())


def main(argv: list[str] | None = None) -> int:
    """Write the shards that the command line `argv` (by default the process's own) asks for.

    Members are `<key>.png` or `<key>.jpg`, `<key>.txt` with the caption and, for digits, `<key>.cls` with
    the digit. A key is the scene's row or the scan's number, in nine digits, so it is in one split only.
    Validation is the rows after the training rows, or the last scans of a permutation named by the seed.
    With `--shifted` the training scenes are shifted, in image and caption, and those of validation are not.

    Returns:
        0 when all is written, 1 when writing failed (one line on stderr).

    Raises:
        SystemExit: code 2, one line on stderr and nothing written: an argument is wrong (such as `--shifted` with
            digits), DIR already holds shards, or digits are asked for and scikit-learn is missing.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        folder = _check_out(args.out, args.overwrite)
        splits = _splits(args)
        shards = {split: -(-total // args.samples_per_shard) for split, (total, _) in splits.items()}
        if max(shards.values()) > 1_000_000:
            raise ValueError(
                "argument --samples-per-shard: must give at most 1000000 shards a split,"
                f" got {args.samples_per_shard}"
            )
        folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"argument --out: the folder {args.out!r} cannot be made: {error.strerror}")
    try:
        sizes = _write_all(folder, splits, args.samples_per_shard, args.image_format)
    except OSError as error:
        print(f"make_shards: writing to {args.out!r} failed: {error}", file=sys.stderr)
        return 1
    print(f"wrote {len(sizes)} shards and {SIZES_FILE} to {folder}")
    for split, (total, _) in splits.items():
        if total:
            print(f"{total} {split} samples: --{split}-data {_pattern(folder, split, shards[split])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
