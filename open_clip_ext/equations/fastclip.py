"""FastCLIP, arXiv 2407.01445: SogCLR with a gamma that decreases from 1, and four ways to treat the temperature."""

import math

from torch import Tensor

from open_clip_ext.equations.basics import gradient_of
from open_clip_ext.equations.isogclr import isogclr
from open_clip_ext.equations.sogclr import sogclr


def fastclip_gamma(epoch: int, gamma_min: float, decay_epochs: int) -> float:
    """FastCLIP's cosine schedule of gamma: 1 in epoch 0, `gamma_min` from epoch `decay_epochs` on.

    The moving average is `sogclr_u` with this gamma. Fast: `MovingAverageTable.set_epoch`.
    """
    if epoch >= decay_epochs:
        return gamma_min
    return 0.5 * (1 + math.cos(math.pi * epoch / decay_epochs)) * (1 - gamma_min) + gamma_min


def fastclip_v0(g: Tensor, u: Tensor) -> Tensor:
    """FastCLIP-v0, 0-d: Eq. 1 without the factor tau and without rho; tau is learned. Fast: `UnscaledTemperature`."""
    return u.log().mean(dim=1).sum() + gradient_of((g / u).mean(dim=1).sum())


fastclip_v1 = sogclr  # with tau fixed
fastclip_v2 = isogclr  # with tau from `fastclip_v2_tau`


def fastclip_v2_tau(
    tau: Tensor, m: Tensor, v: Tensor, gradient: Tensor, epoch: int, eta: float, tau_0: float, tau_max: float
) -> tuple[Tensor, Tensor, Tensor]:
    """FastCLIP-v2's temperatures after a step, as in its released code: tau and Adam's m and v, (2, B) each.

    Adam per row, with betas of 0 in epoch 0 and a bias correction that counts epochs instead of steps.

    Args:
        gradient: as in `isogclr_tau`.
    """
    beta1, beta2 = (0.9, 0.999) if epoch > 0 else (0.0, 0.0)
    gradient = gradient.clamp(-5, 5)
    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient.square()
    m_hat, v_hat = m / (1 - beta1 ** (epoch + 1)), v / (1 - beta2 ** (epoch + 1))
    return (tau - eta * m_hat / (v_hat.sqrt() + 1e-8)).clamp(tau_0, tau_max), m, v


def fastclip_v3(g: Tensor, tau: Tensor, u: Tensor, rho: float) -> Tensor:
    """NeuCLIP, Algorithm 2, 0-d: its value estimates Eq. 1, its gradient is Eq. 4 in the embeddings, Eq. 13 in tau.

    Fast: `Compositional` with `LearnableTemperature`.
    """
    eq13_first_line = u.log().mean(dim=1).sum() + 2 * rho
    eq4 = tau.detach() * (g / u).mean(dim=1).sum()  # its gradient in tau is the other lines of Eq. 13
    return tau * eq13_first_line + gradient_of(eq4)
