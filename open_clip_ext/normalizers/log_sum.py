"""log sum_j exp(l(cos(e_i, q_j) - s_ii) / tau) over vectors q_j that are not of the batch, and its gradient.

What prototypes and queues predict with (neuclip.txt Eq. 10-11). With x_ij = l(cos(e_i, q_j) - s_ii) / tau and the
shares p_ij = exp(x_ij) / sum_j exp(x_ij), the derivatives of the value of anchor i are

    in e_i:     sum_j p_ij l'_ij / tau * q_j / |q_j|      (d,)
    in s_ii:  - sum_j p_ij l'_ij / tau
    in tau:   - sum_j p_ij x_ij / tau

They are sums over the same exponents, so that they cost no second pass: value and derivatives are computed together,
for a few anchors at a time (`streaming`), and only the derivatives are kept, b x d numbers in place of b x k.

Shapes: b anchors a side, k vectors a side, d = embedding dimension.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.streaming import exp_, highest, parts
from open_clip_ext.surrogates import Identity, Surrogate


def exponents_of(
    anchors: Tensor, positives: Tensor, tau: Tensor, others: Tensor, inverse_lengths: Tensor | None,
    surrogate: Surrogate,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """l(cos(e_i, q_j) - s_ii) / tau, (..., r, k), less a number for each anchor; these numbers, (..., r); and the slope
    of l, (..., r, k), or None where it is 1.

    Args:
        anchors: (..., r, d); positives: (r,); tau: 0-d or (..., r).
        others: (..., k, d); inverse_lengths: (..., k), or None if they are unit vectors.
    """
    row_tau = tau[..., None] if tau.dim() else tau
    linear = type(surrogate) is Identity  # then s_ii and tau need no pass over all pairs
    similarities = (anchors / row_tau if linear else anchors) @ others.mT
    if inverse_lengths is not None:
        similarities.mul_(inverse_lengths[..., None, :])
    if linear:
        return similarities, -positives / tau, None
    similarities.sub_(positives[:, None])
    slope = surrogate.slope(similarities)
    return surrogate.value(similarities).div_(row_tau), torch.zeros_like(positives), slope


def log_sums(
    image: Tensor, text: Tensor, positives: Tensor, tau: Tensor, others: Tensor, surrogate: Surrogate,
    lengths: Tensor | None = None, hidden: Sequence[slice | Tensor] = (), slopes: bool = True,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """The values, (2, b), and their derivatives in the anchors, (2, b, d), in s_ii and in tau, (2, b) each.

    Args:
        image, text: anchors, (b, d) each.
        positives: s_ii, (b,).
        tau: 0-d or (2, b).
        others: (2, k, d), those that images meet first.
        lengths: of `others`, (2, k); None if they are unit vectors.
        hidden: places among the k that do not count.
        slopes: whether the derivatives are wanted.
    """
    values = positives.new_empty(2, len(positives))
    by_anchor = image.new_empty(2, *image.shape) if slopes else None
    by_positive, by_tau = torch.empty_like(values), torch.empty_like(values)
    inverse_lengths = None if lengths is None else lengths.reciprocal()
    for side, anchors in enumerate((image, text)):
        inverse = None if lengths is None else inverse_lengths[side]
        for part in parts(len(positives), others.shape[1], image.device):
            part_tau = tau[side, part] if tau.dim() else tau
            exponents, shift, slope = exponents_of(
                anchors[part], positives[part], part_tau, others[side], inverse, surrogate
            )
            for places in hidden:
                exponents[:, places] = -math.inf
            peak = highest(exponents, 1)
            # Where l is not the identity the exponents themselves are wanted again.
            shares = exp_(exponents.sub_(peak) if slope is None else exponents - peak)
            total = shares.sum(1)
            values[side, part] = total.log() + peak[:, 0] + shift
            if not slopes:
                continue
            weights = shares.mul_((1 / (total * part_tau))[:, None])
            if slope is not None:
                for places in hidden:
                    exponents[:, places] = 0.0  # their share is next to 0
                by_tau[side, part] = -exponents.mul_(weights).sum(1)
                weights.mul_(slope)
                by_positive[side, part] = -weights.sum(1)
            if lengths is not None:
                weights.mul_(inverse)
            torch.mm(weights, others[side], out=by_anchor[side, part])
            if slope is None:
                # The shares' sum is 1; sum_j share_j (cos_j - s_ii) / tau is the anchor times its own derivative.
                by_positive[side, part] = -1 / part_tau
                mean = (anchors[part] * by_anchor[side, part]).sum(1)
                by_tau[side, part] = (positives[part] / part_tau - mean) / part_tau
    return values, (by_anchor, by_positive, by_tau) if slopes else None


class LogSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, positives: Tensor, tau: Tensor, others: Tensor, surrogate: Surrogate,
        lengths: Tensor | None, hidden: Sequence[slice | Tensor],
    ) -> Tensor:
        values, derivatives = log_sums(image, text, positives, tau, others, surrogate, lengths, hidden)
        ctx.save_for_backward(*derivatives)
        ctx.one_tau = tau.dim() == 0
        return values

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        by_anchor, by_positive, by_tau = ctx.saved_tensors
        # In place: autograd itself refuses to come here twice, and the losses come here at once.
        image, text = by_anchor.mul_(grad_output[:, :, None])
        by_tau = grad_output * by_tau
        positives = (grad_output * by_positive).sum(0)
        return image, text, positives, by_tau.sum() if ctx.one_tau else by_tau, None, None, None, None


def log_sum(
    image: Tensor, text: Tensor, positives: Tensor, tau: Tensor, others: Tensor, surrogate: Surrogate,
    lengths: Tensor | None = None, hidden: Sequence[slice | Tensor] = (),
) -> Tensor:
    """The values of `log_sums`, with their gradient in `image`, `text`, `positives` and `tau` where one is wanted."""
    inputs = (image, text, positives, tau, others, surrogate, lengths, hidden)
    return LogSum.apply(*inputs) if torch.is_grad_enabled() else log_sums(*inputs, slopes=False)[0]
