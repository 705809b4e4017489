"""A moving average per sample: SogCLR, iSogCLR, FastCLIP, TuneCLIP."""

import math

from torch import Tensor

from open_clip_ext.equations.basics import gradient_of

# SogCLR: a moving average per sample, fixed temperature


def sogclr_u(u: Tensor, g: Tensor, gamma: float | Tensor, eps: float) -> Tensor:
    """NeuCLIP, Eq. 3: u of the batch's rows after the step, (2, B), a constant for autograd.

    The papers do not give u before a row's first visit; at that visit take gamma = 1. Fast: `MovingAverageTable`.

    Args:
        u: before the step, (2, B).
        gamma: in (0, 1]; a number, (B,) or (2, B) where some rows are visited for the first time.
    """
    return (1 - gamma) * u + gamma * (eps + g.detach())


def sogclr(g: Tensor, tau: Tensor, u: Tensor) -> Tensor:
    """SogCLR's loss, 0-d: its value estimates NeuCLIP, Eq. 1, its gradient in the embeddings is Eq. 4.

    `u` is that after the step. Fast: `Compositional` with `FixedTemperature`.
    """
    eq4 = tau * (g / u).mean(dim=1).sum()
    return tau * u.log().mean(dim=1).sum() + gradient_of(eq4)


# iSogCLR: a temperature for each image and each text


def isogclr_s(s: Tensor, g: Tensor, beta0: float | Tensor) -> Tensor:
    """iSogCLR, Eq. 17-18 (Eq. 12 for two views): s of the batch's rows after the step, (2, B).

    It has no epsilon; the fast `MovingAverageTable` adds 1e-14 to g.
    """
    return (1 - beta0) * s + beta0 * g.detach()


def isogclr_objective(g: Tensor, tau: Tensor, rho: float) -> Tensor:
    """iSogCLR's objective (Appendix B) and FastCLIP-v2's, 0-d, if g is over the whole data set; tau is (2, B)."""
    return (tau * rho + tau * g.log()).mean(dim=1).sum()


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


# FastCLIP: u as in SogCLR, with a gamma that decreases from 1


def fastclip_gamma(epoch: int, gamma_min: float, decay_epochs: int) -> float:
    """FastCLIP's cosine schedule of gamma: 1 in epoch 0, `gamma_min` from epoch `decay_epochs` on.

    Fast: `MovingAverageTable.set_epoch`.
    """
    if epoch >= decay_epochs:
        return gamma_min
    return 0.5 * (1 + math.cos(math.pi * epoch / decay_epochs)) * (1 - gamma_min) + gamma_min


def fastclip_v0(g: Tensor, u: Tensor) -> Tensor:
    """FastCLIP-v0, 0-d: Eq. 1 without the factor tau and without rho; tau is learned. Fast: `UnscaledTemperature`."""
    return u.log().mean(dim=1).sum() + gradient_of((g / u).mean(dim=1).sum())


fastclip_v1 = sogclr
fastclip_v2 = isogclr


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


# TuneCLIP: hinged gaps, fixed temperature


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

    The fast `MovingAverageTable` divides by B - 1 and adds epsilon to u. With an epsilon B / (B - 1) times this one it
    has the same gradient and a value larger by 2 tau log(B / (B - 1)).
    """
    g_t = tau * (phi / (eps + u)).mean(dim=1).sum()
    return tuneclip_objective(u, tau, eps) + gradient_of(g_t)
