"""The checkpoint that `--resume` names, and the one with the most training in a run's folder."""

import glob
import os
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from open_clip_ext.errors import InputError
from open_clip_ext.files import PARTIAL, whole_file
from training_ext import checkpoint, midepoch
from training_ext.hosts import host
from training_ext.machine import check_remote_file
from training_ext.patching import replaced

BEFORE_RENAME = "tmp.pt"  # OpenCLIP's name of a --save-most-recent file until it is complete


def resumed_path(args: Namespace) -> str | None:
    """The checkpoint that OpenCLIP will resume from; None without one, or if only OpenCLIP can find it (remote)."""
    if args.resume != "latest":
        return args.resume
    if args.name is None:
        raise InputError("--resume: 'latest' is the latest checkpoint of an experiment; give its --name")
    if args.remote_sync is not None:
        return None
    folder = os.path.join(args.logs, args.name, "checkpoints")
    if not args.save_most_recent:
        return latest_checkpoint(host().main_module.get_latest_checkpoint, folder, remote=False)
    path = os.path.join(folder, host().main_module.LATEST_CHECKPOINT_NAME)
    ahead = numbered_ahead(folder)
    candidates = (ahead, path, path.removesuffix(".pt"))
    return next((found for found in candidates if found and os.path.exists(found)), None)


def numbered_ahead(folder: str) -> str | None:
    """The numbered checkpoint that has more training than that of --save-most-recent; None if there is none."""
    name = host().main_module.LATEST_CHECKPOINT_NAME
    numbered = midepoch.newest_numbered(folder)
    if numbered is None or midepoch.furthest(folder, (name, numbered)) == os.path.join(folder, name):
        return None
    return os.path.join(folder, numbered)


def bring_up_to_date(args: Namespace) -> None:
    """Let the file of --save-most-recent, which OpenCLIP resumes from, be the checkpoint with the most training.

    A kill between the two files of an epoch leaves it behind, and so does a run without the flag.
    """
    if args.resume != "latest" or not args.save_most_recent or args.remote_sync is not None:
        return
    folder = os.path.join(args.logs, args.name, "checkpoints")
    ahead = numbered_ahead(folder)
    if ahead is not None:
        with whole_file(os.path.join(folder, host().main_module.LATEST_CHECKPOINT_NAME)) as file:
            with open(ahead, "rb") as source:
                shutil.copyfileobj(source, file)


def latest_checkpoint(original: Callable, folder: str, remote: bool) -> str | None:
    """Replaces OpenCLIP's `get_latest_checkpoint`, for the folders and files that mislead it.

    It puts a local `folder` as it is in front of a pattern of file names, and takes the last name: that of
    --save-most-recent, however old, or a half-written file of a remote folder.
    """
    main = host().main_module
    if remote:
        listing = partial(_run_without_partial_files, subprocess.run)
        with replaced({(main.__name__, "subprocess.run"): listing}):
            return original(folder, remote=True)
    found = original(os.path.join(glob.escape(folder), ""), remote=False)
    if found is None or os.path.basename(found) not in (main.LATEST_CHECKPOINT_NAME, BEFORE_RENAME):
        return found
    numbered = midepoch.newest_numbered(folder)
    names = [name for name in (numbered, main.LATEST_CHECKPOINT_NAME, BEFORE_RENAME) if name is not None]
    return midepoch.furthest(folder, names) or found


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
