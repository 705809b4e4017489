"""The sums of `open_clip_ext.equations` once more, as loops over the pairs: a second opinion on its matrices.

e1, e2: (B, d) image and text embeddings; tau: 0-d, or (2, B). Gradients come from autograd on these loops.
"""

import torch


def temperature(tau, side, i):
    return tau if tau.dim() == 0 else tau[side, i]


def normalizers(e1, e2, tau):
    """NeuCLIP, Eq. 1's underbraces without epsilon, (2, B); iSogCLR, Eq. 15-16."""
    sides = []
    for side in range(2):
        values = []
        for i in range(len(e1)):
            total = 0.0
            for j in range(len(e1)):
                if j != i:
                    s_ij = torch.dot(e1[i], e2[j]) if side == 0 else torch.dot(e1[j], e2[i])
                    total = total + torch.exp((s_ij - torch.dot(e1[i], e2[i])) / temperature(tau, side, i))
            values.append(total / (len(e1) - 1))
        sides.append(torch.stack(values))
    return torch.stack(sides)


def two_view_normalizers(e1, e2, tau):
    """iSogCLR, Eq. 11 for every anchor of both views, (2, B): its negatives are both views of the other images."""
    sides = []
    for side, (anchors, partners) in enumerate([(e1, e2), (e2, e1)]):
        values = []
        for i in range(len(e1)):
            positive = torch.dot(anchors[i], partners[i])
            negatives = [view[j] for view in (e1, e2) for j in range(len(e1)) if j != i]
            terms = [torch.exp((torch.dot(anchors[i], z) - positive) / temperature(tau, side, i)) for z in negatives]
            values.append(sum(terms) / len(negatives))
        sides.append(torch.stack(values))
    return torch.stack(sides)


def hinged(e1, e2, tau, m):
    """TuneCLIP, Eq. 8, (2, B)."""
    sides = []
    for side in range(2):
        values = []
        for i in range(len(e1)):
            total = 0.0
            for j in range(len(e1)):
                if j != i:
                    s_ij = torch.dot(e1[i], e2[j]) if side == 0 else torch.dot(e1[j], e2[i])
                    total = total + torch.exp(max(s_ij - torch.dot(e1[i], e2[i]) + m, torch.zeros(())) ** 2 / tau)
            values.append(total / len(e1))
        sides.append(torch.stack(values))
    return torch.stack(sides)


def predicted(w1, w2, e1, e2, tau, eps):
    """NeuCLIP, Eq. 10-11, (2, B)."""
    sides = []
    for anchors, w in ((e1, w1), (e2, w2)):
        values = []
        for i in range(len(e1)):
            total = 0.0
            for column in w:
                cosine = torch.dot(anchors[i], column) / (anchors[i].norm() * column.norm())
                total = total + torch.exp((cosine - torch.dot(e1[i], e2[i])) / tau)
            values.append(torch.log(eps + total / len(w)))
        sides.append(torch.stack(values))
    return torch.stack(sides)


def eq13(e1, e2, tau, u, rho):
    """Gradient in tau of FastCLIP, NeuCLIP, Eq. 13."""
    tau = tau.detach().requires_grad_()
    g = normalizers(e1.detach(), e2.detach(), tau)
    total = torch.log(u[0]).mean() + torch.log(u[1]).mean() + 2 * rho
    for side in range(2):
        for i in range(len(e1)):
            (dg,) = torch.autograd.grad(g[side, i], tau, retain_graph=True)
            total = total + tau.detach() / len(e1) * dg / u[side, i]
    return total


def cyclip(e1, e2, tau, inmodal, crossmodal):
    """CLIP's loss by its definition, and CyCLIP's two terms."""
    size = len(e1)
    total = 0.0
    for i in range(size):
        logits_1 = torch.stack([torch.dot(e1[i], e2[j]) / tau for j in range(size)])
        logits_2 = torch.stack([torch.dot(e1[j], e2[i]) / tau for j in range(size)])
        for logits in (logits_1, logits_2):
            total = total - (logits[i] - logits.exp().sum().log()) / (2 * size)
    return total + consistency(e1, e2, inmodal, crossmodal)


def consistency(e1, e2, inmodal, crossmodal):
    """CyCLIP's two sums over all pairs of the batch divided by its size, with their weights."""
    size = len(e1)
    total = 0.0
    for j in range(size):
        for k in range(size):
            total = total + inmodal / size * (torch.dot(e1[j], e1[k]) - torch.dot(e2[j], e2[k])) ** 2
            total = total + crossmodal / size * (torch.dot(e1[j], e2[k]) - torch.dot(e2[j], e1[k])) ** 2
    return total


def dcl(e1, e2, tau):
    """DCL's loss with images and texts as the two views, each other's negatives."""
    total = 0.0
    for i in range(len(e1)):
        for a, b in ((e1, e2), (e2, e1)):
            negatives = [torch.exp(torch.dot(a[i], b[j]) / tau) for j in range(len(e1)) if j != i]
            total = total - (torch.dot(a[i], b[i]) / tau - sum(negatives).log()) / len(e1)
    return total


def partition_functions(e1, e2, s, positive):
    """AmorLIP, Eq. 2, (2, B); the anchor's own pair counts `positive`."""
    sides = []
    for a, b in ((e1, e2), (e2, e1)):
        values = []
        for i in range(len(e1)):
            terms = [torch.exp(s * torch.dot(a[i], b[j])) * (1 if j != i else positive) for j in range(len(e1))]
            values.append(sum(terms) / len(e1))
        sides.append(torch.stack(values))
    return torch.stack(sides)


def amorlip_eq6(e1, e2, s, lam, positive):
    """AmorLIP, Eq. 6, 0-d."""
    size = range(len(e1))
    total = 0.0
    for i in size:
        total = total - 2 * s * torch.dot(e1[i], e2[i]) / len(e1)
        for j in size:
            term = torch.exp(s * torch.dot(e1[i], e2[j])) * (positive if i == j else 1)
            total = total + term * (1 / lam[0, i] + 1 / lam[1, j]) / len(e1) ** 2
    return total


def amorlip_eq9(e1, e2, s, lam):
    """AmorLIP, Eq. 9 for both sides, 0-d; Z is the batch's."""
    z = partition_functions(e1, e2, s, 1)
    total = 0.0
    for side, (a, b) in enumerate([(e1, e2), (e2, e1)]):
        for i in range(len(e1)):
            for j in range(len(e1)):
                weight = torch.exp(s * torch.dot(a[i], b[j]) - torch.log(lam[side, i])) / len(e1) ** 2
                total = total + weight * torch.log(z[side, i] / lam[side, i])
    return total
