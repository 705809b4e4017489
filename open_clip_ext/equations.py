"""Every method as its paper prints it: plain PyTorch with autograd, on one process. Read this first.

These functions are slow and overflow in float32; the losses of `create_loss` do neither, and the tests hold them to
these functions in float64. `python -m open_clip_ext.equations` computes every method on eight pairs.

A step of a method is three lines:

    g = batch_g(gaps(e1, e2), tau)         the batch's estimate of each anchor's normalizer
    u = sogclr_u(u, g, gamma, eps)         the estimate over the whole data set moves: state in, state out
    loss = fastclip_v3(g, tau, u, rho)     a scalar whose gradient by autograd is the paper's

method      | functions here, in the order of a step  | fast classes                              | test_*.py
----------- | --------------------------------------- | ----------------------------------------- | ------------------
clip        | clip                                    | open_clip.loss.ClipLoss                   | equations
cyclip      | cyclip                                  | CyCLIPLoss                                | cyclip
sogclr      | sogclr_u, sogclr                        | MovingAverageTable, FixedTemperature      | temperature
isogclr     | isogclr_s, isogclr, isogclr_tau         | MovingAverageTable, IndividualTemperature | temperature
fastclip-v0 | sogclr_u, fastclip_v0                   | MovingAverageTable, UnscaledTemperature   | temperature
fastclip-v1 | sogclr_u, fastclip_v1                   | MovingAverageTable, FixedTemperature      | temperature
fastclip-v2 | sogclr_u, fastclip_v2, fastclip_v2_tau  | MovingAverageTable, IndividualTemperature | temperature
fastclip-v3 | sogclr_u, fastclip_v3                   | MovingAverageTable, LearnableTemperature  | global_contrastive
neuclip     | neuclip_w                               | Prototypes                                | prototypes
neuclip     | neuclip_alpha, neuclip                  | Prototypes, Unified                       | global_contrastive
amorlip     | amorlip_z, amorlip_lambda, amorlip      | Amortization, AmorLIPLoss                 | amorlip
tuneclip    | tuneclip_phi, tuneclip_u, tuneclip      | MovingAverageTable, PowerHinge            | temperature
queue       | queue_u, queue                          | Queue                                     | queue

The last column names the file of tests/open_clip_ext that holds the two together. `test_equations.py` holds the
functions here to double loops over the pairs. "Fast" in a docstring is what computes the same in training.

in the papers                                              | here
---------------------------------------------------------- | ---------------------------------------------------
e_1i, e_2i; psi_I, psi_T: embeddings of image i and text i | e1, e2: (B, d), unit vectors
s_ij = <e_1i, e_2j>                                        | e1 @ e2.T
h_i: similarity of a negative less that of the positive    | h: (2, B, B - 1); [0] images as anchors, [1] texts
g_1i, g_2i; Phi_1, Phi_2                                   | g, phi: (2, B)
u_1i, u_2i; s_v,i, s_t,i: moving averages                  | u, s: (2, B), the batch's rows of the table
alpha_1i, alpha_2i; lambda_I, lambda_T                     | alpha, lam: (2, B)
W_1, W_2: prototypes, the columns of a (d, m) matrix       | w1, w2: (m, d)
tau, tau_v,i, tau_t,i: temperatures                        | tau: 0-d, or (2, B) where each sample has its own
tau of AmorLIP, an inverse temperature                     | s: 0-d
S, D: the data set; B: the mini-batch                      | what e1 and e2 hold

Sources: CLIP, arXiv 2103.00020. CyCLIP, arXiv 2205.14459. SogCLR, PMLR 162; its equations and those of FastCLIP, arXiv
2407.01445, are cited as NeuCLIP prints them. iSogCLR, PMLR 202. NeuCLIP, arXiv 2511.08417. AmorLIP, arXiv 2505.18983.
TuneCLIP, arXiv 2601.09859. Where a paper is silent the docstring says what is done here.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize


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
    """g_1 and g_2 of every anchor over the batch, (2, B): NeuCLIP, Eq. 1's underbraces, without epsilon as in Eq. 2-5.

    With a temperature for each sample, iSogCLR, Eq. 15-16. Fast: `SimilarityBlocks.log_batch_normalizers`.
    """
    return (h / tau[..., None]).exp().mean(dim=2)


def global_contrastive(g: Tensor, tau: Tensor, rho: float, eps: float) -> Tensor:
    """NeuCLIP, Eq. 1, 0-d: the objective of SogCLR and FastCLIP-v1 (with rho 0), FastCLIP-v3 and NeuCLIP.

    There g is over the whole data set. With the batch's g it is the minibatch objective. Fast: `BatchNormalizer`.
    """
    return tau * (eps + g).log().mean(dim=1).sum() + 2 * tau * rho


def gradient_of(x: Tensor) -> Tensor:
    """0 with the gradient of `x`, for gradients that are not those of the value to report."""
    return x - x.detach()


# CLIP and CyCLIP


def clip(e1: Tensor, e2: Tensor, tau: Tensor) -> Tensor:
    """CLIP, Figure 3, 0-d: both cross entropies, halved. TuneCLIP, Eq. 1 and AmorLIP, Eq. 3 are their sum."""
    logits = e1 @ e2.T / tau
    pairs = torch.arange(len(e1), device=e1.device)
    return (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)) / 2


def cyclip(e1: Tensor, e2: Tensor, tau: Tensor, lambda1: float = 0.25, lambda2: float = 0.25) -> Tensor:
    """CyCLIP, Section 3, 0-d: CLIP's loss, the in-modal and the cross-modal consistency. Fast: `CyCLIPLoss`."""
    cross = e1 @ e2.T
    inmodal = (e1 @ e1.T - e2 @ e2.T).square().sum() / len(e1)
    crossmodal = (cross - cross.T).square().sum() / len(e1)
    return clip(e1, e2, tau) + lambda1 * inmodal + lambda2 * crossmodal


