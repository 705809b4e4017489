"""The papers' equations as they stand, in float64 Python loops: slow, plain exponentials, no tricks.

e1, e2: (B, d) image and text embeddings; tau: 0-d. Gradients come from autograd on these loops.
"""

import torch


def close(actual, expected, tau, nothing=False):
    """Assert that two tensors agree as closely as the type of `actual` lets them.

    An exponent (s_ij - s_ii) / tau is at most 2 / tau, and the rounding of its similarities by eps becomes a relative
    error of 2 eps / tau in its exponential. Sums over the dimension, the batch and a few visits add some such errors:
    64 of them are allowed, relative to the largest of `expected`.

    Args:
        tau: the lowest temperature.
        nothing: whether `expected` may be 0 throughout, where there is nothing to compare.
    """
    largest = expected.abs().max().item()
    assert nothing or largest > 1e-5, "nothing to compare"
    bound = 64 * torch.finfo(actual.dtype).eps * max(2 / float(tau), 1.0) * max(largest, 1e-6)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)


def similarity(e1, e2, i, j):
    return torch.dot(e1[i], e2[j])


def g1(e1, e2, tau, i):
    """neuclip.txt Eq. 1, first underbrace: image i as anchor."""
    total = 0.0
    for j in range(len(e1)):
        if j != i:
            total = total + torch.exp((similarity(e1, e2, i, j) - similarity(e1, e2, i, i)) / tau)
    return total / (len(e1) - 1)


def g2(e1, e2, tau, i):
    """neuclip.txt Eq. 1, second underbrace: text i as anchor."""
    total = 0.0
    for j in range(len(e1)):
        if j != i:
            total = total + torch.exp((similarity(e1, e2, j, i) - similarity(e1, e2, i, i)) / tau)
    return total / (len(e1) - 1)


def batch_normalizers(e1, e2, tau):
    """g of every anchor, (2, B)."""
    size = range(len(e1))
    sides = [[g(e1, e2, tau, i) for i in size] for g in (g1, g2)]
    return torch.stack([torch.stack(side) for side in sides])


def eq3(u, g, gamma, eps, first_visit):
    """Moving average of one row; a first visit takes the new estimate whole."""
    return eps + g if first_visit else (1 - gamma) * u + gamma * (eps + g)


def eq4_surrogate(e1, e2, tau, u):
    """A scalar whose gradient in the embeddings is neuclip.txt Eq. 4; u (2, B) is constant."""
    return tau.detach() * (batch_normalizers(e1, e2, tau.detach()) / u).mean(dim=1).sum()


def eq13(e1, e2, tau, u, rho):
    """Gradient in tau of FastCLIP, neuclip.txt Eq. 13."""
    tau = tau.detach().requires_grad_()
    g = batch_normalizers(e1.detach(), e2.detach(), tau)
    total = torch.log(u[0]).mean() + torch.log(u[1]).mean() + 2 * rho
    for side in range(2):
        for i in range(len(e1)):
            (dg,) = torch.autograd.grad(g[side, i], tau, retain_graph=True)
            total = total + tau.detach() / len(e1) * dg / u[side, i]
    return total


def eq10(w1, e1, e2, tau, eps, i):
    """alpha_1 of image i; w1 (m, d)."""
    total = 0.0
    for column in w1:
        cosine = torch.dot(e1[i], column) / (e1[i].norm() * column.norm())
        total = total + torch.exp((cosine - similarity(e1, e2, i, i)) / tau)
    return torch.log(eps + total / len(w1))


def eq11(w2, e1, e2, tau, eps, i):
    """alpha_2 of text i; w2 (m, d)."""
    total = 0.0
    for column in w2:
        cosine = torch.dot(e2[i], column) / (e2[i].norm() * column.norm())
        total = total + torch.exp((cosine - similarity(e1, e2, i, i)) / tau)
    return torch.log(eps + total / len(w2))


def predicted(w1, w2, e1, e2, tau, eps):
    """alpha of every anchor, (2, B)."""
    size = range(len(e1))
    return torch.stack(
        [
            torch.stack([eq10(w1, e1, e2, tau, eps, i) for i in size]),
            torch.stack([eq11(w2, e1, e2, tau, eps, i) for i in size]),
        ]
    )


def eq12(w1, w2, e1, e2, tau, eps, rho):
    """The unified objective on one batch."""
    alpha = predicted(w1, w2, e1, e2, tau, eps)
    g = batch_normalizers(e1, e2, tau)
    return tau * (torch.exp(-alpha) * (eps + g) + alpha).mean(dim=1).sum() + 2 * tau * (rho - 1)


def both_views(e1, e2, taus):
    """isogclr.txt Eq. 11 for every anchor of both views, (2, B): its negatives are both views of the other images.

    taus: (2, B).
    """
    sides = []
    for side, (anchors, partners) in enumerate([(e1, e2), (e2, e1)]):
        values = []
        for i in range(len(e1)):
            positive = torch.dot(anchors[i], partners[i])
            negatives = [view[j] for view in (e1, e2) for j in range(len(e1)) if j != i]
            total = sum(torch.exp((torch.dot(anchors[i], z) - positive) / taus[side, i]) for z in negatives)
            values.append(total / len(negatives))
        sides.append(torch.stack(values))
    return torch.stack(sides)


def cyclip(e1, e2, tau, inmodal, crossmodal):
    """CLIP's loss by its definition, and Goel et al.'s two sums over all pairs of the batch divided by its size."""
    size = len(e1)
    total = 0.0
    for i in range(size):
        logits_1 = torch.stack([torch.dot(e1[i], e2[j]) / tau for j in range(size)])
        logits_2 = torch.stack([torch.dot(e1[j], e2[i]) / tau for j in range(size)])
        for logits in (logits_1, logits_2):
            total = total - (logits[i] - logits.exp().sum().log()) / (2 * size)
    for j in range(size):
        for k in range(size):
            total = total + inmodal / size * (torch.dot(e1[j], e1[k]) - torch.dot(e2[j], e2[k])) ** 2
            total = total + crossmodal / size * (torch.dot(e1[j], e2[k]) - torch.dot(e2[j], e1[k])) ** 2
    return total


def unit(generator, rows, dimension):
    vectors = torch.randn(rows, dimension, generator=generator, dtype=torch.float64)
    return vectors / vectors.norm(dim=1, keepdim=True)
