"""Check that OpenCLIP can train and evaluate on the data that the flags name."""

import multiprocessing
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from open_clip import IMAGENET_CLASSNAMES
from open_clip_train.data import expand_urls, get_dataset_size
from PIL import Image
from tqdm import tqdm

from open_clip_ext.errors import InputError, reason_of
from training_ext.data.captions import captions_of_samples
from training_ext.data.epochs import steps_per_epoch
from training_ext.data.first_look import look_at_shards
from training_ext.data.folder_files import entries
from training_ext.data.rows import DataRows, kind_of, tolerated
from training_ext.data.shard_scan import scan_all
from training_ext.data.shards import check_missing, estimated_samples, find_shards, local_path, shard_urls
from training_ext.data.tables import unusable_line

MOST_PASSES = 5


def check_size_known(args: Namespace) -> None:
    """Check that the number of samples is known, since OpenCLIP does not count; for our losses it is counted."""
    if args.uses_ext_loss or args.train_num_samples is not None or kind_of(args, args.train_data) != "webdataset":
        return
    try:
        size, _ = get_dataset_size(args.train_data)
    except Exception as error:  # a sizes.json may have anything
        raise InputError(f"its sizes.json cannot be used: {reason_of(error) or repr(error)}", "--train-data") from None
    if not size:
        raise InputError("needed for shards without a sizes.json; give their number of samples", "--train-num-samples")


def check_shards(args: Namespace, rows: DataRows, world_size: int) -> None:
    """Loader workers must be forked, and each needs a full batch in its shards, or OpenCLIP waits forever."""
    if rows.kind != "webdataset":
        return
    if args.workers and (method := multiprocessing.get_start_method()) != "fork":
        raise InputError(
            f"{args.workers} processes that read shards must be forked, and this machine starts them by {method!r}, to "
            "which OpenCLIP's pipeline cannot be sent; give 0", "--workers",
        )
    if args.dataset_resampled:
        return
    urls = expand_urls(args.train_data)[0]
    loaders = max(1, args.workers)
    # Without a count, as if every shard were large.
    sizes = sorted(args.batch_size if rows.shards is None else rows.shards.size_of[url] for url in urls)
    fewest = len(sizes) // world_size // loaders
    if sum(sizes[:fewest]) < args.batch_size:
        raise InputError(
            f"{args.workers} in each of {world_size} process(es) get {fewest} of the {len(sizes)} shards each, which "
            f"may hold only {sum(sizes[:fewest])} samples but --batch-size is {args.batch_size}; lower one of the two, "
            "write smaller shards or use --dataset-resampled",
            "--workers",
        )


def check_steps(args: Namespace, kind: str, num_samples: int, world_size: int) -> int:
    """Refuse epochs without a step, for which OpenCLIP would save the untrained model; return the number of steps."""
    steps = steps_per_epoch(args, kind, num_samples, world_size)
    if steps < 1:
        raise InputError(
            f"{args.batch_size} x {world_size} process(es) x --accum-freq {args.accum_freq} is more than "
            f"the {num_samples} samples of an epoch; lower it",
            "--batch-size",
        )
    return steps


def check_num_samples(args: Namespace, rows: DataRows) -> None:
    """Refuse an epoch of more than `MOST_PASSES` over the data, where --train-num-samples is likely another data set's.

    Shards that were not counted are, if their sizes in bytes and a count of the largest say that it may be one.
    """
    num_samples, there = args.train_num_samples, rows.num_rows
    if num_samples is None or args.dataset_resampled or rows.kind not in ("csv", "webdataset"):
        return
    if rows.kind == "webdataset":
        shards = rows.shards
        if shards is None:
            about = estimated_samples(args.train_data)
            if about is None or num_samples <= MOST_PASSES * about:
                return
            shards = find_shards(args.train_data, max_bad=tolerated(args))
        there = shards.num_listed(args.train_data)
    if num_samples > MOST_PASSES * there:
        raise InputError(
            f"{num_samples}, but {args.train_data!r} has {there}; leave it out, or give more --epochs",
            "--train-num-samples",
        )


def shared_data(args: Namespace) -> str | None:
    """What of --val-data is trained on: a file, a shard or a folder, by any path to it; None if nothing is known."""
    kinds = [kind_of(args, getattr(args, f"{split}_data"), f"--{split}-data") for split in ("train", "val")]
    if kinds == ["csv", "csv"]:
        for inner, outer in ((args.val_data, args.train_data), (args.train_data, args.val_data)):
            path = Path(os.path.realpath(inner))
            if _identity(outer) in map(_identity, (inner, *(path.parents if path.is_dir() else ()))):
                return inner
    if kinds != ["webdataset", "webdataset"]:
        return None
    trained = {_identity(url) for url in shard_urls(args.train_data)}
    return next((url for url in shard_urls(args.val_data, "--val-data") if _identity(url) in trained), None)


def _identity(url: str | Path) -> Any:
    """Equal for two paths to one file, and for equal URLs."""
    try:
        status = os.stat(local_path(str(url)) or "")
    except (OSError, ValueError):
        return url
    return status.st_dev, status.st_ino


def check_val_data(args: Namespace) -> None:
    """Check that the validation data have pairs, which OpenCLIP finds out only after an epoch."""
    kind = kind_of(args, args.val_data, "--val-data")
    if kind == "csv":
        from training_ext.data.csv_rows import read_csv

        table = read_csv(args, args.val_data, flag="--val-data")
        if table.empty:
            raise InputError(f"{args.val_data!r} has no lines; give one with pairs, or leave it out", "--val-data")
        images = table[args.csv_img_key].drop_duplicates()
        # Their headers; silent where it takes a moment.
        for row, image in tqdm(images.items(), desc="Looking at images", total=len(images), unit="file", delay=2):
            try:
                Image.open(image).close()
            except Exception as error:  # image libraries may raise anything
                raise unusable_line(args.val_data, int(str(row)), f"{image!r}: {reason_of(error)}") from None
    elif kind == "webdataset":
        urls = shard_urls(args.val_data, "--val-data")
        check_missing(urls, "--val-data")
        recaption = captions_of_samples(args) if getattr(args, "json_text_key", None) else None
        look_at_shards(urls, recaption=recaption, flag="--val-data")
        # OpenCLIP takes a damaged header for the end of the archive, and would evaluate on what lies before.
        local = {url: path for url in urls if (path := local_path(url)) is not None}
        for url, contents in scan_all(local).items():
            if contents.damage is not None:
                raise InputError(f"shard {url!r} is damaged: {contents.damage}; repair or remove it", "--val-data")


def check_imagenet(args: Namespace) -> None:
    """Refuse a folder of --imagenet-val that lacks classes: OpenCLIP compares the numbers of folders and classes."""
    folder, classes, flag = args.imagenet_val, len(IMAGENET_CLASSNAMES), "--imagenet-val"
    if folder is not None and (num_folders := sum(entry.is_dir() for entry in entries(folder, flag))) != classes:
        raise InputError(
            f"{folder!r} has {num_folders} class folders; give a folder with ImageNet's {classes}, "
            "n01440764 to n15075141",
            flag,
        )
