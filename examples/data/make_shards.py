"""Write generated scenes, scanned digits or icons as webdataset shards that OpenCLIP trains on.

    python examples/data/make_shards.py shapes --out DIR
    python examples/data/make_shards.py digits --out DIR
    python examples/data/make_shards.py icons --iconify FILE --out DIR
    python examples/data/make_shards.py small-icons --wheel FILE --out DIR
    python examples/data/make_shards.py evalset --out DIR

DIR gets `train-000000.tar`, ..., `val-000000.tar`, ... and `sizes.json`, which tells OpenCLIP the number of samples in
each shard. The same arguments and the same Pillow (and resvg) give the same bytes. A file is complete or absent, and
`sizes.json` is written last, so if it exists all shards do.

`shapes --shifted` writes data to fine-tune on: the training scenes are shifted (other colours, short and partly wrong
captions), the validation scenes are the same as without `--shifted`.

`icons` reads the npm package @iconify/json (docs/icons.md). DIR also gets `test-000000.tar`, the folders
`zeroshot-concepts` and `zeroshot-emoji` in CLIP_benchmark's format, and `licenses.tsv` with each set's author and
licence.

`small-icons` reads 9,706 icons from the wheel of mkdocs-material (`pip download --no-deps mkdocs-material`). DIR also
gets `test-000000.tar`, `zeroshot-concepts` of its icons, and `licenses.tsv`.

`evalset` writes a folder that `open_clip_ext.evaluate` reads: small tasks of every kind, and `tasks.json`, their table.
"""

from __future__ import annotations

import argparse
import io
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import BinaryIO, NoReturn

import evalset
from digits import NUM_DIGITS, digit_pairs
from icons import (
    CONCEPT_TEMPLATES,
    EMOJI_TEMPLATES,
    KINDS,
    NUM_VAL,
    Icon,
    collect_icons,
    licence_table,
    split_icons,
)
from PIL import Image
from shard_folder import Sample, Samples, check_out, write_all
from small_icons import collect_small_icons, split_small_icons

from open_clip_ext.data.scenes import MAX_IMAGE_SIZE, MIN_IMAGE_SIZE, describe_scene, shifted_caption
from open_clip_ext.files import is_full
from training_ext.data.shard_scan import usable_cores
from training_ext.tools.pairs.shards import SIZES, pattern

SHAPES_NUM_SAMPLES = 10_000
SHAPES_VAL_SAMPLES = 1_000
DIGITS_VAL_SAMPLES = 297

_MAX_SAMPLES = 1_000_000_000
_MAX_SEED = 2**63 - 1


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
        prog="make_shards.py",
        description="Write generated scenes (shapes), scanned digits or icons as webdataset shards for OpenCLIP.",
        allow_abbrev=False,
    )
    sources = ("shapes", "digits", "icons", "small-icons", "evalset")
    parser.add_argument("source", choices=sources, help="what the pairs are made from")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the shards, created if missing")
    parser.add_argument(
        "--num-samples",
        type=_whole(1, _MAX_SAMPLES),
        metavar="N",
        help=f"training samples (default: {SHAPES_NUM_SAMPLES} shapes, or all digits or icons not held out); of evalset"
        f" the samples of each task (default: {evalset.NUM_SAMPLES})",
    )
    parser.add_argument(
        "--val-samples",
        type=_whole(0, _MAX_SAMPLES),
        metavar="M",
        help=f"validation samples (default: {SHAPES_VAL_SAMPLES} shapes, {DIGITS_VAL_SAMPLES} digits or"
        f" {NUM_VAL} icons)",
    )
    parser.add_argument(
        "--samples-per-shard",
        type=_whole(1, _MAX_SAMPLES),
        metavar="K",
        help="samples in every shard except a split's last (default: 1000, or 10000 icons)",
    )
    parser.add_argument(
        "--seed",
        type=_whole(0, _MAX_SEED),
        default=0,
        help="seed of the scenes, or of the split of digits or icons (default: 0)",
    )
    parser.add_argument(
        "--image-size",
        type=_whole(MIN_IMAGE_SIZE, MAX_IMAGE_SIZE),
        metavar="PIXELS",
        help=f"side of the images, {MIN_IMAGE_SIZE} to {MAX_IMAGE_SIZE} (default: 64, or 32 for icons)",
    )
    parser.add_argument(
        "--image-format", choices=("png", "jpg"), default="png", help="how images are stored (default: png)"
    )
    parser.add_argument(
        "--shifted",
        action="store_true",
        help="shapes: training scenes in other colours with noisy, short captions; validation stays normal",
    )
    parser.add_argument(
        "--iconify", metavar="FILE", help="icons: the .tgz file that `npm pack @iconify/json` writes, or its folder"
    )
    parser.add_argument("--wheel", metavar="FILE", help="small-icons: the wheel of mkdocs-material")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        metavar="KIND",
        help=f"icons: only the sets of these kinds (default: {' '.join(KINDS)})",
    )
    parser.add_argument(
        "--jobs", type=_whole(1, 1024), metavar="J", help="icons: rendering processes (default: one per CPU core)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the shards that DIR already holds")
    return parser


