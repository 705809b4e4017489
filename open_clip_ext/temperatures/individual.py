"""One temperature per image and one per text, updated by the loss itself (iSogCLR, FastCLIP-v2)."""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.errors import InputError
from open_clip_ext.kernels.adam import BETAS, adam_step
from open_clip_ext.options import Derived, option, positive, refuse_unused
from open_clip_ext.row_state import RowState
from open_clip_ext.temperatures.base import FASTCLIP_CODE, RHO, TAU_MAX, TAU_MIN, Temperature, refuse_fastclip_code


class IndividualTemperature(RowState, Temperature):
    """One tau per image and one per text, updated by the loss itself (iSogCLR, Eq. 19-20 and Algorithm 2).

        G_i = tau_i / s_i * dg_i/dtau_i + log(s_i) + rho,    u_i <- (1 - beta_1) u_i + beta_1 G_i,
        tau_i <- clip(tau_i - eta * u_i, tau_0, tau_max)

    Readings fixed here: the factor 1/n of Eq. 19 goes into eta; s_i is updated first and tau_i last, as in Algorithm 2,
    so that both gradients use the new s_i (Eq. 19-21 print the old one) and the old tau_i; G_i is clipped to [-5, 5];
    u_i is 0 before the first visit. A row that occurs several times in a global batch is updated once, by the mean of
    its G_i.

    `tau_optimizer` adam is FastCLIP-v2's: Adam per row, with a bias correction that counts epochs and betas of 0 in
    epoch 0, so that a row's first step has size eta.

    In plain PyTorch: `equations.isogclr`, `equations.isogclr_tau`, `equations.fastclip_v2`,
    `equations.fastclip_v2_tau`.

    Args:
        rho: a larger one pulls every tau_i down; 5.8 to 6.4 on CC3M in iSogCLR.
        tau_min, tau_max: tau_0 (iSogCLR, Section 6.2) and the upper bound.
        tau_lr: eta; 0.03 in iSogCLR's scripts (the paper does not say).
        tau_lr_schedule: eta in epoch e of E, as in the authors' code: constant; cosine (a quarter of a period),
            1e-4 + (eta - 1e-4) cos(pi e / (2 E)); exponential, 1e-4 + (eta - 1e-4) 0.8^e.
        tau_beta: beta_1, the weight of the new G_i, for momentum; 0.9 in the authors' script for image-text pairs, 0.5
            in their script for images.
        fastclip_code: leave tau_i out of the encoders' gradient, as FastCLIP-v2's released loss does. iSogCLR, Eq. 21
            and its authors' code have it, so that an anchor with a lower tau_i gets no larger gradient.
    """

    name = "individual"
    reads_logit_scale = False
    optimizer_options = ()
    rho: float = RHO.with_default(6.0)
    tau_start: float = option(
        0.01, "a sample's temperature before its first visit", valid=positive, expected="a number > 0"
    )
    tau_min: float = TAU_MIN.with_default(0.005)
    tau_max: float = TAU_MAX
    tau_lr: float = option(0.03, "step size of a sample's temperature", valid=positive, expected="a number > 0")
    tau_lr_schedule: str = option(
        "constant", "schedule of --tau-lr by epoch, towards 1e-4", choices=("constant", "cosine", "exponential")
    )
    tau_lr_epochs: int | None = option(
        Derived("all epochs", lambda epochs: epochs), "length of --tau-lr-schedule cosine, in epochs",
        valid=lambda value: value >= 1, expected="at least 1",
    )
    tau_optimizer: str = option(
        "momentum", "optimizer of the samples' temperatures", choices=("momentum", "adam"), in_state=True
    )
    tau_beta: float = option(
        0.9, "weight of the new gradient in the momentum of a sample's temperature",
        valid=lambda value: 0 < value <= 1, expected="in (0, 1]",
    )
    fastclip_code: bool = FASTCLIP_CODE
    CLIP = 5.0
    LAST_LR, LR_DECAY = 1e-4, 0.8

    def __init__(self, num_samples: int, device: torch.device | str = "cpu", **options: Any):
        super().__init__(num_samples, device, **options)
        self.bounds = (self.tau_min, self.tau_max)
        if self.tau_lr_schedule == "cosine" and self.tau_lr_epochs is None:
            raise InputError("the cosine of tau_lr needs its length, or the number of epochs", "tau_lr_epochs")
        self.lr_epochs = self.tau_lr_epochs or 0  # of the cosine alone
        self.scales_encoders = not self.fastclip_code
        self.can_capture = self.rows_on != "host"
        self.follows_epochs = self.tau_optimizer == "adam" or self.tau_lr_schedule != "constant"

    @property
    def columns(self) -> dict[str, float]:
        second = {"second_moment": 0.0} if self.tau_optimizer == "adam" else {}
        return {"tau": self.tau_start, "first_moment": 0.0, **second}

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, explicit: Collection[str]) -> None:
        refuse_fastclip_code(settings)
        if settings["tau_lr_schedule"] != "cosine":
            refuse_unused(explicit, ["tau_lr_epochs"], f"with tau_lr_schedule {settings['tau_lr_schedule']!r}")
            settings["tau_lr_epochs"] = None
        if settings["tau_optimizer"] == "adam":
            refuse_unused(explicit, ["tau_beta"], "with tau_optimizer 'adam'")
        for low, high in (("tau_min", "tau_max"), ("tau_min", "tau_start"), ("tau_start", "tau_max")):
            least, most = settings[low], settings[high]
            if most < least and low in explicit and high not in explicit:
                raise InputError(f"{least:g} is above {high}, {most:g}", low)
            if most < least:
                raise InputError(f"{most:g} is below {low}, {least:g}", high)

    @property
    def current_lr(self) -> float:
        """eta of this epoch."""
        factor = 1.0
        if self.tau_lr_schedule == "cosine":
            factor = math.cos(math.pi / 2 * min(1.0, self.epoch / self.lr_epochs))
        elif self.tau_lr_schedule == "exponential":
            factor = self.LR_DECAY**self.epoch
        return self.LAST_LR + (self.tau_lr - self.LAST_LR) * factor

    def capture_state(self) -> tuple[Any, ...]:
        return self.rows.rows, self.hold

    def value(self, taus: Tensor, values: Tensor) -> Tensor:
        """The objective has the factor tau_i also where the encoders' gradient lacks it."""
        return (taus * values).mean(dim=1).sum()

    def taus(self, tau: Tensor, rows: Tensor | None) -> Tensor:
        assert rows is not None
        return rows[:, :2].T.to(tau.dtype)

    def update(self, batch: Batch, rows: Tensor, gradients: Tensor) -> None:
        self.write(batch, rows, batch.equal_rows.mean(gradients.T))

    def new_rows(self, old: dict[str, Tensor], estimate: Tensor) -> dict[str, Tensor]:
        """A step of `tau_optimizer` on tau_i; `estimate` is the gradient in tau_i, (B, 2)."""
        taus, *moments = (column.to(estimate.dtype) for column in old.values())
        gradient = estimate.clamp(-self.CLIP, self.CLIP)
        if self.tau_optimizer == "momentum":
            new = [(1 - self.tau_beta) * moments[0] + self.tau_beta * gradient]
            step = new[0]
        else:
            betas = BETAS if self.epoch > 0 else (0.0, 0.0)
            step, new = adam_step(gradient, moments, self.epoch + 1, betas)
        moved = taus if self.hold else (taus - self.current_lr * step).clamp(*self.bounds)
        return dict(zip(self.columns, (moved, *new), strict=True))

    def check_state(self, state: dict[str, Any], dimension: int = 0) -> None:
        if not state:
            raise ValueError(f"temperature: {self.name!r} where the state is of another")
        if "rows" not in state and state.keys() != self.columns.keys():
            raise ValueError(f"tau_optimizer: {self.tau_optimizer!r} where the state has {', '.join(state)}")
        super().check_state(state, dimension)
