"""SogCLR, PMLR 162 (as NeuCLIP prints it): a moving average per sample, and a fixed temperature."""

from torch import Tensor

from open_clip_ext.equations.basics import gradient_of


def sogclr_u(u: Tensor, g: Tensor, gamma: float | Tensor, eps: float) -> Tensor:
    """NeuCLIP, Eq. 3: u of the batch's rows after the step, (2, B), a constant for autograd.

    The papers do not give u before a row's first visit, except TuneCLIP's Algorithm 1, 0; at that visit take gamma = 1.
    Fast: `MovingAverageTable`.

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
