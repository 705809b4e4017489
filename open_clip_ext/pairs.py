"""The similarities of a global batch, the normalizers it estimates, and the gradient once they are known.

Shapes: b = pairs of this process, B = pairs of all processes, d = embedding dimension. Side 0 has images as
anchors, side 1 has texts as anchors; what exists per side is stacked in front: (2, b) or (2, B).

For anchor i of a side, x_ij = s_ij - s_ii over the B - 1 other pairs j, and l(x_ij) its surrogate. Everything is
float32 in the log domain: at a temperature of 0.01 the exponents reach 200, far beyond exp in float32.

A temperature is 0-d, or one per anchor and side, (2, b) for this process's and (2, B) for all.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from open_clip_ext.distributed import all_gather, rank
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
    def gather(cls, image: Tensor, text: Tensor) -> "Pairs":
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
    """Similarities of this process's anchors of one side with all samples of a side.

    Args:
        similarities: (b, B).
        others: embeddings of the columns' samples, (B, d).
        column_side: the side of which the columns' samples are anchors.
    """

    similarities: Tensor
    others: Tensor
    column_side: int


class SimilarityBlocks:
    """The blocks of similarities that a process needs, each (b, B): its images against all texts, its texts against all
    images, as OpenCLIP's `local_loss` computes them.

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
        embeddings = ((pairs.image.detach(), pairs.all_image), (pairs.text.detach(), pairs.all_text))
        self.blocks: list[list[Block]] = []
        for side, (anchors, _) in enumerate(embeddings):
            columns = (1 - side, side) if both_sides else (1 - side,)
            self.blocks.append([Block(anchors @ embeddings[c][1].T, embeddings[c][1], c) for c in columns])
        self.negatives = len(self.blocks[0]) * (len(self.all_positives) - 1)

    def log_batch_normalizers(self, all_tau: Tensor) -> Tensor:
        """log g_i over the batch's negatives, (2, b): the minibatch form of neuclip.txt Eq. 1; with negatives of both
        sides, isogclr.txt Eq. 11."""
        tau = local_part(all_tau, self.pairs)
        sums = [
            torch.stack([self._log_sum_exp(block.similarities, of_side(tau, side)) for block in blocks]).logsumexp(0)
            for side, blocks in enumerate(self.blocks)
        ]
        return torch.stack(sums) - math.log(self.negatives)

    def _log_sum_exp(self, similarities: Tensor, tau: Tensor) -> Tensor:
        exponents = self.surrogate.value(similarities - self.positives[:, None]) / (tau[:, None] if tau.dim() else tau)
        exponents.diagonal(self.pairs.offset).fill_(-math.inf)
        return exponents.logsumexp(dim=1)

    def gradients(self, all_tau: Tensor, alpha: Tensor, all_alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of the global batch's sum over sides of mean_i tau_i * exp(-alpha_i) (eps + g_i), alpha constant
        (neuclip.txt Eq. 4; isogclr.txt Eq. 14 and 21).

        Args:
            all_tau: temperatures.
            alpha: log-normalizers of this process's anchors, (2, b), at least L - MAX_LOG_WEIGHT.
            all_alpha: of all anchors, (2, B).

        Returns:
            With respect to `image` and to `text` of this process, (b, d) each, and per anchor
            tau_i * exp(-alpha_i) * dg_i/dtau_i, (2, b).

        A pair's similarity appears with its row's sample as the anchor and with its column's; both weights come
        from the same block, so no gradient travels between processes.
        """
        pairs, batch = self.pairs, self.all_positives.shape[0]
        tau = local_part(all_tau, pairs)
        features, positive_weight, tau_terms = [], 0.0, []
        for side, blocks in enumerate(self.blocks):
            row_tau = of_side(tau, side)
            row_tau = row_tau[:, None] if row_tau.dim() else row_tau
            feature, tau_term = 0.0, 0.0
            for block in blocks:
                row_gap = block.similarities - self.positives[:, None]
                row_weight = self._weights(row_gap, row_tau, alpha[side][:, None])
                tau_term = tau_term - (row_weight * self.surrogate.value(row_gap)).sum(dim=1, keepdim=True) / row_tau
                row_weight = row_weight * self.surrogate.slope(row_gap)
                column_gap = block.similarities - self.all_positives[None, :]
                column_alpha = all_alpha[block.column_side][None, :]
                column_weight = self._weights(column_gap, of_side(all_tau, block.column_side), column_alpha)
                column_weight = column_weight * self.surrogate.slope(column_gap)
                feature = feature + (row_weight + column_weight) @ block.others / batch
                positive_weight = positive_weight + row_weight.sum(dim=1)
            features.append(feature)
            tau_terms.append(tau_term)
        positive_weight = positive_weight[:, None] / batch
        image = features[0] - positive_weight * pairs.text.detach()
        text = features[1] - positive_weight * pairs.image.detach()
        return image, text, torch.cat(tau_terms, dim=1).T

    def _weights(self, gap: Tensor, tau: Tensor, alpha: Tensor) -> Tensor:
        weights = (self.surrogate.value(gap) / tau - alpha).exp_()
        weights.diagonal(self.pairs.offset).zero_()
        return weights.div_(self.negatives)


def of_side(tau: Tensor, side: int) -> Tensor:
    """The temperatures of one side, 0-d or one per anchor."""
    return tau[side] if tau.dim() else tau


def local_part(tau: Tensor, pairs: Pairs) -> Tensor:
    """This process's part of the temperatures, 0-d or (2, b)."""
    return tau[:, pairs.local] if tau.dim() else tau


def add_eps(log_values: Tensor, eps: float) -> Tensor:
    """log(eps + exp(log_values))."""
    log_eps = torch.full((), math.log(eps), dtype=log_values.dtype, device=log_values.device)
    return torch.logaddexp(log_values, log_eps)


class AttachGradient(torch.autograd.Function):
    """A value that is reported, with gradients that were computed beside it."""

    @staticmethod
    def forward(ctx, value: Tensor, inputs: int, *inputs_and_gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs_and_gradients[inputs:])
        return value.clone()

    @staticmethod
    def backward(ctx, grad_output: Tensor):
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

