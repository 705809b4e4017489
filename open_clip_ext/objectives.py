"""Objectives of the encoders and of a normalizer network, given log-normalizers alpha.

Per anchor i, with L_i = log(eps + g_i) over the batch, an objective is weight(tau_i) * value(L_i, alpha_i):

| name | weight | value | of the encoders | of a network that predicts alpha |
|---|---|---|---|---|
| `compositional` | tau | alpha | NeuCLIP, Eq. 4 and 13; SogCLR, FastCLIP | |
| `unified` | tau | exp(L - alpha) + alpha - 1 | NeuCLIP, Eq. 12 | NeuCLIP, Eq. 12 |
| `l2-log` | 1 | (alpha - L)^2 / 2 | | NeuCLIP, Section 5.2 ("separate"); AmorLIP, Eq. 10 |

The encoders' objective adds rho to the value. At fixed alpha both encoder objectives have, in the embeddings, the
gradient of tau * exp(-alpha_i) * (eps + g_i). `unified` adds the gradient through alpha,
tau (1 - exp(L_i - alpha_i)) grad alpha_i. If alpha is exact and does not depend on the batch, this has the expectation
0: it is a control variate, which removes noise as far as grad alpha_i resembles the batch's grad L_i.

`unified` is an upper bound of tau * log(eps + g_i) that is tight at alpha_i = log(eps + g_i). It is linear in g_i, so a
batch's g_i estimates it without bias if alpha does not depend on the batch. A network that minimizes it predicts
log E exp(L); with `l2-log` it predicts E L.

In plain PyTorch: `equations.sogclr`, `equations.neuclip`, `equations.neuclip_separate`.
"""

from typing import ClassVar

import torch
from torch import Tensor

# With exact normalizers L_i - alpha_i is at most log(n / B): 12.4 for 10^9 samples and a batch of 4,096. A larger
# weight means that alpha is wrong, and the bound keeps such anchors from weighing even more. In a table u_i contains
# gamma times the batch's own estimate, so that a weight is at most 1 / gamma: only SCENT's gamma, tiny where u_i is,
# can be below exp(-12.5).
MAX_LOG_WEIGHT = 12.5


class Objective:
    """Value and derivative of an objective per anchor; every argument and result is (2, B) or a slice of it."""

    name: ClassVar[str]
    through_alpha: ClassVar[bool] = True  # whether gradients also flow through alpha

    @staticmethod
    def weight(tau: Tensor) -> Tensor:
        """The factor of an anchor's value in what a network minimizes: tau in NeuCLIP's Eq. 12."""
        return tau

    @staticmethod
    def value(log_batch: Tensor, alpha: Tensor) -> Tensor:
        """The objective per anchor, before its weight.

        Args:
            log_batch: L.
            alpha: log-normalizers.
        """
        raise NotImplementedError

    @staticmethod
    def slope(log_batch: Tensor, alpha: Tensor) -> Tensor:
        """Derivative of `value` in alpha at fixed L; not defined where `through_alpha` is False."""
        raise NotImplementedError

    @classmethod
    def value_and_slope(cls, log_batch: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor | None]:
        """`value` and, where `through_alpha` is True, `slope`."""
        return cls.value(log_batch, alpha), cls.slope(log_batch, alpha) if cls.through_alpha else None


class Compositional(Objective):
    """The objective with alpha as a constant for the encoders."""

    name = "compositional"
    through_alpha = False

    @staticmethod
    def value(log_batch: Tensor, alpha: Tensor) -> Tensor:
        return alpha


class Unified(Objective):
    """NeuCLIP's upper bound of the objective, minimized through alpha too; exp(L - alpha) <= exp(MAX_LOG_WEIGHT)."""

    name = "unified"

    @staticmethod
    def value(log_batch: Tensor, alpha: Tensor) -> Tensor:
        return (log_batch - alpha).clamp(max=MAX_LOG_WEIGHT).exp() + alpha - 1

    @staticmethod
    def slope(log_batch: Tensor, alpha: Tensor) -> Tensor:
        return 1 - (log_batch - alpha).clamp(max=MAX_LOG_WEIGHT).exp()

    @classmethod
    def value_and_slope(cls, log_batch: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        slope = cls.slope(log_batch, alpha)
        return alpha - slope, slope


class L2Log(Objective):
    """The squared error of alpha against the batch's own L."""

    name = "l2-log"

    @staticmethod
    def weight(tau: Tensor) -> Tensor:
        return torch.ones_like(tau)

    @staticmethod
    def value(log_batch: Tensor, alpha: Tensor) -> Tensor:
        return (alpha - log_batch).square() / 2

    @staticmethod
    def slope(log_batch: Tensor, alpha: Tensor) -> Tensor:
        return alpha - log_batch


ENCODER_OBJECTIVES: dict[str, type[Objective]] = {one.name: one for one in (Compositional, Unified)}
NETWORK_OBJECTIVES: dict[str, type[Objective]] = {one.name: one for one in (Unified, L2Log)}
