"""OpenCLIP 4.2: a loop over a task, which has model and loss."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from open_clip.task import CLIPTask, unwrap_model

from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of
from training_ext.core.hosts import range_of
from training_ext.core.hosts.both import IN_MAIN, MAIN, TRAIN, data_parallel, main
from training_ext.core.hosts.both import SEAMS as BOTH
from training_ext.core.loss import TrainingLoss
from training_ext.core.seam import Seam

__all__ = ["HAS_TASKS", "RANGE", "SEAMS", "assign_model_rate", "check_flags", "main"]

RANGE = range_of("v4")
HAS_TASKS = True
# For other data than images and captions, or captions from elsewhere than the .txt that carries the row; and a frozen
# model's features, which this task does not compute
REFUSED = (
    "audio_zeroshot_dataset", "distill_model", "json_text_key", "text_attention_mask", "text_key", "use_naflex",
    "variable_text",
)


def check_flags(args: Namespace) -> None:
    """Raise InputError for the first flag that would be ignored with this package's losses."""
    for name in REFUSED:
        if getattr(args, name, None) not in (None, False, "txt"):
            raise InputError(f"--loss {args.loss} does not follow it; leave it out", flag_of(name))


def assign_model_rate(original: Callable, optimizer: torch.optim.Optimizer, new_lr: float) -> None:
    original(optimizer, new_lr)


class WithoutCompiledLoss(CLIPTask):
    """A task of which torch.compile traces the model alone, since the loss updates state of its own."""

    def compile(self, *, target: str = "task", compile_train: bool = True, **kwargs: Any) -> "WithoutCompiledLoss":
        if target != "task":
            super().compile(target=target, **kwargs)
        elif compile_train:
            kwargs.pop("compile_eval", None)
            self.trainable_module.compile(**self._compile_kwargs(**kwargs))
        return self


class LossTask(WithoutCompiledLoss):
    """A task of a model and one of this package's losses.

    Args:
        highest_scale: where logit_scale is clamped after a step; None: nowhere.
    """

    def __init__(self, model: torch.nn.Module, loss: TrainingLoss, highest_scale: float | None):
        super().__init__(model, default_loss=False)
        self.loss = loss
        self._highest_scale = highest_scale

    def clamp_logit_scale(self, *args: Any, **kwargs: Any) -> None:
        if self._highest_scale is not None:
            super().clamp_logit_scale(self._highest_scale)


def add_to_task(task: Any) -> Any:
    """Let a task of OpenCLIP's add the components' losses to its own."""
    loss = TrainingLoss(task.loss, True)
    del task.loss  # a module, whose place nothing else can take
    task.loss = loss
    return task


def create_task(original: Callable, run: Any) -> Callable:
    """`create_task` with the run's loss, or OpenCLIP's and those of components."""

    def create(args: Any, model: torch.nn.Module, **more: Any) -> Any:
        if not run.args.uses_ext_loss:
            task = original(args, model=model, **more)
            return add_to_task(task) if run.adds_losses else task
        return LossTask(model, run.create_loss(original, args), run.highest_scale())

    return create


def create_optimizer(original: Callable, run: Any) -> Callable:
    def create(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        # The parameters of the wrapped model, since FSDP replaces those that were created.
        return run.prepare_optimizer(original(module, *args, **kwargs), unwrap_model(module))

    return create


SEAMS = (
    *BOTH,
    Seam(
        "open_clip.task.base_task", "torch.nn.parallel.DistributedDataParallel",
        why="OpenCLIP passes device_ids also on CPU, where DistributedDataParallel refuses it",
        contract="prepare_distributed wraps the model by DistributedDataParallel(model, device_ids=[device], ...)",
        replacement=data_parallel,
        used_by="open_clip.task.base_task:TrainingTask.prepare_distributed",
    ),
    Seam(
        MAIN, "create_task",
        why="the loss itself, in a CLIPTask that clamps the temperature as the loss asks",
        contract="main calls create_task(args, model=, dist_model=, naflex_data_config=) once, before it wraps the "
        "model, whose task it trains by prepare_batch, task(batch), compute_accum_loss and clamp_logit_scale",
        replacement=create_task,
        used_by=IN_MAIN,
        parameters=("model", "dist_model"),
    ),
    Seam(
        MAIN, "create_optimizer",
        why="the temperature and components have groups of their own",
        contract="main builds its optimizer by create_optimizer(trainable_module, ...), after the model is wrapped",
        replacement=create_optimizer,
        used_by=IN_MAIN,
    ),
    Seam(
        TRAIN, "get_learning_rate",
        why="the loop logs the largest rate of all groups, which may be the temperature's",
        contract="train_one_epoch logs get_learning_rate(optimizer), of the rates in its groups",
        replacement=lambda original, run: partial(run.logged_learning_rate, original),
        used_by=f"{TRAIN}:train_one_epoch",
    ),
    Seam(
        "open_clip_train.file_utils", "pt_load",
        why="takes our state out of the checkpoint",
        contract="load_checkpoint imports pt_load and reads --resume by pt_load(path, map_location=), before main "
        "creates the data; the model's names are those of the model without wrappers",
        replacement=lambda original, run: partial(run.state.load, original),
        used_by="open_clip.task.checkpoint:load_checkpoint",
    ),
)
