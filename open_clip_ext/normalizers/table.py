"""A table of moving averages, one per image and one per text, as in SogCLR and FastCLIP.

NeuCLIP, Eq. 3, in the log domain with L_i = log(eps + g_i) over the batch:

    log u_i <- logaddexp(log(1 - gamma) + log u_i, log gamma + L_i),    alpha_i = log u_i (the new value).

In plain PyTorch: `equations.sogclr_u`, `equations.isogclr_s`, `equations.tuneclip_u`, `equations.scent_u`; gamma:
`equations.fastclip_gamma`, `equations.scent_gamma`.

Readings fixed here: a row's first visit sets log u_i = L_i, so that no estimate starts from an arbitrary number. A row
that occurs several times in a global batch is updated once, with the mean of its eps + g_i, whatever the order of the
batch and the world size. Its other occurrences are among its negatives, as in OpenCLIP's loss; in the papers, whose
batches are sets, there are none. The estimate of such a row jumps to about log(1 / B), since the gap to a copy is 0,
and with a gamma of 0.2 it may take tens of visits to return. Equal keys (`key=index`, or `--same-key` with a field that
differs for every sample) leave the copies out. An anchor whose keys leave it no negative has g = 0, which its row
averages in.
"""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from open_clip_ext.batch import Batch
from open_clip_ext.errors import InputError
from open_clip_ext.normalizers.base import Normalizer
from open_clip_ext.options import Derived, option, refuse_unused
from open_clip_ext.row_state import RowState


class RowNormalizer(RowState, Normalizer):
    """Base of the estimators that store alpha, one per image and one per text, as the first of their `columns`.

    Before a row's first visit alpha is -inf, and L, the batch's estimate, is used in its place. The estimate that
    `new_rows` gets is L; samples with the same row get the log of the mean of their exp(L).
    """

    intra_modal = True
    allows_keys = True
    allows_reference = True

    def __init__(self, num_samples: int, device: torch.device | str = "cpu", **options: Any):
        super().__init__(num_samples, device, **options)
        self._unvisited = torch.tensor(float(num_samples), dtype=torch.float64)  # rows, before rounding

    @torch.no_grad()
    def update(self, batch: Batch) -> Tensor:
        """Update the batch's rows; return all their columns, (B, c)."""
        old = self.lookup(batch)
        new = self.write(batch, old, batch.equal_rows.log_mean_exp(batch.all_log_batch.T))
        visited = ((old[:, 0] == -math.inf) / batch.equal_rows.count).sum()
        self._unvisited = self._unvisited.to(old.device).addcmul_(visited, batch.finite, value=-1)
        return new

    def forward(self, batch: Batch, updated: Any = None) -> Tensor:
        columns = self.lookup(batch) if updated is None else updated
        alpha = columns[batch.local, :2].T.to(batch.log_batch.dtype)
        return torch.where(alpha == -math.inf, batch.log_batch, alpha)

    def diagnostics(self, log_batch: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        return {"unvisited": self._unvisited.round() / self.num_samples}

    def full_state(self) -> dict[str, Any]:
        state = super().full_state()
        in_files = any(isinstance(value, dict) for value in state.values())  # where nobody counts over all rows
        return state | ({"unvisited": self._unvisited.round().long().cpu()} if in_files else {})

    def load_full_state(self, state: dict[str, Any]) -> None:
        super().load_full_state(state)
        if "unvisited" in state:  # the rows are in files
            self._unvisited = state["unvisited"].double()
        else:
            self._unvisited = (state[next(iter(self.columns))][:, 0] == -math.inf).sum().double()


class MovingAverageTable(RowNormalizer):
    """A table of log u_i for n images and n texts, 8 bytes per pair, sharded over the processes.

    `gamma_schedule` cosine decreases gamma from 1 in epoch 0 to `gamma` at epoch `gamma_decay_epochs` and keeps it
    there (FastCLIP); constant is `gamma` throughout (SogCLR); proximal gives each row sigmoid(log u_i +
    gamma_exponent), so that a small u_i changes slowly (SCENT's proximal mirror descent).
    """

    name = "table"
    columns = {"log_u": -math.inf}
    gamma: float = option(
        0.2, "weight of the new estimate in the moving average, at the end of its schedule",
        valid=lambda value: 0 < value <= 1, expected="in (0, 1]",
    )
    gamma_schedule: str = option(
        "cosine", "gamma by epoch: cosine from 1 to --gamma, or constant; proximal: SCENT's, per row from its estimate",
        choices=("cosine", "constant", "proximal"),
    )
    gamma_exponent: float = option(
        10.0, "logarithm of the step size of SCENT's proximal mirror descent; larger: gamma closer to 1",
        valid=math.isfinite, expected="a finite number",
    )
    gamma_decay_epochs: int = option(
        Derived("half of the epochs", lambda epochs: max(1, epochs // 2)), "epochs of the cosine",
        valid=lambda value: value >= 1, expected="at least 1",
    )

    def __init__(self, num_samples: int, device: torch.device | str = "cpu", **options: Any):
        super().__init__(num_samples, device, **options)
        if self.gamma_schedule == "cosine" and self.gamma_decay_epochs is None:
            raise InputError("the cosine of gamma needs its length, or the number of epochs", "gamma_decay_epochs")
        self.can_capture = self.rows_on != "host"  # where a lookup waits for the device
        self._latest_gamma: Tensor | None = None  # mean over the batch's rows, if each has its own
        self.follows_epochs = self.gamma_schedule == "cosine"

    @property
    def current_gamma(self) -> float:
        """gamma of this epoch."""
        if self.gamma_schedule != "cosine" or self.epoch >= self.gamma_decay_epochs:
            return self.gamma
        cosine = 0.5 * (1 + math.cos(math.pi * self.epoch / self.gamma_decay_epochs))
        return cosine * (1 - self.gamma) + self.gamma

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, explicit: Collection[str]) -> None:
        schedule = settings["gamma_schedule"]
        unused = {
            "cosine": ["gamma_exponent"], "constant": ["gamma_decay_epochs", "gamma_exponent"],
            "proximal": ["gamma", "gamma_decay_epochs"],
        }[schedule]
        refuse_unused(explicit, unused, f"with gamma_schedule {schedule!r}")
        settings.update(dict.fromkeys(unused))

    def capture_state(self) -> tuple[Any, ...]:
        return self.rows.rows, self._unvisited

    def new_rows(self, old: dict[str, Tensor], estimate: Tensor) -> dict[str, Tensor]:
        log_u = old["log_u"]
        log_keep, log_gamma = self._log_weights(log_u)
        new = torch.logaddexp(log_keep + log_u, log_gamma + estimate)
        return {"log_u": torch.where(log_u == -math.inf, estimate, new)}

    def _log_weights(self, old: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """log(1 - gamma) and log gamma; tensors if each row has its own gamma.

        Args:
            old: log u before the step, (B, 2).
        """
        if self.gamma_schedule != "proximal":
            gamma = self.current_gamma
            return math.log1p(-gamma) if gamma < 1 else -math.inf, math.log(gamma)
        log_ratio = old + self.gamma_exponent
        self._latest_gamma = log_ratio.sigmoid().where(old > -math.inf, 1.0).mean()
        return logsigmoid(-log_ratio), logsigmoid(log_ratio)

    def diagnostics(self, log_batch: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        gamma = torch.tensor(self.current_gamma) if self._latest_gamma is None else self._latest_gamma.clone()
        return {"gamma": gamma, **super().diagnostics(log_batch, alpha)}
