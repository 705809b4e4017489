"""The losses that components add to the run's: computed in the model's forward, passed on in its output."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from open_clip_ext.errors import InputError
from training_ext.core.component import Component

PREFIX = "open_clip_ext."  # before the name of a component's loss in the model's output


def add_losses(model: nn.Module, components: Sequence[Component]) -> None:
    """Compute the components' losses within the model's forward in training.

    They travel in the model's output, one number for each micro-batch. With --accum-freq OpenCLIP's loop concatenates
    those of the micro-batches, of which one has a gradient; so their mean has the step's value and its gradient.
    """
    model.register_forward_hook(partial(_add, components), with_kwargs=True)


def _add(
    components: Sequence[Component], model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
) -> Any:
    if not model.training:
        return output
    batch = dict(zip(("image", "text"), args, strict=False)) | kwargs
    added: dict[str, Tensor] = {}
    for component in components:
        for name, value in component.losses(batch, output).items():
            if PREFIX + name in added:
                raise InputError(f"another component adds a loss of this name, {name!r}", component.name)
            added[PREFIX + name] = torch.stack([value])  # of a view FSDP warns
    return {**output, **added}


def take_added(output: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the components' losses, by name with `_loss`, out of a model's output.

    Raises:
        InputError: there are none.
    """
    added = {name: output.pop(name).mean() for name in list(output) if name.startswith(PREFIX)}
    if not added:
        raise InputError("OpenCLIP's task of this model passes no losses of components on; leave their flags out")
    return {f"{name.removeprefix(PREFIX)}_loss": value for name, value in added.items()}


def with_added(losses: Callable[..., dict[str, Tensor]], **output: Any) -> dict[str, Tensor]:
    """The run's loss together with those that components add, as OpenCLIP's loops call it.

    Args:
        losses: from a model's output to losses by name, one of OpenCLIP's or `Run.loss_of`.
    """
    added = take_added(output)
    own = losses(**output)
    if clash := added.keys() & own.keys():
        raise InputError(f"a component adds a loss {clash.pop()!r}, which the run has already")
    own.update(added)  # with names that end in _loss, the only ones that OpenCLIP 4 sums
    return own
