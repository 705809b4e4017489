"""OpenCLIP 4.2: a loop over a task, which has model and loss."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from open_clip.task import CLIPTask, unwrap_model

from training_ext.core.hosts.both import SEAMS as BOTH
from training_ext.core.hosts.both import data_parallel, main
from training_ext.core.seam import MAIN, TRAIN, Seam

__all__ = ["HAS_TASKS", "REFUSED", "SCALE", "SEAMS", "assign_model_rate", "main"]

HAS_TASKS = True
SCALE = "logit_scale"  # name of 1 / tau in a logged step
# For other data than images and captions, or captions from elsewhere than the .txt that carries the row
REFUSED = ("audio_zeroshot_dataset", "json_text_key", "text_attention_mask", "text_key", "use_naflex", "variable_text")


def assign_model_rate(original: Callable, optimizer: torch.optim.Optimizer, new_lr: float) -> None:
    original(optimizer, new_lr)


class LossTask(CLIPTask):
    """A task of a model and one of this package's losses.

    The loss stays outside of what DistributedDataParallel wraps, FSDP shards and torch.compile traces, since it updates
    state of its own.

    Args:
        reference: a frozen model whose features the loss also gets, or None.
        highest_scale: tells where logit_scale is clamped after a step; None: nowhere.
    """

    def __init__(
        self, model: torch.nn.Module, loss: Callable[..., dict], reference: torch.nn.Module | None,
        highest_scale: Callable[[], float | None],
    ):
        super().__init__(model, default_loss=False)
        self.loss = loss
        self.reference = None if reference is None else reference.eval().requires_grad_(False)
        self._highest_scale = highest_scale

    def compile(self, *, target: str = "task", compile_train: bool = True, **kwargs: Any) -> "LossTask":
        if target != "task":
            super().compile(target=target, **kwargs)
        elif compile_train:
            kwargs.pop("compile_eval", None)
            self.trainable_module.compile(**self._compile_kwargs(**kwargs))
        return self

    def train(self, mode: bool = True) -> "LossTask":
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    def training_forward(self, batch: dict[str, torch.Tensor]) -> tuple[dict, dict]:
        if self.reference is None:
            return super().training_forward(batch)
        output = self.trainable_module(**batch)
        report = self._report(output)
        with torch.no_grad():
            output |= {f"dist_{name}": value for name, value in self.reference(**batch).items()}
        losses = self.loss(**output, output_dict=True)
        losses["loss"] = sum(losses.values())
        return losses, report

    def clamp_logit_scale(self, *args: Any, **kwargs: Any) -> None:
        if (highest := self._highest_scale()) is not None:
            super().clamp_logit_scale(highest)


def create_task(original: Callable, run: Any, args: Any, model: torch.nn.Module, **more: Any) -> Any:
    """`create_task` with the run's loss, or OpenCLIP's and those of components."""
    if run.args.uses_ext_loss:
        return LossTask(model, run.create_loss(original, args), more.get("dist_model"), run.highest_scale)
    task = original(args, model=model, **more)
    clamp = task.clamp_logit_scale
    task.clamp_logit_scale = lambda *rest: None if run.highest_scale() is None else clamp(*rest)
    if run.adds_losses:
        losses = run.events.with_added(task.loss)
        del task.loss  # a module, whose place nothing else can take
        task.loss = losses
    return task


def create_optimizer(
    original: Callable, run: Any, module: torch.nn.Module, *args: Any, **kwargs: Any
) -> torch.optim.Optimizer:
    # The parameters of the wrapped model, since FSDP replaces those that were created.
    return run.prepare_optimizer(original(module, *args, **kwargs), unwrap_model(module))


def get_learning_rate(original: Callable, run: Any, optimizer: torch.optim.Optimizer) -> float:
    """The largest rate of all groups, as OpenCLIP's, but without the temperature's."""
    if run.temperature is None:
        return original(optimizer)
    groups = [group for group in optimizer.param_groups if group is not run.temperature.group]
    return original(SimpleNamespace(param_groups=groups))


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
        replacement=lambda original, run: partial(create_task, original, run),
        parameters=("model", "dist_model"),
    ),
    Seam(
        MAIN, "create_optimizer",
        why="the temperature and components have groups of their own",
        contract="main builds its optimizer by create_optimizer(trainable_module, ...), after the model is wrapped",
        replacement=lambda original, run: partial(create_optimizer, original, run),
    ),
    Seam(
        TRAIN, "get_learning_rate",
        why="the loop logs the largest rate of all groups, which may be the temperature's",
        contract="train_one_epoch logs get_learning_rate(optimizer), of the rates in its groups",
        replacement=lambda original, run: partial(get_learning_rate, original, run),
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
