"""SCENT, TempNet and DRRho-CLIP. Where the paper was not at hand, the docstring cites the authors' code."""

import math

from torch import Tensor
from torch.nn.functional import normalize

from open_clip_ext.equations.basics import gaps
from open_clip_ext.equations.tables import fastclip_v3, isogclr, sogclr, sogclr_u

# SCENT: the moving average as a step of mirror descent


def scent_gamma(u: Tensor, c: float) -> Tensor:
    """SCENT's gamma of each row, sigmoid(log u + c), as in the authors' code. Fast: `MovingAverageTable`.

    nu = log u estimates the minimizer of exp(-nu) g + nu. A proximal step from nu_t with step size exp(c) and the
    Bregman divergence of exp(-nu) as its distance minimizes

        exp(-nu) g + nu + exp(-c) [exp(-nu) - exp(-nu_t) + exp(-nu_t) (nu - nu_t)]

    The minimum is nu = log((1 - gamma) u_t + gamma g).
    """
    return u * math.exp(c) / (1 + u * math.exp(c))


def scent_u(u: Tensor, g: Tensor, c: float, eps: float) -> Tensor:
    """SCENT: u of the batch's rows after the step, (2, B). A row's first visit, where u is 0, sets u to eps + g.

    Args:
        c: logarithm of the step size; 10 in the authors' run on DFN-14M.
    """
    return sogclr_u(u, g, scent_gamma(u, c).where(u > 0, 1.0), eps)


scent = fastclip_v3


# TempNet: a network predicts each sample's temperature


def tempnet_tau(
    e: Tensor, A: Tensor, a: Tensor, w: Tensor, log_phi: Tensor, c: Tensor, b: Tensor, tau_min: float, tau_max: float
) -> Tensor:
    """TempNet's temperatures, (B,), of one modality's embeddings e, (B, d): the authors' code without its dropout.

    Fast: `NetworkTemperature`.

    Args:
        A, a: weight, (d, d), and bias, (d,), of the layer before the prototypes.
        w: prototypes, (m, d).
        log_phi: log of the softmax temperature over prototypes, 0-d.
        c, b: weight, (m,), and bias, 0-d, of the output.
    """
    z = (e.detach() @ A.T + a).sigmoid() @ normalize(w, dim=1).T
    p = (z / log_phi.exp()).softmax(dim=1)
    return tau_min + (tau_max - tau_min) * (((p - 1 / len(w)) * z.sigmoid()) @ c + b).sigmoid()


tempnet = isogclr  # with tau from `tempnet_tau`: autograd passes the gradient in tau on to the network


# DRRho-CLIP: subtract the gaps of a frozen reference model


def drrho_gaps(e1: Tensor, e2: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    """DRRho-CLIP: each negative's gap minus the reference model's, (2, B, B - 1). Fast: `GlobalContrastiveLoss`.

    Args:
        r1, r2: the reference's embeddings of the same images and texts, (B, d'), constants.
    """
    return gaps(e1, e2) - gaps(r1, r2)


drrho_clip = sogclr  # with g over `drrho_gaps`, and FastCLIP's gamma
