"""The loss as OpenCLIP's loop calls it."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from open_clip_ext import create_loss, factory
from open_clip_ext.distributed import world_size
from open_clip_ext.losses import Loss
from training_ext.data import RowLoader


def build_loss(args: Namespace, num_rows: int, device: torch.device | str) -> Loss:
    """The loss that the command line asks for.

    Args:
        args: as `params.parse_args` gives them.
        num_rows: of the train data, which tell the length of a pass, too.
        device: where the loss computes.

    Raises:
        InputError: the parts do not go together, or a setting is out of range.
    """
    # Only what was given, and not of the optimizer: the rest resolves again as it did.
    parts = factory.parts_of(args.loss, vars(args))
    own = {*factory.PARTS, *(option.name for part in parts for option in part.options)}
    return create_loss(
        args.loss,
        num_samples=num_rows,
        epochs=args.loss_epochs,
        accum_freq=args.accum_freq,
        steps_per_epoch=max(1, num_rows // (args.batch_size * world_size() * args.accum_freq)),
        device=device,
        **{name: value for name, value in args.given_settings.items() if name in own},
    )


class LogItems(dict):
    """OpenCLIP adds up `values()` to the total loss and logs `items()`: only the latter shows the diagnostics.

    The total, "loss", is the one loss under a name that says less, and is not logged. OpenCLIP asks for `items()` on
    steps that it logs, so that nothing waits for the device on the others.
    """

    def __init__(self, losses: dict[str, Tensor], diagnostics: Callable[[], dict[str, Tensor]]):
        super().__init__(losses)
        self._diagnostics = diagnostics

    def items(self) -> Any:
        own = {name: value for name, value in super().items() if name != "loss"}
        return (own | self._diagnostics()).items()


class TrainingLoss:
    """Adds the samples' rows to OpenCLIP's call, and the diagnostics to what it logs.

    Args:
        loss: one of ours.
        loader: the train loader, which knows the rows of the batches since the last step.
        device: where the loss computes.
    """

    def __init__(self, loss: Loss, loader: RowLoader, device: str | torch.device):
        self.loss = loss
        self.loader = loader
        self.device = torch.device(device)
        self.name = loss.value_name

    def __call__(self, output_dict: bool = False, **model_out: Any) -> Any:
        index = self.loader.latest_rows() if self.loss.needs_index else None
        value = self.value(**model_out, index=index, key=self.loader.latest_keys())
        return LogItems({self.name: value}, self.diagnostics) if output_dict else value

    def value(self, index: Tensor | None = None, key: Tensor | None = None, **model_out: Any) -> Tensor:
        """The loss of a model's output and the samples' rows and keys."""
        if not self.loss.needs_index:
            index = None
        return self.loss(**model_out, index=index, key=key, output_dict=True)["contrastive_loss"]

    def load_diagnostics_state(self, state: dict[str, Any]) -> None:
        """As `Loss.load_diagnostics_state`, from tensors anywhere."""
        self.loss.load_diagnostics_state(
            {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in state.items()}
        )

    def diagnostics(self) -> dict[str, Tensor]:
        """For a logged step; raises if a step so far was not finite."""
        self.loss.raise_if_not_finite()
        return self.loss.diagnostics()
