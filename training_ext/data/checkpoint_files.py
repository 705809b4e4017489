"""The checkpoint files of a run's folder: at the end of an epoch and within one, and the one that `--resume` means."""

import logging
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from open_clip_ext.errors import InputError
from open_clip_ext.files import PARTIAL, whole_file
from training_ext.core import hosts
from training_ext.core.epoch import Epoch
from training_ext.core.plan import Plan, trains
from training_ext.core.state import WEIGHTS, entry_of
from training_ext.core.training import Training
from training_ext.data.checkpoint import SHARDED, SHARDED_PARTS
from training_ext.data.row_folders import MARK, remove_unnamed
from training_ext.openclip.loading import load_mapped

# In the order of OpenCLIP's --resume latest, epoch_3_step_N.pt lies between epoch_3.pt and epoch_4.pt.
NAME, PATTERN = "epoch_{epoch}_step_{step}.pt", re.compile(r"epoch_\d+_step_\d+\.pt")
EPOCH = re.compile(r"epoch_\d+\.pt")
BEFORE_RENAME = "tmp.pt"  # OpenCLIP's name of a --save-most-recent file until it is complete
HALF_WRITTEN = (".epoch_", f".{BEFORE_RENAME}", "epoch_")  # begin of such names that no other command uses


def progress(path: str) -> tuple[int, int]:
    """The completed epochs of a checkpoint, and the batches of the next one."""
    if os.path.isdir(path):
        if not is_whole_folder(path):
            raise FileNotFoundError(path)
        return load_mapped(os.path.join(path, SHARDED_PARTS[-1]))["epoch"], 0  # at the end of an epoch only
    loaded = load_mapped(path)
    entry = entry_of(loaded) or {}
    components = entry.get("components", {})
    if "done" in components.get("recovery", {}):  # within a recovery, whose batches are not the training's
        return 0, 0
    resume_state = entry.get("older") or components.get("exact_resume", {})
    return loaded["epoch"], (resume_state.get("position") or {}).get("batches", 0)


def is_whole_folder(path: str) -> bool:
    """Whether `path` is a complete checkpoint of shards, which only the task loop can resume from."""
    return hosts.installed().HAS_TASKS and all(os.path.exists(os.path.join(path, part)) for part in SHARDED_PARTS)


def furthest(folder: str, names: Iterable[str]) -> str | None:
    """The one of these checkpoints with the most training, of equals the first; None if none of them is whole."""
    done: dict[str, tuple[int, int]] = {}
    for path in (os.path.join(folder, name) for name in names):
        with suppress(Exception):  # a file that is missing or torn
            done[path] = progress(path)
    return max(done, key=lambda path: done[path], default=None)


