"""log sum_j exp(l(cos(e_i, q_j) - s_ii) / tau) over vectors q_j from outside the batch, and its gradient.

Prototypes and queues predict with it (NeuCLIP, Eq. 10-11). With x_ij = l(cos(e_i, q_j) - s_ii) / tau and the softmax
p_ij = exp(x_ij) / sum_j exp(x_ij), the derivatives of anchor i's value are

    in e_i:     sum_j p_ij l'_ij / tau * q_j / |q_j|      (d,)
    in s_ii:  - sum_j p_ij l'_ij / tau
    in tau:   - sum_j p_ij x_ij / tau

All are sums over the same exponents, so one pass computes the value and its derivatives, tile by tile (`streaming`).
Only the derivatives are kept: b x d numbers instead of b x k.

If anchors and vectors have keys, vectors with the anchor's own key are left out.

Shapes: b anchors and k vectors per direction, d = embedding dimension.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.kernels.streaming import exp_, highest, tiles
from open_clip_ext.surrogates import Surrogate, is_linear

# An exponent far below the lowest real one, -4 / 0.01. It is finite, since -inf times its probability 0 would be NaN.
LEFT_OUT = -1e4
Keys = tuple[Tensor, Tensor]  # of the anchors (b,) and of the vectors (k,), int64


def constants_of(positives: Tensor, tau: Tensor, surrogate: Surrogate) -> Tensor:
    """The anchors' constants, (..., r), that `exponents_of` subtracts too little; same arguments."""
    return positives / tau if is_linear(surrogate) else torch.zeros_like(tau)


def exponents_of(
    similarities: Tensor, positives: Tensor, tau: Tensor, surrogate: Surrogate
) -> tuple[Tensor, Tensor | float]:
    """Exponents l(cos(e_i, q_j) - s_ii) / tau plus the anchors' constants (`constants_of`).

    Args:
        similarities: the cosines, (..., r, k), divided by tau if l is linear; overwritten.
        positives: (r,).
        tau: (..., r).

    Returns:
        The exponents and the derivative of l, (..., r, k) or a number.
    """
    if is_linear(surrogate):
        return similarities, 1.0
    similarities.sub_(positives[:, None])
    slope = surrogate.slope(similarities)
    exponents = surrogate.value(similarities).div_(tau[..., None])
    return exponents, slope


