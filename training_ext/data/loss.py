"""Build the loss of a command line, and wrap it for OpenCLIP's training loop."""

from argparse import Namespace
from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.losses import Loss
from training_ext.core.loss import build_loss as build
from training_ext.core.loss import take_added
from training_ext.data.loader import RowLoader
from training_ext.data.rows import DataRows
from training_ext.data.tags import KEY, ROW
from training_ext.openclip.machine import global_batch


def build_loss(
    args: Namespace, num_rows: int, device: torch.device | str, samples_per_epoch: int | None = None
) -> Loss:
    """Build the loss of the command line.

    Args:
        num_rows: rows of the train data.
        samples_per_epoch: of OpenCLIP's epochs, which --train-num-samples may make shorter or longer than a pass over
            the rows; None: `num_rows`.

    Raises:
        InputError: the parts cannot be combined, or a setting is out of range.
    """
    return build(args, num_rows, device, samples_per_epoch or num_rows, global_batch(args))


def samples_per_epoch(args: Namespace, rows: DataRows) -> int:
    """Number of samples that OpenCLIP trains on in an epoch; for shards that of --train-num-samples, if given."""
    if rows.kind != "webdataset":
        return rows.num_rows
    if args.train_num_samples is not None:
        return args.train_num_samples
    return rows.num_rows if rows.shards is None else rows.shards.num_listed(args.train_data)


def steps_per_epoch(args: Namespace, kind: str, num_samples: int, world_size: int) -> int:
    """Number of optimizer steps that OpenCLIP makes in an epoch of `num_samples`."""
    if kind == "webdataset":
        loaders = max(1, args.workers)
        batches = ceil(ceil(num_samples / (args.batch_size * world_size)) / loaders) * loaders
    else:
        batches = ceil(num_samples / world_size) // args.batch_size
    return batches // args.accum_freq


class LogItems(dict):
    """A dict of losses whose `items()` also has the diagnostics.

    OpenCLIP sums `values()` to the total loss, which must not have them, and logs `items()`, without the total "loss"
    here. OpenCLIP calls `items()` on logged steps only, so no other step waits for the
    device.
    """

    def __init__(self, losses: dict[str, Tensor], diagnostics: Callable[[], dict[str, Tensor]]):
        super().__init__(losses)
        self._diagnostics = diagnostics

    def items(self) -> Any:
        own = {name: value for name, value in super().items() if name != "loss"}
        return (own | self._diagnostics()).items()


class TrainingLoss:
    """Calls a loss with the samples' rows and keys since the last step, and adds the diagnostics to OpenCLIP's log."""

    def __init__(
        self, loss: Loss, loader: RowLoader, device: str | torch.device, expects_added: bool = False,
        key_argument: str = "key",
    ):
        self.loss = loss
        self.expects_added = expects_added
        self.key_argument = key_argument
        self.loader = loader
        self.device = torch.device(device)

    @property
    def name(self) -> str:
        """The value's name in logs; a recovery with another surrogate has another value."""
        return self.loss.value_name

    def __call__(self, output_dict: bool = False, **model_out: Any) -> Any:
        added = take_added(model_out, self.expects_added)
        losses = {self.name: self.value(**model_out)} | added
        return LogItems(losses, self.diagnostics) if output_dict else sum(losses.values())

    def value(self, **model_out: Any) -> Tensor:
        """The loss, 0-d, of a model's output for the batches since the last step."""
        index = self.loader.latest(ROW) if self.loss.needs_index else None
        keys = {self.key_argument: self.loader.latest(KEY)}
        return self.loss(**model_out, index=index, **keys, output_dict=True)["contrastive_loss"]

    def load_diagnostics_state(self, state: dict[str, Any]) -> None:
        """As `Loss.load_diagnostics_state`, with tensors on any device."""
        self.loss.load_diagnostics_state(
            {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in state.items()}
        )

    def diagnostics(self) -> dict[str, Tensor]:
        """The diagnostics of a logged step by name; raises if any step so far was not finite."""
        self.loss.raise_if_not_finite()
        return self.loss.diagnostics()
