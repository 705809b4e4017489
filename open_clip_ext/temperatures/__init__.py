"""Temperature schemes: fixed, learned, or one temperature per image and per text.

OpenCLIP's parameter is `logit_scale` = log(1 / tau); its models pass the exponential, 1 / tau, to the loss. A scheme
maps it to the temperatures of the step's anchors and computes the objective's value and its derivative in tau. Per
anchor the objective is

    scale(tau_i) * (value_i + rho),    scale(tau) = tau,

where value_i (`objectives`) estimates log(eps + g_i). In FastCLIP-v0 scale(tau) = 1, and FastCLIP-v2's released code
leaves tau_i out of the encoders' gradient. Both directions are summed, so rho contributes 2 * tau * rho.
Temperatures have the shape (2, B), images as anchors first, even if all are the same tau.
"""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import ROWS_ON, EqualRows, ShardedRows
from open_clip_ext.errors import InputError
from open_clip_ext.kernels.adam import BETAS, adam_step
from open_clip_ext.options import Derived, not_negative, option, positive, refuse_unused
from open_clip_ext.parts import Part

RHO = option(
    8.5, "pulls the temperature down; 6.5 on CC3M, 8.5 on CC12M, 11 on DFN in the papers",
    valid=not_negative, expected="a number >= 0",
)
TAU_MIN = option(
    0.01, "tau_0, lower bound of the temperature", valid=lambda value: 0 < value <= 1, expected="in (0, 1]"
)
TAU_MAX = option(1.0, "upper bound of a sample's temperature", valid=positive, expected="a number > 0")
FASTCLIP_CODE = option(
    False,
    "follow FastCLIP's released code where it differs from the papers. learnable: dg/dtau counts twice in the "
    "temperature's gradient; individual: the encoders' gradient lacks the factor tau_i",
)


def refuse_fastclip_code(settings: dict) -> None:
    """Raise InputError where `fastclip_code` has no meaning: FastCLIP's normalizers are constants for the encoders."""
    if settings["fastclip_code"] and settings["encoder_objective"] != "compositional":
        raise InputError(
            f"with encoder_objective {settings['encoder_objective']!r}, which FastCLIP does not have; "
            "use 'compositional'", "fastclip_code",
        )


class FixedLogitScale(Part):
    """Options of the training command for a fixed logit_scale; no constructor takes them."""

    tau_init: float = option(
        Derived("the model's own"), "initial temperature; if it is fixed, the temperature",
        valid=lambda value: 0 < value <= 10, expected="in (0, 10]",
    )


class LearnedLogitScale(FixedLogitScale):
    """Options of the training command for a learned logit_scale; the lower bound of tau is OpenCLIP's."""

    tau_min: float = TAU_MIN
    lr_tau: float = option(
        Derived("a fraction of --lr, per loss"), "learning rate of logit_scale", valid=positive, expected="a number > 0"
    )
    lr_tau_scheduler: str = option(
        "model", "model: the model's schedule; fastclip: no warm-up, a third while tau <= 0.03",
        choices=("model", "fastclip"),
    )


