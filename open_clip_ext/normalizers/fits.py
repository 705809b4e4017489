"""What a normalizer-prediction network minimises, per anchor, with L = log(eps + g) over the batch and tau held fixed.

| name | objective | source |
|---|---|---|
| `unified` | tau * (exp(L - alpha) + alpha - 1) | NeuCLIP, Eq. 12, its network part; optimum log E exp(L) |
| `l2-log` | (alpha - L)^2 / 2 | NeuCLIP, Section 5.2; AmorLIP, Eq. 10; optimum E L |

As printed: `equations.neuclip`, `equations.neuclip_separate`.
"""

import torch
from torch import Tensor

from open_clip_ext.pairs import MAX_LOG_WEIGHT


class UnifiedFit:
    name = "unified"

    @staticmethod
    def factor(tau: Tensor) -> Tensor:
        """Of the objective over `values`, of the shape of tau, 0-d or (2, B)."""
        return tau

    @staticmethod
    def values(log_batch: Tensor, alpha: Tensor) -> Tensor:
        """Per anchor and without `factor`, to be compared as tau moves; all arguments and the result (2, B).
        exp(L - alpha) is bounded by exp(MAX_LOG_WEIGHT)."""
        return (log_batch - alpha).clamp(max=MAX_LOG_WEIGHT).exp() + alpha - 1

    @staticmethod
    def slopes(log_batch: Tensor, alpha: Tensor) -> Tensor:
        """Derivative of `values` in alpha."""
        return 1 - (log_batch - alpha).clamp(max=MAX_LOG_WEIGHT).exp()


class L2LogFit:
    name = "l2-log"

    @staticmethod
    def factor(tau: Tensor) -> Tensor:
        """As `UnifiedFit.factor`."""
        return torch.ones_like(tau)

    @staticmethod
    def values(log_batch: Tensor, alpha: Tensor) -> Tensor:
        """As `UnifiedFit.values`."""
        return (alpha - log_batch).square() / 2

    @staticmethod
    def slopes(log_batch: Tensor, alpha: Tensor) -> Tensor:
        """As `UnifiedFit.slopes`."""
        return alpha - log_batch


FITS = {fit.name: fit for fit in (UnifiedFit, L2LogFit)}