# SogCLR: a moving average per sample, fixed temperature


def sogclr_u(u: Tensor, g: Tensor, gamma: float | Tensor, eps: float) -> Tensor:
    """NeuCLIP, Eq. 3: u of the batch's rows after the step, (2, B), a constant for autograd.

    The papers do not say what u is before a row's first visit: here gamma is 1 then. Fast: `MovingAverageTable`.

    Args:
        u: before the step, (2, B).
        gamma: in (0, 1]; a number, or (B,) where some rows are visited for the first time.
    """
    return (1 - gamma) * u + gamma * (eps + g.detach())


def sogclr(g: Tensor, tau: Tensor, u: Tensor) -> Tensor:
    """NeuCLIP, Eq. 4 as a gradient in the embeddings, at u after the step; the value estimates Eq. 1, 0-d.

    Fast: `Compositional` with `FixedTemperature`.
    """
    eq4 = tau * (g / u).mean(dim=1).sum()
    return tau * u.log().mean(dim=1).sum() + gradient_of(eq4)


# iSogCLR: a temperature for each image and each text


def isogclr_s(s: Tensor, g: Tensor, beta0: float | Tensor) -> Tensor:
    """iSogCLR, Eq. 17-18 (Eq. 12 for two views): s of the batch's rows after the step, (2, B).

    There is no epsilon in it; the fast `MovingAverageTable` adds one to g, 1e-14.
    """
    return (1 - beta0) * s + beta0 * g.detach()


def isogclr_objective(g: Tensor, tau: Tensor, rho: float) -> Tensor:
    """iSogCLR, Appendix B, 0-d, for g over the whole data set and temperatures (2, B); also FastCLIP-v2's."""
    return (tau * rho + tau * g.log()).mean(dim=1).sum()


def isogclr(g: Tensor, tau: Tensor, s: Tensor, rho: float) -> Tensor:
    """iSogCLR, Eq. 21 as a gradient in the embeddings and Eq. 19-20 in tau, with 1/B in place of 1/n, 0-d.

    The value estimates `isogclr_objective`. Fast: `IndividualTemperature`.

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

    The authors' code clips the gradient at 5, which the paper does not mention. Before a row's first visit u is 0 here;
    the paper does not say.

    Args:
        gradient: G(tau) of Eq. 19-20 without 1/n, (2, B).
    """
    u = (1 - beta1) * u + beta1 * gradient.clamp(-5, 5)
    return (tau - eta * u).clamp(tau_0, tau_max), u


