"""NeuCLIP, arXiv 2511.08417: a network of prototypes (NPN) predicts the log-normalizers; one objective trains both."""

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from open_clip_ext.equations.basics import batch_g, gaps


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

    A reset takes the last m <= B pairs of the batch. The paper does not say what to take where m > B; the fast class
    takes the latest m pairs of several batches. Fast: `NPN`, `Prototypes`.

    Args:
        optimizer: of w1 and w2, such as torch.optim.Adagrad([w1, w2], lr=1.0).
    """
    e1, e2, tau = e1.detach(), e2.detach(), tau.detach()
    if t % T_r == 0:  # line 3
        w1.data.copy_(e2[-len(w1) :])  # line 4
        w2.data.copy_(e1[-len(w2) :])
    g = batch_g(gaps(e1, e2), tau)
    for _ in range(T_u):  # line 6
        optimizer.zero_grad()
        neuclip(g, tau, neuclip_alpha(w1, w2, e1, e2, tau, eps), rho=0.0, eps=eps).backward()  # line 7
        optimizer.step()  # line 8


def neuclip_algorithm_1(
    image_encoder: nn.Module, text_encoder: nn.Module, images: Tensor, texts: Tensor, tau: Tensor,
    optimizer: torch.optim.Optimizer, w1: Tensor, w2: Tensor, npn_optimizer: torch.optim.Optimizer, batch_size: int,
    T: int, T_r: int, T_u: int, rho: float, eps: float,
) -> list[float]:
    """NeuCLIP, Algorithm 1, whole: train the encoders, tau and the prototypes for T steps, in place.

    Args:
        image_encoder, text_encoder: (B, ...) to (B, d).
        images, texts: the data set S, (n, ...) each.
        tau: a leaf that requires a gradient.
        optimizer: of the encoders and tau; npn_optimizer: of the prototypes w1 and w2, (m, d), m <= batch_size.

    Returns:
        Eq. 12 on each step's batch.
    """
    values = []
    for t in range(T):  # line 1
        batch = torch.randperm(len(images))[:batch_size]  # line 2
        e1, e2 = normalize(image_encoder(images[batch]), dim=1), normalize(text_encoder(texts[batch]), dim=1)
        neuclip_w(w1, w2, npn_optimizer, e1, e2, tau, t, T_r, T_u, eps)  # lines 3-9
        alpha = neuclip_alpha(w1.detach(), w2.detach(), e1, e2, tau, eps)  # line 10
        objective = neuclip(batch_g(gaps(e1, e2), tau), tau, alpha, rho, eps)
        optimizer.zero_grad()
        objective.backward()  # line 11
        optimizer.step()  # line 12
        values.append(objective.item())
    return values
