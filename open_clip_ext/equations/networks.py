"""NeuCLIP's and AmorLIP's networks, which predict the normalizers, and a queue of embeddings."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from open_clip_ext.equations.basics import batch_g, gaps, gradient_of

# NeuCLIP: a network of prototypes predicts the log-normalizers


def neuclip_alpha(w1: Tensor, w2: Tensor, e1: Tensor, e2: Tensor, tau: Tensor, eps: float) -> Tensor:
    """NeuCLIP, Eq. 10-11: the log-normalizers, (2, B), that the prototypes, (m, d), predict. Fast: `Prototypes`."""
    e, w = normalize(torch.stack([e1, e2]), dim=2), normalize(torch.stack([w1, w2]), dim=2)
    cosines_above_positive = e @ w.mT - (e1 * e2).sum(dim=1)[:, None]
    return (eps + batch_g(cosines_above_positive, tau)).log()


def neuclip(g: Tensor, tau: Tensor, alpha: Tensor, rho: float, eps: float) -> Tensor:
    """NeuCLIP, Eq. 12 on the batch, 0-d; its gradient also goes through alpha. Fast: `Unified`."""
    bound = (-alpha).exp() * (eps + g) + alpha
    return tau * bound.mean(dim=1).sum() + 2 * tau * (rho - 1)


def neuclip_separate(g: Tensor, alpha: Tensor, eps: float) -> Tensor:
    """NeuCLIP, Section 5.2, 0-d: the network's objective in the ablation "Separate" (AmorLIP's). Fast: `L2Log`."""
    return (alpha - (eps + g).log()).square().mean(dim=1).sum() / 2


def neuclip_w(
    w1: Tensor, w2: Tensor, optimizer: torch.optim.Optimizer, e1: Tensor, e2: Tensor, tau: Tensor, t: int, T_r: int,
    T_u: int, eps: float,
) -> None:
    """NeuCLIP, Algorithm 1, lines 3-9: update the prototypes, (m, d), in place at step `t`.

    Lines 10-12 are `neuclip_alpha`, then `neuclip` with its gradient in e1, e2 and tau. A reset takes the last m <= B
    pairs of the batch. The paper does not say what to take where m > B; the fast class takes the latest m pairs of
    several batches. Fast: `NetworkNormalizer`, `Prototypes`.

    Args:
        optimizer: of w1 and w2, such as torch.optim.Adagrad([w1, w2], lr=1.0).
    """
    e1, e2, tau = e1.detach(), e2.detach(), tau.detach()
    if t % T_r == 0:
        w1.data.copy_(e2[-len(w1) :])
        w2.data.copy_(e1[-len(w2) :])
    g = batch_g(gaps(e1, e2), tau)
    for _ in range(T_u):
        optimizer.zero_grad()
        neuclip(g, tau, neuclip_alpha(w1, w2, e1, e2, tau, eps), rho=0.0, eps=eps).backward()
        optimizer.step()


# AmorLIP: networks learn the partition functions, and the encoders divide by them


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


# A queue of the latest embeddings; not from a paper


def queue_alpha(
    texts: Tensor, images: Tensor, g: Tensor, e1: Tensor, e2: Tensor, tau: Tensor, mixing: float, eps: float
) -> Tensor:
    """The queue's log-normalizers mixed with the batch's, (2, B). Fast: `Queue`, `GlobalContrastiveLoss.mixing`.

    The batch's part is a constant.

    Args:
        texts, images: queued embeddings without the batch's own, (k, d) each, k >= 1.
        mixing: weight of the batch, in [0, 1).
    """
    above_positive = torch.stack([e1 @ texts.T, e2 @ images.T]) - (e1 * e2).sum(dim=1)[:, None]
    return (mixing * (eps + g).detach() + (1 - mixing) * (eps + batch_g(above_positive, tau))).log()


queue = neuclip
