"""Refuse a checkpoint that OpenCLIP would resume in silence, and wrongly."""

import math
import os
from argparse import Namespace
from typing import Any

from open_clip_ext.distributed import plain_name
from open_clip_ext.errors import InputError
from training_ext.core.component import Components
from training_ext.core.state import KEY, check_components, check_optimizer
from training_ext.core.temperature import trains_logit_scale
from training_ext.openclip.hosts import LEGACY, TASKS, host, shards_model
from training_ext.openclip.loading import load_mapped


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
    check_optimizer(path, content, host().loop == TASKS, bool(shards_model(args)))
    check_components(path, content.get(KEY, {}), Components.of(args))
    _check_temperature(path, content, args)


def _check_temperature(path: str, content: dict[str, Any], args: Namespace) -> None:
    saved = {plain_name(name): value for name, value in content.get("state_dict", {}).items()}.get("logit_scale")
    if saved is None or not args.uses_ext_loss or args.tau_init is None or trains_logit_scale(args):
        return
    if abs(saved.double().item() + math.log(args.tau_init)) > 1e-5:
        tau = math.exp(-saved.item())
        raise InputError(f"{args.tau_init:g}, but {path!r} has {tau:g}; give {tau:g}", "--tau-init")
