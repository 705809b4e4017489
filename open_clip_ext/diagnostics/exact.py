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
from collections.abc import Callable

import torch
from torch import Tensor

from open_clip_ext.batch import add_eps
from open_clip_ext.diagnostics.embeddings import Anchors, Embeddings, Pairs, full_precision
from open_clip_ext.errors import InputError
from open_clip_ext.surrogates import Surrogate

CHUNK_MIB = 64
LEAST_GROUP = 16  # anchors that share a random batch


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
    progress: Callable[[float], object] | None = None,
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
        chunk_mib: size of the one block of similarities that is in memory at a time, in MiB, > 0.
        progress: called after each block with the number of anchors it completes, a fraction; k in all.

    Raises:
        ValueError: shapes, rows, temperatures or `chunk_mib` do not fit; the message names the argument.
    """
    pairs = Pairs(image, text, device)
    taus = _expanded(tau, len(anchors), pairs.device)
    height = max(1, min(len(anchors), math.isqrt(int(chunk_mib * 2**18))))
    sums = []
    with full_precision():
        for index, own_taus in zip(anchors.split(height), taus.split(height, dim=1), strict=True):
            part = Anchors(pairs, index, own_taus, surrogate, intra_modal)
            total = own_taus.new_full(own_taus.shape, -math.inf, dtype=torch.float64)
            for first, columns in pairs.chunks(block_width(chunk_mib, height)):
                count = len(columns[0])
                total = torch.logaddexp(total, part.log_sums(columns, part.own_places(first, count)))
                if progress is not None:
                    progress(len(index) * count / len(pairs))
            sums.append(total)
    return _log_means(sums, len(pairs) - 1, intra_modal, eps)


def _expanded(tau: Tensor | float, count: int, device: torch.device) -> Tensor:
    """Temperatures as (2, count) float32; ValueError if they are of another shape or not above 0."""
    tau = torch.as_tensor(tau, dtype=torch.float32).to(device)
    if tau.dim() and tuple(tau.shape) != (2, count):
        raise ValueError(f"tau must be 0-d or (2, {count}); got {tuple(tau.shape)}")
    if not (tau > 0).all():
        raise ValueError(f"tau must be > 0; got {tau.min().item():g}")
    return tau.expand(2, count)


def _log_means(sums: list[Tensor], others: int, intra_modal: bool, eps: float) -> Tensor:
    """log(eps + g) from parts of the anchors' log-sums over `others` pairs."""
    return add_eps(torch.cat(sums, dim=1) - math.log(others * (2 if intra_modal else 1)), eps)


def block_width(chunk_mib: float, height: int) -> int:
    """Columns of a block of similarities of `height` anchors."""
    if chunk_mib * 2**18 < 1:
        raise ValueError(f"chunk_mib: {chunk_mib} is out of range; it must be at least 2**-18")
    return max(1, int(chunk_mib * 2**18) // height)


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

    The n pairs may also be a batch, for which this is B times the gradient of its Eq. 4, with the estimates of its B
    anchors as alpha. If alpha_i does not depend on the batch, a batch's gradient has the expectation of this function's
    result over all n pairs with the same alpha_i; with the exact alpha_i it is the exact gradient.

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
    pairs = Pairs(image, text, device)
    if tuple(alpha.shape) != (2, len(pairs)):
        raise ValueError(f"alpha must be (2, {len(pairs)}); got {tuple(alpha.shape)}")
    place = pairs.device
    tau = _expanded(tau, len(pairs), place)
    picked = Anchors(pairs, rows, tau[:, rows.to(place)], surrogate, intra_modal)
    # The factors of a weight go into its exponent.
    shift = alpha.to(place, torch.float32) + math.log((2 if intra_modal else 1) * (len(pairs) - 1))
    if scale is not None:
        shift = shift - (torch.as_tensor(scale, dtype=torch.float32).to(place) / tau).log()
    own_tau, own_shift = (values[:, rows.to(place), None] for values in (tau, shift))

    def weights(gaps: Tensor, tau: Tensor, shift: Tensor, own: tuple[Tensor, Tensor]) -> Tensor:
        slope = picked.surrogate.slope(gaps)
        found = picked.surrogate.value(gaps).div_(tau).sub_(shift).exp_().mul_(slope)
        found[own] = 0
        return found

    gradients = torch.zeros(2, len(rows), pairs.dimension, dtype=torch.float64, device=place)
    by_positive = torch.zeros(len(rows), dtype=torch.float64, device=place)
    with full_precision():
        for first, columns in pairs.chunks(block_width(chunk_mib, len(rows))):
            here = slice(first, first + len(columns[0]))
            own = picked.own_places(first, len(columns[0]))
            positives = (columns[0] * columns[1]).sum(dim=1)
            for side, other in picked.sides:
                similarities = picked.embeddings[side] @ columns[other].T
                gaps = similarities - picked.positives[:, None]
                as_anchors = weights(gaps, own_tau[side], own_shift[side], own)
                as_negatives = weights(similarities - positives, tau[other, here], shift[other, here], own)
                gradients[side] += (as_anchors + as_negatives) @ columns[other]
                by_positive += as_anchors.sum(dim=1)
    for gradient, partner in zip(gradients, reversed(picked.embeddings), strict=True):
        gradient.sub_(by_positive[:, None] * partner)
    return gradients


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
    progress: Callable[[float], object] | None = None,
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
    pairs = Pairs(image, text, device)
    if not 2 <= batch_size <= len(pairs):
        raise InputError(f"{batch_size} is out of range; it must be from 2 to the {len(pairs)} pairs", "batch_size")
    taus, size = _expanded(tau, len(anchors), pairs.device), group_size(batch_size)
    sums = []
    with full_precision():
        for index, own_taus in zip(anchors.split(size), taus.split(size, dim=1), strict=True):
            group = Anchors(pairs, index, own_taus, surrogate, intra_modal)
            draw = random.Random(f"{seed} {batch_size} {int(index[0])}")
            batch = torch.tensor(draw.sample(range(len(pairs)), batch_size))
            # Each anchor leaves out its own pair, or the last one if the batch does not have it: B - 1 remain.
            left_out = group.index[:, None] == batch
            left_out[~left_out.any(dim=1), -1] = True
            sums.append(group.log_sums(pairs.take(batch), left_out.to(pairs.device)))
            if progress is not None:
                progress(len(index))
    return _log_means(sums, batch_size - 1, intra_modal, eps)


def group_size(batch_size: int) -> int:
    """Number of anchors that share a random batch of B pairs.

    A batch per anchor would take longer than everything else; few batches would make the mean error uncertain. 10,000
    anchors have 625 batches up to B = 1024 and 157 at 4096.
    """
    return max(LEAST_GROUP, batch_size // 64)
