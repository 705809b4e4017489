"""Sizes of the blocks in which similarities are computed, and in-place helpers for them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Elements of a part: small enough that it and its intermediate values fit a CPU's cache; on a GPU so many that the
# launches of its operations do not count, 128 MiB. Constants and not a share of the free memory, so that all processes
# and a resumed training have the same parts: sums over other parts round otherwise.
CPU_PART, GPU_PART = 1 << 19, 1 << 25
LEAST_ROWS = 256  # matrix products with fewer rows are slow
CPU_TILE, GPU_TILE = (512, 1024), (4096, 8192)  # rows and columns of a tile, a part that need not have all columns
# Beside the largest term, 1, exp(-60) is negligible. A product of it with an embedding, 1 / B and tau is still a normal
# number; below exp(-87) float32 is subnormal, which slows a CPU's exponentials and matrix products 40 times.
LEAST_EXPONENT = -60.0


def parts(rows: int, columns: int, device: torch.device, least: int = 1) -> list[slice]:
    """Split `rows` so that a slice times `columns` has at most a part's elements, but a slice has at least
    `least * LEAST_ROWS` rows."""
    numbers = CPU_PART if device.type == "cpu" else GPU_PART
    step = max(least * LEAST_ROWS, numbers // max(1, columns))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def tiles(
    rows: int, columns: Sequence[slice], device: torch.device, size: tuple[int, int] | None = None
) -> tuple[list[slice], list[slice]]:
    """Split `rows` and the given `columns` so that a pair of slices is a tile of at most `size`, by default `CPU_TILE`
    or `GPU_TILE`."""
    height, width = size or (CPU_TILE if device.type == "cpu" else GPU_TILE)

    def pieces(span: slice, size: int) -> list[slice]:
        return [slice(at, min(at + size, span.stop)) for at in range(span.start, span.stop, size)]

    return pieces(slice(0, rows), height), [piece for some in columns for piece in pieces(some, width)]


def largest(*tensors: Tensor) -> Tensor:
    """The largest absolute value of each tensor, (number of tensors,): not finite if one of its values is not."""
    if tensors[0].device.type == "cpu":  # where the norm takes 15 times as long
        extremes = [extreme for tensor in tensors for extreme in torch.aminmax(tensor.detach())]
        return torch.stack(extremes).view(-1, 2).abs().amax(dim=1)
    norms = torch._foreach_norm([tensor.detach() for tensor in tensors], math.inf)
    return torch.stack(norms) if len(norms) > 1 else norms[0][None]


def are_not_finite(*tensors: Tensor) -> Tensor:
    """Whether each tensor has a NaN or infinity, (number of tensors,) bool."""
    return ~(largest(*tensors) < math.inf)


def exp_(exponents: Tensor) -> Tensor:
    """`exponents.exp_()` for exponents less a maximum or log-normalizer; on a CPU those below -60 are raised to -60."""
    if exponents.device.type == "cpu":
        exponents.clamp_(min=LEAST_EXPONENT)
    return exponents.exp_()


def highest(exponents: Tensor, dim: int) -> Tensor:
    """Maximum along `dim`, which stays with length 1; -inf if the dimension is empty."""
    if exponents.shape[dim] == 0:
        return exponents.new_full([1 if at == dim else size for at, size in enumerate(exponents.shape)], -math.inf)
    return exponents.amax(dim, keepdim=True)


def log_sum_exp_(exponents: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
    """`exponents.logsumexp(dim)`, overwriting `exponents`, which are finite where nothing else is along `dim`."""
    peak = highest(exponents, dim)
    return torch.add(exp_(exponents.sub_(peak)).sum(dim).log_(), peak.squeeze(dim), out=out)


def add_exp_(peaks: Tensor, totals: Tensor, exponents: Tensor, dim: int, memory: Tensor, is_first: bool) -> None:
    """Add exp(exponents), summed along `dim`, to exp(peaks) * totals, which are of the other dimension, in place.

    Args:
        peaks: the highest exponents so far, finite; their log-sum-exp alone would be rounded at the size of exponents.
        memory: overwritten; `exponents` or a tensor of their shape.
        is_first: whether `peaks` and `totals` are empty.
    """
    if is_first:
        torch.amax(exponents, dim, out=peaks)
    else:
        before = peaks.clone()
        torch.maximum(before, exponents.amax(dim), out=peaks)
        totals.mul_((before - peaks).exp_())
    add_sum_(totals, exp_(torch.sub(exponents, peaks.unsqueeze(dim), out=memory)), dim, is_first)


def add_sum_(totals: Tensor, terms: Tensor, dim: int, is_first: bool) -> None:
    """Add `terms`, summed along `dim`, to `totals`, which are empty if `is_first`."""
    if is_first:
        torch.sum(terms, dim, out=totals)
    else:
        totals.add_(terms.sum(dim))