class Temperature(Part, nn.Module):
    """Base class of the temperature schemes.

    Attributes:
        reads_logit_scale: whether 1 / logit_scale is the temperature.
        trains_logit_scale: whether the parameter gets a gradient; if not, the training command freezes it.
        allows_reference: as for `Normalizer`.
        allows_views: whether the two views of an image can share a temperature (`negatives="views"`).
        hold: freeze the per-sample temperatures; their momentum still updates, as an optimizer's at learning rate 0.
    """

    optimizer_options = FixedLogitScale.options
    reads_logit_scale = True
    trains_logit_scale = False
    allows_reference = True
    allows_views = True
    hold = False
    rho = 0.0
    num_samples: int  # where `needs_index`

    def materialize(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        """As `Normalizer.materialize`."""

    def observe(self, batch: Batch) -> None:
        """Called with each training step's embeddings, before its temperatures are looked up."""

    def lookup(self, batch: Batch) -> Tensor | None:
        """The values stored or predicted for a global batch's samples, (B, c); None if there are none.

        Args:
            batch: the global batch; its temperatures are not known yet.
        """
        return None

    def taus(self, tau: Tensor, rows: Tensor | None) -> Tensor:
        """Temperatures of all anchors, (2, B), or 0-d if all are equal, detached.

        Args:
            tau: 1 / logit_scale, 0-d.
            rows: the result of `lookup`.
        """
        return tau.detach()

    def scale(self, taus: Tensor) -> Tensor:
        """The factor of each anchor in the encoders' objective."""
        return taus

    def value(self, taus: Tensor, values: Tensor) -> Tensor:
        """The estimate of the global objective, 0-d, from the anchors' values, (2, B)."""
        return (self.scale(taus) * (values + self.rho)).mean(dim=1).sum()

    def gradient(self, taus: Tensor, values: Tensor, tau_terms: Tensor, batch: int) -> Tensor | None:
        """This process's part of the derivative of `value` in the learned tau, 0-d; None if tau is not learned.

        Args:
            taus, values: of this process's anchors, (2, b).
            tau_terms: tau * d value_i / dtau of the same anchors, (2, b).
            batch: B.
        """
        return None

    def update(self, batch: Batch, rows: Tensor, gradients: Tensor) -> None:
        """Update the stored values, once per step; they stay as they are if `batch.finite` is False.

        Args:
            rows: the result of `lookup`, at which the gradients were computed.
            gradients: derivative of tau_i * (value_i + rho) in tau_i of all anchors, (2, B).
        """

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch, 0-based."""

    def diagnostics(self, taus: Tensor) -> dict[str, Tensor]:
        return {"tau": taus[0, 0]}

    def full_state(self) -> dict[str, Tensor]:
        """As `Normalizer.full_state`."""
        return {}

    def check_state(self, state: dict[str, Tensor], dimension: int) -> None:
        """As `Normalizer.check_state`."""

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        """Load the result of `full_state`."""


class FixedTemperature(Temperature):
    """One tau that is not trained, and therefore no rho (SogCLR, FastCLIP-v1, TuneCLIP).

    In plain PyTorch: `equations.sogclr`, `equations.fastclip_v1`, `equations.tuneclip`.
    """

    name = "fixed"


class LearnableTemperature(Temperature):
    """One tau for both directions, learned with the encoders (NeuCLIP, Eq. 1 and 13; FastCLIP-v3's RGCL-g).

    In plain PyTorch: `equations.fastclip_v3`; `equations.scent`, which is the same.

    By Eq. 13 tau falls while the mean over anchors of KL(p_i || uniform) is below rho and rests where they are equal,
    with p_ij proportional to exp(l(s_ij - s_ii) / tau) over the anchor's negatives j. So exp(-rho) is roughly the
    fraction of the negatives that count. NeuCLIP's rho is 6.5 for CC3M, 8.5 for CC12M and 11 for all three DFN sets
    (Table 3). FastCLIP's released code counts dg/dtau twice, which changes the tau that is reached; the values of rho
    published with that code were tuned for it.
    """

    name = "learnable"
    optimizer_options = LearnedLogitScale.options
    trains_logit_scale = True
    rho: float = RHO
    fastclip_code: bool = FASTCLIP_CODE

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.slope_weight = 2 if self.fastclip_code else 1

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, given: Collection[str]) -> None:
        refuse_fastclip_code(settings)

    def gradient(self, taus: Tensor, values: Tensor, tau_terms: Tensor, batch: int) -> Tensor:
        """NeuCLIP, Eq. 13."""
        return (values + self.rho + self.slope_weight * tau_terms).sum() / batch


class UnscaledTemperature(Temperature):
    """One learned tau with FastCLIP-v0's objective: log(eps + g_i) without the factor tau and without rho.

    In plain PyTorch: `equations.fastclip_v0`; with the batch's own normalizers `equations.dcl`.
    """

    name = "unscaled"
    optimizer_options = LearnedLogitScale.options
    trains_logit_scale = True

    def scale(self, taus: Tensor) -> Tensor:
        return torch.ones_like(taus)

    def gradient(self, taus: Tensor, values: Tensor, tau_terms: Tensor, batch: int) -> Tensor:
        return (tau_terms / taus).sum() / batch


class IndividualTemperature(Temperature):
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
        num_samples: n.
        device: where the rows are kept, unless `rows_on` says otherwise.
        rho: a larger one pulls every tau_i down (iSogCLR: 5.8 to 6.4 on CC3M; FastCLIP-v2: 7).
        tau_start: tau_i before its first visit (FastCLIP-v2: 0.03).
        tau_min, tau_max: tau_0 (iSogCLR, Section 6.2; FastCLIP-v2: 0.01) and the upper bound.
        tau_lr: eta; 0.03 in iSogCLR's scripts (the paper does not say), 0.0133 in FastCLIP-v2's.
        tau_lr_schedule: eta in epoch e of E, as in the authors' code: constant; cosine (a quarter of a period),
            1e-4 + (eta - 1e-4) cos(pi e / (2 E)); exponential, 1e-4 + (eta - 1e-4) 0.8^e.
        tau_lr_epochs: E of the cosine.
        tau_optimizer: momentum or adam.
        tau_beta: beta_1, the weight of the new G_i, for momentum; 0.9 in the authors' script for image-text pairs, 0.5
            in their script for images.
        fastclip_code: leave tau_i out of the encoders' gradient, as FastCLIP-v2's released loss does. iSogCLR, Eq. 21
            and its authors' code have it, so that an anchor with a lower tau_i gets no larger gradient.
    """

    name = "individual"
    reads_logit_scale = False
    needs_index = True
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
    rows_on: str = ROWS_ON
    CLIP = 5.0
    LAST_LR, LR_DECAY = 1e-4, 0.8

    def __init__(self, num_samples: int, device: torch.device | str = "cpu", **options: Any):
        super().__init__(**options)
        self.num_samples = num_samples
        self.bounds = (self.tau_min, self.tau_max)
        if self.tau_lr_schedule == "cosine" and self.tau_lr_epochs is None:
            raise InputError("the cosine of tau_lr needs its length, or the number of epochs", "tau_lr_epochs")
        self.lr_epochs = self.tau_lr_epochs or 0  # of the cosine alone
        self.scales_encoders = not self.fastclip_code
        self.follows_epochs = self.tau_optimizer == "adam" or self.tau_lr_schedule != "constant"
        self.epoch = 0
        self.columns = ("tau", "first_moment", *(("second_moment",) if self.tau_optimizer == "adam" else ()))
        fill = [self.tau_start, self.tau_start, *[0.0] * (2 * len(self.columns) - 2)]  # each for images and texts
        self.rows = ShardedRows(num_samples, len(fill), fill=fill, device=device, on_host=self.rows_on == "host")

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, given: Collection[str]) -> None:
        refuse_fastclip_code(settings)
        if settings["tau_lr_schedule"] != "cosine":
            refuse_unused(given, ["tau_lr_epochs"], f"with tau_lr_schedule {settings['tau_lr_schedule']!r}")
            settings["tau_lr_epochs"] = None
        if settings["tau_optimizer"] == "adam":
            refuse_unused(given, ["tau_beta"], "with tau_optimizer 'adam'")
        low, high = settings["tau_min"], settings["tau_max"]
        if high < low:
            raise InputError(f"{high:g} is below tau_min, {low:g}", "tau_max")
        if not low <= settings["tau_start"] <= high:
            start = settings["tau_start"]
            raise InputError(f"{start:g} is not in [tau_min, tau_max], [{low:g}, {high:g}]", "tau_start")

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def current_lr(self) -> float:
        """eta of this epoch."""
        factor = 1.0
        if self.tau_lr_schedule == "cosine":
            factor = math.cos(math.pi / 2 * min(1.0, self.epoch / self.lr_epochs))
        elif self.tau_lr_schedule == "exponential":
            factor = self.LR_DECAY**self.epoch
        return self.LAST_LR + (self.tau_lr - self.LAST_LR) * factor

    def scale(self, taus: Tensor) -> Tensor:
        return taus if self.scales_encoders else torch.ones_like(taus)

    def value(self, taus: Tensor, values: Tensor) -> Tensor:
        """The objective has the factor tau_i also where the encoders' gradient lacks it."""
        return (taus * (values + self.rho)).mean(dim=1).sum()

    def lookup(self, batch: Batch) -> Tensor:
        assert batch.index is not None
        return self.rows.lookup(batch.index)

    def taus(self, tau: Tensor, rows: Tensor | None) -> Tensor:
        assert rows is not None
        return rows[:, :2].T.to(tau.dtype)

    def diagnostics(self, taus: Tensor) -> dict[str, Tensor]:
        return {"tau": taus.mean(), "tau_min": taus.min(), "tau_max": taus.max()}

    def update(self, batch: Batch, rows: Tensor, gradients: Tensor) -> None:
        assert batch.index is not None
        old = rows.to(gradients.dtype)
        taus, *moments = old.split(2, dim=1)
        gradient = EqualRows(batch.index).mean(gradients.T).clamp(-self.CLIP, self.CLIP)
        if self.tau_optimizer == "momentum":
            new = [(1 - self.tau_beta) * moments[0] + self.tau_beta * gradient]
            step = new[0]
        else:
            betas = BETAS if self.epoch > 0 else (0.0, 0.0)
            step, new = adam_step(gradient, moments, self.epoch + 1, betas)
        moved = taus if self.hold else (taus - self.current_lr * step).clamp(*self.bounds)
        self.rows.assign(batch.index, torch.where(batch.finite, torch.cat([moved, *new], dim=1), old))

    def full_state(self) -> dict[str, Tensor]:
        table = self.rows.gather()
        if table is None:
            return {}
        if not isinstance(table, Tensor):  # in files
            return {"rows": table}
        return {name: part.clone() for name, part in zip(self.columns, table.split(2, dim=1), strict=True)}

    def check_state(self, state: dict[str, Tensor], dimension: int) -> None:
        if not state:
            raise ValueError(f"temperature: {self.name!r} where the state is of another")
        for name in self.columns:
            if name not in state and "rows" not in state:
                raise ValueError(f"tau_optimizer: {self.tau_optimizer!r} where the state has no {name}")
        if "second_moment" in state.keys() - set(self.columns):
            raise ValueError(f"tau_optimizer: {self.tau_optimizer!r} where the state has the moments of 'adam'")
        self.rows.check(self._table_of(state))

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        self.rows.load(self._table_of(state))

    def _table_of(self, state: dict[str, Tensor]) -> Any:
        return state["rows"] if "rows" in state else torch.cat([state[name] for name in self.columns], dim=1)


TEMPERATURES = {
    scheme.name: scheme
    for scheme in (FixedTemperature, LearnableTemperature, UnscaledTemperature, IndividualTemperature)
}
