"""A custom loss: NUCLR (Wang et al. 2024, the authors' code), which learns an offset per sample in the normalizer.

    python examples/nuclr.py --dataset-type shapes --train-num-samples 8000 --loss nuclr --epochs 16 ...

takes every flag of `open_clip_ext.main`. As a negative of anchor i, sample j has the weight
exp((s_ij - s_ii - zeta_j) / tau): a sample that resembles many others gets a larger zeta_j and less weight. The offset
belongs to the negative, and all anchors contribute to its gradient, which none of the library's four parts provides. So
this is a `Loss` with its own `compute`. To keep it short, every process holds B x B similarities.

    u_i    <- (1 - gamma) u_i + gamma * mean_j!=i a_ij,    a_ij = exp((s_ij - s_ii - zeta_j) / tau)
    grad    = mean_i mean_j!=i a_ij / (u_i + exp(-xi / tau) / (n - 1)) * grad (s_ij - s_ii)
    z_j    <- (1 - theta) z_j + theta * (1 - n / (n - 1) * mean_i a_ij / (u_i + exp(-zeta_i / tau) / (n - 1)))
    zeta_j <- zeta_j - eta * z_j

for image anchors with the texts' zeta, and vice versa. xi is the largest zeta at the end of the previous epoch, at
least `nuclr_xi`; mean_i includes i = j. A row's first visit sets u and z to the new values.
"""

import math
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import EqualRows
from open_clip_ext.distributed import all_gather, rank, world_size
from open_clip_ext.losses import Loss
from open_clip_ext.main import leave, main
from open_clip_ext.options import Derived, not_negative, option, positive
from open_clip_ext.presets import PRESETS, LossPreset
from open_clip_ext.row_state import RowState
from open_clip_ext.temperatures import FixedLogitScale


