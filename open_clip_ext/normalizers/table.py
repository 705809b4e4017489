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
differs for every sample) leave the copies out.
"""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import ROWS_ON, EqualRows, ShardedRows
from open_clip_ext.errors import InputError
from open_clip_ext.normalizers.base import Normalizer
from open_clip_ext.options import Derived, option, refuse_unused


class MovingAverageTable(Normalizer):
    """A table of log u_i for n images and n texts, 8 bytes per pair, sharded over the processes.

    Args:
        num_samples: n, the data set's number of rows.
        device: where the rows are kept, unless `rows_on` says otherwise.
        options: see the class's body. gamma_schedule: `cosine` decreases gamma from 1 in epoch 0 to `gamma` at epoch
            `gamma_decay_epochs` and keeps it there (FastCLIP); `constant` is `gamma` throughout (SogCLR); `proximal`
            gives each row sigmoid(log u_i + gamma_exponent), so that a small u_i changes slowly (SCENT's proximal
            mirror descent).

    Raises:
        InputError: an argument is out of range; the message names it.
    """

    name = "table"
    intra_modal = True
    allows_keys = True
    allows_reference = True
    needs_index = True
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
    rows_on: str = ROWS_ON

    def __init__(self, num_samples: int, device: torch.device | str = "cpu", **options: Any):
        super().__init__(**options)
        if num_samples < 1:
            raise InputError(f"{num_samples!r} is out of range; the table needs at least 1 row", "num_samples")
        if self.gamma_schedule == "cosine" and self.gamma_decay_epochs is None:
            raise InputError("the cosine of gamma needs its length, or the number of epochs", "gamma_decay_epochs")
        self.num_samples = num_samples
        self.log_u = ShardedRows(num_samples, columns=2, fill=-math.inf, device=device, on_host=self.rows_on == "host")
        self._unvisited = torch.tensor(num_samples)  # number of rows, kept on the batches' device
        self._latest_gamma: Tensor | None = None  # mean over the batch's rows, if each has its own
        self.follows_epochs = self.gamma_schedule == "cosine"
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def current_gamma(self) -> float:
        """gamma of this epoch."""
        if self.gamma_schedule != "cosine" or self.epoch >= self.gamma_decay_epochs:
            return self.gamma
        cosine = 0.5 * (1 + math.cos(math.pi * self.epoch / self.gamma_decay_epochs))
        return cosine * (1 - self.gamma) + self.gamma

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, given: Collection[str]) -> None:
        schedule = settings["gamma_schedule"]
        unused = {
            "cosine": ["gamma_exponent"], "constant": ["gamma_decay_epochs", "gamma_exponent"],
            "proximal": ["gamma", "gamma_decay_epochs"],
        }[schedule]
        refuse_unused(given, unused, f"with gamma_schedule {schedule!r}")
        settings.update(dict.fromkeys(unused))

    @torch.no_grad()
    def update(self, batch: Batch) -> Tensor:
        """Update the batch's rows; return their new log u, (B, 2)."""
        assert batch.index is not None
        old = self.log_u.lookup(batch.index)
        equal_rows = EqualRows(batch.index)
        estimate = equal_rows.log_mean_exp(batch.all_log_batch.T)
        log_keep, log_gamma = self._log_weights(old)
        new = torch.logaddexp(log_keep + old, log_gamma + estimate)
        new = torch.where(old == -math.inf, estimate, new)
        new = torch.where(batch.finite, new, old)
        self.log_u.assign(batch.index, new)
        first_visits = (old[:, 0] == -math.inf) & batch.finite
        visited = (first_visits / equal_rows.count).sum().round().long()
        self._unvisited = self._unvisited.to(old.device) - visited
        return new

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

    def forward(self, batch: Batch, updated: Any = None) -> Tensor:
        assert batch.index is not None
        known = self.log_u.lookup(batch.index) if updated is None else updated
        alpha = known[batch.local].T.to(batch.log_batch.dtype)
        return torch.where(alpha == -math.inf, batch.log_batch, alpha)

    def diagnostics(self, log_batch: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        gamma = torch.tensor(self.current_gamma) if self._latest_gamma is None else self._latest_gamma
        return {"gamma": gamma, "unvisited": self._unvisited / self.num_samples}

    def full_state(self) -> dict[str, Tensor]:
        table = self.log_u.gather()
        if table is None:
            return {}
        in_files = not isinstance(table, Tensor)  # where nobody counts over all rows
        return {"log_u": table, **({"unvisited": self._unvisited.cpu()} if in_files else {})}

    def check_state(self, state: dict[str, Tensor], dimension: int) -> None:
        self.log_u.check(state["log_u"])

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        self.log_u.load(state["log_u"])
        in_files = "unvisited" in state
        self._unvisited = state["unvisited"] if in_files else (state["log_u"][:, 0] == -math.inf).sum()
