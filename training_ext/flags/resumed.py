"""Refuse a checkpoint that OpenCLIP would resume in silence, and wrongly."""

import math
import os
from argparse import Namespace
from typing import Any

from open_clip_ext.distributed import plain_name
from open_clip_ext.errors import InputError
from training_ext.core import hosts
from training_ext.core.older import of_today
from training_ext.core.plan import Plan, trains
from training_ext.core.run import Run
from training_ext.core.state import entry_of
from training_ext.core.temperature import trains_logit_scale
from training_ext.data.checkpoint import read_sharded_entry
from training_ext.openclip.loading import load_checkpoint


def check_folder(path: str | None, args: Namespace) -> None:
    """Raise InputError for a folder of shards that the training loop cannot read."""
    if path is None or not os.path.isdir(path):
        return
    if not hosts.installed().HAS_TASKS:
        raise InputError(f"{path!r} is a folder of shards, which open_clip_train.main does not read", "--resume")
    if not Plan(args).shards_model:
        raise InputError(f"{path!r} is a folder of shards, for --fsdp and several processes; give a file", "--resume")


def find_resumed(run: Run, path: str | None) -> tuple[str, dict | None] | None:
    """The local checkpoint with a training state at `path`, and our entry in it; None if remote or weights only.

    Raises:
        InputError: it is missing or not complete, or the run cannot go on from it.
    """
    if path is None or "://" in path:
        return None
    if os.path.isdir(path):
        entry = read_sharded_entry(path)
        entry = None if entry is None else of_today(entry)
        run.state.check_entry(path, entry)
        return path, entry
    content = load_checkpoint(path)
    if isinstance(content, dict) and "epoch" not in content and "state_dict" in content:
        raise InputError(f"{path!r} has weights only; give it as --pretrained", "--resume")
    if trains(run.args):
        run.state.check_content(path, content)
        if run.args.loss is not None and isinstance(content, dict) and "epoch" in content:
            check_resumed(path, content, run.args)
    return (path, entry_of(content)) if isinstance(content, dict) and "epoch" in content else None


def check_resumed(path: str, content: dict[str, Any], args: Namespace) -> None:
    """Raise InputError for the content of a training checkpoint that is done, or of another fixed temperature."""
    epoch = content["epoch"]
    if isinstance(epoch, int) and epoch >= args.epochs and args.resume != "latest":  # a requeued job may be done
        raise InputError(f"{args.epochs}, but --resume {path!r} has completed {epoch}; give more", "--epochs")
    saved = {plain_name(name): value for name, value in content.get("state_dict", {}).items()}.get("logit_scale")
    if saved is None or not args.uses_ext_loss or args.tau_init is None or trains_logit_scale(args):
        return
    if abs(saved.double().item() + math.log(args.tau_init)) > 1e-5:
        tau = math.exp(-saved.item())
        raise InputError(f"{args.tau_init:g}, but {path!r} has {tau:g}; give {tau:g}", "--tau-init")
