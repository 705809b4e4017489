"""The checkpoint that `--resume` names, and the one with the most training in a run's folder."""

import os
import re
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from open_clip_ext.errors import InputError
from open_clip_ext.files import PARTIAL, whole_file
from training_ext.core import checkpoint
from training_ext.features import midepoch
from training_ext.openclip.hosts import host
from training_ext.openclip.machine import check_remote_file
from training_ext.openclip.patching import replaced

BEFORE_RENAME = "tmp.pt"  # OpenCLIP's name of a --save-most-recent file until it is complete
FOLDER = re.compile(r"epoch_(\d+|latest)")  # of shards


def resumed_path(args: Namespace) -> str | None:
    """The checkpoint that OpenCLIP will resume from; None without one, or if only OpenCLIP can find it (remote)."""
    if args.resume != "latest":
        return args.resume
    if args.name is None:
        raise InputError("'latest' is the latest checkpoint of an experiment; give its --name", "--resume")
    if args.remote_sync is not None:
        return None
    folder = os.path.join(args.logs, args.name, "checkpoints")
    if not args.save_most_recent:
        return latest_checkpoint(host().main_module.get_latest_checkpoint, folder, remote=False)
    path = os.path.join(folder, host().main_module.LATEST_CHECKPOINT_NAME)
    candidates = (most_trained(folder), path, path.removesuffix(".pt"))
    return next((found for found in candidates if found and os.path.exists(found)), None)


def most_trained(folder: str) -> str | None:
    """The checkpoint with the most training; if several have it, that of --save-most-recent. None if none is whole."""
    file = host().main_module.LATEST_CHECKPOINT_NAME
    names = (file, file.removesuffix(".pt"), midepoch.newest_numbered(folder))
    return midepoch.furthest(folder, [name for name in names if name is not None])


def bring_up_to_date(args: Namespace) -> None:
    """Let the checkpoint of --save-most-recent, which OpenCLIP resumes from, be the one with the most training.

    A kill between the two checkpoints of an epoch leaves it behind, and so does a run without the flag. It is a file or
    a folder of shards, and OpenCLIP prefers the file, also an older one from within an epoch.
    """
    if args.resume != "latest" or not args.save_most_recent or args.remote_sync is not None:
        return
    folder = os.path.join(args.logs, args.name, "checkpoints")
    latest = os.path.join(folder, host().main_module.LATEST_CHECKPOINT_NAME)
    shards = latest.removesuffix(".pt")
    ahead = most_trained(folder)
    if ahead is None or ahead == latest:
        return
    if os.path.isfile(ahead):
        with whole_file(latest) as file, open(ahead, "rb") as source:
            shutil.copyfileobj(source, file)
        return
    if ahead != shards:
        partial_copy = f"{shards}{PARTIAL}"
        shutil.rmtree(partial_copy, ignore_errors=True)  # left by an earlier run that was killed
        shutil.copytree(ahead, partial_copy)
        shutil.rmtree(shards, ignore_errors=True)
        os.rename(partial_copy, shards)
    with suppress(FileNotFoundError):
        os.remove(latest)


def latest_checkpoint(original: Callable, folder: str, remote: bool) -> str | None:
    """Replaces OpenCLIP's `get_latest_checkpoint`, for the folders and files that mislead it.

    It puts a local `folder` as it is in front of a pattern of file names, and takes the last name: that of
    --save-most-recent, however old, or a half-written file of a remote folder. So a local folder is listed here: its
    files, and in the task loop also its complete folders of shards.
    """
    main = host().main_module
    if remote:
        listing = partial(_run_without_partial_files, subprocess.run)
        with replaced({(main.__name__, "subprocess.run"): listing}):
            return original(folder, remote=True)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    resumable = [
        name for name in names
        if (name.endswith(".pt") and not name.startswith("."))
        or (FOLDER.fullmatch(name) and midepoch.is_whole_folder(os.path.join(folder, name)))
    ]
    if not resumable:
        return None
    found = max(resumable, key=main.natural_key)
    by_age = (main.LATEST_CHECKPOINT_NAME, main.LATEST_CHECKPOINT_NAME.removesuffix(".pt"), BEFORE_RENAME)
    if found not in by_age:
        return os.path.join(folder, found)
    numbered = midepoch.newest_numbered(folder)
    candidates = by_age if numbered is None else (numbered, *by_age)
    return midepoch.furthest(folder, candidates) or os.path.join(folder, found)


def _run_without_partial_files(run: Callable, *args: Any, **kwargs: Any) -> subprocess.CompletedProcess:
    """`subprocess.run` of a listing, without the lines that end with a temporary name."""
    result = run(*args, **kwargs)
    lines = result.stdout.splitlines(keepends=True)
    result.stdout = b"".join(line for line in lines if not line.rstrip().endswith(PARTIAL.encode()))
    return result


def find_resumed(path: str | None) -> tuple[str, dict | None] | None:
    """The local checkpoint with a training state at `path`, and our entry in it; None if it is not such a one."""
    if path is None:
        return None
    if "://" in path:
        check_remote_file("--resume", path)
        return None
    has_training_state, entry = checkpoint.read_entry(path)
    return (path, entry) if has_training_state else None
