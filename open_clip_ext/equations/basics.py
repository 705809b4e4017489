"""Similarity gaps and the batch's normalizers, which all methods use; CLIP, CyCLIP and DCL."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def gaps(e1: Tensor, e2: Tensor) -> Tensor:
    """h: s_ij - s_ii over j != i for image i as anchor, s_ji - s_ii for text i, (2, B, B - 1)."""
    s = e1 @ e2.T
    h = torch.stack([s, s.T]) - s.diagonal()[:, None]
    others = ~torch.eye(len(s), dtype=torch.bool, device=s.device)
    return h[:, others].view(2, len(s), len(s) - 1)


def two_view_gaps(e1: Tensor, e2: Tensor) -> Tensor:
    """h for two views of images, (2, B, 2 (B - 1)): the negatives are both views of the other images.

    iSogCLR, Eq. 3 and the set B_i of Eq. 11, for either view as the anchor.
    """
    s = torch.stack([e1, e2]) @ torch.cat([e1, e2]).T
    h = s - (e1 * e2).sum(dim=1)[:, None]
    others = ~torch.eye(len(e1), dtype=torch.bool, device=s.device).repeat(1, 2)
    return h[:, others].view(2, len(e1), 2 * (len(e1) - 1))


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


# CLIP, CyCLIP and DCL


def clip(e1: Tensor, e2: Tensor, tau: Tensor) -> Tensor:
    """CLIP, Figure 3, 0-d: the mean of both cross-entropies. TuneCLIP, Eq. 1 and AmorLIP, Eq. 3 are their sum."""
    logits = e1 @ e2.T / tau
    pairs = torch.arange(len(e1), device=e1.device)
    return (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)) / 2


def consistency_terms(e1: Tensor, e2: Tensor) -> tuple[Tensor, Tensor]:
    """CyCLIP, Section 3: the in-modal and the cross-modal consistency divided by B, 0-d each."""
    cross = e1 @ e2.T
    inmodal = (e1 @ e1.T - e2 @ e2.T).square().sum() / len(e1)
    crossmodal = (cross - cross.T).square().sum() / len(e1)
    return inmodal, crossmodal


def cyclip(e1: Tensor, e2: Tensor, tau: Tensor, lambda1: float = 0.25, lambda2: float = 0.25) -> Tensor:
    """CyCLIP, Section 3, 0-d: CLIP's loss plus in-modal and cross-modal consistency. Fast: `CyCLIPLoss`."""
    inmodal, crossmodal = consistency_terms(e1, e2)
    return clip(e1, e2, tau) + lambda1 * inmodal + lambda2 * crossmodal


def consistency(e1: Tensor, e2: Tensor, tau: Tensor, lam: float) -> Tensor:
    """What `--consistency` adds to `global_contrastive` and its estimates, 0-d; not from a paper.

    CLIP's loss is half of the sum of both directions divided by tau, so that CyCLIP's terms get the factor 2 tau. Fast:
    `GlobalContrastiveLoss`.

    Args:
        tau: the factor of the objective, a constant here: 0-d, (2, B) where each sample has its own, or 1 for
            `fastclip_v0` and `dcl`, whose objectives have none.
        lam: lambda_1 and lambda_2 of CyCLIP.
    """
    inmodal, crossmodal = consistency_terms(e1, e2)
    return 2 * tau.detach().mean() * lam * (inmodal + crossmodal)


def dcl(e1: Tensor, e2: Tensor, tau: Tensor) -> Tensor:
    """DCL's loss, 0-d, with images and texts as the two views: CLIP's without the positive in the denominator.

    The means of both directions are summed; the negatives are of the other modality. With the mean over the negatives
    in place of their sum it is `fastclip_v0` with the batch's own g and without epsilon: `--loss dcl` reports that
    value, 2 log(B - 1) less. Fast: `UnscaledTemperature` with `BatchNormalizer`.
    """
    s = e1 @ e2.T / tau
    negatives = s.masked_fill(torch.eye(len(s), dtype=torch.bool, device=s.device), -torch.inf)
    return (-2 * s.diagonal() + negatives.logsumexp(dim=1) + negatives.logsumexp(dim=0)).mean()
