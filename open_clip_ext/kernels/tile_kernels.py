"""Triton kernels over the tiles of a block of similarities: a tile's product, and a loss's pass over it in registers.

The factors are embeddings times 2^8 in 16 bits, so a product s is a similarity times 2^16 (`UNIT`), and the positives p
and inverse temperatures t are given in units that fit: an anchor's exponent of 2 for another pair is x = (s - p) * t.
A pair has one of its row's anchor and one of its column's. Sums over a tile are written as parts, (tiles, anchors), and
joined afterwards: no atomics, so that the same input gives the same bits.

Rows (m, D) and columns (n, D) have contiguous vectors; the pair of row i is column i + offset. An argument is None
where its values are not wanted, as the columns' sums where their anchors are another process's. Positions are 32-bit
integers: m * n, and a stride times m or n, must be less than 2^31.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(8)  # rows of tiles that are computed one after another, so that their columns stay in the cache
LEAST = tl.constexpr(-1e30)  # a product that is left out: finite, since inf - inf is NaN
UNIT = tl.constexpr(2.0**-16)
LOG2_E = tl.constexpr(1.4426950408889634)
SIGMOID_FACTOR = tl.constexpr(2.0**15)  # of weights of at most 1, so that small ones are normal numbers in float16


@triton.jit
def tile_of(m, n, BM: tl.constexpr, BN: tl.constexpr):
    """Row and column of tiles of this program."""
    rows, columns, at = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.program_id(0)
    first = at // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = at % (GROUP * columns)
    return first + within % height, within // height


@triton.jit
def products_of(
    rows, columns, row_stride, column_stride, i, j, m, n,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Inner products (BM, BN) of rows i and columns j; those beyond the last repeat it."""
    row = rows + tl.minimum(i, m - 1)[:, None] * row_stride
    column = columns + tl.minimum(j, n - 1)[None, :] * column_stride
    products = tl.zeros((BM, BN), tl.float32)
    for start in range(0, D, BK):
        k = start + tl.arange(0, BK)
        if D % BK == 0:
            left, right = tl.load(row + k[None, :]), tl.load(column + k[:, None])
        else:
            left = tl.load(row + k[None, :], k[None, :] < D, 0.0)
            right = tl.load(column + k[:, None], k[:, None] < D, 0.0)
        products = tl.dot(left, right, products, input_precision="ieee")  # of float32 in the interpreter alone
    return products


@triton.jit
def has_own(tile_row, tile_column, offset, BM: tl.constexpr, BN: tl.constexpr):
    """Whether a row's own column is in the tile."""
    start = tile_row * BM + offset - tile_column * BN
    return (start < BN) & (start + BM > 0)


