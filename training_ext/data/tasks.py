"""This package's losses as a task of OpenCLIP 4.x, whose loop trains tasks: model and loss in one module."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from training_ext.core.hosts.v4 import WithoutCompiledLoss
from training_ext.core.loss import take_added
from training_ext.data.loss import LogItems, TrainingLoss


class TaskLosses(LogItems):
    """The losses of a step as the task loop takes them.

    The loop sums the losses in `items()` and sets the total, "loss"; from then on it logs `items()`, on every process.
    """

    def __init__(
        self, value: Tensor, name: str, diagnostics: Callable[[], dict[str, Tensor]],
        added: Mapping[str, Tensor] = MappingProxyType({}),
    ):
        super().__init__({"contrastive_loss": value, **added}, diagnostics)
        self._name = name
        self._added = added

    def items(self) -> Any:
        if "loss" not in self:
            return dict.items(self)
        values = {self._name: self["contrastive_loss"], **self._added} | self._diagnostics()
        # The loop reduces them over the processes, which NCCL does on its own devices only.
        return {name: value.to(self["loss"].device) for name, value in values.items()}.items()


class LossTask(WithoutCompiledLoss):
    """A task of a model and one of this package's losses.

    The loss stays outside of what DistributedDataParallel wraps, FSDP shards and torch.compile traces.

    Args:
        reference: a frozen model whose features the loss also gets, or None.
        clamp: called with OpenCLIP's `clamp_logit_scale` after each step.

    `loss` is set once the data are known, and never without a training.
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

    def training_forward(self, batch: dict[str, Tensor]) -> tuple[dict, dict]:
        output = self.trainable_module(**batch)
        report = self._report(output)
        if self.reference is not None:
            with torch.no_grad():
                output |= {f"dist_{name}": value for name, value in self.reference(**batch).items()}
        losses = self._losses(output)
        losses["loss"] = sum(losses.values())
        return losses, report

    def compute_accum_loss(
        self, inputs: dict[str, Tensor], inputs_no_accum: dict[str, Tensor], accum_batches: list
    ) -> tuple[dict, dict]:
        return self._losses(inputs | inputs_no_accum), self._report(inputs_no_accum)

    def _losses(self, output: dict[str, Tensor]) -> TaskLosses:
        added = take_added(output, self.loss.expects_added)
        return TaskLosses(self.loss.value(**output), self.loss.name, self.loss.diagnostics, added)

    def clamp_logit_scale(self, *args: Any, **kwargs: Any) -> None:
        self._clamp(super().clamp_logit_scale)
