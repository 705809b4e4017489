"""A custom loss: GloFND (arXiv 2502.20612), which learns a threshold per sample and leaves out the negatives above it.

    python examples/glofnd.py --dataset-type shapes --train-num-samples 8000 --loss glofnd --epochs 16 ...

takes every flag of `open_clip_ext.main`. In your own package, PRESET is an entry point of the group
open_clip_ext.losses. None of the library's four parts chooses an anchor's negatives, so this is a `Loss` with its own
`compute`. To keep it short, every process holds B x B numbers, and exponentials are not in the log domain: tau should
be at least 0.025.

For anchor i, lambda_i approaches the (1 - share) quantile of its similarities s_ij with the negatives of the whole data
set. It minimizes share * lambda + mean_j max(s_ij - lambda, 0), by Adam with the gradient
share - mean_j [s_ij > lambda_i], as in the authors' code. From epoch `glofnd_start` on, g_i is the mean over the
negatives with s_ij <= lambda_i; the rest is FastCLIP-v1. `glofnd_g` and `glofnd_lambda` are the equations.
"""

from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import EqualRows
from open_clip_ext.distributed import all_gather, rank, world_size
from open_clip_ext.losses import Loss
from open_clip_ext.main import leave, main
from open_clip_ext.options import not_negative, option, positive
from open_clip_ext.presets import PRESETS, LossPreset
from open_clip_ext.row_state import RowState
from open_clip_ext.temperatures import FixedLogitScale


def glofnd_lambda(
    lam: Tensor, m: Tensor, v: Tensor, above: Tensor, share: float, epoch: int, lr: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The thresholds after the step and Adam's moments, (2, B) each; the bias correction counts epochs.

    Args:
        above: fraction of each anchor's negatives in the batch that are above its threshold, (2, B).
    """
    gradient = share - above
    m, v = 0.9 * m + 0.1 * gradient, 0.98 * v + 0.02 * gradient.square()
    m_hat, v_hat = m / (1 - 0.9 ** (epoch + 1)), v / (1 - 0.98 ** (epoch + 1))
    return (lam - lr * m_hat / (v_hat.sqrt() + 1e-8)).clamp(-1, 1), m, v


def glofnd_g(s: Tensor, tau: Tensor, kept: Tensor) -> Tensor:
    """g over the kept negatives, (2, B); 0 for an anchor without any.

    Args:
        s: similarities, one anchor per row, (2, B, B).
        kept: mask of the negatives, (2, B, B) bool.
    """
    gaps = s - s.diagonal(dim1=1, dim2=2)[:, :, None]
    return ((gaps / tau).exp() * kept).sum(dim=2) / kept.sum(dim=2).clamp(min=1)


class GloFND(RowState, Loss):
    """FastCLIP-v1's loss without the negatives above the anchors' thresholds.

    It keeps u, the threshold and its moments for `num_samples` images and texts. Args: see the class's body.
    """

    name = "glofnd"
    trains_logit_scale = False
    optimizer_options = FixedLogitScale.options
    glofnd_share: float = option(
        1e-4, "fraction of the negatives that are treated as false", valid=lambda value: 0 < value < 1,
        expected="in (0, 1)",
    )
    glofnd_lr: float = option(0.05, "step size of the thresholds", valid=positive, expected="a number > 0")
    glofnd_start: int = option(15, "first epoch with thresholds", valid=not_negative, expected="at least 0")
    glofnd_gamma: float = option(
        0.2, "weight of the new estimate in the moving average u", valid=lambda value: 0 < value <= 1,
        expected="in (0, 1]",
    )
    glofnd_eps: float = option(1e-14, "eps added to g", valid=positive, expected="a number > 0")

    columns = {"u": 0.0, "lambda": 1.0, "m": 0.0, "v": 0.0}  # u of 0: the row was never visited

    def __init__(self, num_samples: int, device: torch.device | str = "cpu", **options: Any):
        super().__init__(num_samples, device, **options)
        self.epoch = 0

    def compute(
        self, image: Tensor, text: Tensor, logit_scale: Tensor, index: Tensor | None, update_state: bool
    ) -> Tensor:
        assert index is not None
        tau = logit_scale.detach().reciprocal()
        e1, e2, index = everyone(image), everyone(text), all_gather(index.to(image.device))
        s = torch.stack([e1 @ e2.T, e2 @ e1.T])
        others = ~torch.eye(len(e1), dtype=torch.bool, device=s.device).expand(2, -1, -1)
        with torch.no_grad():
            u, lam, m, v = self.rows.lookup(index).T.to(s.dtype).split(2)
            equal = EqualRows(index)
            if update_state and self.epoch >= self.glofnd_start:
                above = ((s > lam[:, :, None]) & others).sum(dim=2) / (len(e1) - 1)
                above = equal.mean(above.T.to(s.dtype)).T
                lam, m, v = glofnd_lambda(lam, m, v, above, self.glofnd_share, self.epoch, self.glofnd_lr)
        kept = others & (s <= lam[:, :, None]) if self.epoch >= self.glofnd_start else others
        g = self.glofnd_eps + glofnd_g(s, tau, kept)
        with torch.no_grad():
            if update_state:
                new = equal.mean(g.T).T
                u = torch.where(u == 0, new, (1 - self.glofnd_gamma) * u + self.glofnd_gamma * new)
                self.rows.assign(index, torch.cat([u, lam, m, v]).T)
        gradient = tau * (g / u).mean(dim=1).sum()
        # Every process has the global value with a graph to its own pairs; DistributedDataParallel averages gradients.
        return (tau * u.log().mean(dim=1).sum()).detach() + world_size() * (gradient - gradient.detach())

def everyone(own: Tensor) -> Tensor:
    """The features of all processes, (B, d), with a graph to this process's own."""
    parts = list(all_gather(own).split(len(own)))
    parts[rank()] = own
    return torch.cat(parts)


PRESET = LossPreset(
    GloFND.name, "fastclip-v1 without the negatives above a learned threshold of each anchor",
    "Balmaseda et al. 2025, arXiv 2502.20612", loss=GloFND, defaults={"tau_init": 0.03},
)

if __name__ == "__main__":
    PRESETS[PRESET.name] = PRESET
    leave(main())
