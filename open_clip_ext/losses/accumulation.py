"""One computation of a loss and of its gradients for all the calls of an accumulated step."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from open_clip_ext.distributed import all_gather, world_size
from open_clip_ext.kernels.autograd import attach_gradients

Inputs = Mapping[str, Tensor | None]


class FirstCall:
    """A step's first call: its inputs, its value and all its gradients, without a graph.

    A later call with equal inputs gets this value and these gradients. With other inputs, as where dropout draws anew
    in each forward pass, it must not: they belong to other features than those that the call differentiates.

    Args:
        compute: from the inputs to the loss, 0-d.
        inputs: by name; those of floating point get a gradient, if the loss has one.
        parameters: of the loss itself; likewise.
    """

    def __init__(self, compute: Callable[..., Tensor], inputs: Inputs, parameters: Iterable[nn.Parameter]):
        self.inputs = {name: None if tensor is None else tensor.detach() for name, tensor in inputs.items()}
        leaves = {name: None if tensor is None else tensor.detach() for name, tensor in inputs.items()}
        variables = [leaf.requires_grad_() for leaf in _floating(leaves)]
        variables += _trained(parameters)
        value = compute(**leaves)
        self.value = value.detach()
        self.gradients = torch.autograd.grad(value, variables, allow_unused=True) if value.requires_grad else ()

    def has(self, inputs: Inputs) -> bool:
        """Whether `inputs` equal the first call's bit for bit on every process. Waits for the device."""
        names = self.inputs.keys() | inputs.keys()
        is_equal = all(_are_equal(self.inputs.get(name), inputs.get(name)) for name in names)
        if world_size() == 1:
            return is_equal
        return bool(all_gather(torch.full((1,), is_equal, device=self.value.device)).all())

    def attached(self, inputs: Inputs, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The value, with a backward pass that gives a call's inputs and the parameters their gradients."""
        pairs = zip([*_floating(inputs), *_trained(parameters)], self.gradients, strict=False)
        return attach_gradients(self.value, [(tensor, gradient) for tensor, gradient in pairs if gradient is not None])


def _floating(inputs: Inputs) -> list[Tensor]:
    return [tensor for tensor in inputs.values() if tensor is not None and tensor.is_floating_point()]


def _trained(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or (one.dtype, one.device) != (other.dtype, other.device):
        return one is other
    return torch.equal(one, other)
