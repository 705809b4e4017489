"""Check the data that the flags name to evaluate on."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from open_clip import IMAGENET_CLASSNAMES
from PIL import Image
from tqdm import tqdm

from open_clip_ext.errors import InputError, reason_of
from training_ext.data.captions import captions_of_samples
from training_ext.data.csv_rows import read_csv
from training_ext.data.first_look import look_at_shards
from training_ext.data.folder_files import entries
from training_ext.data.rows import kind_of
from training_ext.data.shard_scan import scan_all
from training_ext.data.shards import check_missing, local_path, shard_urls
from training_ext.data.tables import unusable_line
from training_ext.openclip.loading import warn_once


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


def check(args: Namespace) -> None:
    """Check that the validation data, if there are any, have pairs, which OpenCLIP finds out only after an epoch."""
    if not args.val_data:
        return
    kind = kind_of(args, args.val_data, "--val-data")
    if kind == "csv":
        table = read_csv(args, args.val_data, flag="--val-data")
        if table.empty:
            raise InputError(f"{args.val_data!r} has no lines; give one with pairs, or leave it out", "--val-data")
        images = table[args.csv_img_key].drop_duplicates()
        if (share := 100 * len(images) / len(table)) < 100:
            warn_once(
                f"--val-data: the {len(table)} lines of {args.val_data!r} have {len(images)} images, so that "
                f"image_to_text_R@1 is at most {share:.3g} %; image_to_text_any_R@1 accepts every caption of an image"
            )
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
