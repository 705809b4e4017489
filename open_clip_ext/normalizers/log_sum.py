"""log sum_j exp(l(cos(e_i, q_j) - s_ii) / tau) over vectors q_j that are not of the batch, and its gradient.

What prototypes and queues predict with. The gradient of an anchor's value is a sum over the same exponents, so that it
costs no second pass: both are computed together, for a few anchors at a time (`streaming`), and only the gradients are
kept, b x d numbers in place of b x k.

Shapes: b anchors a side, k vectors a side, d = embedding dimension.
"""

import math
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.streaming import exp_, highest, parts
from open_clip_ext.surrogates import Surrogate


def log_sums(
    image: Tensor, text: Tensor, positives: Tensor, tau: Tensor, others: Tensor, surrogate: Surrogate,
    lengths: Tensor | None = None, hidden: Tensor | None = None, slopes: bool = True,
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
    derivatives = None
    if slopes:
        derivatives = image.new_empty(2, *image.shape), torch.empty_like(values), torch.empty_like(values)
    for side, anchors in enumerate((image, text)):
        for part in parts(len(positives), others.shape[1], image.device):
            part_tau = tau[side, part, None] if tau.dim() else tau
            gaps = anchors[part] @ others[side].T
            if lengths is not None:
                gaps.div_(lengths[side])
            gaps.sub_(positives[part, None])
            slope = surrogate.slope(gaps) if slopes else None
            exponents = surrogate.value(gaps).div_(part_tau)
            if hidden is not None:
                exponents.index_fill_(1, hidden, -math.inf)
            peak = highest(exponents, 1)
            shares = exp_(exponents - peak if slopes else exponents.sub_(peak))
            total = shares.sum(1, keepdim=True)
            values[side, part] = (total.log() + peak)[:, 0]
            if not slopes:
                continue
            shares.div_(total * part_tau)
            if hidden is not None:
                exponents.index_fill_(1, hidden, 0.0)  # their share is 0
            by_anchor, by_positive, by_tau = derivatives
            by_tau[side, part] = -exponents.mul_(shares).sum(1)
            if isinstance(slope, Tensor):
                shares.mul_(slope)
            by_positive[side, part] = -shares.sum(1)
            if lengths is not None:
                shares.div_(lengths[side])
            torch.mm(shares, others[side], out=by_anchor[side, part])
    return values, derivatives


class LogSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, positives: Tensor, tau: Tensor, others: Tensor, surrogate: Surrogate,
        lengths: Tensor | None, hidden: Tensor | None,
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
    lengths: Tensor | None = None, hidden: Tensor | None = None,
) -> Tensor:
    """The values of `log_sums`, with their gradient in `image`, `text`, `positives` and `tau` where one is wanted."""
    inputs = (image, text, positives, tau, others, surrogate, lengths, hidden)
    return LogSum.apply(*inputs) if torch.is_grad_enabled() else log_sums(*inputs, slopes=False)[0]
