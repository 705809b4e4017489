"""OpenCLIP 2.26 to 3.3: a loop over model, loss and optimizer."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from training_ext.core.hosts import release
from training_ext.core.hosts.both import SEAMS as BOTH
from training_ext.core.hosts.both import data_parallel, main
from training_ext.core.seam import MAIN, TRAIN, Seam

__all__ = ["HAS_TASKS", "REFUSED", "SCALE", "SEAMS", "assign_model_rate", "main"]

HAS_TASKS = False
SCALE = "scale"  # name of 1 / tau in a logged step
REFUSED = ("horovod", "torchscript", "trace")  # flags that would be ignored with this package's losses


def assign_model_rate(original: Callable, optimizer: torch.optim.Optimizer, new_lr: float) -> None:
    """OpenCLIP's one rate for all groups, times a group's `lr_scale`."""
    original(optimizer, new_lr)
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_scale", 1.0)


def clamped(original: Callable, run: Any, model: torch.nn.Module) -> Any:
    """`unwrap_model` for the clamp after each step: OpenCLIP gets a copy, and logit_scale is clamped here."""
    logit_scale = original(model).logit_scale
    if (highest := run.highest_scale()) is not None:
        logit_scale.clamp_(0, highest)
    return SimpleNamespace(logit_scale=logit_scale.detach().clone())


TIMM = Seam(
    "timm.optim", "create_optimizer_v2",
    why="the same for --opt timm/...",
    contract="main imports create_optimizer_v2 from timm.optim when --opt starts with timm/",
    replacement=lambda original, run: partial(run.create_optimizer, original),
)

SEAMS = (
    *BOTH,
    *((TIMM,) if release() >= (2, 30) else ()),  # before, there is no --opt
    Seam(
        MAIN, "torch.nn.parallel.DistributedDataParallel",
        why="OpenCLIP passes device_ids also on CPU, where DistributedDataParallel refuses it",
        contract="main wraps the model by DistributedDataParallel(model, device_ids=[device], ...)",
        replacement=data_parallel,
    ),
    Seam(
        MAIN, "optim.AdamW",
        why="the temperature and components have groups of their own",
        contract="main builds optim.AdamW(groups, ...) once, the model's parameters in groups",
        replacement=lambda original, run: partial(run.create_optimizer, original),
    ),
    Seam(
        TRAIN, "unwrap_model",
        why="OpenCLIP clamps the temperature after each step, which must not move a fixed one",
        contract="train_one_epoch uses unwrap_model(model) only to clamp its logit_scale",
        replacement=lambda original, run: partial(clamped, original, run),
        used_by=f"{TRAIN}:train_one_epoch",
    ),
    Seam(
        MAIN, "pt_load",
        why="takes our state out of the checkpoint",
        contract="main loads --resume by pt_load(path, map_location=), before it creates data and loss",
        replacement=lambda original, run: partial(run.state.load, original),
    ),
    Seam(
        MAIN, "create_loss",
        why="the loss itself",
        contract="main calls create_loss(args) once and only to train, and the loop calls what it returns with the "
        "model's output and output_dict=True, and sums the values of the dict that it gets",
        replacement=lambda original, run: partial(run.create_loss, original),
    ),
)
