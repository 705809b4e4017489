"""One computation of a loss and of its gradients for all the calls of an accumulated step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from open_clip_ext.kernels.autograd import attach_gradients

Inputs = dict[str, Any]  # a tensor by name, or None


@dataclass
class FirstCall:
    """A step's first call: its value and all its gradients, without a graph, for the later calls.

    Where dropout draws anew in each forward pass, a later call's features differ from the first one's. Its gradient is
    the first one's all the same, as in GradCache: the average over the draws is closer to that of one large batch than
    with gradients of its own, which would combine its features with estimates that were updated with others
    (docs/custom-loop.md).

    Attributes:
        gradients: in the inputs of floating point and then in the loss's own parameters; None where there is none.
    """

    value: Tensor  # 0-d
    gradients: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, compute: Callable[..., Tensor], inputs: Inputs, parameters: Iterable[nn.Parameter]) -> "FirstCall":
        """Call `compute` on the inputs by name; `parameters` are the loss's own."""
        leaves = {name: None if tensor is None else tensor.detach() for name, tensor in inputs.items()}
        variables = [leaf.requires_grad_() for leaf in _floating(leaves)] + _trained(parameters)
        value = compute(**leaves)
        gradients = torch.autograd.grad(value, variables, allow_unused=True) if value.requires_grad else ()
        return cls(value.detach(), gradients)

    def clone(self) -> "FirstCall":
        return FirstCall(self.value.clone(), tuple(None if one is None else one.clone() for one in self.gradients))

    def attached(self, inputs: Inputs, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The value, with a backward pass that gives a call's inputs and the parameters their gradients."""
        pairs = zip(_floating(inputs) + _trained(parameters), self.gradients, strict=False)
        parts = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
        return attach_gradients(self.value.clone(), parts)


def _floating(inputs: Inputs) -> list[Tensor]:
    return [tensor for tensor in inputs.values() if tensor is not None and tensor.is_floating_point()]


def _trained(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter for parameter in parameters if parameter.requires_grad]
