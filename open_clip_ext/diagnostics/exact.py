"""Exact log-normalizers and the gradient of the global objective, over the whole data set.

Log-normalizers (NeuCLIP, Eq. 1 and 9):

    alpha_1i = log(eps + g_1i),    g_1i = mean over all j != i of exp(l(s_ij - s_ii) / tau_i)    image i as anchor
    alpha_2i = log(eps + g_2i),    g_2i = mean over all j != i of exp(l(s_ji - s_ii) / tau_i)    text i as anchor

for a sample of anchors, as in NeuCLIP, Appendix B.6. `embedding_gradients` is the gradient (Eq. 2). Similarities are
float32, each block is summed in float32, and the blocks in float64, relative to each anchor's largest exponent, so that
no temperature overflows.

Shapes: n = pairs of the data set, k = anchors, d = embedding dimension. Values of both directions are stacked along the
first axis, (2, k), images as anchors first. Embeddings are (n, d) float32 unit vectors: one tensor, or a sequence of
blocks of rows (n_1, d), (n_2, d), ... that may be memory-mapped; image and text have the same blocks.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from open_clip_ext.batch import add_eps
from open_clip_ext.diagnostics.embeddings import Anchors, Embeddings, LogSums, Rows, full_precision
from open_clip_ext.errors import InputError
from open_clip_ext.surrogates import Surrogate

CHUNK_MIB = 64
LEAST_GROUP = 16  # anchors that share a random batch
_GATHERED_ROWS = 1 << 14  # rows of random batches that are read at a time


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: on shared cores, threads wait for each other much longer than many small products take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def exact_log_normalizers(
    image: Embeddings,
    text: Embeddings,
    anchors: Tensor,
    tau: Tensor | float,
    surrogate: Surrogate | None = None,
    eps: float = 1e-14,
    intra_modal: bool = False,
    device: torch.device | str | None = None,
    chunk_mib: float = CHUNK_MIB,
    progress: Callable[[int], object] | None = None,
) -> Tensor:
    """Exact log(eps + g_i) of each anchor over all other pairs, (2, k) float64 (NeuCLIP, Eq. 9).

    Args:
        image, text: the embeddings of the n >= 2 pairs.
        anchors: rows of the anchors, (k,) int64, in any order.
        tau: temperatures > 0, 0-d or (2, k).
        surrogate: l of `open_clip_ext.surrogates`; None: the identity.
        eps: eps of Eq. 1, > 0.
        intra_modal: whether samples of the anchor's own modality are negatives, too.
        device: where to compute; None: where the embeddings are.
        chunk_mib: size of a block of similarities in MiB, > 0. Memory holds one block at a time, the anchors'
            embeddings, and what a custom surrogate allocates.
        progress: called with the number of pairs processed since the last call, n in all.

    Raises:
        ValueError: shapes, rows, temperatures or `chunk_mib` do not fit; the message names the argument.
    """
    rows = (Rows(image, device), Rows(text, device))
    picked = Anchors(*rows, anchors, tau, surrogate, intra_modal)
    sums = LogSums(len(picked), picked.tau.device)
    height, width = _chunk_shape(chunk_mib, len(picked))
    space = torch.empty(height * width, device=picked.tau.device)
    first = 0
    with full_precision():
        for columns in zip(*(side.chunks(width) for side in rows), strict=True):
            count = len(columns[0])
            for start in range(0, len(picked), height):
                part = slice(start, min(start + height, len(picked)))
                own = _own_places(picked.index[part], first, count)
                out = space[: (part.stop - start) * count].view(part.stop - start, count)
                for side, column_sides in picked.sides:
                    for column_side in column_sides:
                        exponents = picked.exponents(side, part, columns[column_side], out)
                        exponents[own] = -math.inf
                        sums.add(side, part, exponents)
            first += count
            if progress is not None:
                progress(count)
    return add_eps(sums.value() - math.log(picked.negatives), eps)


@torch.no_grad()
def embedding_gradients(
    image: Embeddings,
    text: Embeddings,
    rows: Tensor,
    alpha: Tensor,
    tau: Tensor | float,
    scale: Tensor | float | None = None,
    surrogate: Surrogate | None = None,
    intra_modal: bool = False,
    device: torch.device | str | None = None,
    chunk_mib: float = CHUNK_MIB,
) -> Tensor:
    """n times the gradient of the global objective in the embeddings of k pairs, (2, k, d) float64, images first.

    This is NeuCLIP, Eq. 2 with respect to the embeddings instead of the encoders' weights. With

        w_1ij = exp(l(s_ij - s_ii) / tau_1i - alpha_1i) l'(s_ij - s_ii)    image i as anchor, text j as negative
        w_2ij = exp(l(s_ji - s_ii) / tau_2i - alpha_2i) l'(s_ji - s_ii)    text i as anchor, image j as negative

    the gradient in image a's embedding e_1a is

        n dF/de_1a = 1/(n - 1) sum_(j != a) [ w_1aj (e_2j - e_2a) - w_2aj e_2a + w_2ja e_2j ]

    with image a as anchor, as text a's positive, and as a negative of all other texts; for texts, swap the modalities.

    The n pairs may also be a batch: over B random pairs the sum is B times the gradient of the batch's Eq. 4, where
    alpha has the estimates of its B anchors. If row a is in the batch, each other row is in it with probability
    (B - 1)/(n - 1), for which the factor 1/(B - 1) in place of 1/(n - 1) compensates. So if alpha_i does not depend on
    the batch, the conditional expectation of a batch's gradient is this function's result over all n pairs with the
    same alpha_i; with the exact alpha_i it is the exact gradient.

    Args:
        image, text: the embeddings of the n >= 2 pairs.
        rows: the k pairs, as rows of the data set, (k,) int64.
        alpha: log-normalizers of all pairs as anchors, (2, n).
        tau: temperatures > 0 of all pairs, 0-d or (2, n).
        scale: factor of each log(eps + g_i) in the objective, 0-d or (2, n); None: tau, as in Eq. 1.
        surrogate, intra_modal, device, chunk_mib: as in `exact_log_normalizers`.

    Raises:
        ValueError: shapes, rows, temperatures or `chunk_mib` do not fit; the message names the argument.
    """
    sides = (Rows(image, device), Rows(text, device))
    place = sides[0].device
    if tuple(alpha.shape) != (2, len(sides[0])):
        raise ValueError(f"alpha must be (2, {len(sides[0])}); got {tuple(alpha.shape)}")
    tau = torch.as_tensor(tau, dtype=torch.float32).to(place).expand(2, len(sides[0]))
    picked = Anchors(*sides, rows, tau[:, rows.to(place)], surrogate, intra_modal)
    # The factors of a weight go into its exponent.
    shift = alpha.to(place, torch.float32) + math.log(picked.negatives)
    if scale is not None:
        shift = shift - (torch.as_tensor(scale, dtype=torch.float32).to(place) / tau).log()
    own_tau, own_shift = (values[:, rows.to(place), None] for values in (tau, shift))

    def weights(gaps: Tensor, tau: Tensor, shift: Tensor, own: tuple[Tensor, Tensor]) -> Tensor:
        slope = picked.surrogate.slope(gaps)
        found = picked.surrogate.value(gaps).div_(tau).sub_(shift).exp_().mul_(slope)
        found[own] = 0
        return found

    gradients = torch.zeros(2, len(picked), sides[0].dimension, dtype=torch.float64, device=place)
    by_positive = torch.zeros(len(picked), dtype=torch.float64, device=place)
    first, width = 0, _columns(chunk_mib, len(picked))
    with full_precision():
        for columns in zip(*(side.chunks(width) for side in sides), strict=True):
            here = slice(first, first + len(columns[0]))
            own = _own_places(picked.index, first, len(columns[0]))
            positives = (columns[0] * columns[1]).sum(dim=1)
            for side, column_sides in picked.sides:
                for other in column_sides:
                    similarities = picked.embeddings[side] @ columns[other].T
                    gaps = similarities - picked.positives[:, None]
                    as_anchors = weights(gaps, own_tau[side], own_shift[side], own)
                    as_negatives = weights(similarities - positives, tau[other, here], shift[other, here], own)
                    gradients[side] += (as_anchors + as_negatives) @ columns[other]
                    by_positive += as_anchors.sum(dim=1)
            first = here.stop
    for gradient, partner in zip(gradients, reversed(picked.embeddings), strict=True):
        gradient.sub_(by_positive[:, None] * partner)
    return gradients


def _chunk_shape(chunk_mib: float, anchors: int) -> tuple[int, int]:
    """Anchors and columns of a block of similarities."""
    height = max(1, min(anchors, math.isqrt(_elements(chunk_mib))))
    return height, _columns(chunk_mib, height)


def _columns(chunk_mib: float, height: int) -> int:
    """Columns of a block of similarities of `height` anchors."""
    return max(1, _elements(chunk_mib) // height)


def _elements(chunk_mib: float) -> int:
    elements = int(chunk_mib * 2**18)
    if elements < 1:
        raise ValueError(f"chunk_mib: {chunk_mib} is out of range; it must be at least 2**-18")
    return elements


def _own_places(index: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Positions of the anchors' own pairs in a block of the columns `first` .. `first + count - 1`."""
    column = index - first
    place = ((column >= 0) & (column < count)).nonzero()[:, 0]
    return place, column[place]


