"""TuneCLIP, arXiv 2601.09859: hinged gaps and a fixed temperature. Its Algorithm 1 (OSR) is `recovery`."""

from torch import Tensor

from open_clip_ext.equations.basics import gradient_of


def tuneclip_phi(h: Tensor, tau: Tensor, m: float) -> Tensor:
    """TuneCLIP, Eq. 8 over the batch, (2, B): the sum over B - 1 negatives is divided by B. Fast: `PowerHinge`."""
    hinged = (h + m).clamp(min=0).square()
    return (hinged / tau).exp().sum(dim=2) / h.shape[1]


def tuneclip_objective(phi: Tensor, tau: Tensor, eps: float) -> Tensor:
    """TuneCLIP, Eq. 9, 0-d: the objective if phi is over the whole data set."""
    return tau * (eps + phi).log().mean(dim=1).sum()


def tuneclip_u(u: Tensor, phi: Tensor, gamma: float | Tensor) -> Tensor:
    """TuneCLIP, Algorithm 2: u of the batch's rows after the step, (2, B), without epsilon, which `tuneclip` adds."""
    return (1 - gamma) * u + gamma * phi.detach()


def tuneclip(phi: Tensor, tau: Tensor, u: Tensor, eps: float) -> Tensor:
    """TuneCLIP's loss, 0-d: its value estimates Eq. 9, its gradient in the embeddings is Algorithm 2's.

    The fast `MovingAverageTable` adds epsilon to u instead and divides by B - 1: the same up to a constant, see
    `open_clip_ext.equations`.
    """
    g_t = tau * (phi / (eps + u)).mean(dim=1).sum()
    return tuneclip_objective(u, tau, eps) + gradient_of(g_t)
