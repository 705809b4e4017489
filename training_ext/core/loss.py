"""Build the loss of a command line, and give it and the components' losses to OpenCLIP's training loop."""

from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from open_clip_ext import create_loss, factory
from open_clip_ext.errors import InputError
from open_clip_ext.losses import Loss

if TYPE_CHECKING:
    from training_ext.core.component import Component

ADDED = "open_clip_ext."  # before the name of a component's loss in the model's output


def build_loss(
    args: Namespace, num_rows: int, device: torch.device | str, samples_per_epoch: int, global_batch: int
) -> Loss:
    """Build the loss of the command line.

    Args:
        num_rows: rows of the train data.
        samples_per_epoch: of OpenCLIP's epochs, which --train-num-samples may make shorter or longer than a pass over
            the rows.
        global_batch: samples of one optimizer step, over all processes and accumulated batches.

    Raises:
        InputError: the parts cannot be combined, or a setting is out of range.
    """
    # Only the loss's settings that were given; the others get their defaults again.
    parts = factory.parts_of(args.loss, vars(args))
    own = {*factory.PARTS, *(option.name for part in parts for option in part.options)}
    loss = create_loss(
        args.loss,
        num_samples=num_rows,
        epochs=args.loss_epochs,
        accum_freq=args.accum_freq,
        device=device,
        **{name: value for name, value in args.given_settings.items() if name in own},
    )
    loss.one_batch_per_step = True  # in OpenCLIP's loops, which keep a step's micro-batches and their features
    batch = max(1, global_batch)
    steps_per_pass = max(1, num_rows // batch)
    steps_per_epoch = max(1, samples_per_epoch // batch)
    loss.set_steps_per_pass(steps_per_pass, args.loss_epochs * steps_per_epoch / steps_per_pass)
    return loss


def add_losses(model: nn.Module, components: "Iterable[Component]") -> bool:
    """Compute the components' losses within the model's forward in training, and return whether there are any.

    They travel in the model's output, one number for each micro-batch. With --accum-freq OpenCLIP's loop concatenates
    those of the micro-batches, of which one has a gradient; so their mean has the step's value and its gradient.
    """
    adding = [component for component in components if component.answers("losses")]
    if adding:
        model.register_forward_hook(partial(_add, adding), with_kwargs=True)
    return bool(adding)


def _add(
    components: "list[Component]", model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
) -> Any:
    if not model.training:
        return output
    batch = dict(zip(("image", "text"), args, strict=False)) | kwargs
    added: dict[str, Tensor] = {}
    for component in components:
        for name, value in component.losses(batch, output).items():
            if ADDED + name in added:
                raise InputError(f"another component adds a loss of this name, {name!r}", component.name)
            added[ADDED + name] = torch.stack([value])  # of a view FSDP warns
    return {**output, **added}


def take_added(output: dict[str, Tensor], expected: bool) -> dict[str, Tensor]:
    """Take the components' losses, by name with `_loss`, out of a model's output.

    Raises:
        InputError: they are expected and not there.
    """
    added = {name: output.pop(name).mean() for name in list(output) if name.startswith(ADDED)}
    if expected and not added:
        raise InputError("OpenCLIP's task of this model passes no losses of components on; leave their flags out")
    return {f"{name.removeprefix(ADDED)}_loss": value for name, value in added.items()}


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


class TrainingLoss:
    """What OpenCLIP's loops call for the loss: the run's, and those that components add.

    Args:
        losses: from a model's output to losses by name, one of OpenCLIP's or `Run.loss_of`.
        expects_added: whether components add losses.
    """

    def __init__(self, losses: Callable[..., dict[str, Tensor]], expects_added: bool):
        self.losses = losses
        self.expects_added = expects_added

    def __call__(self, output_dict: bool = False, **output: Any) -> Any:
        added = take_added(output, self.expects_added)
        losses = self.losses(**output, output_dict=True)
        if clash := added.keys() & losses.keys():
            raise InputError(f"a component adds a loss {clash.pop()!r}, which the run has already")
        losses.update(added)  # with names that end in _loss, the only ones that OpenCLIP 4 sums
        return losses if output_dict else sum(losses.values())
