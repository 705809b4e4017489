"""The similarities of a global batch, the normalizers it estimates, and the gradient once they are known.

Shapes: b = pairs of this process, B = pairs of all processes, d = embedding dimension. Side 0 has images as
anchors, side 1 has texts as anchors; what exists per side is stacked in front: (2, b) or (2, B).

For anchor i of a side, x_ij = s_ij - s_ii over the B - 1 other pairs j, and l(x_ij) its surrogate. Everything is
float32 in the log domain: at a temperature of 0.01 the exponents reach 200, far beyond exp in float32.

A temperature is 0-d, or one per anchor and side, (2, b) for this process's and (2, B) for all.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.distributed import all_gather, rank, world_size
from open_clip_ext.streaming import exp_, log_sum_exp_, parts
from open_clip_ext.surrogates import Surrogate

# No exact normalizer lets L_i - alpha_i exceed log(n / B), 12.4 for 10^9 samples and a batch of 4,096. A larger weight
# means that alpha is wrong; it is bounded, so that one anchor cannot fill the optimizers' accumulators for good, nor
# leave float16. A table never gets there, since u_i contains gamma times the batch's own estimate.
MAX_LOG_WEIGHT = 12.5


@dataclass
class Pairs:
    """The batch as this process sees it.

    Args:
        image, text: (b, d) float32 unit vectors of this process, with their graph.
        all_image, all_text: (B, d) of all processes, detached, in the order of ranks.
        offset: position of this process's first pair among the B.
    """

    image: Tensor
    text: Tensor
    all_image: Tensor
    all_text: Tensor
    offset: int

    @classmethod
    def of_process(cls, image: Tensor, text: Tensor) -> "Pairs":
        """This process's pairs as if there were no others."""
        return cls(image, text, image.detach(), text.detach(), 0)

    @classmethod
    def gather(cls, image: Tensor, text: Tensor) -> "Pairs":
        if world_size() == 1:
            return cls.of_process(image, text)
        both = all_gather(torch.cat([image.detach(), text.detach()], dim=1))
        all_image, all_text = both.chunk(2, dim=1)
        return cls(image, text, all_image, all_text, rank() * image.shape[0])

    @property
    def local(self) -> slice:
        return slice(self.offset, self.offset + self.image.shape[0])

    @property
    def all_positives(self) -> Tensor:
        """s_kk, (B,)."""
        return (self.all_image * self.all_text).sum(dim=1)


@dataclass
class Block:
    """Similarities of this process's samples of one side with all samples of a side; never held whole.

    Args:
        rows, columns: their embeddings, (b, d) and (B, d).
        row_side, column_side: the side of which each are anchors.
        whole: there is but one process, and the columns' samples are anchors here as well.
    """

    rows: Tensor
    columns: Tensor
    row_side: int
    column_side: int
    whole: bool = False


