"""Exact log-normalizers over the whole data set (NeuCLIP, Eq. 1 and 9):

    alpha_1i = log(eps + g_1i),    g_1i = mean over all j != i of exp(l(s_ij - s_ii) / tau_i)    image i as anchor
    alpha_2i = log(eps + g_2i),    g_2i = mean over all j != i of exp(l(s_ji - s_ii) / tau_i)    text i as anchor

for a sample of anchors, as in NeuCLIP, Appendix B.6. Similarities are float32, each block is summed in float32, and the
blocks in float64, relative to each anchor's largest exponent, so that no temperature overflows.

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
            for start, columns in pairs.chunks(block_width(chunk_mib, height)):
                count = len(columns[0])
                total = torch.logaddexp(total, part.log_sums(columns, part.positives_among(start, count)))
                if progress is not None:
                    progress(len(index) * count / len(pairs))
            sums.append(total)
    return _log_means(sums, len(pairs) - 1, intra_modal, eps)


def _expanded(tau: Tensor | float, count: int, device: torch.device) -> Tensor:
    """Expand `tau` to (2, count) float32; ValueError if it has another shape or a value is not above 0."""
    tau = torch.as_tensor(tau, dtype=torch.float32).to(device)
    if tau.dim() and tuple(tau.shape) != (2, count):
        raise ValueError(f"tau must be 0-d or (2, {count}); got {tuple(tau.shape)}")
    if not (tau > 0).all():
        raise ValueError(f"tau must be > 0; got {tau.min().item():g}")
    return tau.expand(2, count)


def _log_means(sums: list[Tensor], num_pairs: int, intra_modal: bool, eps: float) -> Tensor:
    """log(eps + g), (2, k), from the log-sums of groups of anchors over the negatives in `num_pairs` pairs."""
    return add_eps(torch.cat(sums, dim=1) - math.log(num_pairs * (2 if intra_modal else 1)), eps)


def block_width(chunk_mib: float, height: int) -> int:
    """Number of columns with which a block of similarities with `height` rows takes `chunk_mib` MiB."""
    if chunk_mib * 2**18 < 1:
        raise ValueError(f"chunk_mib: {chunk_mib} is out of range; it must be at least 2**-18")
    return max(1, int(chunk_mib * 2**18) // height)


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
    `seed`, B and the first anchor of its group. With B = n the estimate is exact.

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
