"""`Feature`: one capability of a training with its options, its rules, and the events that it answers."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from open_clip_ext.metrics_file import TRAIN
from open_clip_ext.options import WithOptions
from training_ext.context import Run
from training_ext.data.loss import TrainingLoss
from training_ext.data.rows import DataRows


@dataclass(frozen=True)
class Epoch:
    """One epoch of OpenCLIP's loop: of the training, or of the recovery of statistics before it.

    OpenCLIP takes it for TensorBoard's writer, and so gives it the numbers of each step that it logs, on process 0.

    Args:
        stage: TRAIN or RECOVERY of `metrics_file`.
        number, of: completed epochs of this stage, and all of them.
        seed: number that seeds the order of the data.
        loader: the train loader.
        steps: optimizer steps of the whole epoch.
        before, ahead: steps of this stage before the epoch, and of the whole run after it.
        tensorboard: TensorBoard's writer, or None.
        saved: `order` and `position` of the checkpoint that resumes within this epoch, or None.
        save: every process calls it with a `position`, and a checkpoint is written there.
        saves_last: whether one is needed after the last step too, since an evaluation may fail or be killed.
        numbers: those of the latest step, by name; empty if OpenCLIP does not log it.
    """

    stage: str
    number: int
    of: int
    seed: int
    loader: Any
    steps: int
    before: int
    ahead: int
    tensorboard: Any
    saved: dict[str, Any] | None
    save: Callable[[dict[str, Any]], None]
    saves_last: bool = False
    numbers: dict[str, float] = field(default_factory=dict)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """The method of TensorBoard's writer."""
        self.numbers[name.removeprefix("train/")] = value
        if self.tensorboard is not None:
            self.tensorboard.add_scalar(name, value, step)

    @property
    def batches(self) -> int:
        """Batches of the whole epoch, of each process."""
        return self.loader.num_batches

    @property
    def first_batch(self) -> int:
        """How many of them an earlier run has done; known within the context of `Feature.epoch`."""
        return getattr(self.loader, "first", 0)

    @property
    def is_training(self) -> bool:
        return self.stage == TRAIN

    @property
    def title(self) -> str:
        return f"Epoch {self.number}" if self.is_training else f"Recovery {self.number + 1}/{self.of}"


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of OpenCLIP's, to which features add metrics; on process 0.

    Args:
        epoch: number of completed epochs.
        model: without wrappers, in evaluation mode.
        data: OpenCLIP's, by name.
        transform, tokenizer: of the evaluated model.
        worker_init_fn: of loaders.
    """

    epoch: int
    model: torch.nn.Module
    data: dict[str, Any]
    transform: Any
    tokenizer: Any
    worker_init_fn: Callable[[int], None]


@dataclass(frozen=True)
class NewTraining:
    """A training before its first step.

    Args:
        model, optimizer, scaler: those that OpenCLIP trains with.
        loss: of this package, or None.
        loader: the train loader.
        rows: of the train data, where a feature or the loss needs them.
        reference: digest of the reference model of --distill-model, or None.
        run_epoch: runs an epoch of OpenCLIP's loop without its schedule and clamp; it appears in the log only.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    loss: TrainingLoss | None
    loader: Any
    rows: DataRows | None
    reference: str | None
    run_epoch: Callable[[Epoch], None]


class Feature(WithOptions):
    """One capability of a training, in a file of its own.

        class KeepBest(Feature):
            keep_best: str | None = option(None, "keep the weights with the best of this metric", metavar="METRIC")

            def evaluated(self, epoch, metrics, model, data): ...

    has the flag `--keep-best` and its value as `self.keep_best`. It answers an event by overriding its method. It uses
    neither names of OpenCLIP's loop nor another feature: what two of them share is the core's.

    Class attributes:
        needs_loss: whether its flags are refused without --loss.
        topic: heading of its flags in --help.
    """

    needs_loss: ClassVar[bool] = True
    topic: ClassVar[str] = "the run"

    def __init__(self, run: Run):
        super().__init__(**{option.name: getattr(run.args, option.name) for option in self.options})
        self.run = run

    # The events, in the order in which they occur

    @classmethod
    def resolve(cls, args: Namespace) -> None:
        """Fill in settings in `args`, of a run with --loss; raise InputError for those that have no effect.

        Settings of the loss are those given until then. `args.epochs_before` epochs, 0.0 here, count for its schedules.
        """

    def metrics(self) -> Sequence[str]:
        """Names of the metrics that it adds to an evaluation."""
        return ()

    def check(self, metrics: list[str]) -> None:
        """Process 0, before anything is written: raise InputError for flags that cannot work.

        Args:
            metrics: names of all that the run evaluates.
        """

    def check_rows(self, rows: DataRows, resumes: bool) -> None:
        """The same, when the train data were read; `resumes`: a training goes on."""

    def model_built(self, model: torch.nn.Module) -> None:
        """The model to train is built, and the log is set up."""

    def data_built(self, data: dict[str, Any], rows: DataRows | None) -> None:
        """Every process has OpenCLIP's data sets, and the rows of the train data if the run needs them."""

    def loss_built(self, loss: TrainingLoss) -> None:
        """Every process has its loss and its train loader; only of this package's losses."""

    def begin(self, resumed: bool) -> None:
        """A training begins, before any evaluation; `resumed`: an earlier run has begun it."""

    def before_training(self, training: NewTraining) -> None:
        """A new training is about to make its first step; pretrained weights were evaluated."""

    def epoch(self, epoch: Epoch) -> AbstractContextManager[None]:
        """A context around each epoch's steps."""
        return nullcontext()

    def step_done(self, step: int, numbers: dict[str, float]) -> None:
        """`step` steps of the epoch are done; `numbers` are the last one's as in `Epoch`. Only with --loss."""

    def scores(self, evaluation: Evaluation) -> dict[str, float]:
        """Process 0, within an evaluation: values of `metrics`."""
        return {}

    def evaluated(
        self, epoch: int, metrics: dict[str, Any], model: torch.nn.Module, data: dict[str, Any]
    ) -> None:
        """Process 0: the model, without wrappers, was evaluated after `epoch` epochs; 0: before the first step."""

    def end(self, trained: bool) -> None:
        """The run ends, after an error or not; `trained`: it has trained to the end."""