# FastCLIP: u as in SogCLR, with a gamma that comes down from 1


def fastclip_gamma(epoch: int, gamma_min: float, decay_epochs: int) -> float:
    """FastCLIP's cosine: 1 in epoch 0, `gamma_min` from `decay_epochs` on. Fast: `MovingAverageTable.set_epoch`."""
    if epoch >= decay_epochs:
        return gamma_min
    return 0.5 * (1 + math.cos(math.pi * epoch / decay_epochs)) * (1 - gamma_min) + gamma_min


def fastclip_v0(g: Tensor, u: Tensor) -> Tensor:
    """FastCLIP-v0, 0-d: as for Eq. 1 without its factor tau and rho, tau learned. Fast: `UnscaledTemperature`."""
    return u.log().mean(dim=1).sum() + gradient_of((g / u).mean(dim=1).sum())


fastclip_v1 = sogclr
fastclip_v2 = isogclr


def fastclip_v2_tau(
    tau: Tensor, m: Tensor, v: Tensor, gradient: Tensor, epoch: int, eta: float, tau_0: float, tau_max: float
) -> tuple[Tensor, Tensor, Tensor]:
    """FastCLIP-v2's step of the temperatures, as its released code has it: tau, m and v after it, (2, B) each.

    Adam for each row, with betas of 0 in epoch 0, and the bias corrected by the epoch in place of the step.

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
    """NeuCLIP, Algorithm 2: Eq. 4 as a gradient in the embeddings, Eq. 13 in tau; the value estimates Eq. 1, 0-d.

    Fast: `Compositional` with `LearnableTemperature`.
    """
    eq13_first_line = u.log().mean(dim=1).sum() + 2 * rho
    eq4 = tau.detach() * (g / u).mean(dim=1).sum()  # in tau: the other lines of Eq. 13
    return tau * eq13_first_line + gradient_of(eq4)


# NeuCLIP: a network of prototypes predicts the log-normalizers


def neuclip_alpha(w1: Tensor, w2: Tensor, e1: Tensor, e2: Tensor, tau: Tensor, eps: float) -> Tensor:
    """NeuCLIP, Eq. 10-11: the log-normalizers that the prototypes (m, d) predict, (2, B). Fast: `Prototypes`."""
    e, w = normalize(torch.stack([e1, e2]), dim=2), normalize(torch.stack([w1, w2]), dim=2)
    cosines_above_positive = e @ w.mT - (e1 * e2).sum(dim=1)[:, None]
    return (eps + batch_g(cosines_above_positive, tau)).log()


def neuclip(g: Tensor, tau: Tensor, alpha: Tensor, rho: float, eps: float) -> Tensor:
    """NeuCLIP, Eq. 12 on the batch, 0-d, with its gradient through alpha as well. Fast: `Unified`."""
    bound = (-alpha).exp() * (eps + g) + alpha
    return tau * bound.mean(dim=1).sum() + 2 * tau * (rho - 1)


def neuclip_separate(g: Tensor, alpha: Tensor, eps: float) -> Tensor:
    """NeuCLIP, Section 5.2, 0-d: the network's objective in the ablation "Separate", AmorLIP's. Fast: `L2Log`."""
    return (alpha - (eps + g).log()).square().mean(dim=1).sum() / 2


def neuclip_w(
    w1: Tensor, w2: Tensor, optimizer: torch.optim.Optimizer, e1: Tensor, e2: Tensor, tau: Tensor, t: int, T_r: int,
    T_u: int, eps: float,
) -> None:
    """NeuCLIP, Algorithm 1, lines 3-9: step `t` of the prototypes (m, d), which change in place.

    Lines 10-12 are `neuclip_alpha`, and `neuclip` with its gradient in e1, e2 and tau. A reset takes the last m <= B
    pairs of the batch; where m > B the paper does not say which, and the fast class takes the latest m of several
    batches. Fast: `NetworkNormalizer`, `Prototypes`.

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


