"""Keep a checkpoint's state per sample in a folder beside it: when, under which name, and until when.

Above `--split-rows-above` every process writes its own rows (see `open_clip_ext.row_files`). The folder has a new name
each time and is complete before the checkpoint that names it is written, so a kill leaves the older checkpoint with
the older folder. Folders that no checkpoint names are removed.
"""

import logging
import os
import re
import secrets
import shutil
from argparse import Namespace
from collections.abc import Iterable
from contextlib import nullcontext
from math import inf
from typing import Any

from open_clip_ext.distributed import rank
from open_clip_ext.errors import InputError
from open_clip_ext.losses import Loss
from open_clip_ext.row_files import NotSharedError, check_row_files, rows_in_files
from open_clip_ext.row_state import bytes_per_row
from training_ext.core.state import entry_of
from training_ext.openclip.loading import load_mapped, one_line

MIB = 2**20
# In MiB. Up to there process 0 gathers and writes in some five seconds, and a checkpoint in one file is easier to move.
SPLIT_ABOVE = 1024.0
MARK = ".rows-"
FOLDER = re.compile(rf"[^/\\]+{re.escape(MARK)}[0-9a-f]{{8}}")


def splits(args: Namespace, num_bytes: int) -> bool:
    """Whether `num_bytes` of rows per sample, over all processes, are saved by each process in its own files."""
    if args.remote_sync is not None:
        return False
    above = getattr(args, "split_rows_above", inf)  # a flag of what splits them
    return num_bytes > (SPLIT_ABOVE if above is None else above) * MIB


def save_state(args: Namespace, loss: Loss, file: str) -> tuple[dict[str, Any], str | None]:
    """The loss's state for a checkpoint; every process calls it.

    Args:
        file: the checkpoint, or what its name begins with.

    Returns:
        The state, and the name of the folder beside `file` that has its rows, None where they are in the state.
    """
    num_bytes = loss.num_samples * sum(bytes_per_row(loss).values()) if loss.needs_index else 0
    if splits(args, num_bytes):
        try:
            with rows_in_files(f"{file}{MARK}{secrets.token_hex(4)}") as files:
                state = loss.full_state()
            return state, os.path.basename(files.folder)
        except NotSharedError as error:
            if rank() == 0:
                logging.warning(f"{error}; until then process 0 gathers the rows")
    return loss.full_state(), None


def load_state(loss: Loss, state: dict[str, Any], folder: str | None, path: str, flag: str) -> None:
    """Load a loss's state from a checkpoint.

    Args:
        state: as `Loss.full_state` gave it; without the rows of samples if they are in files.
        folder: the folder of these files; None if `state` has the rows.
        path, flag: the checkpoint and the flag that named it, for messages.

    Raises:
        InputError: the state is of other settings.
    """
    try:
        with nullcontext() if folder is None else rows_in_files(folder):
            loss.load_full_state(state)
    except ValueError as error:
        raise error if isinstance(error, InputError) else InputError(f"{path!r}: {one_line(error)}", flag) from None


def folder_of(file: str, name: Any, flag: str) -> str | None:
    """The path of the folder `name` that a checkpoint names; None if it names none.

    It lies beside `file`, or where `file` is a link, beside the file that the link leads to.

    Raises:
        InputError: it is not on a local disk, or no such name.
    """
    if name is None:
        return None
    if not isinstance(name, str) or not FOLDER.fullmatch(name):
        raise InputError(f"{file!r} names {name!r} as the folder of its rows, which is not such a name", flag)
    if "://" in file:
        raise InputError(
            f"{file!r} has its rows per sample in the folder {name!r} beside it, which is read from a local "
            "disk; copy both there",
            flag,
        )
    beside = os.path.join(os.path.dirname(file), name)
    linked = os.path.join(os.path.dirname(os.path.realpath(file)), name)
    return beside if os.path.exists(beside) or not os.path.exists(linked) else linked


def check(file: str, name: Any, state: Any, flag: str) -> None:
    """Raise InputError unless the folder has all rows of the checkpoint `file`."""
    if (folder := folder_of(file, name, flag)) is not None:
        try:
            check_row_files(folder, state)
        except InputError as error:
            raise InputError(f"{error}", flag) from None


def remove_unnamed(folder: str, files: Iterable[str], begin: str = "") -> None:
    """Remove the folders of rows in `folder` that no checkpoint names: what a kill or a removed checkpoint leaves.

    Args:
        files: paths of the checkpoints beside them. If one cannot be read, nothing is removed.
        begin: of the folders' names.
    """
    with os.scandir(folder) as entries:
        row_folders = [
            entry.path for entry in entries
            if entry.is_dir(follow_symlinks=False) and FOLDER.fullmatch(entry.name) and entry.name.startswith(begin)
        ]
    if not row_folders:
        return
    named = set()
    for file in files:
        try:
            named.add(_named_in(file))
        except FileNotFoundError:
            continue
        except Exception as error:
            logging.warning(f"Folders of rows beside '{file}' are kept, as it cannot be read: {one_line(error)}")
            return
    for path in row_folders:
        if os.path.basename(path) not in named:
            shutil.rmtree(path, ignore_errors=True)


def _named_in(file: str) -> Any:
    """The folder that the checkpoint of a training or of a recovery names, if any."""
    content = load_mapped(file)
    if not isinstance(content, dict):
        return None
    if "optimizer" not in content and "rows" in content:  # of a recovery, or of shards from before version 0.1
        return content["rows"]
    entry = entry_of(content) if "optimizer" in content else content
    return None if entry is None else rows_folder_of(entry)


def rows_folder_of(entry: dict[str, Any]) -> Any:
    """The name of the folder that our entry of a checkpoint names, if any."""
    if "older" in entry:
        return entry["older"].get("rows")
    return entry.get("components", {}).get("row_files", {}).get("folder")