class NUCLR(RowState, Loss):
    """NUCLR's loss; keeps log u, zeta and z for `num_samples` images and texts.

    Args: see the class's body; the defaults are those of the authors' script for CC3M, 30 epochs.
    """

    name = "nuclr"
    trains_logit_scale = False
    optimizer_options = FixedLogitScale.options
    nuclr_gamma: float = option(
        0.8, "weight of the new estimate in u", valid=lambda value: 0 < value <= 1, expected="in (0, 1]"
    )
    nuclr_theta: float = option(
        0.9, "weight of the new gradient in z", valid=lambda value: 0 < value <= 1, expected="in (0, 1]"
    )
    nuclr_eta: float = option(
        5e-6, "step size of the texts' offsets; cosine, and divided by 10 after half of the epochs, by 100 after 3/4",
        valid=positive, expected="a number > 0",
    )
    nuclr_eta_images: float = option(
        0.1, "step size of the images' offsets over that of the texts'", valid=not_negative, expected="a number >= 0"
    )
    nuclr_zeta: float = option(-0.05, "initial offsets", valid=math.isfinite, expected="a finite number")
    nuclr_xi: float = option(0.0, "lower bound of xi", valid=math.isfinite, expected="a finite number")
    nuclr_start: int = option(5, "first epoch that updates the offsets", valid=not_negative, expected="at least 0")
    nuclr_epochs: int | None = option(
        Derived("all epochs", lambda epochs: epochs), "length of the offsets' schedule",
        valid=lambda value: value >= 1, expected="at least 1",
    )
    xi: Tensor

    def __init__(self, num_samples: int, device: torch.device | str = "cpu", **options: Any):
        super().__init__(num_samples, device, **options)
        self.register_buffer("xi", torch.full((2,), self.nuclr_xi), persistent=False)
        self.epoch = 0
        self._epoch_of_xi = 0

    @property
    def columns(self) -> dict[str, float]:
        return {"log_u": -math.inf, "zeta": self.nuclr_zeta, "z": math.inf}

    @property
    def current_eta(self) -> float:
        """eta of this epoch, for texts."""
        epochs = self.nuclr_epochs or 1
        if self.epoch < self.nuclr_start:
            return 0.0
        part = (self.epoch - self.nuclr_start) / max(1, epochs - 1 - self.nuclr_start)
        factor = 1.0 if self.epoch < epochs // 2 else 0.1 if self.epoch < epochs * 3 // 4 else 0.01
        return factor * self.nuclr_eta * (1 + math.cos(math.pi * part)) / 2

    def compute(
        self, image: Tensor, text: Tensor, logit_scale: Tensor, index: Tensor | None, update_state: bool
    ) -> Tensor:
        assert index is not None
        tau, n = logit_scale.detach().reciprocal(), self.num_samples
        e1, e2, index = everyone(image), everyone(text), all_gather(index.to(image.device))
        s = torch.stack([e1 @ e2.T, e2 @ e1.T])
        h = s - s.diagonal(dim1=1, dim2=2)[:, :, None]
        own = torch.eye(len(e1), dtype=torch.bool, device=s.device)
        with torch.no_grad():
            if update_state and self._epoch_of_xi != self.epoch:
                highest = all_gather(self.rows.rows[:-1, 2:4].amax(dim=0, keepdim=True)).amax(dim=0)
                self.xi, self._epoch_of_xi = highest.clamp(min=self.nuclr_xi).to(self.xi), self.epoch
            log_u, zeta, z = self.rows.lookup(index).T.to(s.dtype).split(2)
            equal = EqualRows(index)
            log_a = (h - zeta.flip(0)[:, None]) / tau  # the negatives of image anchors are texts, with their offsets
            log_g = log_a.masked_fill(own, -math.inf).logsumexp(dim=2) - math.log(len(e1) - 1)
            log_g = equal.log_mean_exp(log_g.T).T
            if update_state:
                kept = math.log1p(-self.nuclr_gamma) if self.nuclr_gamma < 1 else -math.inf
                moved = torch.logaddexp(kept + log_u, math.log(self.nuclr_gamma) + log_g)
                log_u = torch.where(log_u == -math.inf, log_g, moved)
                if self.epoch >= self.nuclr_start:
                    log_own = torch.logaddexp(log_u, -zeta.flip(0) / tau - math.log(n - 1))
                    weights = (log_a - log_own[:, :, None]).exp().mean(dim=1).flip(0)  # by the negative's modality
                    gradient = equal.mean((1 - n / (n - 1) * weights).T).T
                    z = torch.where(z == math.inf, gradient, (1 - self.nuclr_theta) * z + self.nuclr_theta * gradient)
                    zeta = zeta - self.current_eta * torch.tensor([[self.nuclr_eta_images], [1.0]]).to(z) * z
                self.rows.assign(index, torch.cat([log_u, zeta, z]).T)
            known = torch.where(log_u == -math.inf, log_g, log_u)
            log_all = torch.logaddexp(known, -self.xi.flip(0)[:, None].to(s) / tau - math.log(n - 1))
            weights = (log_a - log_all[:, :, None]).exp().masked_fill(own, 0.0) / (len(e1) - 1)
        value = (tau * log_all).mean(dim=1).sum()
        gradient = (weights * h).sum(dim=2).mean(dim=1).sum()
        # Every process has the global value with a graph to its own pairs; DistributedDataParallel averages gradients.
        return value + world_size() * (gradient - gradient.detach())

    def full_state(self) -> dict[str, Any]:
        return {**super().full_state(), "xi": self.xi.cpu().clone(), "epoch_of_xi": self._epoch_of_xi}

    def load_full_state(self, state: dict[str, Any]) -> None:
        super().load_full_state(state)
        self.xi.copy_(state["xi"])
        self._epoch_of_xi = int(state["epoch_of_xi"])


def everyone(own: Tensor) -> Tensor:
    """The features of all processes, (B, d), with a graph to this process's own."""
    parts = list(all_gather(own).split(len(own)))
    parts[rank()] = own
    return torch.cat(parts)


PRESET = LossPreset(
    NUCLR.name, "sogclr whose normalizers have a learned offset for each negative",
    "the code of bokun-wang/NUCLR", loss=NUCLR, defaults={"tau_init": 0.01},
)

if __name__ == "__main__":
    PRESETS[PRESET.name] = PRESET
    leave(main())
