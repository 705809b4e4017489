"""Triton kernels over the tiles of a block of similarities: a tile's product, and a loss's pass over it in registers.

An anchor's exponent for another pair is x = l(s - p) * t, with its positive's similarity p and its inverse temperature
t; a pair has one of its row's anchor and one of its column's. Sums over a tile are written as parts, (tiles, anchors),
and joined afterwards: no atomics, so that the same input gives the same bits.

Rows (m, D) and columns (n, D) have contiguous vectors; the pair of row i is column i + offset. An argument is None
where its values are not wanted, as the columns' sums where their anchors are another process's. Positions are 32-bit
integers: m * n, and a stride times m or n, must be less than 2^31.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(8)  # rows of tiles that are computed one after another, so that their columns stay in the cache
LEAST = tl.constexpr(-1e30)  # an exponent that is left out: finite, since inf - inf is NaN


@triton.jit
def tile_of(m, n, BM: tl.constexpr, BN: tl.constexpr):
    """Row and column of tiles of this program."""
    rows, columns, at = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.program_id(0)
    first = at // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = at % (GROUP * columns)
    return first + within % height, within // height


@triton.jit
def similarities_of(
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
        products = tl.dot(left, right, products, input_precision="tf32")
    return products


@triton.jit
def value_of(gap, margin, POWER: tl.constexpr):
    """l(gap): the identity where `margin` is None, else a hinge to the power 1 or 2; NaN stays NaN."""
    if margin is not None:
        gap = tl.where(gap < -margin, 0.0, gap + margin)
        if POWER == 2:
            gap = gap * gap
    return gap


@triton.jit
def times_slope(weights, gap, margin, POWER: tl.constexpr):
    """`weights` times dl/ds."""
    if margin is not None:
        if POWER == 2:
            weights = weights * (2 * tl.where(gap < -margin, 0.0, gap + margin))
        else:
            weights = tl.where(gap > -margin, weights, 0.0)
    return weights


@triton.jit
def of_negatives(
    s, tile_row, tile_column, i, j, m, n, offset, row_keys, column_keys, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Similarities (BM, BN) with `LEAST` for pairs that are no negatives: the anchor's own, those with its key, and
    what is beyond the ends."""
    if row_keys is not None:
        keys, others = tl.load(row_keys + i, i < m, 0), tl.load(column_keys + j, j < n, 0)
        s = tl.where(keys[:, None] == others[None, :], LEAST, s)
    if has_own(tile_row, tile_column, offset, BM, BN) | ((tile_row + 1) * BM > m) | ((tile_column + 1) * BN > n):
        s = tl.where((i + offset)[:, None] == j[None, :], LEAST, s)
        s = tl.where((i < m)[:, None] & (j < n)[None, :], s, LEAST)
    return s


@triton.jit
def has_own(tile_row, tile_column, offset, BM: tl.constexpr, BN: tl.constexpr):
    """Whether a row's own column is in the tile."""
    start = tile_row * BM + offset - tile_column * BN
    return (start < BN) & (start + BM > 0)


@triton.jit
def exponents(s, positives, inverse, shift, margin, POWER: tl.constexpr):
    """x + shift; that of `LEAST` gives exp 0."""
    if margin is not None:
        x = tl.where(s < 0.5 * LEAST, LEAST, value_of(s - positives, margin, POWER) * inverse + shift)
    else:
        x = s * inverse + (shift - positives * inverse)
    return x


@triton.jit
def sum_of_exponentials(s, positives, inverse, margin, POWER: tl.constexpr, DIM: tl.constexpr):
    """Along `DIM` the highest exponent, and the sum of exp(x) over that of the highest; x grows with s."""
    top = tl.max(s, DIM)
    peak = value_of(top - positives, margin, POWER) * inverse
    t = tl.expand_dims(inverse, DIM)
    if margin is not None:
        x = exponents(s, tl.expand_dims(positives, DIM), t, tl.expand_dims(-peak, DIM), margin, POWER)
    else:
        x = (s - tl.expand_dims(top, DIM)) * t  # needs fewer registers, and is 0 where s is the highest
    return peak, tl.where(top < 0.5 * LEAST, 0.0, tl.sum(tl.exp(x), DIM))


