"""This package's state within OpenCLIP's checkpoint file.

It is one extra key of the optimizer's state, of tensors, numbers and strings. The model's part of the file
is as OpenCLIP writes it, so that `open_clip.create_model_and_transforms(..., pretrained=path)` loads it.
"""

import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from open_clip_ext import factory
from open_clip_ext.distributed import world_size
from open_clip_ext.errors import FULL, InputError
from open_clip_ext.files import is_full, os_error, whole_file
from open_clip_ext.options import Option, default_value, flag_of
from training_ext.data.rows import DataRows, needs_index
from training_ext.openclip.loading import load_verified, one_line

KEY = "open_clip_ext"
FORMAT, IN_FILES = 3, 4  # IN_FILES: the rows per sample are in a folder beside the file, see `row_folders`
READABLE = (2, FORMAT, IN_FILES)  # 2: at the end of an epoch only
SHARDED = "open_clip_ext.state"  # in the folder of a checkpoint of shards
SHARDED_PARTS = (".metadata", "_metadata_extra.pt")  # OpenCLIP's and torch's files of a complete one
STATE_PARTS = ("normalizer", "temperature")


def state_options(args: Namespace) -> list[Option]:
    """Options of the chosen loss on which the form of its state depends."""
    return [option for option in factory.options_of(factory.parts_of(args.loss, vars(args))) if option.in_state]


def state_settings(args: Namespace) -> list[str]:
    """Names of `state_options`."""
    return [option.name for option in state_options(args)]