@triton.jit
def of_negatives(
    s, tile_row, tile_column, i, j, m, n, offset, row_keys, column_keys, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Products with `LEAST` for pairs that are no negatives: the anchor's own, those with its key, and what is beyond
    the ends."""
    if row_keys is not None:
        keys, others = tl.load(row_keys + i, i < m, 0), tl.load(column_keys + j, j < n, 0)
        s = tl.where(keys[:, None] == others[None, :], LEAST, s)
    if has_own(tile_row, tile_column, offset, BM, BN) | ((tile_row + 1) * BM > m) | ((tile_column + 1) * BN > n):
        s = tl.where((i + offset)[:, None] == j[None, :], LEAST, s)
        s = tl.where((i < m)[:, None] & (j < n)[None, :], s, LEAST)
    return s


@triton.jit
def store_sums(
    s, positives, inverse, parts, tile, tiles, at, anchors, MOMENTS: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """Write a tile's part of the sums of anchors `at`, whose negatives lie along `DIM`: see `sums`."""
    top = tl.max(s, DIM)
    peak = (top - positives) * inverse
    part, is_anchor, step = parts + tile * anchors + at, at < anchors, tiles * anchors
    e = tl.exp2(s * tl.expand_dims(inverse, DIM) - tl.expand_dims(top * inverse, DIM))
    total = tl.where(top < 0.5 * LEAST, 0.0, tl.sum(e, DIM))
    if MOMENTS:
        moment = tl.where(top < 0.5 * LEAST, 0.0, (tl.sum(e * s, DIM) - top * total) * inverse)
    tl.store(part, peak, is_anchor)
    tl.store(part + step, total, is_anchor)
    if MOMENTS:
        tl.store(part + 2 * step, moment, is_anchor)


@triton.jit(do_not_specialize=["m", "offset"])
def sums(
    rows, columns, row_stride, column_stride, m, n, offset,
    row_positives, column_positives, row_inverse, column_inverse, row_keys, column_keys, row_parts, column_parts, own,
    MOMENTS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Of each anchor's negatives the highest exponent P, and the sum of e = 2^(x - P); with MOMENTS also the sum of
    e * (x - P).

    Writes these to row_parts (2 or 3, tiles of columns, m) and column_parts (2 or 3, tiles of rows, n), and each pair's
    own exponent to own, (m,).
    """
    tile_row, tile_column = tile_of(m, n, BM, BN)
    i, j = tile_row * BM + tl.arange(0, BM), tile_column * BN + tl.arange(0, BN)
    s = products_of(rows, columns, row_stride, column_stride, i, j, m, n, D, BM, BN, BK)
    positives, inverse = tl.load(row_positives + i, i < m, 0.0), tl.load(row_inverse + i, i < m, 0.0)
    if own is not None:
        if has_own(tile_row, tile_column, offset, BM, BN):
            at = i + offset
            product = tl.sum(tl.where(at[:, None] == j[None, :], s, 0.0), 1)
            is_here = (at >= tile_column * BN) & (at < (tile_column + 1) * BN) & (i < m)
            tl.store(own + i, (product - positives) * inverse, is_here)
    s = of_negatives(s, tile_row, tile_column, i, j, m, n, offset, row_keys, column_keys, BM, BN)
    store_sums(s, positives, inverse, row_parts, tile_column, tl.cdiv(n, BN), i, m, MOMENTS, 1)
    if column_parts is not None:
        positives, inverse = tl.load(column_positives + j, j < n, 0.0), tl.load(column_inverse + j, j < n, 0.0)
        store_sums(s, positives, inverse, column_parts, tile_row, tl.cdiv(m, BM), j, n, MOMENTS, 0)


@triton.jit
def join(parts, peaks, totals, moments, tiles, m, ROUNDS: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr):
    """Merge the `parts` (2 or 3, tiles, m) of `sums` into those of earlier tiles, (m,) each."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    peak, total = tl.load(peaks + i, i < m, 0.0), tl.load(totals + i, i < m, 0.0)
    if moments is not None:
        moment = tl.load(moments + i, i < m, 0.0)
    for round in range(ROUNDS):
        tile = round * BT + tl.arange(0, BT)
        part, is_part = parts + tile[:, None] * m + i[None, :], (tile < tiles)[:, None] & (i < m)[None, :]
        others = tl.load(part, is_part, LEAST)
        highest = tl.maximum(peak, tl.max(others, 0))
        lower, all_lower = peak - highest, others - highest[None, :]
        decay, decays = tl.exp2(lower), tl.exp2(all_lower)
        more = tl.load(part + tiles * m, is_part, 0.0)
        if moments is not None:
            some = decays * (tl.load(part + 2 * tiles * m, is_part, 0.0) + more * all_lower)
            moment = decay * (moment + total * lower) + tl.sum(some, 0)
        total = decay * total + tl.sum(decays * more, 0)
        peak = highest
    tl.store(peaks + i, peak, i < m)
    tl.store(totals + i, total, i < m)
    if moments is not None:
        tl.store(moments + i, moment, i < m)


@triton.jit(do_not_specialize=["m", "offset"])
def weights(
    rows, columns, row_stride, column_stride, m, n, offset,
    row_positives, column_positives, row_inverse, column_inverse, row_keys, column_keys,
    row_shift, column_shift, row_factors, column_factors, own, log2_factor, out,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Weights of a tile's pairs in the gradient, of both anchors together: 2^(x + shift), with factors times these.

    Writes out (m, n), the weights times 2^log2_factor. With factors `own`, (m,), is the weight of each pair itself.
    """
    tile_row, tile_column = tile_of(m, n, BM, BN)
    i, j = tile_row * BM + tl.arange(0, BM), tile_column * BN + tl.arange(0, BN)
    s = products_of(rows, columns, row_stride, column_stride, i, j, m, n, D, BM, BN, BK)
    s = of_negatives(s, tile_row, tile_column, i, j, m, n, offset, row_keys, column_keys, BM, BN)
    more = tl.load(log2_factor)
    positives, inverse = tl.load(row_positives + i, i < m, 0.0), tl.load(row_inverse + i, i < m, 0.0)
    shift = tl.load(row_shift + i, i < m, 0.0) + more
    others, other_inverse = tl.load(column_positives + j, j < n, 0.0), tl.load(column_inverse + j, j < n, 0.0)
    other_shift = tl.load(column_shift + j, j < n, 0.0) + more
    weight = tl.exp2(s * inverse[:, None] + (shift - positives * inverse)[:, None])
    other = tl.exp2(s * other_inverse[None, :] + (other_shift - others * other_inverse)[None, :])
    if row_factors is not None:
        weight = weight * tl.load(row_factors + i, i < m, 0.0)[:, None]
        weight += other * tl.load(column_factors + j, j < n, 0.0)[None, :]
        if has_own(tile_row, tile_column, offset, BM, BN):
            of_pairs = tl.load(own + i, i < m, 0.0) * tl.exp2(more)
            weight = tl.where((i + offset)[:, None] == j[None, :], of_pairs[:, None], weight)
    else:
        weight += other
    place = out + i[:, None] * n + j[None, :]
    tl.store(place, weight.to(out.dtype.element_ty), (i < m)[:, None] & (j < n)[None, :])


@triton.jit(do_not_specialize=["m", "offset"])
def sigmoids(
    rows, columns, row_stride, column_stride, m, n, offset, scale, bias, out, row_parts,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """SigLIP's weights: sigmoid(l), and -sigmoid(-l) of a pair itself, with the logit l = scale * s + bias.

    Writes out (m, n), the weights times `SIGMOID_FACTOR`, and row_parts (2, tiles of columns, m): sums of
    -log2 sigmoid(-l), or of the pair itself -log2 sigmoid(l), and of the weights.
    """
    tile_row, tile_column = tile_of(m, n, BM, BN)
    i, j = tile_row * BM + tl.arange(0, BM), tile_column * BN + tl.arange(0, BN)
    s = products_of(rows, columns, row_stride, column_stride, i, j, m, n, D, BM, BN, BK)
    x = s * (tl.load(scale) * (LOG2_E * UNIT)) + tl.load(bias) * LOG2_E
    is_here = has_own(tile_row, tile_column, offset, BM, BN)
    if is_here | ((tile_row + 1) * BM > m) | ((tile_column + 1) * BN > n):
        x = tl.where((i + offset)[:, None] == j[None, :], -x, x)
        x = tl.where((i < m)[:, None] & (j < n)[None, :], x, LEAST)
    u = tl.exp2(-tl.abs(x))  # at most 1
    # log2(1 + u) by a polynomial that differs from it by 3e-7 of it: the logarithm of a sum near 1 loses u's digits.
    series = 0.2561797 + u * (-0.15559997 + u * (0.063787594 - 0.012370643 * u))
    series = u * (1.4426948 + u * (-0.72131073 + u * (0.48007375 + u * (-0.35345468 + u * series))))
    weight = tl.exp2(-series)  # 1 / (1 + u), without a division
    weight = tl.where(x < 0, u * weight, weight)
    if row_parts is not None:
        value = tl.sum(tl.where(x < 0, 0.0, x) + series, 1)
    if is_here:  # after the sum, so that no other tile of values is still needed
        weight = tl.where((i + offset)[:, None] == j[None, :], -weight, weight)
    if row_parts is not None:
        part = row_parts + tile_column * m + i
        tl.store(part, value, i < m)
        tl.store(part + tl.cdiv(n, BN) * m, tl.sum(weight, 1), i < m)
    place = out + i[:, None] * n + j[None, :]
    weight = weight * SIGMOID_FACTOR
    tl.store(place, weight.to(out.dtype.element_ty), (i < m)[:, None] & (j < n)[None, :])