class SimilarityBlocks:
    """The similarities that a process needs: its images against all texts and its texts against all images, as
    OpenCLIP's `local_loss` computes them, or one block for both where there is one process.

    They are computed in parts of some rows (`streaming`), once for the batch's own normalizers and once for the
    gradient; nothing of b x B numbers is kept. One part's similarities are there at a time, and the gradient overwrites
    them.

    Args:
        pairs: the batch.
        surrogate: l.
        both_sides: whether samples of the anchor's own side are negatives too; that takes two more blocks.
    """

    def __init__(self, pairs: Pairs, surrogate: Surrogate, both_sides: bool = False):
        self.pairs = pairs
        self.surrogate = surrogate
        self.all_positives = pairs.all_positives
        self.positives = self.all_positives[pairs.local]
        image, text = pairs.image.detach(), pairs.text.detach()
        if len(image) == len(pairs.all_image):
            self.blocks = [Block(image, text, 0, 1, whole=True)]
        else:
            self.blocks = [Block(image, pairs.all_text, 0, 1), Block(text, pairs.all_image, 1, 0)]
        if both_sides:
            self.blocks += [Block(image, pairs.all_image, 0, 0), Block(text, pairs.all_text, 1, 1)]
        self.parts = parts(len(image), len(self.all_positives), image.device)
        self.negatives = (2 if both_sides else 1) * (len(self.all_positives) - 1)
        self._latest: tuple[Block, slice, Tensor] | None = None
        self._memory = self._part_memory()

    def _part_memory(self) -> Tensor:
        """For the numbers of any part: on a CPU fresh memory takes as long as a pass over it."""
        rows = max(part.stop - part.start for part in self.parts)
        return self.positives.new_empty(rows * len(self.all_positives))

    def _similarities(self, block: Block, part: slice) -> Tensor:
        """(rows of the part, B). The one computed last is still there for whoever asks again."""
        if self._latest is not None and self._latest[0] is block and self._latest[1] == part:
            return self._latest[2]
        rows = block.rows[part]
        memory = self._memory[: len(rows) * len(block.columns)].view(len(rows), -1)
        self._latest = (block, part, torch.mm(rows, block.columns.T, out=memory))
        return memory

    def log_batch_normalizers(self, all_tau: Tensor) -> Tensor:
        """log g_i over the batch's negatives, (2, b): the minibatch form of NeuCLIP's Eq. 1; with negatives of both
        sides, iSogCLR, Eq. 11. As printed: `equations.batch_g`."""
        tau = local_part(all_tau, self.pairs)
        log_sums = self.positives.new_full((2, len(self.positives)), -math.inf)
        memory = self._part_memory()
        for block in self.blocks:
            for part in self.parts:
                similarities = self._similarities(block, part)
                own = self.pairs.offset + part.start
                row_tau = of_side(tau, block.row_side, part)
                rows = self._log_sum(similarities, self.positives[part], row_tau, 1, own, memory)
                log_sums[block.row_side, part] = torch.logaddexp(log_sums[block.row_side, part], rows)
                if block.whole:
                    column_tau = of_side(tau, block.column_side)
                    columns = self._log_sum(similarities, self.positives, column_tau, 0, own, memory)
                    log_sums[block.column_side] = torch.logaddexp(log_sums[block.column_side], columns)
        return log_sums - math.log(self.negatives)

    def _log_sum(
        self, similarities: Tensor, positives: Tensor, tau: Tensor, dim: int, own: int, memory: Tensor
    ) -> Tensor:
        """Over the negatives, which are along `dim`; the anchors are along the other dimension."""
        gaps = torch.sub(similarities, positives.unsqueeze(dim), out=like(memory, similarities))
        exponents = self.surrogate.value(gaps).div_(tau.unsqueeze(dim) if tau.dim() else tau)
        exponents.diagonal(own).fill_(-math.inf)
        return log_sum_exp_(exponents, dim)

    def add_gradients(
        self, features: tuple[Tensor, Tensor], all_tau: Tensor, alpha: Tensor, all_alpha: Tensor
    ) -> Tensor:
        """Gradient of the global batch's sum over sides of mean_i tau_i * exp(-alpha_i) (eps + g_i), alpha constant
        (NeuCLIP, Eq. 4; iSogCLR, Eq. 14 and 21).

        Args:
            features: that with respect to `image` and to `text` of this process, (b, d) each, is added to these.
            all_tau: temperatures.
            alpha: log-normalizers of this process's anchors, (2, b), at least L - MAX_LOG_WEIGHT.
            all_alpha: of all anchors, (2, B).

        Returns:
            Per anchor tau_i * exp(-alpha_i) * dg_i/dtau_i, (2, b).

        A pair's similarity appears with its row's sample as the anchor and with its column's; both weights come
        from the same part, so no gradient travels between processes.
        """
        tau = local_part(all_tau, self.pairs)
        share = 1 / len(self.all_positives)
        tau_terms, positive_weight = torch.zeros_like(alpha), torch.zeros_like(self.positives)
        memory, row_memory = self._part_memory(), self._part_memory()
        for block in reversed(self.blocks):
            row_side, column_side = block.row_side, block.column_side
            for part in reversed(self.parts):  # the similarities of the first pass's last part are still there
                similarities = self._similarities(block, part)
                own = self.pairs.offset + part.start
                weights, positive, by_tau = self._weights(
                    similarities, self.positives[part], of_side(tau, row_side, part), alpha[row_side, part], 1, own,
                    gaps=memory, out=row_memory,
                )
                positive_weight[part] += positive
                tau_terms[row_side, part] -= by_tau
                column_weights, positive, by_tau = self._weights(
                    similarities, self.all_positives, of_side(all_tau, column_side), all_alpha[column_side], 0, own,
                    gaps=self._memory, out=memory,
                )
                self._latest = None  # overwritten
                weights.add_(column_weights)
                features[row_side][part].addmm_(weights, block.columns, alpha=share)
                if block.whole:
                    positive_weight += positive
                    tau_terms[column_side] -= by_tau
                    features[column_side].addmm_(weights.T, block.rows[part], alpha=share)
        for feature, partner in zip(features, (self.pairs.text, self.pairs.image), strict=True):
            feature.addcmul_(positive_weight[:, None], partner.detach(), value=-share)
        return tau_terms

    def _weights(
        self, similarities: Tensor, positives: Tensor, tau: Tensor, alpha: Tensor, dim: int, own: int,
        gaps: Tensor, out: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """exp(l / tau - alpha) dl/ds / N of each pair of a part; for each anchor their sum over its negatives, and that
        of exp(l / tau - alpha) l / tau / N. The negatives are along `dim`, the anchors along the other dimension. `out`
        is memory for the first of these, `gaps` for what is needed on the way, perhaps that of `similarities`."""
        gaps = torch.sub(similarities, positives.unsqueeze(dim), out=like(gaps, similarities))
        slope = self.surrogate.slope(gaps)
        exponents = self.surrogate.value(gaps).div_(tau.unsqueeze(dim) if tau.dim() else tau)
        shift = (alpha + math.log(self.negatives)).unsqueeze(dim)
        weights = exp_(torch.sub(exponents, shift, out=like(out, similarities)))
        weights.diagonal(own).zero_()
        by_tau = exponents.mul_(weights).sum(dim)
        if isinstance(slope, Tensor) or slope != 1:
            weights.mul_(slope)
        return weights, weights.sum(dim), by_tau


def like(memory: Tensor, tensor: Tensor) -> Tensor:
    """Some of the memory in the shape of `tensor`."""
    return memory[: tensor.numel()].view_as(tensor)


def of_side(tau: Tensor, side: int, part: slice = slice(None)) -> Tensor:
    """The temperatures of one side's anchors, or of a part of them; 0-d or one per anchor."""
    return tau[side, part] if tau.dim() else tau


def local_part(tau: Tensor, pairs: Pairs) -> Tensor:
    """This process's part of the temperatures, 0-d or (2, b)."""
    return tau[:, pairs.local] if tau.dim() else tau


def add_eps(log_values: Tensor, eps: float) -> Tensor:
    """log(eps + exp(log_values))."""
    log_eps = torch.full((), math.log(eps), dtype=log_values.dtype, device=log_values.device)
    return torch.logaddexp(log_values, log_eps)


def log_mean_of_sides(log_values: Tensor) -> Tensor:
    """log of the mean of exp(log_values) over the sides, the same for both; (2, b) to (2, b)."""
    return (log_values.logsumexp(dim=0) - math.log(2)).expand_as(log_values)


class AttachGradient(torch.autograd.Function):
    """A value that is reported, with gradients that were computed beside it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, inputs: int, *inputs_and_gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs_and_gradients[inputs:])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients = tuple(grad_output * gradient for gradient in ctx.saved_tensors)
        return (None, None, *gradients, *(None for _ in gradients))


def attach_gradients(value: Tensor, gradients: list[tuple[Tensor, Tensor]]) -> Tensor:
    """`value` (0-d) whose backward gives each input of `gradients` its gradient.

    Args:
        gradients: pairs (input, gradient of the same shape).
    """
    inputs = [tensor for tensor, _ in gradients]
    return AttachGradient.apply(value.detach(), len(inputs), *inputs, *(gradient for _, gradient in gradients))


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """`tensor` unchanged, its gradient times `factor`."""
    if factor == 1 or not tensor.requires_grad:
        return tensor
    scaled = tensor.clone()
    scaled.register_hook(lambda gradient: gradient * factor)
    return scaled

