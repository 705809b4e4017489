"""What components see of OpenCLIP's epochs and evaluations: `Epoch`, `Evaluation`."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from open_clip_ext.metrics_file import TRAIN


@dataclass(frozen=True)
class Epoch:
    """One epoch of OpenCLIP's loop: of the training, or one that a component runs besides.

    Args:
        run: runs an epoch like this one, see `dataclasses.replace`, within the `epoch` of all components.
        number, of: completed epochs of its stage, and all of them.
        seed: OpenCLIP's number of the epoch, which seeds the order of the data.
        data: OpenCLIP's data sets, by name.
        before, ahead: steps of its stage before the epoch, and of the whole run after it.
        model, optimizer, scaler: those that OpenCLIP trains with.
        task: what OpenCLIP's `evaluate` takes for the model: OpenCLIP 4's task, which has it, else the model.
        scheduler: sets the learning rates of a step.
        args: what the loop takes for the command line.
        writer: TensorBoard's, to which OpenCLIP gives the numbers of each step that it logs on process 0; or None.
        content: returns what OpenCLIP would save after this many epochs.
        stage: TRAIN, or a component's name for its own epochs.
    """

    run: Callable[["Epoch"], Any]
    number: int
    of: int
    seed: int
    data: dict[str, Any]
    before: int
    ahead: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    task: Any
    scheduler: Callable[[int], None]
    args: Namespace
    writer: Any
    content: Callable[[int], dict[str, Any]]
    stage: str = TRAIN

    @property
    def loader(self) -> Any:
        """The train loader."""
        return self.data["train"].dataloader

    @property
    def batches(self) -> int:
        """Batches of the whole epoch, of each process."""
        return self.loader.num_batches

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole epoch."""
        return self.batches // self.args.accum_freq

    @property
    def first_batch(self) -> int:
        """How many batches an earlier run has done; known once the epoch has begun."""
        return getattr(self.loader, "first", 0)

    @property
    def is_training(self) -> bool:
        return self.stage == TRAIN

    @property
    def title(self) -> str:
        return f"Epoch {self.number}" if self.is_training else f"{self.stage.title()} {self.number + 1}/{self.of}"


@dataclass(frozen=True)
class Evaluation:
    """One evaluation within a training, which runs on process 0 alone.

    Args:
        epoch: number of completed epochs.
        model: without wrappers, in evaluation mode.
        data: OpenCLIP's data sets, by name.
        tokenizer: of the evaluated model.
    """

    epoch: int
    model: nn.Module
    data: dict[str, Any] = field(repr=False)
    tokenizer: Any = None