def amorlip_kernel(e1: Tensor, e2: Tensor, s: Tensor, positive: float = 1.0) -> Tensor:
    """exp(s <e_1i, e_2j>), (B, B).

    Args:
        positive: what the anchor's own pair counts: 1 in the paper, 1e-3 in the authors' released code.
    """
    weights = torch.ones(len(e1), len(e1), dtype=e1.dtype, device=e1.device).fill_diagonal_(positive)
    return weights * (s * e1 @ e2.T).exp()


def amorlip_z(e1: Tensor, e2: Tensor, s: Tensor, positive: float = 1.0) -> Tensor:
    """AmorLIP, Eq. 2: the partition function of every anchor over the batch, (2, B)."""
    kernel = amorlip_kernel(e1, e2, s, positive)
    return torch.stack([kernel.mean(dim=1), kernel.mean(dim=0)])


def amorlip_beta(t: int, T: int, beta_T: float) -> float:
    """AmorLIP, Section 3.3: beta of epoch t = 1, ..., T. Fast: `Amortization.current_beta`."""
    return beta_T - 0.5 * beta_T * (1 + math.cos(math.pi * t / T))


def amorlip_z_comb(z: Tensor, previous: Tensor, beta_t: float) -> Tensor:
    """AmorLIP, Eq. 12, (2, B).

    Args:
        previous: lambda of the target networks that the last epoch ended with, (2, B).
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
    """AmorLIP, what the online networks minimise, 0-d: Eq. 10, or Eq. 8 with `f` and Appendix C's 0.1 times Eq. 10.

    Z_comb replaces Z, as Section 3.3 says. The mean over the batch of Eq. 8's exponential, exp(s <.,.>) / Z_comb, is
    Z / Z_comb. Fast: `DIVERGENCES`.
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
    """AmorLIP, Algorithm 1, lines 7-8: step `k` of the networks, which change in place. Fast: `Amortization`.

    Line 4 makes new networks at the start of an epoch; line 6 is `amorlip_z_comb`, and line 9 `amorlip` with lambda of
    the target networks. The paper counts k from 1; here from 0, so that new networks are trained before they are used.

    Args:
        optimizer: of the online networks.
        alpha: what the target keeps of itself, Eq. 11.
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


def amorlip_mle(e1: Tensor, e2: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """AmorLIP, Eq. 5's first line, 0-d: the objective, for Z over the whole data set."""
    return -2 * s * (e1 * e2).sum(dim=1).mean() + z.log().mean(dim=1).sum()


def amorlip(e1: Tensor, e2: Tensor, s: Tensor, lam: Tensor, rho: float, positive: float = 1.0) -> Tensor:
    """AmorLIP, Eq. 6 over the constant s, plus rho / s (Appendix C), as a gradient in e1, e2 and s, 0-d.

    The value has Eq. 5 in place of Eq. 6. Fast: `AmorLIPLoss`.

    Args:
        lam: lambda of the target networks, (2, B), a constant.
    """
    kernel, lam = amorlip_kernel(e1, e2, s, positive), lam.detach()
    eq6 = -2 * s * (e1 * e2).sum(dim=1).mean() + (kernel / lam[0][:, None]).mean() + (kernel / lam[1]).mean()
    value = (amorlip_mle(e1, e2, s, lam) + rho) / s
    return value.detach() + gradient_of(eq6 / s.detach() + rho / s)


# TuneCLIP: hinged gaps, fixed temperature


def tuneclip_phi(h: Tensor, tau: Tensor, m: float) -> Tensor:
    """TuneCLIP, Eq. 8 over the batch, (2, B): the mean has |B| in its denominator. Fast: `PowerHinge`."""
    hinged = (h + m).clamp(min=0).square()
    return (hinged / tau).exp().sum(dim=2) / h.shape[1]


def tuneclip_objective(phi: Tensor, tau: Tensor, eps: float) -> Tensor:
    """TuneCLIP, Eq. 9, 0-d, for phi over the whole data set."""
    return tau * (eps + phi).log().mean(dim=1).sum()


def tuneclip_u(u: Tensor, phi: Tensor, gamma: float | Tensor) -> Tensor:
    """TuneCLIP, Algorithm 2: u of the batch's rows after the step, (2, B). Its epsilon comes when u is used."""
    return (1 - gamma) * u + gamma * phi.detach()