def atomic_save(save: Callable, content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
    """`torch.save` that writes a complete file or none: after a kill an older file at `path` is intact.

    Raises:
        OSError: it cannot be written; names `path` and the reason.
    """
    if not isinstance(path, (str, os.PathLike)):
        return save(content, path, *args, **kwargs)
    try:
        with whole_file(path) as file:
            save(content, file, *args, **kwargs)
    except (OSError, RuntimeError) as error:
        cause = os_error(error)
        if cause is None:
            raise
        reason = cause.strerror or str(cause)
        if is_full(cause):
            needed, free = _size(content) / 2**20, shutil.disk_usage(os.path.dirname(path) or ".").free / 2**20
            reason = f"it needs {needed:.1f} MiB, and {FULL} ({free:.1f} MiB free)"
        raise OSError(cause.errno, reason, os.fspath(path)) from None


def _size(content: Any) -> int:
    """Bytes of the tensors in a checkpoint."""
    if isinstance(content, torch.Tensor):
        return content.numel() * content.element_size()
    values = content.values() if isinstance(content, dict) else content if isinstance(content, (list, tuple)) else ()
    return sum(map(_size, values))


def fit_names(checkpoint: Any, wrapped: bool) -> None:
    """Add or remove the prefix "module." of DistributedDataParallel in the names of the model's state.

    OpenCLIP itself removes it to resume on one process, but does not add it to resume one process's file on several.
    A file may also have the weights alone.
    """
    if not isinstance(checkpoint, dict):
        return
    weights = checkpoint.get("state_dict", {} if "epoch" in checkpoint else checkpoint)
    if isinstance(weights, dict):
        before = "module." if wrapped else ""
        fitted = {before + str(name).removeprefix("module."): value for name, value in weights.items()}
        weights.clear()
        weights.update(fitted)


def make_entry(
    args: Namespace, rows: DataRows, loss_state: dict[str, Any], folder: str | None, reference: str | None,
    order: dict[str, Any], position: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The entry under `KEY`.

    Args:
        loss_state, folder: as `row_folders.save_state` gives them.
        reference: digest of the reference model of --distill-model, if there is one.
        order, position: as in `features.resume`, None at the end of an epoch.
    """
    return {
        "format": FORMAT if folder is None else IN_FILES,
        "loss": args.loss,
        "num_rows": rows.num_rows,
        "data_digest": rows.digest,
        "data_listing": rows.listing,
        "shard_keys": {} if rows.shards is None else rows.shards.counted,
        "osr_epochs": args.epochs_before,
        "reference": reference,
        **{name: getattr(args, name) for name in (*STATE_PARTS, *state_settings(args))},
        "state": loss_state,
        "rows": folder,
        "order": order,
        "position": position,
    }


def order_of(args: Namespace, streams: int) -> dict[str, Any]:
    """What the order of the train data depends on, by flag or name; `streams` as in `RowLoader`."""
    order = {"--seed": args.seed, "processes": world_size(), "--batch-size": args.batch_size}
    order["--accum-freq"] = args.accum_freq
    if streams:
        order |= {"--workers": streams, "--dataset-resampled": args.dataset_resampled}
        order["--train-data-upsampling-factors"] = args.train_data_upsampling_factors
    return order


def take_entry(checkpoint: Any) -> dict[str, Any] | None:
    """Remove our entry from a loaded checkpoint and return it; None if there is none."""
    optimizer = checkpoint.get("optimizer") if isinstance(checkpoint, dict) else None
    return optimizer.pop(KEY, None) if isinstance(optimizer, dict) else None


def read_sharded_entry(folder: str) -> dict[str, Any] | None:
    """Our entry of a checkpoint that is a folder, None if there is none. Tensors stay on disk.

    Raises:
        InputError: the checkpoint or the entry is not complete.
    """
    path = os.path.join(folder, SHARDED)
    missing = [name for name in SHARDED_PARTS if not os.path.exists(os.path.join(folder, name))]
    try:
        if missing:
            raise FileNotFoundError(f"it has no {missing[0]}")
        return load_verified(path) if os.path.exists(path) else None
    except Exception as error:
        raise InputError(f"{folder!r} is not a complete checkpoint: {one_line(error)}", "--resume") from None


def check_entry(
    entry: dict[str, Any] | None, path: str, args: Namespace, rows: DataRows | None, flag: str = "--resume",
    instead: str = "give --pretrained PATH to start from its weights only",
) -> None:
    """Raise InputError unless training with `args` can resume from a checkpoint with this entry.

    Args:
        flag, instead: start and end of the message.
    """
    given = f"--loss {args.loss}" if args.loss else "OpenCLIP's own loss"
    if entry is None:
        if args.uses_ext_loss:
            raise InputError(f"{path!r} was not trained with {given}; {instead}", flag)
        return
    if entry["format"] not in READABLE:
        age = "a newer" if entry["format"] > max(READABLE) else "an older"
        raise InputError(f"{path!r} was written by {age} open_clip_ext (format {entry['format']}); {instead}", flag)
    if any(entry[name] != getattr(args, name) for name in ("loss", *STATE_PARTS)):
        if args.uses_ext_loss:
            given += _parts(vars(args))
        saved = f"--loss {entry['loss']}{_parts(entry)}"
        raise InputError(f"{path!r} was trained with {saved}, not with {given}; {instead}", flag)
    for option in state_options(args):
        # A file from before an option existed was trained with its default.
        value, saved = getattr(args, option.name), entry.get(option.name, default_value(option.default))
        own = flag_of(option.name)
        if value != saved:
            right = f"give {saved}" if not isinstance(saved, bool) else f"give {own}" if saved else "leave it out"
            raise InputError(f"{value}, but {path!r} has {saved}; {right}", own)
    recovery = entry.get("osr_epochs", 0.0)  # absent in files from before the recovery existed
    if args.epochs_before != recovery:
        raise InputError(
            f"{args.epochs_before:g}, but {path!r} was trained after {recovery:g}, which its schedules "
            f"count; give --osr-epochs {recovery:g}",
            "--osr-epochs",
        )
    if args.uses_ext_loss and (saved := entry["state"].get("surrogate", args.surrogate)) != args.surrogate:
        raise InputError(f"{args.surrogate}, but the table of {path!r} is of {saved}; give {saved}", "--surrogate")
    if rows is not None and not is_same_data(entry, rows):
        if rows.kind in ("synthetic", "shapes") and entry["num_rows"] != rows.num_rows:
            num_rows = entry["num_rows"]
            raise InputError(f"{rows.num_rows}, but {path!r} has {num_rows}; give {num_rows}", "--train-num-samples")
        others = "other samples" if rows.captions is None else "other captions, or images below the folder of all"
        raise InputError(
            f"{path!r} was trained on other data ({entry['num_rows']} rows; --train-data has "
            f"{rows.num_rows}, or the same number of {others}); {instead}",
            flag,
        )
    if rows is not None and rows.shards is not None and needs_index(args):
        before = entry.get("shard_keys", {})
        for name, digest in rows.shards.counted.items():
            if before.get(name, digest) != digest:
                raise InputError(
                    f"{path!r} was trained on other samples: those in shard {name!r} have other keys now; "
                    f"{instead}",
                    flag,
                )


def is_same_data(entry: dict[str, Any], rows: DataRows) -> bool:
    """Whether the entry's training had these rows. If one of the two has not counted its shards, by their names alone,
    since then `num_rows` is the length of an epoch."""
    if entry["data_digest"] in (rows.digest, rows.captions):
        return not rows.counted or rows.num_rows == entry["num_rows"]
    listing = entry.get("data_listing", entry["data_digest"])  # absent in older files
    both_counted = rows.counted and entry["data_digest"] != listing
    return not both_counted and rows.listing == listing


def check_reference(entry: dict[str, Any], path: str, args: Namespace, reference: str | None) -> None:
    """Raise InputError if the loss's rows belong to another reference model than the one with this digest."""
    if entry.get("reference", reference) != reference:  # absent in older files
        raise InputError(
            f"{args.distill_pretrained!r} has other weights than the reference model with which "
            f"{path!r} was trained; give those",
            "--distill-pretrained",
        )


def _parts(settings: dict[str, Any]) -> str:
    return "".join(f" --{part} {settings[part]}" for part in STATE_PARTS if settings[part] is not None)
