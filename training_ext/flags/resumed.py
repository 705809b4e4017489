"""Refuse a checkpoint that OpenCLIP would resume in silence, and wrongly."""

import math
import os
from argparse import Namespace
from typing import Any

from open_clip_ext.distributed import plain_name
from open_clip_ext.errors import InputError
from training_ext.openclip.hosts import LEGACY, TASKS, host, shards_model
from training_ext.openclip.loading import load_mapped
from training_ext.thin.temperature import trains_logit_scale


def check_folder(path: str | None, args: Namespace) -> None:
    """Raise InputError for a folder of shards that the training loop cannot read."""
    if path is None or not os.path.isdir(path):
        return
    if host().loop == LEGACY:
        raise InputError(f"{path!r} is a folder of shards, which {host().main} does not read", "--resume")
    if not shards_model(args):
        raise InputError(f"{path!r} is a folder of shards, for --fsdp and several processes; give a file", "--resume")


def check_resumed(path: str, args: Namespace) -> None:
    """Raise InputError for a training checkpoint that is done, or of another loop or another fixed temperature.

    Args:
        path: a local file or folder that `checkpoint_files.find_resumed` could read.
    """
    if os.path.isdir(path):
        return
    content = load_mapped(path)
    epoch = content["epoch"]
    if isinstance(epoch, int) and epoch >= args.epochs and args.resume != "latest":  # a requeued job may be done
        raise InputError(f"{args.epochs}, but --resume {path!r} has completed {epoch}; give more", "--epochs")
    _check_loop(path, content, args)
    _check_temperature(path, content, args)


def _check_loop(path: str, content: dict[str, Any], args: Namespace) -> None:
    """Another loop's optimizer has its parameters in another order; under FSDP they are given by name."""
    by_tasks = "global_step" in content
    if by_tasks != (host().loop == TASKS):
        right = "add --legacy-loop"
        if by_tasks:
            right = "leave out --legacy-loop" if args.legacy_loop else "resume it with open_clip_torch 4"
        raise InputError(
            f"{path!r} was written by {'the task loop' if by_tasks else 'the legacy loop'}, whose optimizer has "
            f"another order; {right}, or give it as --pretrained for its weights only",
            "--resume",
        )
    groups = content.get("optimizer", {}).get("param_groups") or [{"params": []}]
    sharded = any(isinstance(name, str) for name in groups[0]["params"][:1])
    if sharded != bool(shards_model(args)):
        right = "train with it on several processes" if sharded else "leave it out"
        raise InputError(
            f"{path!r} was written {'with' if sharded else 'without'} --fsdp; {right}, or give the file as "
            "--pretrained for its weights only",
            "--resume",
        )


def _check_temperature(path: str, content: dict[str, Any], args: Namespace) -> None:
    saved = {plain_name(name): value for name, value in content.get("state_dict", {}).items()}.get("logit_scale")
    if saved is None or not args.uses_ext_loss or args.tau_init is None or trains_logit_scale(args):
        return
    if abs(saved.double().item() + math.log(args.tau_init)) > 1e-5:
        tau = math.exp(-saved.item())
        raise InputError(f"{args.tau_init:g}, but {path!r} has {tau:g}; give {tau:g}", "--tau-init")
