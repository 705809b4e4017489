"""The command `open_clip_ext.make_shards`: its flags and its steps."""

import hashlib
import json
import os
import warnings
from argparse import Namespace
from pathlib import Path

from open_clip_ext.errors import InputError, fault_of_machine
from open_clip_ext.files import InUseError, only_user, whole_file
from training_ext.core.flags import OneLineParser
from training_ext.data.epochs import steps_per_epoch
from training_ext.data.settings import setting_for
from training_ext.openclip.machine import check_writable
from training_ext.tools.pairs.shards import SIZES, pattern, why_unfit
from training_ext.tools.pairs.sheet import draw, opened
from training_ext.tools.pairs.sources import HELD_OUT, LeftOut, Pair, drawn, find_sources
from training_ext.tools.pairs.writing import REPORT, Job, Report, read_images, write

SHEET, SHOWN, COLUMNS, SHOWN_SIZE = "samples.png", 40, 8, 256
PER_SHARD, FEWEST_SHARDS = 1000, 8  # shards, so that several loader workers have some
LARGEST_BATCH, EPOCHS, WORKERS = 256, 30, 4  # of the printed training; batch: of a process
SHARE, FEWEST_HELD_OUT, LARGEST_SHARE = 0.01, 30, 0.2  # of the images to validate on


def parse(argv: list[str]) -> Namespace:
    """Parse the command's flags.

    Raises:
        InputError: a wrong flag.
    """
    parser = OneLineParser(
        prog="open_clip_ext.make_shards", allow_abbrev=False,
        description="Writes your own images and captions as webdataset shards that OpenCLIP trains on.",
    )
    add = parser.add_argument
    about = "folder of images with a .txt of the same name, one caption a line; or a .csv, .tsv or .parquet"
    add("sources", nargs="+", metavar="SOURCE", help=about)
    add("--out", required=True, metavar="SHARDS", help="folder for the shards; a run that was stopped resumes")
    add("--val", nargs="+", metavar="SOURCE", help="sources of the validation pairs, in place of a share")
    default = f"{SHARE}, at least {FEWEST_HELD_OUT} images, but at most {LARGEST_SHARE}"
    add("--val-share", type=float, metavar="SHARE", help=f"of the images to validate on (default: {default})")
    add("--seed", type=int, default=0, help="of the order and the share (default: 0)")
    add("--size", type=int, metavar="PIXELS", help="shorter side that larger images get (default: bytes are kept)")
    add("--per-shard", type=int, metavar="N", help=f"images per shard (default: {PER_SHARD}, fewer for small data)")
    add("--csv-separator", default="\t", metavar="CHAR", help="of a csv (default: a tab)")
    image, caption = ("--image-key", "--csv-img-key"), ("--caption-key", "--csv-caption-key")
    add(*image, dest="csv_img_key", default="filepath", metavar="NAME", help="column of the images, paths or, in a "
        "parquet, their bytes (default: filepath)")  # fmt: skip
    add(*caption, dest="csv_caption_key", default="title", metavar="NAME", help="column of captions (default: title)")
    args = parser.parse_args(argv)
    for flag, value, least in (("--size", args.size, 1), ("--per-shard", args.per_shard, 1)):
        if value is not None and value < least:
            raise InputError(f"{value} is out of range; it must be at least {least}", flag)
    if args.val_share is not None and not 0 <= args.val_share < 1:
        raise InputError(f"{args.val_share} is out of range; it must be in [0, 1)", "--val-share")
    return args


