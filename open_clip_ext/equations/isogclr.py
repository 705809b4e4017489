"""iSogCLR, PMLR 202: a moving average and a temperature for each image and each text."""

import torch
from torch import Tensor

from open_clip_ext.equations.basics import gradient_of


def two_view_gaps(e1: Tensor, e2: Tensor) -> Tensor:
    """h for two views of images, (2, B, 2 (B - 1)): the negatives are both views of the other images.

    iSogCLR, Eq. 3 and the set B_i of Eq. 11, for either view as the anchor.
    """
    s = torch.stack([e1, e2]) @ torch.cat([e1, e2]).T
    h = s - (e1 * e2).sum(dim=1)[:, None]
    is_negative = ~torch.eye(len(e1), dtype=torch.bool, device=s.device).repeat(1, 2)
    return h[:, is_negative].view(2, len(e1), 2 * (len(e1) - 1))


def isogclr_objective(g: Tensor, tau: Tensor, rho: float) -> Tensor:
    """iSogCLR's objective (Appendix B) and FastCLIP-v2's, 0-d, if g is over the whole data set; tau is (2, B)."""
    return (tau * rho + tau * g.log()).mean(dim=1).sum()


def isogclr_s(s: Tensor, g: Tensor, beta0: float | Tensor) -> Tensor:
    """iSogCLR, Eq. 17-18 (Eq. 12 for two views): s of the batch's rows after the step, (2, B).

    It has no epsilon; the fast `MovingAverageTable` adds 1e-14 to g.
    """
    return (1 - beta0) * s + beta0 * g.detach()


def isogclr(g: Tensor, tau: Tensor, s: Tensor, rho: float) -> Tensor:
    """iSogCLR's loss, 0-d: its gradient is Eq. 21 in the embeddings and Eq. 19-20 in tau, with 1/B in place of 1/n.

    The value estimates `isogclr_objective`. Eq. 13-14 and 19-21 print s before the step. Here it is s after the step:
    Algorithm 2 updates s first, and Lemma 5 compares g with s after the step. Fast: `IndividualTemperature`.

    Args:
        tau: of the batch's rows before the step, (2, B).
        s: after the step, (2, B).
    """
    eq21 = (tau.detach() / s * g).mean(dim=1).sum()
    return (tau * (s.log() + rho)).mean(dim=1).sum() + gradient_of(eq21)


def isogclr_tau(
    tau: Tensor, u: Tensor, gradient: Tensor, beta1: float, eta: float, tau_0: float, tau_max: float
) -> tuple[Tensor, Tensor]:
    """iSogCLR, Algorithm 2, lines 8-9: the rows' temperatures and their momentum u after the step, (2, B) each.

    The authors' code clips the gradient at 5, which the paper does not mention. Nor does it give u before a row's first
    visit: here 0.

    Args:
        gradient: G(tau) of Eq. 19-20 without 1/n, (2, B).
    """
    u = (1 - beta1) * u + beta1 * gradient.clamp(-5, 5)
    return (tau - eta * u).clamp(tau_0, tau_max), u
