"""Triton kernels of an update of NeuCLIP's prototypes: a pass over an anchor's similarities, and one over the rows."""

import triton
import triton.language as tl

from open_clip_ext.objectives import MAX_LOG_WEIGHT

MAX = tl.constexpr(MAX_LOG_WEIGHT)
LEAST = tl.constexpr(-1e30)  # an exponent that is left out: finite, since inf - inf is NaN


@triton.jit(do_not_specialize=["size", "start", "batch"])
def weigh(
    products, inverse, shifts, log_batch, weights, anchor_keys, keys, alphas, log_eps, size, start, batch, m,
    UNIFIED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Overwrite products, (2, size, m), of anchors over tau from `start` on with each pair's weight in the gradient in
    the prototypes' directions; write alphas, (2, batch).

    Args:
        inverse: 1 / |W_j|, (2, m).
        shifts: what an exponent lacks; `weights`: the anchor's in the objective; (2, batch).
    """
    at = tl.program_id(0)
    side, anchor = at // size, start + at % size
    j, place = tl.arange(0, BM), side * batch + anchor
    here = products + at.to(tl.int64) * m + j
    exponents = tl.load(here, j < m, 0.0) * tl.load(inverse + side * m + j, j < m, 0.0)
    counts = j < m
    if keys is not None:
        counts = counts & (tl.load(keys + j, j < m, 0) != tl.load(anchor_keys + anchor))
    exponents = tl.where(counts, exponents, LEAST)
    peak, shift = tl.max(exponents, 0), tl.load(shifts + place)
    probs = tl.exp(exponents - peak)
    log_mean = tl.log(tl.sum(probs, 0)) + peak + shift
    least = tl.load(log_eps)
    highest = tl.maximum(log_mean, least)
    alpha = highest + tl.log(tl.exp(log_mean - highest) + tl.exp(least - highest))
    log_estimate = tl.load(log_batch + place)
    alpha = tl.where(peak < 0.5 * LEAST, log_estimate, alpha)  # no prototype counts
    slope = 1 - tl.exp(tl.minimum(log_estimate - alpha, MAX)) if UNIFIED else alpha - log_estimate
    tl.store(here, probs * (tl.exp(peak + shift - alpha) * slope * tl.load(weights + place)), j < m)
    tl.store(alphas + place, alpha)


@triton.jit
def descend(gradient, vectors, sums, inverse, rows, lr, decay, eps, d, BR: tl.constexpr, BD: tl.constexpr):
    """AdaGrad's step in `rows` vectors of d numbers and its sums of squares, for the gradient in their directions;
    inverse, which has 1 / |W_j|, gets that after the step."""
    row, column = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)
    is_here = (row < rows)[:, None] & (column < d)[None, :]
    at = row.to(tl.int64)[:, None] * d + column[None, :]
    scale = tl.load(inverse + row, row < rows, 0.0)
    slopes, vector = tl.load(gradient + at, is_here, 0.0), tl.load(vectors + at, is_here, 0.0)
    radial = tl.sum(slopes * vector, 1)
    slopes = slopes * scale[:, None] - vector * (radial * scale * scale * scale)[:, None] + decay * vector
    total = tl.load(sums + at, is_here, 0.0) + slopes * slopes
    vector = vector - lr * slopes / (tl.sqrt(total) + eps)
    tl.store(sums + at, total, is_here)
    tl.store(vectors + at, vector, is_here)
    length = tl.sqrt(tl.sum(vector * vector, 1))
    tl.store(inverse + row, 1 / tl.where(length == 0, 1.0, length), row < rows)
