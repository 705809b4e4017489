"""A loss of ours as a task of OpenCLIP 4.x, whose loop trains tasks: model and loss in one module."""

from collections.abc import Callable
from typing import Any

import torch
from open_clip.task import CLIPTask
from torch import Tensor, nn

from training_ext.loss import LogItems, TrainingLoss

BESIDE = ("index", "key")
"""What a batch holds for the loss and not for the model."""


class Batch(dict):
    """Images and tokens, which the loop passes to the model as they are; `beside` is the rest, on the CPU."""

    beside: dict[str, Tensor]


class TaskLosses(LogItems):
    """The loop adds up those of `items()` that are losses and sets the total, "loss"; from then on `items()` is what it
    logs, on every process."""

    def __init__(self, value: Tensor, name: str, diagnostics: Callable[[], dict[str, Tensor]]):
        super().__init__({"contrastive_loss": value}, diagnostics)
        self._name = name

    def items(self) -> Any:
        if "loss" not in self:
            return dict.items(self)
        return ({self._name: self["loss"]} | self._diagnostics()).items()


class LossTask(CLIPTask):
    """A model and a loss of ours.

    The loss stays outside of what DistributedDataParallel wraps, FSDP divides and torch.compile traces.

    Args:
        model: as OpenCLIP built it.
        reference: a frozen model whose features the loss gets, too, or None.
        clamp: called with `clamp_logit_scale` of OpenCLIP's after each step.

    `loss` is set once the data are known, and not at all where nothing is trained.
    """

    loss: TrainingLoss

    def __init__(self, model: nn.Module, reference: nn.Module | None, clamp: Callable[[Callable], None]):
        super().__init__(model, default_loss=False)
        self.reference = None if reference is None else reference.eval().requires_grad_(False)
        self._clamp = clamp

    def train(self, mode: bool = True) -> "LossTask":
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    def prepare_batch(
        self, batch: dict[str, Any], device: torch.device, input_dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        for_model = {name: value for name, value in batch.items() if name not in BESIDE}
        prepared = Batch(super().prepare_batch(for_model, device, input_dtype))
        prepared.beside = {name: batch[name] for name in BESIDE if name in batch}
        return prepared

    def training_forward(self, batch: Batch) -> tuple[dict, dict]:
        output = self.trainable_module(**batch)
        report = self._report(output)
        if self.reference is not None:
            with torch.no_grad():
                output |= {f"dist_{name}": value for name, value in self.reference(**batch).items()}
        losses = self._losses(output, [batch])
        losses["loss"] = losses["contrastive_loss"]
        return losses, report

    def compute_accum_loss(
        self, inputs: dict[str, Tensor], inputs_no_accum: dict[str, Tensor], accum_batches: list[Batch]
    ) -> tuple[dict, dict]:
        return self._losses(inputs | inputs_no_accum, accum_batches), self._report(inputs_no_accum)

    def _losses(self, output: dict[str, Tensor], batches: list[Batch]) -> TaskLosses:
        beside = {name: torch.cat([batch.beside[name] for batch in batches]) for name in batches[0].beside}
        return TaskLosses(self.loss.value(**output, **beside), self.loss.name, self.loss.diagnostics)

    def compile(self, *, target: str = "task", compile_train: bool = True, **kwargs: Any) -> "LossTask":
        """Of a task, the model alone: our state moves within the loss."""
        if target == "model":
            super().compile(target=target, **kwargs)
        elif compile_train:
            kwargs.pop("compile_eval", None)
            self.trainable_module.compile(**self._compile_kwargs(**kwargs))
        return self

    def clamp_logit_scale(self, *args: Any, **kwargs: Any) -> None:
        self._clamp(super().clamp_logit_scale)
