"""What is replaced in OpenCLIP 4.2 for hooks of components."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from open_clip.task import get_model_from_task, save_checkpoint
from open_clip_train.train import TrainState

from training_ext.core.epoch import Epoch
from training_ext.core.hosts.both_events import EVALUATE, GET_DATA, zero_shot
from training_ext.core.seam import MAIN, Seam

without_wrapper = get_model_from_task  # the model within the task that is evaluated


def train_one_epoch(
    original: Callable, run: Any, state: TrainState, data: dict[str, Any], args: Namespace, tb_writer: Any = None
) -> Any:
    def run_epoch(own: Epoch) -> Any:
        # A component's own epoch gets its own counters, not the training's.
        besides = replace(state, epoch=own.seed, scheduler=own.scheduler, losses_ema={})
        return original(state if own.is_training else besides, own.data, own.args, tb_writer=own.writer)

    def content(epochs: int) -> dict[str, Any]:
        counters = {"global_step": state.global_step, "samples_seen": state.samples_seen}
        rest = {"scaler": state.scaler, "name": args.name, **counters}
        return save_checkpoint(state.task, state.optimizer, epochs, **rest)

    return run.events.train_one_epoch(
        run_epoch, state.epoch, data, args, model=state.task.trainable_module, optimizer=state.optimizer,
        scaler=state.scaler, task=state.task, scheduler=state.scheduler, writer=tb_writer, content=content,
    )


EVENTS = {
    "data_built": GET_DATA,
    "epoch": Seam(
        MAIN, "train_one_epoch",
        why="components do something before and after an epoch, and run epochs of their own",
        contract="called once per epoch as (state, data, args, tb_writer=) before the state's optimizer is saved; "
        "takes the epoch's number, task, optimizer, scaler and scheduler from the state and counts in it; calls "
        "set_epoch of data['train'], goes through its dataloader, calls scheduler(step), and gives the numbers of a "
        "step, on those of --log-metric-every-n-steps, too, to tb_writer.add_scalar('train/' + name, number, step); of "
        "the losses it takes what items() gives, on every process",
        replacement=lambda original, run: partial(train_one_epoch, original, run),
    ),
    "evaluated": EVALUATE,
    "scores": zero_shot("zero_shot_eval_all"),
}
"""What is replaced for a hook, by its name, if a component has it."""