def run(argv: list[str]) -> None:
    """Write the shards, or what is missing of them.

    Raises:
        InputError: one line; nothing was written, or what is complete stays.
    """
    args = parse(argv)
    out = Path(args.out)
    if problem := why_unfit(args.out):
        raise InputError(problem, "--out")
    for source in (*args.sources, *(args.val or ())):
        if out.resolve().is_relative_to(Path(source).resolve()):
            raise InputError(f"{args.out!r} is in the source {source!r}; give a folder outside", "--out")
    check_writable("--out", args.out)
    left_out: LeftOut = {}
    train = find_sources(args.sources, args, None, left_out)
    if args.val:
        val = find_sources(args.val, args, "--val", left_out)
        held_out = {pair.place for pair in val}
        if shared := [pair.name for pair in train if pair.place in held_out]:
            left_out[HELD_OUT] = shared
            train = [pair for pair in train if pair.place not in held_out]
        if not train:
            raise InputError(f"{' '.join(args.val)} has all images; none is left to train on", "--val")
    else:
        share = default_share(len(train)) if args.val_share is None else args.val_share
        train, val = split(train, share, args.seed)
    args.per_shard = args.per_shard or min(PER_SHARD, -(-len(train) // FEWEST_SHARDS))
    try:
        with only_user(out), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of images
            _write(args, out, train, val, left_out)
    except OSError as error:
        if (fault := fault_of_machine(error, out)) is None:
            raise
        raise InputError(f"{fault}; with the folder writable again the same command goes on", "--out") from None
    except InUseError as holder:
        raise InputError(f"{args.out!r} is in use by {holder}; let that end, or give another folder", "--out") from None


def default_share(images: int) -> float:
    """What to validate on without `--val-share`."""
    return min(max(SHARE, FEWEST_HELD_OUT / images), LARGEST_SHARE)


def split(pairs: list[Pair], share: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """The pairs to train and to validate on, in their order; at least one to validate on, unless the share is 0."""
    number = min(max(1, round(share * len(pairs))) if share else 0, len(pairs) - 1)
    chosen = {id(pair) for pair in sorted(pairs, key=lambda pair: drawn(seed, f"val {pair.name}"))[:number]}
    return [pair for pair in pairs if id(pair) not in chosen], [pair for pair in pairs if id(pair) in chosen]


def _write(args: Namespace, out: Path, train: list[Pair], val: list[Pair], left_out: LeftOut) -> None:
    jobs = [
        Job(name, number, pairs[start : start + args.per_shard])
        for name, pairs in (("train", train), ("val", val))
        for number, start in enumerate(range(0, len(pairs), args.per_shard))
    ]
    content = [(job.file, [(pair.name, pair.captions, pair.file_size()) for pair in job.pairs]) for job in jobs]
    made_of = hashlib.sha256(json.dumps([args.size, content]).encode()).hexdigest()
    report = Report.start(out, made_of, left_out)
    write(out, jobs, report, args.size)
    counts = {name: sum(n for file, n in report.shards.items() if file.startswith(name)) for name in ("train", "val")}
    if not counts["train"]:
        for name in (*report.shards, REPORT):  # else the same command would not look at the images again
            os.remove(out / name)
        raise InputError("none of the images can be used: " + " ".join(report.told().split()))
    with whole_file(out / SIZES, text=True) as file:
        json.dump(report.shards, file, indent=1)
    images = []
    for pair, stored_image in read_images(train[:SHOWN], args.size, {}):
        if stored_image is not None:
            image = opened(pair.name, stored_image.data)  # as the model sees it
            image.thumbnail((SHOWN_SIZE, SHOWN_SIZE))
            images.append((image, pair.captions[0]))
    if images:
        draw(images, COLUMNS, out / SHEET)
    print(report.told().encode(errors="replace").decode())  # a file's name may be no text
    print(f"{counts['train']} train and {counts['val']} validation samples; see {out / SHEET} and {out / REPORT}")
    if 0 < len(val) < FEWEST_HELD_OUT:
        error = f"a recall's standard error is up to {50 / len(val) ** 0.5:.0f} points"
        print(f"fewer than {FEWEST_HELD_OUT} validation images measure nothing, as {error}: give --val or --val-share")
    note = setting_for(counts["train"]).note
    print(f"to train on them, with what docs/settings.md has for so many pairs{note and f' ({note})'}:")
    print(f"  {training(out, report.shards, jobs)}")


def training(out: Path, sizes: dict[str, int], jobs: list[Job]) -> str:
    """A training's command line. The numbers of samples are in sizes.json."""
    train = sorted(number for file, number in sizes.items() if file.startswith("train"))
    workers, pairs = min(WORKERS, len(train)), sum(train)
    setting = setting_for(pairs)
    most = setting.largest_batch(pairs)
    # A worker needs a batch in its shards.
    batch = max(2, 1 << max(1, min(LARGEST_BATCH, sum(train[: len(train) // workers]), most)).bit_length() - 1)
    accumulated = most // batch if most > LARGEST_BATCH else 1
    size = Namespace(batch_size=batch, workers=workers, accum_freq=accumulated)
    steps = EPOCHS * steps_per_epoch(size, "webdataset", pairs, 1)
    flags = setting.command(pairs, steps)
    parts = [f"python -m open_clip_ext.main {flags} --model ViT-B-32"]
    for split in ("train", "val"):
        if number := sum(job.split == split for job in jobs):
            parts.append(f"--{split}-data {pattern(out, split, number)}")
    if any(len(pair.captions) > 1 for job in jobs for pair in job.pairs if job.split == "train"):
        parts.append("--captions-field captions")
    parts.append(f"--batch-size {batch} --workers {workers} --epochs {EPOCHS}")
    if accumulated > 1:
        parts.append(f"--accum-freq {accumulated}")
    if "--warmup" not in flags:
        parts.append(f"--warmup {max(1, steps // 10)}")
    return " ".join(parts)