def _make_evalset(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        folder = check_out(args.out, args.overwrite)
        _check_options(args)
        for name, default in (("val_samples", None), ("image_format", "png")):
            if getattr(args, name) != default:
                raise ValueError(f"argument --{name.replace('_', '-')}: must be left out with evalset")
    except ValueError as error:
        parser.error(str(error))
    size = args.num_samples or evalset.NUM_SAMPLES
    try:
        evalset.write_evalset(folder, size, args.samples_per_shard, args.seed, args.image_size)
    except OSError as error:
        print(f"make_shards: writing to {args.out!r} failed: {error}", file=sys.stderr)
        return 1
    print(f"wrote {len(evalset.TASKS)} tasks: --data {shlex.quote(str(folder))}")
    return 0


def _shapes(rows: Iterable[int], args: argparse.Namespace, shifted: bool = False) -> Iterator[Sample]:
    for row in rows:
        scene = describe_scene(args.seed, row)
        caption = shifted_caption(args.seed, row) if shifted else scene.caption
        yield f"{row:09d}", _encode(scene.render(args.image_size, shifted), args.image_format), caption, None


def _digits(rows: list[int], args: argparse.Namespace) -> Iterator[Sample]:
    for row, (image, caption, label) in zip(rows, digit_pairs(args.image_size, rows), strict=True):
        yield f"{row:09d}", _encode(image, args.image_format), caption, label


def _icons(icons: Iterable[tuple[Icon, int | None]], spool: BinaryIO) -> Iterator[Sample]:
    for icon, label in icons:
        spool.seek(icon.start)
        yield icon.key, spool.read(icon.length), icon.caption, label


def _shuffled(count: int, seed: int) -> list[int]:
    # shuffle() may change between Python versions; random() may not.
    draw = random.Random(seed).random
    keys = [draw() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def _check_options(args: argparse.Namespace) -> None:
    """Set the defaults that depend on the source; ValueError if an option is not for that source."""
    for name, source in (
        ("shifted", "shapes"), ("iconify", "icons"), ("kinds", "icons"), ("jobs", "icons"), ("wheel", "small-icons")
    ):  # fmt: skip
        if getattr(args, name) and args.source != source:
            raise ValueError(f"argument --{name}: must come with {source}, got {args.source}")
    icons = args.source in ("icons", "small-icons")
    if args.source == "icons" and not args.iconify:
        raise ValueError(
            "argument --iconify: must be given with icons: the file that `npm pack @iconify/json` writes"
        )
    if args.source == "small-icons" and not args.wheel:
        raise ValueError("argument --wheel: must be given with small-icons: the wheel of mkdocs-material")
    if icons and args.image_format != "png":
        raise ValueError(f"argument --image-format: must be png with {args.source}, got {args.image_format}")
    usual = {"icons": 10_000, "evalset": evalset.SAMPLES_PER_SHARD}.get(args.source, 1000)
    args.samples_per_shard = args.samples_per_shard or usual
    args.image_size = args.image_size or (32 if icons else 64)


def _icon_splits(
    args: argparse.Namespace, spool: BinaryIO
) -> tuple[dict[str, Samples], dict[str, str | Samples]]:
    """The splits, and the other files, text or samples, by their path below DIR."""
    val = {} if args.val_samples is None else {"num_val": args.val_samples}
    if args.source == "icons":
        jobs = args.jobs or usable_cores()
        found = collect_icons(args.iconify, spool, args.image_size, args.seed, args.kinds or KINDS, jobs)
        parts = split_icons(found, **val)
    else:
        found = collect_small_icons(args.wheel, spool, args.image_size, args.seed)
        parts = split_small_icons(found, **val)
    left_out = ", ".join(f"{count} {reason}" for reason, count in found.left_out.items() if count) or "none"
    if not parts.train and args.source == "icons":
        kinds = " ".join(args.kinds or KINDS)
        raise ValueError(
            f"argument --iconify: {args.iconify!r} has no icon of --kinds {kinds} to train on; left out: {left_out}"
        )
    train = len(parts.train) if args.num_samples is None else args.num_samples
    for name, requested, icons in (("num", train, parts.train), ("val", args.val_samples or 0, parts.val)):
        if requested > len(icons):
            raise ValueError(
                f"argument --{name}-samples: must be at most {len(icons)}, the number of icons, got {requested}"
            )
    splits = {"train": parts.train[:train], "val": parts.val, "test": parts.test}
    used = {icon for icons in splits.values() for icon in icons}
    beside: dict[str, str | Samples] = {}
    for folder, classes, templates in (
        ("zeroshot-concepts", parts.concepts, CONCEPT_TEMPLATES),
        ("zeroshot-emoji", parts.emoji, EMOJI_TEMPLATES),
    ):
        labelled = [(icon, label) for label, icons in enumerate(classes.values()) for icon in icons]
        if labelled:
            labelled.sort(key=lambda pair: pair[0].rank)
            used |= {icon for icon, _ in labelled}
            beside[f"{folder}/classnames.txt"] = "".join(f"{name}\n" for name in classes)
            beside[f"{folder}/zeroshot_classification_templates.txt"] = "".join(f"{line}\n" for line in templates)
            beside[f"{folder}/test/nshards.txt"] = "1\n"
            beside[f"{folder}/test/0.tar"] = len(labelled), _icons(labelled, spool)
    beside["licenses.tsv"] = licence_table(found, used)
    print(f"left out: {left_out}")
    return {
        split: (len(icons), _icons([(icon, None) for icon in icons], spool)) for split, icons in splits.items()
    }, beside


def _splits(args: argparse.Namespace) -> dict[str, Samples]:
    """Each split's number of samples and its samples; ValueError or ImportError if that is impossible."""
    if args.source == "shapes":
        train = SHAPES_NUM_SAMPLES if args.num_samples is None else args.num_samples
        val = SHAPES_VAL_SAMPLES if args.val_samples is None else args.val_samples
        return {
            "train": (train, _shapes(range(train), args, args.shifted)),
            "val": (val, _shapes(range(train, train + val), args)),
        }
    val = DIGITS_VAL_SAMPLES if args.val_samples is None else args.val_samples
    if val >= NUM_DIGITS:
        raise ValueError(
            f"argument --val-samples: must leave some of the {NUM_DIGITS} digits for training, got {val}"
        )
    train = NUM_DIGITS - val if args.num_samples is None else args.num_samples
    if train + val > NUM_DIGITS:
        raise ValueError(
            f"argument --num-samples: must be at most {NUM_DIGITS - val} ({NUM_DIGITS} digits minus {val} for"
            f" validation), got {train}"
        )
    order = _shuffled(NUM_DIGITS, args.seed)
    digit_pairs(args.image_size, [])
    return {
        "train": (train, _digits(order[:train], args)),
        "val": (val, _digits(order[NUM_DIGITS - val :], args)),
    }


def _encode(image: Image.Image, image_format: str) -> bytes:
    stream = io.BytesIO()
    if image_format == "png":
        image.save(stream, "PNG")
    else:
        image.save(stream, "JPEG", quality=95, subsampling=0)
    return stream.getvalue()


def main(argv: list[str] | None = None) -> int:
    """Write the shards that the command line `argv` (default: the process's own) specifies.

    Members are `<key>.png` or `<key>.jpg`, `<key>.txt` with the caption and, for digits, `<key>.cls` with the digit. A
    key is the scene's row or the scan's number, in nine digits, and thus occurs in one split only; an icon's key is its
    set's prefix and its name. Validation takes the rows after the training rows, or the last scans of a permutation
    seeded by `--seed`. `--shifted` shifts the training scenes, in image and caption, but not the validation scenes.

    Returns:
        0 when all is written, 1 when writing failed (one line on stderr).

    Raises:
        SystemExit: code 2, with one line on stderr and nothing written: an argument is wrong (such as `--shifted` with
            digits), DIR already has shards, or the package that reads digits or icons is not installed.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.source == "evalset":
        return _make_evalset(parser, args)
    # Holds the rendered icons until their order in the shards is known.
    spool = tempfile.TemporaryFile()
    try:
        return _make_shards(parser, args, spool)
    finally:
        with suppress(OSError):  # it writes what is left, although nobody will read it
            spool.close()


def _make_shards(parser: argparse.ArgumentParser, args: argparse.Namespace, spool: BinaryIO) -> int:
    try:
        folder = check_out(args.out, args.overwrite)
        _check_options(args)
        splits, beside = _icon_splits(args, spool) if "icons" in args.source else (_splits(args), {})
        shards = {split: -(-total // args.samples_per_shard) for split, (total, _) in splits.items()}
        if max(shards.values()) > 1_000_000:
            raise ValueError(
                "argument --samples-per-shard: must give at most 1000000 shards per split,"
                f" got {args.samples_per_shard}"
            )
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    except OSError as error:
        where = f" in the temporary folder {tempfile.gettempdir()!r} (TMPDIR)" if is_full(error) else ""
        print(f"make_shards: reading or rendering failed: {error}{where}", file=sys.stderr)
        return 1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sizes = write_all(folder, splits, beside, args.samples_per_shard, args.image_format)
    except OSError as error:
        print(f"make_shards: writing to {args.out!r} failed: {error}", file=sys.stderr)
        return 1
    print(f"wrote {len(sizes)} shards and {SIZES} to {folder}")
    for split, (total, _) in splits.items():
        if total:
            option = "val" if split == "test" else split
            print(f"{total} {split} samples: --{option}-data {pattern(folder, split, shards[split])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
