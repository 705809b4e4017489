"""The file of recovered optimizer statistics: `--osr-save`, `--osr-load`.

It has tensors, numbers and strings, by parameter name, so it does not depend on the number of processes.
"""

import os
from argparse import Namespace
from math import ceil
from typing import Any

import torch

from open_clip_ext import factory
from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of
from training_ext.core.files import atomic_save
from training_ext.core.state import state_options
from training_ext.data import row_folders
from training_ext.data.row_folders import MARK, remove_unnamed
from training_ext.data.rows import DataRows, needs_index
from training_ext.openclip.loading import load_verified, one_line
from training_ext.openclip.machine import check_writable

KIND = "open_clip_ext statistics recovery"
FLAG = "--osr-load"
FORMAT = 2
# With these flags a model of the same name and weights is another one.
FORCED = ("force_quick_gelu", "force_custom_text", "force_patch_dropout", "force_image_size", "force_context_length")


def identity(args: Namespace, rows: DataRows | None) -> dict[str, Any]:
    """What the statistics belong to, from the command line: model, data if known, loss and optimizer, as text.

    The margin, learning rates and schedules are left out, so that they can be swept over the same statistics.
    """
    names = (*factory.PARTS, *(option.name for option in state_options(args)))
    parts = [name for name in names if getattr(args, name) is not None]
    data: dict[str, str] = {}
    if rows is not None:
        data["data"] = f"{rows.num_rows} rows, digest {(rows.captions or rows.digest)[:16]}"
        if rows.listing is not None and not needs_index(args):  # n may be the length of an epoch
            data["data"] = f"shards, digest {rows.listing[:16]}"
        if rows.captions is not None:
            data["set of image paths"] = f"digest {rows.digest[:16]}"
    forced = [f"{flag_of(name)} {getattr(args, name)}" for name in FORCED if getattr(args, name)]
    return {
        "model": " ".join([args.model.rstrip("/").rpartition("/")[2], *forced]),  # without the folder of a local model
        **data,
        "loss": " ".join([args.loss, *(f"{flag_of(name)} {getattr(args, name)}" for name in parts)]),
        "optimizer": f"{args.opt} with betas {args.beta1}, {args.beta2}",
    }


def save(path: str, content: dict[str, Any]) -> None:
    """Write `content` to `path`, complete or not at all, and remove the folders of rows of the file it replaces."""
    atomic_save(torch.save, {"kind": KIND, "format": FORMAT, **content}, path)
    remove_unnamed(os.path.dirname(path) or ".", [path], begin=f"{os.path.basename(path)}{MARK}")


def read(path: str) -> dict[str, Any]:
    """Read the file; its tensors stay on disk until they are used.

    Raises:
        InputError: the file is missing, damaged, not one of recovered statistics, or not complete.
    """
    try:
        content = load_verified(path)
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(
            f"there is no file {path!r}; to resume a training that began with it, give its --osr-epochs instead", FLAG
        ) from None
    except Exception as error:
        raise InputError(f"{path!r} cannot be read: {one_line(error)}", FLAG) from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise InputError(f"{path!r} was not written by --osr-save", FLAG)
    if content["format"] > FORMAT:
        raise InputError(f"{path!r} was written by another open_clip_ext (format {content['format']})", FLAG)
    epochs = ceil(content["epochs"])
    done = content.get("done", epochs)  # files from before version 0.1 may be of a part of a recovery
    if done < epochs or content.get("position") is not None:
        interrupted = f"of an interrupted recovery (epoch {done} of {epochs}) by an earlier version"
        raise InputError(f"{path!r} is {interrupted}; recover it anew with --osr-epochs", FLAG)
    return content


def check(content: dict[str, Any], own: dict[str, Any], path: str) -> None:
    """Raise InputError unless the statistics have the entries `own` of an `identity`."""
    saved = content["identity"]
    for name, value in own.items():
        if saved.get(name, value) != value:  # what one of the two does not know is not compared
            wrong = f"{path!r} was recovered with another {name}: {saved[name]}, not {value}"
            raise InputError(f"{wrong}; recover it anew with --osr-epochs", FLAG)


def check_files(args: Namespace, rows: DataRows, resumes: bool) -> None:
    """Raise InputError unless the run can load what it is to load, and save what it recovers; see `check_rows`."""
    path = args.osr_load
    if path is not None and not (resumes and args.uses_ext_loss):
        content = read(path)
        check(content, identity(args, rows), path)
        row_folders.check(path, content.get("rows"), content["loss_state"], FLAG)
    if args.osr_save is not None and not resumes:
        if os.path.exists(args.osr_save):
            raise InputError(f"{args.osr_save!r} exists; give another path, or load it with --osr-load", "--osr-save")
        check_writable("--osr-save", os.path.dirname(args.osr_save) or ".")
