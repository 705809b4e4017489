"""The base class of the temperature schemes, and the schemes with one temperature: fixed or learned.

OpenCLIP's parameter is `logit_scale` = log(1 / tau); its models pass the exponential, 1 / tau, to the loss. A scheme
maps it to the temperatures of the step's anchors and computes the objective's value and its derivative in tau. Per
anchor the objective is

    scale(tau_i) * (value_i + rho),    scale(tau) = tau,

where value_i (`objectives`) estimates log(eps + g_i). In FastCLIP-v0 scale(tau) = 1, and FastCLIP-v2's released code
leaves tau_i out of the encoders' gradient. Both directions are summed, so rho contributes 2 * tau * rho.
Temperatures have the shape (2, B), images as anchors first, even if all are the same tau.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from open_clip_ext.batch import Batch
from open_clip_ext.errors import InputError
from open_clip_ext.options import NOT_NEGATIVE, POSITIVE, Derived, Part, option

RHO = option(8.5, "pulls the temperature down; 6.5 on CC3M, 8.5 on CC12M, 11 on DFN in the papers", **NOT_NEGATIVE)
TAU_MIN = option(
    0.01, "tau_0, lower bound of the temperature", valid=lambda value: 0 < value <= 1, expected="in (0, 1]"
)
TAU_MAX = option(1.0, "upper bound of a sample's temperature", **POSITIVE)
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
    lr_tau: float = option(Derived("a fraction of --lr, per loss"), "learning rate of logit_scale", **POSITIVE)
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
        can_capture: as for `Normalizer`.
        scales_encoders: whether an anchor has the factor tau_i in the encoders' objective.
        hold: freeze the per-sample temperatures; their momentum still updates, as an optimizer's at learning rate 0.
    """

    optimizer_options = FixedLogitScale.options
    reads_logit_scale = True
    trains_logit_scale = False
    allows_reference = True
    allows_views = True
    scales_encoders = True
    can_capture = False
    hold = False
    rho = 0.0

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
        return taus if self.scales_encoders else torch.ones_like(taus)

    def value(self, taus: Tensor, values: Tensor) -> Tensor:
        """The estimate of the global objective, 0-d, from the anchors' value_i + rho, (2, B)."""
        return (taus * values if self.scales_encoders else values).mean(dim=1).sum()

    def gradient(self, taus: Tensor, values: Tensor, tau_terms: Tensor, batch: int) -> Tensor | None:
        """This process's part of the derivative of `value` in the learned tau, 0-d; None if tau is not learned.

        Args:
            taus, values: of this process's anchors, (2, b), as above.
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

    def capture_state(self) -> tuple[Any, ...]:
        """As of `Normalizer`, for all methods of a step."""
        return ()

    def diagnostics(self, taus: Tensor) -> dict[str, Tensor]:
        if self.reads_logit_scale:
            return {"tau": taus[0, 0].clone()}
        return {"tau": taus.mean(), "tau_min": taus.min(), "tau_max": taus.max()}


class FixedTemperature(Temperature):
    """One tau that is not trained, and therefore no rho (SogCLR, FastCLIP-v1, TuneCLIP).

    In plain PyTorch: `equations.sogclr`, `equations.fastclip_v1`, `equations.tuneclip`.
    """

    name = "fixed"
    can_capture = True


class LearnableTemperature(Temperature):
    """One tau for both directions, learned with the encoders (NeuCLIP, Eq. 1 and 13; FastCLIP-v3's RGCL-g).

    In plain PyTorch: `equations.fastclip_v3`; `equations.scent`, which is the same.

    By Eq. 13 tau falls while D, the mean over anchors of KL(p_i || uniform), is below rho, and settles where D equals
    rho; p_ij is proportional to exp(l(s_ij - s_ii) / tau) over the anchor's negatives j. So exp(-rho) is roughly the
    fraction of the negatives that have weight. NeuCLIP's rho is 6.5 for CC3M, 8.5 for CC12M and 11 for all three DFN
    sets (Table 3). FastCLIP's released code counts dg/dtau twice, which changes the tau that is reached; the values of
    rho published with that code were tuned for it.
    """

    name = "learnable"
    can_capture = True
    optimizer_options = LearnedLogitScale.options
    trains_logit_scale = True
    rho: float = RHO
    fastclip_code: bool = FASTCLIP_CODE

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, explicit: Collection[str]) -> None:
        refuse_fastclip_code(settings)

    def gradient(self, taus: Tensor, values: Tensor, tau_terms: Tensor, batch: int) -> Tensor:
        """NeuCLIP, Eq. 13."""
        return torch.add(values, tau_terms, alpha=2 if self.fastclip_code else 1).sum() / batch


class UnscaledTemperature(Temperature):
    """One learned tau with FastCLIP-v0's objective: log(eps + g_i) without the factor tau and without rho.

    In plain PyTorch: `equations.fastclip_v0`; with the batch's own normalizers `equations.dcl`.
    """

    name = "unscaled"
    can_capture = True
    optimizer_options = LearnedLogitScale.options
    trains_logit_scale = True
    scales_encoders = False

    def gradient(self, taus: Tensor, values: Tensor, tau_terms: Tensor, batch: int) -> Tensor:
        return (tau_terms / taus).sum() / batch
