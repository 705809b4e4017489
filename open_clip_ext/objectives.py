"""What is minimised once the log-normalizers alpha are known or predicted.

Per anchor i, with L_i = log(eps + g_i) over the batch, an objective is weight(tau_i) * value(L_i, alpha_i):

| name | weight | value | of the encoders | of a network that predicts alpha |
|---|---|---|---|---|
| `compositional` | tau | alpha | NeuCLIP, Eq. 4 and 13; SogCLR, FastCLIP | |
| `unified` | tau | exp(L - alpha) + alpha - 1 | NeuCLIP, Eq. 12 | NeuCLIP, Eq. 12 |
| `l2-log` | 1 | (alpha - L)^2 / 2 | | NeuCLIP, Section 5.2 ("separate"); AmorLIP, Eq. 10 |

The encoders' objective adds rho to the value. Its gradient at fixed alpha is the same for both, that of
tau * exp(-alpha_i) * (eps + g_i); `unified` adds what comes through alpha. `unified` is an upper bound of
tau * log(eps + g_i), met where alpha_i = log(eps + g_i), and linear in g_i: a batch's g_i gives an unbiased estimate
for an alpha that does not depend on the batch. A network that minimises it predicts log E exp(L), with `l2-log` E L.

As printed: `equations.sogclr`, `equations.neuclip`, `equations.neuclip_separate`.
"""

from typing import ClassVar

import torch
from torch import Tensor

# No exact normalizer lets L_i - alpha_i exceed log(n / B), 12.4 for 10^9 samples and a batch of 4,096. A larger weight
# means that alpha is wrong; it is bounded, so that one anchor cannot fill the optimizers' accumulators for good, nor
# leave float16. A table never gets there, since u_i contains gamma times the batch's own estimate.
MAX_LOG_WEIGHT = 12.5


class Objective:
    """Value and slope of an objective per anchor; every argument and result is (2, B) or a part of it."""

    name: ClassVar[str]
    through_alpha: ClassVar[bool] = True  # whether it is also minimised through alpha

    @staticmethod
    def weight(tau: Tensor) -> Tensor:
        return tau

    @staticmethod
    def value(log_batch: Tensor, alpha: Tensor) -> Tensor:
        """Args:
        log_batch: L.
        alpha: log-normalizers.
        """
        raise NotImplementedError

    @staticmethod
    def slope(log_batch: Tensor, alpha: Tensor) -> Tensor:
        """Derivative of `value` in alpha at fixed L."""
        raise NotImplementedError


class Compositional(Objective):
    """alpha is a constant for the encoders."""

    name = "compositional"
    through_alpha = False

    @staticmethod
    def value(log_batch: Tensor, alpha: Tensor) -> Tensor:
        return alpha


class Unified(Objective):
    """exp(L - alpha) is bounded by exp(MAX_LOG_WEIGHT)."""

    name = "unified"

    @staticmethod
    def value(log_batch: Tensor, alpha: Tensor) -> Tensor:
        return (log_batch - alpha).clamp(max=MAX_LOG_WEIGHT).exp() + alpha - 1

    @staticmethod
    def slope(log_batch: Tensor, alpha: Tensor) -> Tensor:
        return 1 - (log_batch - alpha).clamp(max=MAX_LOG_WEIGHT).exp()


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
