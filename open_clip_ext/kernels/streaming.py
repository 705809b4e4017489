"""Similarities in parts: a block of a few MiB at a time is computed, used and forgotten."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Numbers in a part: it and what is derived from it should stay in a CPU's cache, and fill a GPU.
CPU_PART, GPU_PART = 1 << 19, 1 << 22
LEAST_ROWS = 256  # matrix products of fewer are slow
CPU_TILE, GPU_TILE = (512, 1024), (1024, 4096)  # rows and columns of a part that need not have all columns
# Beside a largest term of 1, exp(-80) is nothing; from exp(-87) on, where float32 leaves the normal numbers, a CPU
# takes up to 40 times as long.
LEAST_EXPONENT = -80.0


def parts(rows: int, columns: int, device: torch.device, least: int = 1) -> list[slice]:
    """Slices of `rows` such that each, times `columns`, is at most a part's numbers, but at least `least` times
    `LEAST_ROWS` rows."""
    numbers = CPU_PART if device.type == "cpu" else GPU_PART
    step = max(least * LEAST_ROWS, numbers // max(1, columns))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def tiles(rows: int, columns: Sequence[slice], device: torch.device) -> tuple[list[slice], list[slice]]:
    """Slices of `rows`, and of those columns that count: a product of one with the other is a part, at most `CPU_TILE`
    or `GPU_TILE`."""
    height, width = CPU_TILE if device.type == "cpu" else GPU_TILE

    def pieces(whole: slice, size: int) -> list[slice]:
        return [slice(at, min(at + size, whole.stop)) for at in range(whole.start, whole.stop, size)]

    return pieces(slice(0, rows), height), [piece for some in columns for piece in pieces(some, width)]


def are_finite(*tensors: Tensor) -> Tensor:
    """Whether there is neither NaN nor infinity in a tensor, (number of tensors,), in one pass over each: either would
    be an extreme of it."""
    extremes = [extreme for tensor in tensors for extreme in torch.aminmax(tensor.detach())]
    return torch.stack(extremes).view(-1, 2).isfinite().all(dim=1)


def exp_(exponents: Tensor) -> Tensor:
    """`exponents.exp_()` of numbers that were made comparable to 0; on a CPU what is below exp(-80) counts as that."""
    if exponents.device.type == "cpu":
        exponents.clamp_(min=LEAST_EXPONENT)
    return exponents.exp_()


def highest(exponents: Tensor, dim: int) -> Tensor:
    """The largest along `dim`, which stays with length 1; -inf where there is nothing."""
    if exponents.shape[dim] == 0:
        return exponents.new_full([1 if at == dim else size for at, size in enumerate(exponents.shape)], -math.inf)
    return exponents.amax(dim, keepdim=True)


def log_sum_exp_(exponents: Tensor, dim: int) -> Tensor:
    """`exponents.logsumexp(dim)` in their own memory, which is overwritten; of nothing but -inf, nearly that."""
    peak = highest(exponents, dim).clamp_(min=torch.finfo(exponents.dtype).min)
    return exp_(exponents.sub_(peak)).sum(dim).log_().add_(peak.squeeze(dim))

