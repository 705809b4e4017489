"""UniCL, arXiv 2204.03610: an anchor has several positives, the samples with its label.

The mean over them stands outside the logarithm, as SupCon's (arXiv 2004.11362). The same in the global objective is not
from a paper.

A step of a global method with labels y, for example FastCLIP-v3's:

    g, x = unicl_g(e1, e2, tau, y), unicl_shift(e1, e2, tau, y)
    u = sogclr_u(u, g, gamma, eps)
    loss = fastclip_v3(g * x.exp(), tau, u * x.detach().exp(), rho)

and NeuCLIP's neuclip(g * x.exp(), tau, alpha + x, rho, eps * x.detach().exp()). Fast: `SeveralPositives`.
"""

import torch
from torch import Tensor


def _weights(y: Tensor) -> Tensor:
    """Weights of the positives, (B, B): 1 / |P_i| at (i, j) if i and j have the same label, else 0; P_i contains i."""
    same = (y[:, None] == y).double()
    return same / same.sum(dim=1, keepdim=True)


def unicl(e1: Tensor, e2: Tensor, tau: Tensor, y: Tensor) -> Tensor:
    """UniCL's bidirectional loss, 0-d, in CLIP's scale: the mean over both directions and the batch.

    Where all labels differ it is `clip`. Fast: `ChunkedCLIPLoss` with a `positive_key`.

    Args:
        y: labels, (B,).
    """
    logits, p = e1 @ e2.T / tau, _weights(y).to(e1)
    return -(p * logits.log_softmax(dim=1) + p * logits.T.log_softmax(dim=1)).sum(dim=1).mean() / 2


def unicl_objective(e1: Tensor, e2: Tensor, tau: Tensor, y: Tensor, rho: float) -> Tensor:
    """NeuCLIP, Eq. 1, 0-d, without epsilon, where an anchor's value is the mean over its positives k:

        mean_k tau log mean_j exp((s_ij - s_ik) / tau)        j: samples of other labels

    Over a data set it is what the global losses estimate, with P_i the positives in the batch. Every label must have
    negatives.
    """
    s, p = e1 @ e2.T, _weights(y).to(e1)
    counts = (p == 0).to(e1)
    total = 2 * tau * rho
    for side in (s, s.T):
        gaps = side[:, None, :] - side[:, :, None]  # [i, k, j]
        g = ((gaps / tau).exp() * counts[:, None]).sum(dim=2) / counts.sum(dim=1)[:, None]
        total = total + tau * (p * g.log()).sum(dim=1).mean()
    return total


def unicl_g(e1: Tensor, e2: Tensor, tau: Tensor, y: Tensor) -> Tensor:
    """g of every anchor over the batch's samples of other labels, (2, B), without epsilon; 0 where there are none.

    It is relative to the anchor's own pair, as the estimators' u and alpha are. Fast: `SimilarityBlocks` with keys.
    """
    s = e1 @ e2.T
    h = torch.stack([s, s.T]) - s.diagonal()[:, None]
    counts = (y[:, None] != y).to(s)
    return ((h / tau[..., None]).exp() * counts).sum(dim=2) / counts.sum(dim=1).clamp(min=1)


def unicl_shift(e1: Tensor, e2: Tensor, tau: Tensor, y: Tensor) -> Tensor:
    """(s_ii - mean_k s_ik) / tau, (2, B): added to a log-normalizer relative to the anchor's own pair, it makes it one
    relative to the mean of the anchor's positives k."""
    s, p = e1 @ e2.T, _weights(y).to(e1)
    return (s.diagonal() - torch.stack([(p * s).sum(dim=1), (p * s.T).sum(dim=1)])) / tau
