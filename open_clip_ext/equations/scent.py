"""SCENT, arXiv 2602.02877, from its abstract and the authors' code: the moving average as a step of mirror descent."""

import math

from torch import Tensor

from open_clip_ext.equations.fastclip import fastclip_v3
from open_clip_ext.equations.sogclr import sogclr_u


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


scent = fastclip_v3  # with u from `scent_u`
