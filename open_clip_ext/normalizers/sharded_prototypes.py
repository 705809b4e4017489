"""Prototypes sharded over processes.

Process r keeps the prototypes r, r + W, r + 2W, ... The log-sum-exp over m prototypes is the log-sum-exp over processes
of their parts, so an update of the network sends 2 B numbers per process instead of a gradient of 2 m d. The encoders'
gradient through alpha is a sum over processes, too: 2 B (d + 2) numbers once per step.

Shapes: m prototypes per direction, k of them active, k_r of those on this process; B pairs of all processes, b of this
one.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import SCATTER, all_gather, log_sum_over_processes
from open_clip_ext.kernels.log_sum import Keys, log_sums
from open_clip_ext.surrogates import Surrogate

# Of an H100, as measured: bytes and operations a second, and seconds in which its host launches an update's operations
# one by one, as those of split ones. Assumed: bytes a second between hosts, less than between the GPUs of one, and
# seconds of a collective of a few bytes.
MEMORY, PRODUCTS, LAUNCHES, BETWEEN_PROCESSES, COLLECTIVE = 3e12, 300e12, 1.2e-3, 25e9, 40e-6
# How often an update passes over the prototypes, and over their similarities: `benchmarks/operations.py` counts the
# former. Split ones have no kernels.
PASSES, PASSES_OF_KERNELS = (25, 10), (8, 4)


def is_split_faster(processes: int, m: int, dimension: int, updates: int, pairs: int, has_kernels: bool) -> bool:
    """Whether split prototypes make a step with `pairs` of all processes faster on GPUs, by counting.

    What they save must outweigh the collectives, and for each anchor what is sent and 12 passes over its gradient.

    Args:
        has_kernels: whether the updates of all prototypes are by `fused_prototypes`.
    """
    numbers = 2 * 4  # bytes of a float32 in both directions

    def seconds(passes: tuple[int, int]) -> float:
        """Of an update of all prototypes."""
        moved = numbers * m * (passes[0] * dimension + passes[1] * pairs)
        return moved / MEMORY + 8 * m * dimension * pairs / PRODUCTS

    whole = seconds(PASSES_OF_KERNELS if has_kernels else PASSES)
    saved = updates * (whole - max(seconds(PASSES) / processes, LAUNCHES)) - (updates + 3) * COLLECTIVE
    row = dimension + 2
    sent = row + (updates + 1) * (processes - 1)
    return saved > pairs * numbers * (12 * row / MEMORY + sent / BETWEEN_PROCESSES)


class ShardedLogSum(torch.autograd.Function):
    """log sum_j' exp(l(cos(e_i, W_j') - s_ii) / tau) over the prototypes of all processes, for this process's anchors.

    Differentiable inputs: this process's `image` and `text`, (b, d), `positives`, (b,), and `tau`, (2, b). Constants:
    the batch, this process's prototypes, (2, k_r, d), their norms, (2, k_r), l, and the keys of `log_sums`.
    """

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, positives: Tensor, tau: Tensor,
        batch: Batch, prototypes: Tensor, lengths: Tensor, surrogate: Surrogate,
        keys: Keys | None,
    ) -> Tensor:
        anchors = (batch.all_image, batch.all_text, batch.all_positives, batch.all_tau)
        needs_grad = any(ctx.needs_input_grad)
        local_sums, derivatives = log_sums(*anchors, prototypes, surrogate, lengths, needs_grad=needs_grad, keys=keys)
        log_total = log_sum_over_processes(local_sums)
        if derivatives is None:
            return log_total[:, batch.local]
        grad_anchor, grad_positive, grad_tau = derivatives
        partial = torch.cat([grad_anchor, grad_positive[:, :, None], grad_tau[:, :, None]], dim=2)
        ctx.save_for_backward(partial, (local_sums - log_total).exp())
        ctx.local = batch.local
        return log_total[:, batch.local]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        partial, probs = ctx.saved_tensors
        slopes = probs * all_gather(grad_output.T).T
        # In place, as in `log_sum`: autograd refuses a second backward pass.
        summed = _sum_of_own(partial.mul_(slopes[:, :, None]), ctx.local)
        image, text = summed[:, :, :-2]
        return image, text, summed[:, :, -2].sum(dim=0), summed[:, :, -1], None, None, None, None, None


def _sum_of_own(partial: Tensor, local: slice) -> Tensor:
    """Sum (2, B, c) over processes; return the rows of this process's anchors, (2, b, c)."""
    if dist.get_backend() == "nccl":
        by_process = partial.transpose(0, 1).contiguous()
        local_rows = by_process.new_empty(local.stop - local.start, *by_process.shape[1:])
        getattr(dist, SCATTER)(local_rows, by_process)
        return local_rows.transpose(0, 1)
    dist.all_reduce(partial)  # gloo has no reduce-scatter
    return partial[:, local]
