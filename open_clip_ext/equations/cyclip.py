"""CyCLIP, arXiv 2205.14459: CLIP's loss plus terms that make the similarities consistent."""

from torch import Tensor

from open_clip_ext.equations.basics import clip


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
    """The term that `--consistency` adds to `global_contrastive` and its estimates, 0-d; not from a paper.

    CLIP's loss is half of the sum of both directions divided by tau, so that CyCLIP's terms get the factor 2 tau. Fast:
    `GlobalContrastiveLoss`.

    Args:
        tau: the factor of the objective, a constant here: 0-d, (2, B) where each sample has its own, or 1 for
            `fastclip_v0` and `dcl`, whose objectives have none.
        lam: lambda_1 and lambda_2 of CyCLIP.
    """
    inmodal, crossmodal = consistency_terms(e1, e2)
    return 2 * tau.detach().mean() * lam * (inmodal + crossmodal)