def log_sums(
    image: Tensor, text: Tensor, positives: Tensor, tau: Tensor, vectors: Tensor, surrogate: Surrogate,
    lengths: Tensor | None = None, slices: Sequence[slice] | None = None, needs_grad: bool = True,
    keys: Keys | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Compute the values, (2, b), and their derivatives in the anchors, (2, b, d), in s_ii and in tau, (2, b) each.

    Args:
        image, text: anchors, (b, d) each.
        positives: s_ii, (b,).
        tau: (2, b).
        vectors: q_j, (2, k, d): [0] against image anchors, [1] against text anchors.
        lengths: norms of `vectors`, (2, k); None if they are unit vectors.
        slices: which of the k vectors to sum over, as slices with start and stop that do not overlap; None: all.
        needs_grad: whether to compute the derivatives; if not, None stands in their place.
        keys: of anchors and vectors, if they have any.
    """
    slices = [slice(0, vectors.shape[1])] if slices is None else slices
    linear = is_linear(surrogate)
    constants = constants_of(positives, tau, surrogate)
    values = torch.empty_like(tau)
    if all(some.stop == some.start for some in slices):
        values.fill_(-math.inf)  # nothing is written below
    grad_anchor = grad_positive = grad_tau = None
    if needs_grad:
        grad_anchor = image.new_empty(2, *image.shape)
        if all(some.stop == some.start for some in slices):
            grad_anchor.zero_()  # with no vectors nothing is written below
    if needs_grad and not linear:
        grad_positive, grad_tau = torch.zeros_like(values), torch.zeros_like(values)
    for side, anchors in enumerate((image, text)):
        _write(
            values[side], _one(grad_anchor, side), _one(grad_positive, side), _one(grad_tau, side), _one(lengths, side),
            anchors, positives, tau[side], constants[side], vectors[side], surrogate, slices, keys,
        )
    if grad_anchor is None:
        return values, None
    if grad_positive is None or grad_tau is None:  # l is linear
        # sum_j p_ij = 1, and sum_j p_ij cos_ij / tau is the inner product of the anchor and its derivative.
        grad_positive = -1 / tau
        grad_tau = torch.empty_like(tau)
        for anchors, gradient, mean in zip((image, text), grad_anchor, grad_tau, strict=True):
            torch.sum(anchors * gradient, 1, out=mean)
        grad_tau = (constants - grad_tau) / tau
    return values, (grad_anchor, grad_positive, grad_tau)


def _one(tensor: Tensor | None, side: int) -> Tensor | None:
    return None if tensor is None else tensor[side]


def _write(
    values: Tensor, grad_anchor: Tensor | None, grad_positive: Tensor | None, grad_tau: Tensor | None,
    lengths: Tensor | None, anchors: Tensor, positives: Tensor, tau: Tensor, constants: Tensor, vectors: Tensor,
    surrogate: Surrogate, slices: Sequence[slice], keys: Keys | None,
) -> None:
    """Write one direction's values and those derivatives that are not None; for a linear l only `grad_anchor`."""
    linear = is_linear(surrogate)
    rows, columns = tiles(len(positives), slices, anchors.device)
    height, width = (max((piece.stop - piece.start for piece in pieces), default=0) for pieces in (rows, columns))
    # Allocated once for all tiles: on a CPU new memory costs as much time as a pass over it.
    products_memory = anchors.new_empty(height * width)
    anchors_memory, vectors_memory = (anchors.new_empty(size, anchors.shape[1]) for size in (height, width))
    for column in columns:
        is_first_tile = column is columns[0]
        some = vectors[column]
        if lengths is not None:
            some = torch.div(some, lengths[column, None], out=vectors_memory[: len(some)])
        for row in rows:
            scaled_anchors, row_tau = anchors[row], tau[row]
            if linear:
                scaled_anchors = torch.div(scaled_anchors, row_tau[:, None], out=anchors_memory[: len(scaled_anchors)])
            products = products_memory[: len(scaled_anchors) * len(some)].view(-1, len(some))
            torch.mm(scaled_anchors, some.T, out=products)
            exponents, slope = exponents_of(products, positives[row], row_tau, surrogate)
            if keys is not None:
                exponents.masked_fill_(keys[0][row, None] == keys[1][column], LEFT_OUT)
            peak = highest(exponents, 1)
            # If l is not the identity, the derivative in tau needs the exponents again.
            probs = exp_(exponents.sub_(peak) if linear else exponents - peak)
            peak = peak[:, 0] - constants[row]
            total, after = probs.sum(1), values[row]
            if is_first_tile:
                torch.add(total.log(), peak, out=after)
            else:
                before = after.clone()
                torch.logaddexp(before, total.log_().add_(peak), out=after)
            if grad_anchor is not None:
                if not is_first_tile:
                    # The new total scales down the probabilities of the earlier tiles.
                    decay = (before - after).exp_()
                    grad_anchor[row].mul_(decay[:, None])
                factor = total.reciprocal_() if is_first_tile else (peak - after).exp_()
                weights = probs.mul_((factor / row_tau)[:, None])
                if grad_tau is not None and grad_positive is not None:
                    if not is_first_tile:
                        grad_tau[row].mul_(decay)
                        grad_positive[row].mul_(decay)
                    grad_tau[row].sub_(exponents.mul_(weights).sum(1))
                    weights.mul_(slope)
                    grad_positive[row].sub_(weights.sum(1))
                grad_anchor[row].addmm_(weights, some, beta=0 if is_first_tile else 1)


def number_of_equals(keys: Tensor, vector_keys: Tensor) -> Tensor:
    """Number of `vector_keys` (k,) that equal each of `keys` (b,), as (b,) int64."""
    ordered = vector_keys.sort().values
    return torch.searchsorted(ordered, keys, right=True) - torch.searchsorted(ordered, keys)


class LogSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, positives: Tensor, tau: Tensor, vectors: Tensor, surrogate: Surrogate,
        lengths: Tensor | None, slices: Sequence[slice] | None, keys: Keys | None,
    ) -> Tensor:
        values, derivatives = log_sums(image, text, positives, tau, vectors, surrogate, lengths, slices, keys=keys)
        assert derivatives is not None
        ctx.save_for_backward(*derivatives)
        return values

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_anchor, grad_positive, grad_tau = ctx.saved_tensors
        # In place: autograd refuses a second backward pass, and the losses run the first one at once.
        image, text = grad_anchor.mul_(grad_output[:, :, None])
        positives = (grad_output * grad_positive).sum(0)
        return image, text, positives, grad_output * grad_tau, None, None, None, None, None


def log_sum(
    image: Tensor, text: Tensor, positives: Tensor, tau: Tensor, vectors: Tensor, surrogate: Surrogate,
    lengths: Tensor | None = None, slices: Sequence[slice] | None = None, keys: Keys | None = None,
) -> Tensor:
    """The values of `log_sums`, (2, b); autograd differentiates them in `image`, `text`, `positives` and `tau`."""
    inputs = (image, text, positives, tau, vectors, surrogate, lengths, slices)
    return LogSum.apply(*inputs, keys) if torch.is_grad_enabled() else log_sums(*inputs, needs_grad=False, keys=keys)[0]
