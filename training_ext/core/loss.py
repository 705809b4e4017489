"""Build the loss of a command line, and give its value to OpenCLIP's training loop."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from open_clip_ext import create_loss, factory
from open_clip_ext.losses import Loss
from training_ext.core.plan import global_batch


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
    # Only the loss's settings that were given; the others get their defaults again.
    parts = factory.parts_of(args.loss, vars(args))
    own = {*factory.PARTS, *(option.name for part in parts for option in part.options)}
    batch = max(1, global_batch(args))
    steps_per_pass = max(1, num_rows // batch)
    steps_per_epoch = max(1, (samples_per_epoch or num_rows) // batch)
    loss = create_loss(
        args.loss,
        num_samples=num_rows,
        epochs=args.loss_epochs, steps_per_epoch=steps_per_epoch,
        accum_freq=args.accum_freq,
        device=device,
        **{name: value for name, value in args.given_settings.items() if name in own},
    )
    loss.one_batch_per_step = True  # in OpenCLIP's loops, which keep a step's micro-batches and their features
    loss.set_steps_per_pass(steps_per_pass, args.loss_epochs * steps_per_epoch / steps_per_pass)
    return loss


class LossItems(dict):
    """The losses of a step by name, of which OpenCLIP's loops sum `values()`, or `items()` before "loss" is there.

    From then on `items()` is what they log: also the value under the loss's own name, and its diagnostics. They call it
    on logged steps only, so no other step waits for the device.
    """

    def __init__(self, value: Tensor, name: str, diagnostics: Callable[[], dict[str, Tensor]]):
        super().__init__(contrastive_loss=value)
        self._name = name
        self._diagnostics = diagnostics

    def items(self) -> Any:
        if "loss" not in self:
            return super().items()
        own = {self._name if name == "contrastive_loss" else name: value for name, value in super().items()}
        # OpenCLIP 4 reduces them over the processes, which NCCL does on its own devices only.
        return {name: value.to(self["loss"].device) for name, value in (own | self._diagnostics()).items()}.items()
