"""What is replaced in OpenCLIP 2.26 to 3.3 for hooks of components."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from training_ext.core.epoch import Epoch
from training_ext.core.hosts.both_events import EVALUATE, GET_DATA, zero_shot
from training_ext.core.seam import MAIN, Seam


def without_wrapper(model: Any) -> torch.nn.Module:
    """The model within the DistributedDataParallel that is evaluated, if any."""
    return getattr(model, "module", model)


def train_one_epoch(
    original: Callable, run: Any, model: torch.nn.Module, data: dict[str, Any], loss: Any, epoch: int,
    optimizer: torch.optim.Optimizer, scaler: Any, scheduler: Callable, dist_model: Any, args: Namespace,
    tb_writer: Any = None,
) -> Any:
    def run_epoch(own: Epoch) -> Any:
        rest = optimizer, scaler, own.scheduler, dist_model, own.args
        return original(model, own.data, loss, own.seed, *rest, tb_writer=own.writer)

    def content(epochs: int) -> dict[str, Any]:
        whole = {
            "epoch": epochs,
            "name": args.name,
            "state_dict": getattr(model, "_orig_mod", model).state_dict(),  # without torch.compile's prefix
            "optimizer": optimizer.state_dict(),
        }
        return whole if scaler is None else {**whole, "scaler": scaler.state_dict()}

    return run.events.train_one_epoch(
        run_epoch, epoch, data, args, model=model, optimizer=optimizer, scaler=scaler, task=model,
        scheduler=scheduler, writer=tb_writer, content=content,
    )


EVENTS = {
    "data_built": GET_DATA,
    "epoch": Seam(
        MAIN, "train_one_epoch",
        why="components do something before and after an epoch, and run epochs of their own",
        contract="called once per epoch as (model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, "
        "tb_writer=), before optimizer.state_dict() is saved; it calls set_epoch of data['train'], goes through its "
        "dataloader, calls scheduler(step), and gives the numbers of each step that it logs to "
        "tb_writer.add_scalar('train/' + name, number, step)",
        replacement=lambda original, run: partial(train_one_epoch, original, run),
    ),
    "evaluated": EVALUATE,
    "scores": zero_shot("zero_shot_eval"),
}
"""What is replaced for a hook, by its name, if a component has it."""
