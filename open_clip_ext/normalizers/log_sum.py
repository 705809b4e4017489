"""log sum_j exp(l(cos(e_i, q_j) - s_ii) / tau) over vectors q_j that are not of the batch, and its gradient.

What prototypes and queues predict with (NeuCLIP, Eq. 10-11). With x_ij = l(cos(e_i, q_j) - s_ii) / tau and the
shares p_ij = exp(x_ij) / sum_j exp(x_ij), the derivatives of the value of anchor i are

    in e_i:     sum_j p_ij l'_ij / tau * q_j / |q_j|      (d,)
    in s_ii:  - sum_j p_ij l'_ij / tau
    in tau:   - sum_j p_ij x_ij / tau

They are sums over the same exponents, so that they cost no second pass: value and derivatives are computed together,
for some anchors and some vectors at a time (`streaming`), and only the derivatives are kept, b x d numbers in place of
b x k.

Shapes: b anchors a side, k vectors a side, d = embedding dimension.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.streaming import exp_, highest, tiles
from open_clip_ext.surrogates import Identity, Surrogate


def is_linear(surrogate: Surrogate) -> bool:
    """Whether l(x) = x, so that 1 / tau can be put into one of the factors of a product of matrices."""
    return type(surrogate) is Identity


def exponents_of(
    similarities: Tensor, positives: Tensor, tau: Tensor, surrogate: Surrogate
) -> tuple[Tensor, Tensor, Tensor | float]:
    """l(cos(e_i, q_j) - s_ii) / tau, (..., r, k), less a number for each anchor; these numbers, (..., r); and the slope
    of l, (..., r, k) or a number.

    Args:
        similarities: (..., r, k), overwritten: the cosines, over tau where l is linear.
        positives: (r,); tau: 0-d or (..., r).
    """
    if is_linear(surrogate):
        return similarities, -positives / tau, 1.0
    similarities.sub_(positives[:, None])
    slope = surrogate.slope(similarities)
    exponents = surrogate.value(similarities).div_(tau[..., None] if tau.dim() else tau)
    return exponents, torch.zeros_like(positives), slope


def log_sums(
    image: Tensor, text: Tensor, positives: Tensor, tau: Tensor, others: Tensor, surrogate: Surrogate,
    lengths: Tensor | None = None, seen: Sequence[slice] | None = None, slopes: bool = True,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """The values, (2, b), and their derivatives in the anchors, (2, b, d), in s_ii and in tau, (2, b) each.

    Args:
        image, text: anchors, (b, d) each.
        positives: s_ii, (b,).
        tau: 0-d or (2, b).
        others: (2, k, d), those that images meet first.
        lengths: of `others`, (2, k); None if they are unit vectors.
        seen: which of the k count, slices with a start and a stop that do not overlap; None for all.
        slopes: whether the derivatives are wanted.
    """
    seen = [slice(0, others.shape[1])] if seen is None else seen
    linear = is_linear(surrogate)
    values = positives.new_full((2, len(positives)), -math.inf)
    by_anchor = by_positive = by_tau = None
    if slopes:
        by_anchor = image.new_empty(2, *image.shape)
        if all(some.stop == some.start for some in seen):
            by_anchor.zero_()  # as nothing is written below
    if slopes and not linear:
        by_positive, by_tau = torch.zeros_like(values), torch.zeros_like(values)
    for side, anchors in enumerate((image, text)):
        side_tau = tau[side] if tau.dim() else tau
        _write(
            values[side], _one(by_anchor, side), _one(by_positive, side), _one(by_tau, side), _one(lengths, side),
            anchors, positives, side_tau, others[side], surrogate, seen,
        )
    if by_anchor is None:
        return values, None
    if by_positive is None or by_tau is None:  # l is linear
        # The shares' sum is 1; sum_j share_j (cos_j - s_ii) / tau is the anchor times its own derivative.
        by_positive = (-1 / tau).expand_as(values)
        means = [(anchors * slope).sum(1) for anchors, slope in zip((image, text), by_anchor, strict=True)]
        by_tau = (positives / tau - torch.stack(means)) / tau
    return values, (by_anchor, by_positive, by_tau)


def _one(tensor: Tensor | None, side: int) -> Tensor | None:
    return None if tensor is None else tensor[side]


def _write(
    values: Tensor, by_anchor: Tensor | None, by_positive: Tensor | None, by_tau: Tensor | None, lengths: Tensor | None,
    anchors: Tensor, positives: Tensor, tau: Tensor, others: Tensor, surrogate: Surrogate, seen: Sequence[slice],
) -> None:
    """Write what `log_sums` gives of one side, and what is not None of its derivatives: of a linear l that in the
    anchors alone."""
    linear = is_linear(surrogate)
    divisor = tau if linear and tau.dim() == 0 else 1.0  # of the vectors
    rows, columns = tiles(len(positives), seen, anchors.device)
    height, width = (max((some.stop - some.start for some in slices), default=0) for slices in (rows, columns))
    # Once for all: on a CPU fresh memory takes as long as a pass over it.
    product_memory, vector_memory = anchors.new_empty(height * width), anchors.new_empty(width, anchors.shape[1])
    for column in columns:
        first = column is columns[0]
        some = others[column]
        if lengths is not None or divisor is tau:
            divisors = divisor if lengths is None else lengths[column, None] * divisor
            some = torch.div(some, divisors, out=vector_memory[: len(some)])
        for row in rows:
            row_tau = tau[row] if tau.dim() else tau
            products = product_memory[: (row.stop - row.start) * len(some)].view(-1, len(some))
            torch.mm(anchors[row], some.T, out=products)
            if linear and tau.dim():
                products.div_(row_tau[:, None])
            exponents, shift, slope = exponents_of(products, positives[row], row_tau, surrogate)
            peak = highest(exponents, 1)
            # Where l is not the identity the exponents themselves are wanted again.
            shares = exp_(exponents.sub_(peak) if linear else exponents - peak)
            peak = peak[:, 0] + shift
            log_sum = shares.sum(1).log_().add_(peak)
            before = values[row]
            after = log_sum if first else torch.logaddexp(before, log_sum)
            if by_anchor is not None:
                if not first:
                    # What was summed before keeps exp(before - after) of its share in the whole.
                    kept = (before - after).exp_()
                    by_anchor[row].mul_(kept[:, None])
                weights = shares.mul_(((peak - after).exp_() * (divisor / row_tau))[:, None])
                if by_tau is not None and by_positive is not None:
                    if not first:
                        by_tau[row].mul_(kept)
                        by_positive[row].mul_(kept)
                    by_tau[row].sub_(exponents.mul_(weights).sum(1))
                    weights.mul_(slope)
                    by_positive[row].sub_(weights.sum(1))
                by_anchor[row].addmm_(weights, some, beta=0 if first else 1)
            values[row] = after


class LogSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, positives: Tensor, tau: Tensor, others: Tensor, surrogate: Surrogate,
        lengths: Tensor | None, seen: Sequence[slice] | None,
    ) -> Tensor:
        values, derivatives = log_sums(image, text, positives, tau, others, surrogate, lengths, seen)
        assert derivatives is not None
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
    lengths: Tensor | None = None, seen: Sequence[slice] | None = None,
) -> Tensor:
    """The values of `log_sums`, with their gradient in `image`, `text`, `positives` and `tau` where one is wanted."""
    inputs = (image, text, positives, tau, others, surrogate, lengths, seen)
    return LogSum.apply(*inputs) if torch.is_grad_enabled() else log_sums(*inputs, slopes=False)[0]
