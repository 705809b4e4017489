"""log sum_j exp(l(cos(e_i, q_j) - s_ii) / tau) over vectors q_j that are not of the batch, and its gradient.

What prototypes and queues predict with (NeuCLIP, Eq. 10-11). With x_ij = l(cos(e_i, q_j) - s_ii) / tau and the
shares p_ij = exp(x_ij) / sum_j exp(x_ij), the derivatives of the value of anchor i are

    in e_i:     sum_j p_ij l'_ij / tau * q_j / |q_j|      (d,)
    in s_ii:  - sum_j p_ij l'_ij / tau
    in tau:   - sum_j p_ij x_ij / tau

They are sums over the same exponents, so that they cost no second pass: value and derivatives are computed together,
for some anchors and some vectors at a time (`streaming`), and only the derivatives are kept, b x d numbers in place of
b x k.

Where anchors and vectors have keys, the vectors with the anchor's own do not count.

Shapes: b anchors a side, k vectors a side, d = embedding dimension.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.kernels.streaming import exp_, highest, tiles
from open_clip_ext.kernels.surrogates import is_linear, value_
from open_clip_ext.surrogates import Surrogate

LEFT_OUT = -1e4  # an exponent far below any other, -4 / 0.01 the lowest, whose product with its share is still a number
Keys = tuple[Tensor, Tensor]  # of the anchors (b,) and of the vectors (k,), int64


def exponents_of(
    similarities: Tensor, positives: Tensor, tau: Tensor, surrogate: Surrogate
) -> tuple[Tensor, Tensor, Tensor | float]:
    """l(cos(e_i, q_j) - s_ii) / tau, (..., r, k), less a number for each anchor; these numbers, (..., r); and the slope
    of l, (..., r, k) or a number.

    Args:
        similarities: (..., r, k), overwritten: the cosines, over tau where l is linear.
        positives: (r,); tau: (..., r).
    """
    if is_linear(surrogate):
        return similarities, -positives / tau, 1.0
    similarities.sub_(positives[:, None])
    slope = surrogate.slope(similarities)
    exponents = value_(surrogate, similarities).div_(tau[..., None])
    return exponents, torch.zeros_like(positives), slope


def log_sums(
    image: Tensor, text: Tensor, positives: Tensor, tau: Tensor, others: Tensor, surrogate: Surrogate,
    lengths: Tensor | None = None, seen: Sequence[slice] | None = None, slopes: bool = True, keys: Keys | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """The values, (2, b), and their derivatives in the anchors, (2, b, d), in s_ii and in tau, (2, b) each.

    Args:
        image, text: anchors, (b, d) each.
        positives: s_ii, (b,).
        tau: (2, b).
        others: (2, k, d), those that images meet first.
        lengths: of `others`, (2, k); None if they are unit vectors.
        seen: which of the k count, slices with a start and a stop that do not overlap; None for all.
        slopes: whether the derivatives are wanted.
        keys: of anchors and vectors, if they have any.
    """
    seen = [slice(0, others.shape[1])] if seen is None else seen
    linear = is_linear(surrogate)
    values = positives.new_full((2, len(positives)), -math.inf)
    grad_anchor = grad_positive = grad_tau = None
    if slopes:
        grad_anchor = image.new_empty(2, *image.shape)
        if all(some.stop == some.start for some in seen):
            grad_anchor.zero_()  # as nothing is written below
    if slopes and not linear:
        grad_positive, grad_tau = torch.zeros_like(values), torch.zeros_like(values)
    for side, anchors in enumerate((image, text)):
        _write(
            values[side], _one(grad_anchor, side), _one(grad_positive, side), _one(grad_tau, side), _one(lengths, side),
            anchors, positives, tau[side], others[side], surrogate, seen, keys,
        )
    if grad_anchor is None:
        return values, None
    if grad_positive is None or grad_tau is None:  # l is linear
        # The shares' sum is 1; sum_j share_j (cos_j - s_ii) / tau is the anchor times its own derivative.
        grad_positive = -1 / tau
        means = [(anchors * slope).sum(1) for anchors, slope in zip((image, text), grad_anchor, strict=True)]
        grad_tau = (positives / tau - torch.stack(means)) / tau
    return values, (grad_anchor, grad_positive, grad_tau)


def _one(tensor: Tensor | None, side: int) -> Tensor | None:
    return None if tensor is None else tensor[side]


def _write(
    values: Tensor, grad_anchor: Tensor | None, grad_positive: Tensor | None, grad_tau: Tensor | None,
    lengths: Tensor | None, anchors: Tensor, positives: Tensor, tau: Tensor, others: Tensor, surrogate: Surrogate,
    seen: Sequence[slice], keys: Keys | None,
) -> None:
    """Write what `log_sums` gives of one side, and what is not None of its derivatives: of a linear l that in the
    anchors alone."""
    linear = is_linear(surrogate)
    rows, columns = tiles(len(positives), seen, anchors.device)
    height, width = (max((some.stop - some.start for some in slices), default=0) for slices in (rows, columns))
    # Once for all: on a CPU fresh memory takes as long as a pass over it.
    products_memory = anchors.new_empty(height * width)
    anchors_memory, others_memory = (anchors.new_empty(size, anchors.shape[1]) for size in (height, width))
    for column in columns:
        first = column is columns[0]
        some = others[column]
        if lengths is not None:
            some = torch.div(some, lengths[column, None], out=others_memory[: len(some)])
        for row in rows:
            left, row_tau = anchors[row], tau[row]
            if linear:
                left = torch.div(left, row_tau[:, None], out=anchors_memory[: len(left)])
            products = products_memory[: len(left) * len(some)].view(-1, len(some))
            torch.mm(left, some.T, out=products)
            exponents, shift, slope = exponents_of(products, positives[row], row_tau, surrogate)
            if keys is not None:
                exponents.masked_fill_(keys[0][row, None] == keys[1][column], LEFT_OUT)
            peak = highest(exponents, 1)
            # Where l is not the identity the exponents themselves are wanted again.
            shares = exp_(exponents.sub_(peak) if linear else exponents - peak)
            peak = peak[:, 0] + shift
            log_sum = shares.sum(1).log_().add_(peak)
            before = values[row]
            after = log_sum if first else torch.logaddexp(before, log_sum)
            if grad_anchor is not None:
                if not first:
                    # What was summed before keeps exp(before - after) of its share in the whole.
                    kept = (before - after).exp_()
                    grad_anchor[row].mul_(kept[:, None])
                weights = shares.mul_(((peak - after).exp_() / row_tau)[:, None])
                if grad_tau is not None and grad_positive is not None:
                    if not first:
                        grad_tau[row].mul_(kept)
                        grad_positive[row].mul_(kept)
                    grad_tau[row].sub_(exponents.mul_(weights).sum(1))
                    weights.mul_(slope)
                    grad_positive[row].sub_(weights.sum(1))
                grad_anchor[row].addmm_(weights, some, beta=0 if first else 1)
            values[row] = after


def number_of_equals(keys: Tensor, others: Tensor) -> Tensor:
    """How often each of `keys` (b,) occurs among `others` (k,), (b,) int64."""
    ordered = others.sort().values
    return torch.searchsorted(ordered, keys, right=True) - torch.searchsorted(ordered, keys)


class LogSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, positives: Tensor, tau: Tensor, others: Tensor, surrogate: Surrogate,
        lengths: Tensor | None, seen: Sequence[slice] | None, keys: Keys | None,
    ) -> Tensor:
        values, derivatives = log_sums(image, text, positives, tau, others, surrogate, lengths, seen, keys=keys)
        assert derivatives is not None
        ctx.save_for_backward(*derivatives)
        return values

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_anchor, grad_positive, grad_tau = ctx.saved_tensors
        # In place: autograd itself refuses to come here twice, and the losses come here at once.
        image, text = grad_anchor.mul_(grad_output[:, :, None])
        positives = (grad_output * grad_positive).sum(0)
        return image, text, positives, grad_output * grad_tau, None, None, None, None, None


def log_sum(
    image: Tensor, text: Tensor, positives: Tensor, tau: Tensor, others: Tensor, surrogate: Surrogate,
    lengths: Tensor | None = None, seen: Sequence[slice] | None = None, keys: Keys | None = None,
) -> Tensor:
    """The values of `log_sums`, with their gradient in `image`, `text`, `positives` and `tau` where one is wanted."""
    inputs = (image, text, positives, tau, others, surrogate, lengths, seen)
    return LogSum.apply(*inputs, keys) if torch.is_grad_enabled() else log_sums(*inputs, slopes=False, keys=keys)[0]
