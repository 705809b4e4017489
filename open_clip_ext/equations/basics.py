"""Shared by all methods: similarity gaps, the batch's normalizers, the global objective, CLIP and SigLIP."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid


def gaps(e1: Tensor, e2: Tensor) -> Tensor:
    """h: s_ij - s_ii over j != i for image i as anchor, s_ji - s_ii for text i, (2, B, B - 1)."""
    s = e1 @ e2.T
    h = torch.stack([s, s.T]) - s.diagonal()[:, None]
    is_negative = ~torch.eye(len(s), dtype=torch.bool, device=s.device)
    return h[:, is_negative].view(2, len(s), len(s) - 1)


def batch_g(h: Tensor, tau: Tensor) -> Tensor:
    """g_1 and g_2 of every anchor over the batch, (2, B), without epsilon: NeuCLIP, Eq. 1's underbraces.

    With one temperature per sample: iSogCLR, Eq. 15-16. Fast: `SimilarityBlocks.log_batch_normalizers`.
    """
    return (h / tau[..., None]).exp().mean(dim=2)


def global_contrastive(g: Tensor, tau: Tensor, rho: float, eps: float) -> Tensor:
    """NeuCLIP, Eq. 1, 0-d: the objective of SogCLR and FastCLIP-v1 (with rho 0), FastCLIP-v3 and NeuCLIP.

    The paper's g is over the whole data set; the batch's g gives the minibatch objective. Fast: `BatchNormalizer`.
    """
    return tau * (eps + g).log().mean(dim=1).sum() + 2 * tau * rho


def gradient_of(x: Tensor) -> Tensor:
    """A zero that has the gradient of `x`: added to a reported value, it leaves the value and adds the gradient."""
    return x - x.detach()


def clip(e1: Tensor, e2: Tensor, tau: Tensor) -> Tensor:
    """CLIP, Figure 3, 0-d: the mean of both cross-entropies. Fast: `ChunkedCLIPLoss`."""
    logits = e1 @ e2.T / tau
    pairs = torch.arange(len(e1), device=e1.device)
    return (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)) / 2


def siglip(e1: Tensor, e2: Tensor, tau: Tensor, bias: Tensor) -> Tensor:
    """SigLIP, Eq. 1, 0-d: each pair by itself, as a match or not. Fast: `ChunkedSigLIPLoss`."""
    signs = 2 * torch.eye(len(e1), dtype=e1.dtype, device=e1.device) - 1
    return -logsigmoid(signs * (e1 @ e2.T / tau + bias)).sum() / len(e1)