def newest_numbered(folder: str) -> str | None:
    """Name of the checkpoint with the largest epoch and step in its name."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    numbered = [name for name in names if EPOCH.fullmatch(name) or PATTERN.fullmatch(name)]
    numbered += [
        name for name in names if EPOCH.fullmatch(f"{name}.pt") and is_whole_folder(os.path.join(folder, name))
    ]
    # The name decides between file and folder of an epoch: the file, as in OpenCLIP's order.
    return max(
        numbered, key=lambda name: ([int(digits) for digits in re.findall(r"\d+", name)], name), default=None
    )


def save_within(plan: Plan, training: Training, epoch: Epoch, step: int) -> None:
    """Save a checkpoint after `step` steps of an epoch in place of earlier ones; every process calls this."""
    args, state = plan.args, training.state
    done = epoch.number if epoch.is_training else 0  # completed epochs of the training
    # A recovery's is the least of all names, since it stays in a remote folder beside those of the training.
    name = NAME.format(epoch=done, step=step if epoch.is_training else 0)
    state.gather(training, done, name.removesuffix(".pt"))
    content = epoch.content(done) if plan.is_first or plan.shards_model else None
    if plan.is_first:
        # OpenCLIP's --remote-sync does not copy the file of --save-most-recent.
        latest = args.save_most_recent and args.remote_sync is None
        path = os.path.join(args.checkpoint_path, hosts.installed().main().LATEST_CHECKPOINT_NAME if latest else name)
        state.save(torch.save, content, path)
        remove_older(path)
        logging.info(f"Saved after step {step} of {epoch.title.lower()}: {path}")
    state.entry = None


def remove_older(path: str) -> list[str]:
    """Remove the mid-epoch checkpoints beside a newer checkpoint at `path`, with their exported weights; return their
    names."""
    folder, newer = os.path.split(path)
    older = [name for name in os.listdir(folder) if PATTERN.fullmatch(name) and name != newer]
    for name in older:
        os.remove(os.path.join(folder, name))
        with suppress(FileNotFoundError):
            os.remove(os.path.join(os.path.dirname(folder), WEIGHTS, name))
    remove_folders(folder)
    return older


def replace_older(path: str) -> None:
    """Remove them, and log the checkpoint of the epoch that has taken their place."""
    if older := remove_older(path):
        logging.info(f"Saved after the epoch: {path}, in place of {', '.join(older)}")


def remove_folders(folder: str) -> None:
    """Remove what no run resumes from: folders of rows without a checkpoint, what a kill left half-written, and the
    file of --save-most-recent if the folder of shards that has taken its place is newer."""
    file = os.path.join(folder, hosts.installed().main().LATEST_CHECKPOINT_NAME)
    shards = file.removesuffix(".pt")
    if os.path.exists(file) and os.path.isdir(shards) and furthest("", (file, shards)) == shards:
        os.remove(file)
    paths = [os.path.join(folder, name) for name in os.listdir(folder)]
    for path in paths:
        if path.endswith(PARTIAL) and os.path.basename(path).startswith(HALF_WRITTEN):
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    sharded = [os.path.join(path, SHARDED) for path in paths if os.path.isdir(path)]
    # Recovered statistics (--osr-save) may lie here, too, with rows of their own in FILE.rows-*.
    with_rows = {path.rpartition(MARK)[0] for path in paths}
    files = [path for path in paths if path.endswith(".pt") or path in with_rows]
    remove_unnamed(folder, files + sharded, begin="epoch_")


def resumed_path(args: Namespace) -> str | None:
    """The checkpoint that OpenCLIP will resume from; None without one, or if only OpenCLIP can find it (remote)."""
    if args.resume != "latest":
        return args.resume
    if args.name is None:
        raise InputError("'latest' is the latest checkpoint of an experiment; give its --name", "--resume")
    if args.remote_sync is not None:
        return None
    return most_trained(os.path.join(args.logs, args.name, "checkpoints"), or_torn=True)


def most_trained(folder: str, or_torn: bool = False) -> str | None:
    """The checkpoint with the most training; if several have it, that of --save-most-recent.

    Args:
        or_torn: if none is whole, return one that is there. Else None.
    """
    file = hosts.installed().main().LATEST_CHECKPOINT_NAME
    names = (file, file.removesuffix(".pt"), BEFORE_RENAME, newest_numbered(folder))
    there = [name for name in names if name is not None and os.path.exists(os.path.join(folder, name))]
    last = os.path.join(folder, there[-1]) if or_torn and there else None
    return last if last and len(there) == 1 else furthest(folder, there) or last


def last_saved(args: Namespace) -> str:
    """The end of a message on process 0: what is left of a training that fails."""
    if not trains(args) or not getattr(args, "save_logs", False):
        return ""
    path = most_trained(args.checkpoint_path)
    return "; no checkpoint is complete" if path is None else f"; the last complete checkpoint is {path!r}"


def bring_up_to_date(args: Namespace) -> None:
    """Let the checkpoint of --save-most-recent, which OpenCLIP resumes from, be the one with the most training.

    A kill between the two checkpoints of an epoch leaves it behind, and so does a run without the flag. It is a file or
    a folder of shards, and OpenCLIP prefers the file, also an older one from within an epoch.
    """
    if args.resume != "latest" or not args.save_most_recent or args.remote_sync is not None:
        return
    folder = os.path.join(args.logs, args.name, "checkpoints")
    latest = os.path.join(folder, hosts.installed().main().LATEST_CHECKPOINT_NAME)
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
    """Replaces OpenCLIP's `get_latest_checkpoint`, for local folders that mislead it.

    It puts a local `folder` as it is in front of a pattern of file names, and takes the last name: that of
    --save-most-recent, however old. Here it is the checkpoint with the most training; if none is whole, one that
    cannot be read, since a run must not begin anew without a word.
    """
    return original(folder, remote=True) if remote else most_trained(folder, or_torn=True)