def tuneclip(phi: Tensor, tau: Tensor, u: Tensor, eps: float) -> Tensor:
    """TuneCLIP, Algorithm 2's gradient in the embeddings; the value estimates Eq. 9, 0-d.

    The fast `MovingAverageTable` has means over B - 1, and epsilon in u. With B / (B - 1) times this epsilon its
    gradient is the same, and its value larger by 2 tau log(B / (B - 1)).
    """
    g_t = tau * (phi / (eps + u)).mean(dim=1).sum()
    return tuneclip_objective(u, tau, eps) + gradient_of(g_t)


# A queue of the latest embeddings; not from a paper


def queue_u(
    texts: Tensor, images: Tensor, g: Tensor, e1: Tensor, e2: Tensor, tau: Tensor, mixing: float, eps: float
) -> Tensor:
    """The queue's normalizers mixed with the batch's, (2, B), constants. Fast: `Queue`, `GlobalContrastiveLoss.mixing`.

    Args:
        texts, images: queued embeddings that are not of the batch, (k, d) each, k >= 1.
        mixing: weight of the batch, in [0, 1).
    """
    alpha = neuclip_alpha(texts, images, e1, e2, tau, eps)
    return (mixing * (eps + g) + (1 - mixing) * alpha.exp()).detach()


queue = fastclip_v3


def main() -> None:
    """Print every method's value on eight pairs in 16 dimensions, at the first visit of their rows."""
    torch.manual_seed(0)
    e1 = normalize(torch.randn(8, 16, dtype=torch.float64), dim=1)
    e2 = normalize(e1 + 0.2 * torch.randn(8, 16, dtype=torch.float64), dim=1)
    tau, rho, eps = torch.tensor(0.07, dtype=torch.float64), 6.5, 1e-14
    taus, new_rows = tau.expand(2, 8), torch.zeros(2, 8, dtype=torch.float64)
    h = gaps(e1, e2)
    g, phi = batch_g(h, tau), tuneclip_phi(h, tau, m=0.1)
    u = sogclr_u(new_rows, g, gamma=fastclip_gamma(epoch=0, gamma_min=0.2, decay_epochs=15), eps=eps)

    w1, w2 = (torch.empty(4, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    neuclip_w(w1, w2, torch.optim.Adagrad([w1, w2], lr=0.1), e1, e2, tau, t=0, T_r=500, T_u=10, eps=eps)

    online, target = (
        nn.ModuleList(nn.Sequential(nn.Linear(16, 1), nn.Flatten(0)).double() for _ in range(2)) for _ in range(2)
    )
    z = amorlip_z(e1, e2, 1 / tau)
    adam = torch.optim.Adam(online.parameters(), lr=1e-3)
    amorlip_lambda(online, target, adam, e1, e2, z, z, k=0, T_online=8, T_target=2, T_lambda=3, alpha=0.999)

    values = {
        "clip": clip(e1, e2, tau),
        "cyclip": cyclip(e1, e2, tau),
        "sogclr": sogclr(g, tau, u),
        "isogclr": isogclr(g, taus, isogclr_s(new_rows, g, beta0=1.0), rho),
        "fastclip-v0": fastclip_v0(g, u),
        "fastclip-v1": fastclip_v1(g, tau, u),
        "fastclip-v2": fastclip_v2(g, taus, u, rho),
        "fastclip-v3": fastclip_v3(g, tau, u, rho),
        "neuclip": neuclip(g, tau, neuclip_alpha(w1, w2, e1, e2, tau, eps), rho, eps),
        "amorlip": amorlip(e1, e2, 1 / tau, amorlip_networks(target, e1, e2), rho),
        "tuneclip": tuneclip(phi, tau, tuneclip_u(new_rows, phi, gamma=1.0), eps),
        "queue": queue(g, tau, queue_u(e2.roll(1, 0), e1.roll(1, 0), g, e1, e2, tau, 0.6, eps), rho),
    }
    for name, value in values.items():
        print(f"{name:12} {value.item():8.4f}")


if __name__ == "__main__":
    main()