@triton.jit
def store_parts(parts, first, second, tile, tiles, at, anchors):
    """Write a tile's two sums of anchors `at` into parts (2, tiles, anchors)."""
    part = parts + tile * anchors + at
    tl.store(part, first, at < anchors)
    tl.store(part + tiles * anchors, second, at < anchors)


@triton.jit(do_not_specialize=["m", "offset"])
def sums(
    rows, columns, row_stride, column_stride, m, n, offset,
    row_positives, column_positives, row_inverse, column_inverse, row_keys, column_keys, margin,
    row_parts, column_parts, own,
    POWER: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Of each anchor's negatives the highest exponent, and the sum of exp(x) over that of the highest.

    Writes row_parts (2, tiles of columns, m), column_parts (2, tiles of rows, n), and own, (m,): each pair's own
    exponent.
    """
    tile_row, tile_column = tile_of(m, n, BM, BN)
    i, j = tile_row * BM + tl.arange(0, BM), tile_column * BN + tl.arange(0, BN)
    s = similarities_of(rows, columns, row_stride, column_stride, i, j, m, n, D, BM, BN, BK)
    positives, inverse = tl.load(row_positives + i, i < m, 0.0), tl.load(row_inverse + i, i < m, 0.0)
    if own is not None:
        if has_own(tile_row, tile_column, offset, BM, BN):
            at = i + offset
            similarity = tl.sum(tl.where(at[:, None] == j[None, :], s, 0.0), 1)
            is_here = (at >= tile_column * BN) & (at < (tile_column + 1) * BN) & (i < m)
            tl.store(own + i, value_of(similarity - positives, margin, POWER) * inverse, is_here)
    s = of_negatives(s, tile_row, tile_column, i, j, m, n, offset, row_keys, column_keys, BM, BN)
    peak, total = sum_of_exponentials(s, positives, inverse, margin, POWER, 1)
    store_parts(row_parts, peak, total, tile_column, tl.cdiv(n, BN), i, m)
    if column_parts is not None:
        positives, inverse = tl.load(column_positives + j, j < n, 0.0), tl.load(column_inverse + j, j < n, 0.0)
        peak, total = sum_of_exponentials(s, positives, inverse, margin, POWER, 0)
        store_parts(column_parts, peak, total, tile_row, tl.cdiv(m, BM), j, n)


@triton.jit
def join(parts, peaks, totals, tiles, m, BT: tl.constexpr, BM: tl.constexpr):
    """Merge the `parts` (2, tiles, m) of `sums` into peaks and totals, (m,)."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    peak, total = tl.load(peaks + i, i < m, 0.0), tl.load(totals + i, i < m, 0.0)
    for start in range(0, tiles, BT):
        tile = start + tl.arange(0, BT)
        part, here = parts + tile[:, None] * m + i[None, :], (tile < tiles)[:, None] & (i < m)[None, :]
        some = tl.load(part, here, LEAST)
        highest = tl.maximum(peak, tl.max(some, 0))
        more = tl.load(part + tiles * m, here, 0.0) * tl.exp(some - highest[None, :])
        total = total * tl.exp(peak - highest) + tl.sum(more, 0)
        peak = highest
    tl.store(peaks + i, peak, i < m)
    tl.store(totals + i, total, i < m)


@triton.jit
def weights_of(s, positives, inverse, shift, margin, POWER: tl.constexpr, DIM: tl.constexpr):
    """exp(x + shift) dl/ds, and along `DIM` their sums and those of exp(x + shift) x."""
    p, t = tl.expand_dims(positives, DIM), tl.expand_dims(inverse, DIM)
    weights = tl.exp(exponents(s, p, t, tl.expand_dims(shift, DIM), margin, POWER))
    if margin is not None:
        terms = tl.sum(weights * value_of(s - p, margin, POWER), DIM) * inverse
        weights = times_slope(weights, s - p, margin, POWER)
        total = tl.sum(weights, DIM)
    else:
        total = tl.sum(weights, DIM)
        terms = (tl.sum(weights * s, DIM) - positives * total) * inverse
    return weights, total, terms


@triton.jit(do_not_specialize=["m", "offset"])
def weights(
    rows, columns, row_stride, column_stride, m, n, offset,
    row_positives, column_positives, row_inverse, column_inverse, row_keys, column_keys, margin,
    row_shift, column_shift, row_factors, column_factors, own, out, row_parts, column_parts,
    POWER: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Weights of a tile's pairs in the gradient, of both anchors together: exp(x + shift) dl/ds, or with factors
    exp(x + shift) factor.

    Writes out (m, n). Without factors also row_parts (2, tiles of columns, m) and column_parts (2, tiles of rows, n):
    sums of an anchor's weights, and of exp(x + shift) x. With factors `own`, (m,), is the weight of each pair itself.
    """
    tile_row, tile_column = tile_of(m, n, BM, BN)
    i, j = tile_row * BM + tl.arange(0, BM), tile_column * BN + tl.arange(0, BN)
    s = similarities_of(rows, columns, row_stride, column_stride, i, j, m, n, D, BM, BN, BK)
    s = of_negatives(s, tile_row, tile_column, i, j, m, n, offset, row_keys, column_keys, BM, BN)
    positives, inverse = tl.load(row_positives + i, i < m, 0.0), tl.load(row_inverse + i, i < m, 0.0)
    shift = tl.load(row_shift + i, i < m, 0.0)
    weight, total, terms = weights_of(s, positives, inverse, shift, margin, POWER, 1)
    if row_parts is not None:
        store_parts(row_parts, total, terms, tile_column, tl.cdiv(n, BN), i, m)
    if row_factors is not None:
        weight = weight * tl.load(row_factors + i, i < m, 0.0)[:, None]
    positives, inverse = tl.load(column_positives + j, j < n, 0.0), tl.load(column_inverse + j, j < n, 0.0)
    shift = tl.load(column_shift + j, j < n, 0.0)
    other, total, terms = weights_of(s, positives, inverse, shift, margin, POWER, 0)
    if column_parts is not None:
        store_parts(column_parts, total, terms, tile_row, tl.cdiv(m, BM), j, n)
    if column_factors is not None:
        other = other * tl.load(column_factors + j, j < n, 0.0)[None, :]
    weight += other
    if own is not None:
        if has_own(tile_row, tile_column, offset, BM, BN):
            weight = tl.where((i + offset)[:, None] == j[None, :], tl.load(own + i, i < m, 0.0)[:, None], weight)
    place = out + i[:, None] * n + j[None, :]
    tl.store(place, weight.to(out.dtype.element_ty), (i < m)[:, None] & (j < n)[None, :])


@triton.jit(do_not_specialize=["m", "offset"])
def sigmoids(
    rows, columns, row_stride, column_stride, m, n, offset, scale, bias, out, row_parts,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """SigLIP's weights: sigmoid(l), and -sigmoid(-l) of a pair itself, with the logit l = scale * s + bias.

    Writes out (m, n) and row_parts (2, tiles of columns, m): sums of -log sigmoid(-l), or of the pair itself
    -log sigmoid(l), and of the weights.
    """
    tile_row, tile_column = tile_of(m, n, BM, BN)
    i, j = tile_row * BM + tl.arange(0, BM), tile_column * BN + tl.arange(0, BN)
    s = similarities_of(rows, columns, row_stride, column_stride, i, j, m, n, D, BM, BN, BK)
    x = s * tl.load(scale) + tl.load(bias)
    is_own, is_pair = (i + offset)[:, None] == j[None, :], (i < m)[:, None] & (j < n)[None, :]
    x = tl.where(is_own, -x, x)
    small = tl.exp(-tl.abs(x))  # at most 1
    weight = tl.where(x < 0, small, 1.0) / (1 + small)
    weight = tl.where(is_own, -weight, weight)
    if row_parts is not None:
        # log(1 + small) = 2 artanh(z): its series, since the logarithm of a sum near 1 would lose small's digits.
        z = small / (2 + small)
        q = z * z
        series = 1 / 11 + q * (1 / 13 + q / 15)
        series = 1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * series))))
        value = tl.where(x < 0, 0.0, x) + 2 * z * series
        value, weight_sum = tl.sum(tl.where(is_pair, value, 0.0), 1), tl.sum(tl.where(is_pair, weight, 0.0), 1)
        store_parts(row_parts, value, weight_sum, tile_column, tl.cdiv(n, BN), i, m)
    place = out + i[:, None] * n + j[None, :]
    tl.store(place, weight.to(out.dtype.element_ty), is_pair)