@torch.no_grad()
def minibatch_log_normalizers(
    image: Embeddings,
    text: Embeddings,
    anchors: Tensor,
    tau: Tensor | float,
    batch_size: int,
    surrogate: Surrogate | None = None,
    eps: float = 1e-14,
    intra_modal: bool = False,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: Callable[[int], object] | None = None,
) -> Tensor:
    """Minibatch estimate of log(eps + g_i) for each anchor, (2, k) float64: Eq. 9 over a random batch of B pairs, the
    anchor and B - 1 others ("Mini-batch Approximation", NeuCLIP, Section 3).

    `group_size(B)` consecutive anchors share a batch, as the anchors of a training step do. Their estimates are
    therefore not independent, but every choice of an anchor's B - 1 others is equally likely. A batch depends only on
    `seed`, B and its group's first anchor. With B = n the estimate is exact.

    Args:
        batch_size: B, from 2 to n.
        seed: of the random batches.
        progress: called with the number of anchors processed since the last call.
        image, text, anchors, tau, surrogate, eps, intra_modal, device: as in `exact_log_normalizers`.

    Raises:
        InputError: B is out of range.
        ValueError: as `exact_log_normalizers`.
    """
    rows = (Rows(image, device), Rows(text, device))
    picked = Anchors(*rows, anchors, tau, surrogate, intra_modal)
    if not 2 <= batch_size <= len(rows[0]):
        raise InputError(f"{batch_size} is out of range; it must be from 2 to the {len(rows[0])} pairs", "batch_size")
    sums = LogSums(len(picked), picked.tau.device)
    size = group_size(batch_size)
    groups = [slice(start, min(start + size, len(picked))) for start in range(0, len(picked), size)]
    at_once = max(1, _GATHERED_ROWS // batch_size)
    with full_precision(), _one_thread():
        for first in range(0, len(groups), at_once):
            parts = groups[first : first + at_once]
            batches = [_draw(len(rows[0]), batch_size, seed, picked.index[part]) for part in parts]
            taken = [side.take(torch.cat(batches)).split(batch_size) for side in rows]
            for part, batch, *columns in zip(parts, batches, *taken, strict=True):
                left_out = _left_out(picked.index[part], batch).to(picked.tau.device)
                out = torch.empty(left_out.shape, device=picked.tau.device)
                for side, column_sides in picked.sides:
                    for column_side in column_sides:
                        exponents = picked.exponents(side, part, columns[column_side], out)
                        sums.add(side, part, exponents.masked_fill_(left_out, -math.inf))
                if progress is not None:
                    progress(part.stop - part.start)
    return add_eps(sums.value() - math.log(len(picked.sides[0][1]) * (batch_size - 1)), eps)


def group_size(batch_size: int) -> int:
    """Number of anchors that share a random batch of B pairs.

    A batch per anchor would take longer than everything else; few batches would make the mean error uncertain. 10,000
    anchors have 625 batches up to B = 1024 and 157 at 4096.
    """
    return max(LEAST_GROUP, batch_size // 64)


def _draw(num_rows: int, batch_size: int, seed: int, group: Tensor) -> Tensor:
    """Draw B rows in random order, (B,), for a group of anchors."""
    draw = random.Random(f"{seed} {batch_size} {int(group[0])}")
    return torch.tensor(draw.sample(range(num_rows), batch_size))


def _left_out(anchors: Tensor, batch: Tensor) -> Tensor:
    """Mask, (g, B), of each anchor's own pair in the batch, or of the last one if it is absent: B - 1 remain."""
    left_out = anchors[:, None] == batch[None, :]
    left_out[~left_out.any(dim=1), -1] = True
    return left_out


@torch.no_grad()
def nearest_rows(
    image: Embeddings,
    text: Embeddings,
    other_image: Tensor,
    other_text: Tensor,
    device: torch.device | str | None = None,
    chunk_mib: float = CHUNK_MIB,
) -> Tensor:
    """Row of the most similar pair of the data set, by the sum of image and text cosines, (m,) int64.

    Args:
        image, text: the embeddings of the n pairs.
        other_image, other_text: the pairs to look up, (m, d) unit vectors, such as their embeddings by older weights.
        device, chunk_mib: as in `exact_log_normalizers`.
    """
    rows = (Rows(image, device), Rows(text, device))
    others = [other.to(rows[0].device, torch.float32) for other in (other_image, other_text)]
    best = torch.full((len(other_image),), -math.inf, device=rows[0].device)
    nearest = torch.zeros(len(other_image), dtype=torch.int64, device=rows[0].device)
    first = 0
    with full_precision():
        for columns in zip(*(side.chunks(_columns(chunk_mib, len(best))) for side in rows), strict=True):
            cosines = torch.addmm(others[0] @ columns[0].T, others[1], columns[1].T)
            highest, place = cosines.max(dim=1)
            nearest = torch.where(highest > best, place + first, nearest)
            best = torch.maximum(best, highest)
            first += len(columns[0])
    return nearest.cpu()
