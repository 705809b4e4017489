"""Attach gradients that were computed together with a value."""

from typing import Any

import torch
from torch import Tensor


class AttachGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: tuple[Tensor], inputs: int, *inputs_and_gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs_and_gradients[inputs:])
        return value[0]  # out of a tuple it is no input, of which autograd would want a copy

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True; the gradients here are constants
            raise RuntimeError("this loss has no second derivatives; call backward without create_graph")
        gradients = torch._foreach_mul(ctx.saved_tensors, grad_output)  # one kernel on a GPU
        return (None, None, *gradients, *(None for _ in gradients))


def attach_gradients(value: Tensor, gradients: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return `value`, 0-d, with a backward pass that gives each input its gradient.

    Args:
        value: the result has its memory.
        gradients: pairs (input, gradient of the same shape).
    """
    inputs = [tensor for tensor, _ in gradients]
    return AttachGradient.apply((value.detach(),), len(inputs), *inputs, *(gradient for _, gradient in gradients))


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Return `tensor` unchanged, with its gradient multiplied by `factor`."""
    if factor == 1 or not tensor.requires_grad:
        return tensor
    scaled = tensor.clone()
    if scaled.requires_grad:  # not under no_grad
        scaled.register_hook(lambda gradient: gradient * factor)
    return scaled
