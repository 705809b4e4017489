"""AmorLIP, arXiv 2505.18983: networks learn the partition functions, and the encoders divide by them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from open_clip_ext.equations.basics import gradient_of


def amorlip_kernel(e1: Tensor, e2: Tensor, scale: Tensor, positive: float = 1.0) -> Tensor:
    """exp(scale <e_1i, e_2j>), (B, B).

    Args:
        scale: 1 / tau, 0-d, OpenCLIP's logit_scale.exp(), which the paper calls tau.
        positive: weight of the anchor's own pair: 1 in the paper, 1e-3 in the authors' released code.
    """
    weights = torch.ones(len(e1), len(e1), dtype=e1.dtype, device=e1.device).fill_diagonal_(positive)
    return weights * (scale * e1 @ e2.T).exp()


def amorlip_z(e1: Tensor, e2: Tensor, scale: Tensor, positive: float = 1.0) -> Tensor:
    """AmorLIP, Eq. 2: the partition function of every anchor over the batch, (2, B)."""
    kernel = amorlip_kernel(e1, e2, scale, positive)
    return torch.stack([kernel.mean(dim=1), kernel.mean(dim=0)])


def amorlip_beta(t: int, T: int, beta_T: float) -> float:
    """AmorLIP, Section 3.3: beta of epoch t = 1, ..., T. Fast: `Amortization.current_beta`."""
    return beta_T - 0.5 * beta_T * (1 + math.cos(math.pi * t / T))


def amorlip_z_comb(z: Tensor, previous: Tensor, beta_t: float) -> Tensor:
    """AmorLIP, Eq. 12, (2, B).

    Args:
        previous: lambda of the target networks at the end of the last epoch, (2, B).
    """
    return beta_t * previous + (1 - beta_t) * z


def kl(t: Tensor) -> Tensor:
    """AmorLIP, Section 2: f of the KL divergence."""
    return t * t.log()


def js(t: Tensor) -> Tensor:
    """AmorLIP, Section 2: f of the Jensen-Shannon divergence."""
    return (t * t.log() - (t + 1) * ((t + 1) / 2).log()) / 2


def amorlip_objective(
    lam: Tensor, z: Tensor, z_comb: Tensor, f: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """AmorLIP's objective of the online networks, 0-d: Eq. 10, or with `f` Eq. 8 plus 0.1 times Eq. 10 (Appendix C).

    Z_comb replaces Z (Section 3.3). Averaged over the batch, Eq. 8's exp(scale <.,.>) / Z_comb is Z / Z_comb.
    Fast: `DIVERGENCES`.
    """
    eq10 = (lam.log() - z_comb.log()).square().mean(dim=1).sum() / 2
    if f is None:
        return eq10
    eq8 = (z / z_comb * f(z_comb / lam)).mean(dim=1).sum()
    return eq8 + 0.1 * eq10


def amorlip_networks(networks: nn.ModuleList, e1: Tensor, e2: Tensor) -> Tensor:
    """AmorLIP, Section 3.2: lambda = exp(MLP(e)), (2, B), with a network for images and one for texts."""
    return torch.stack([network(e) for network, e in zip(networks, (e1, e2), strict=True)]).exp()


def amorlip_lambda(
    online: nn.ModuleList, target: nn.ModuleList, optimizer: torch.optim.Optimizer, e1: Tensor, e2: Tensor, z: Tensor,
    z_comb: Tensor, k: int, T_online: int, T_target: int, T_lambda: int, alpha: float,
    f: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """AmorLIP, Algorithm 1, lines 7-8: update the networks in place at step `k` of an epoch. Fast: `Amortization`.

    Line 4 makes new networks at the start of an epoch; line 6 is `amorlip_z_comb`; line 9 is `amorlip` with lambda of
    the target networks. The paper counts k from 1. Here k starts at 0, so that new networks are trained before use.

    Args:
        optimizer: of the online networks.
        alpha: EMA decay of the target networks, Eq. 11.
    """
    e1, e2, z, z_comb = e1.detach(), e2.detach(), z.detach(), z_comb.detach()
    if k % T_online == 0:
        for _ in range(T_lambda):
            optimizer.zero_grad()
            amorlip_objective(amorlip_networks(online, e1, e2), z, z_comb, f).backward()
            optimizer.step()
    if k % T_target == 0:
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.data = alpha * slow.data + (1 - alpha) * fast.data  # Eq. 11


def amorlip_mle(e1: Tensor, e2: Tensor, scale: Tensor, z: Tensor) -> Tensor:
    """AmorLIP, Eq. 5's first line, 0-d: the objective if Z is over the whole data set."""
    return -2 * scale * (e1 * e2).sum(dim=1).mean() + z.log().mean(dim=1).sum()


def amorlip(e1: Tensor, e2: Tensor, scale: Tensor, lam: Tensor, rho: float, positive: float = 1.0) -> Tensor:
    """AmorLIP, 0-d, with the gradient in e1, e2 and scale of Eq. 6 divided by the constant scale, plus rho / scale
    (Appendix C).

    The value has Eq. 5 in place of Eq. 6. Fast: `AmorLIPLoss`.

    Args:
        lam: lambda of the target networks, (2, B), a constant.
    """
    kernel, lam = amorlip_kernel(e1, e2, scale, positive), lam.detach()
    eq6 = -2 * scale * (e1 * e2).sum(dim=1).mean() + (kernel / lam[0][:, None]).mean() + (kernel / lam[1]).mean()
    value = (amorlip_mle(e1, e2, scale, lam) + rho) / scale
    return value.detach() + gradient_of(eq6 / scale.detach() + rho / scale)
