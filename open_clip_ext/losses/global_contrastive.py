"""The global contrastive objective with its four replaceable parts.

NeuCLIP, Eq. 1, estimated from one global batch:

    F = (1/n) sum_i [ tau * log(eps + g_1i) + tau * log(eps + g_2i) ] + 2 * tau * rho
    g_1i = mean over j != i of exp(l(s_ij - s_ii) / tau)      image i as anchor, all texts j
    g_2i = mean over j != i of exp(l(s_ji - s_ii) / tau)      text i as anchor, all images j

Both sides are summed and rho is on that scale, as in the papers; FastCLIP's released code halves the sum.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from open_clip_ext.distributed import all_gather, world_size
from open_clip_ext.errors import InputError
from open_clip_ext.losses.base import Loss
from open_clip_ext.losses.compositional import Compositional
from open_clip_ext.losses.unified import Unified
from open_clip_ext.normalizers.base import Batch, Normalizer
from open_clip_ext.options import Option, positive
from open_clip_ext.pairs import (
    MAX_LOG_WEIGHT,
    Pairs,
    SimilarityBlocks,
    add_eps,
    attach_gradients,
    local_part,
    log_mean_of_sides,
)
from open_clip_ext.probe import NormalizerProbe
from open_clip_ext.streaming import are_finite
from open_clip_ext.surrogates import Identity, Surrogate
from open_clip_ext.temperature import Temperature


class GlobalContrastiveLoss(Loss):
    """Any of the methods that minimise the global contrastive objective.

    Under torch.distributed each process passes its own b pairs; the gradients are exact for the global batch of B
    pairs once averaged over processes, as DistributedDataParallel does. They do not depend on OpenCLIP's
    `local_loss` and `gather_with_grad`.

    Args:
        normalizer: estimator of the log-normalizers; holds the state.
        temperature: scheme that the temperature follows; may hold state too.
        objective: `Compositional` or `Unified`.
        surrogate: l, what a negative's similarity gap counts as.
        mixing: share of the batch's own estimate, as a constant, in every exp(alpha), in [0, 1); 0 leaves the estimator
            alone. It bounds the weights exp(L - alpha) by 1 / mixing, as gamma does in a table. Of no paper, ours.
        eps: eps of Eq. 1, > 0; it decides which easy anchors still get a gradient.
        negatives: `cross`: an anchor's negatives are of the other side. `both`: also of its own side, 2 (B - 1) in
            all; for two views of images in place of image and text (iSogCLR, Eq. 2-4 and 11), where each view of an
            image is an anchor with a row and a temperature of its own. `views`: the same, but as the paper has it with
            one s_i, u_i and tau_i for each image: g_i is the mean over its two views as anchors, and so is tau_i's
            gradient.
        accum_freq, validate: as in `Loss`.

    Raises:
        InputError: the parts do not go together, or an argument is out of range.
    """

    options = (
        Option("loss_eps", float, 1e-14, "eps inside the logarithm of the loss", valid=positive, wanted="a number > 0"),
        Option(
            "mixing", float, 0.0, "share of the batch's own estimate mixed into every normalizer; bounds the weights",
            valid=lambda value: 0 <= value < 1, wanted="in [0, 1)",
        ),
        Option(
            "negatives", str, "cross",
            "whether only the other side's samples are negatives, or both sides'; views: both, with one estimate and "
            "one temperature for the two views of an image",
            choices=("cross", "both", "views"),
        ),
    )
    name = "global contrastive"
    trains_logit_scale = False  # the temperature decides
    CHECKED = ("image_features", "text_features", "logit_scale", "similarities", "index", "log-normalizers")

    def __init__(
        self,
        normalizer: Normalizer,
        temperature: Temperature,
        objective: type[Compositional] | type[Unified],
        surrogate: Surrogate | None = None,
        mixing: float = 0.0,
        eps: float = 1e-14,
        negatives: str = "cross",
        accum_freq: int = 1,
        validate: bool = False,
    ):
        super().__init__(accum_freq, validate)
        for option, value in zip(self.options, (eps, mixing, negatives), strict=True):
            option.check(value)
        if negatives != "cross" and not normalizer.knows_both_sides:
            raise InputError(
                f"--negatives: {negatives!r} with --normalizer {normalizer.name}, which estimates over the other side "
                "alone; use 'cross'"
            )
        if objective.needs_differentiable_normalizer and not normalizer.differentiable:
            raise InputError(
                f"--encoder-objective: {objective.name!r} needs a normalizer that is a function of the embeddings; "
                f"with --normalizer {normalizer.name} use 'compositional'"
            )
        self.normalizer = normalizer
        self.temperature = temperature
        self.objective = objective
        self.surrogate = surrogate or Identity()
        self.mixing = mixing
        self.eps = eps
        self.both_sides = negatives != "cross"
        self.one_per_pair = negatives == "views"
        self.needs_index = normalizer.needs_index or temperature.needs_index
        if self.needs_index:
            self.num_samples = (normalizer if normalizer.needs_index else temperature).num_samples
        self.trains_logit_scale = temperature.trains_logit_scale
        self.probe = NormalizerProbe(self.surrogate, eps, self.both_sides, self.one_per_pair)
        self._last: tuple[Tensor, Tensor, Tensor] | None = None
        self._step_taus: Tensor

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.probe.restart()
        self.normalizer.set_epoch(epoch)
        self.temperature.set_epoch(epoch)

    def set_steps_per_epoch(self, steps: int) -> None:
        self.normalizer.set_steps_per_epoch(steps)

    def description(self) -> str:
        parts = {
            "normalizers": self.normalizer.description(), "temperature": self.temperature.name,
            "surrogate": self.surrogate.name, "encoder objective": self.objective.name,
        }
        return ", ".join(f"{part} {name}" for part, name in parts.items())

    def hold_temperatures(self, hold: bool) -> None:
        self.temperature.hold = hold

    def compute(
        self, image: Tensor, text: Tensor, logit_scale: Tensor, index: Tensor | None, moves: bool
    ) -> Tensor:
        """The value is equal on every process."""
        pairs = Pairs.gather(image, text)
        tau = logit_scale.reciprocal()
        with torch.no_grad():
            index, index_problem = self._global_index(index, image.device)
            taus = self._taus(tau, index, moves)
            blocks = SimilarityBlocks(pairs, self.surrogate, self.both_sides)
            log_batch = add_eps(blocks.log_batch_normalizers(taus), self.eps)
            if self.one_per_pair:
                log_batch = log_mean_of_sides(log_batch)
            batch, problems = self._global_batch(pairs, blocks, log_batch, taus, index, index_problem)
            if moves:
                self.normalizer.update(batch)

        wants_slopes = torch.is_grad_enabled() and self.objective.needs_differentiable_normalizer
        leaves = pairs.image, pairs.text, blocks.positives, local_part(taus, pairs)
        inputs = [tensor.detach().requires_grad_(wants_slopes) for tensor in leaves]
        with torch.set_grad_enabled(wants_slopes):
            alpha = self._alpha(pairs, inputs, batch, log_batch)
        with torch.no_grad():
            all_alpha = all_gather(alpha.T).T
            self.note(torch.cat([problems, ~are_finite(all_alpha)]))
            self._last = (taus, batch.log_batch, all_alpha)
            if moves:
                self.probe.observe(batch, all_alpha)
            log_values = self.objective.log_values(batch.log_batch, all_alpha)
            value = self.temperature.value(taus, log_values)
            gradients, tau_terms = self._gradients(pairs, blocks, tau, taus, log_batch, inputs, alpha, all_alpha)
            if moves and self.temperature.needs_index and index is not None:
                all_tau_terms = all_gather(tau_terms.T).T
                per_anchor = log_values + self.temperature.rho + all_tau_terms
                if self.one_per_pair:
                    per_anchor = per_anchor.mean(dim=0).expand(2, -1)
                self.temperature.update(index, taus, per_anchor, batch.finite)
        return attach_gradients(value, gradients)

    def _alpha(self, pairs: Pairs, inputs: list[Tensor], batch: Batch, log_batch: Tensor) -> Tensor:
        """Log-normalizers of this process's anchors, (2, b).

        Args:
            inputs: image, text, s_ii and temperatures of this process, of which alone alpha has a graph.
        """
        image, text, positives, taus = inputs
        return self.mixed(self.normalizer(replace(pairs, image=image, text=text), positives, taus, batch), log_batch)

    def mixed(self, alpha: Tensor, log_batch: Tensor) -> Tensor:
        """The log-normalizers in use, (2, b), from the estimator's and the batch's own L: mixing, and the bound on
        exp(L - alpha)."""
        if self.mixing > 0:
            alpha = torch.logaddexp(math.log(self.mixing) + log_batch, math.log1p(-self.mixing) + alpha)
        return alpha.maximum(log_batch - MAX_LOG_WEIGHT)

    def _taus(self, tau: Tensor, index: Tensor | None, moves: bool) -> Tensor:
        """The step's temperatures; those per sample are moved by its first call, and its other calls want the old."""
        if moves or not self.training or not self.temperature.needs_index:
            self._step_taus = self.temperature.taus(tau, index)
        return self._step_taus

    def _global_index(self, index: Tensor | None, device: torch.device) -> tuple[Tensor | None, Tensor]:
        """Rows of the global batch, and whether one of them is out of range, on the device."""
        if not self.needs_index or index is None:
            return None, torch.zeros((), dtype=torch.bool, device=device)
        index = all_gather(index.to(device, non_blocking=True))
        outside = ((index < 0) | (index >= self.num_samples)).any()
        return index.clamp(0, self.num_samples - 1), outside

    def _global_batch(
        self, pairs: Pairs, blocks: SimilarityBlocks, log_batch: Tensor, taus: Tensor, index: Tensor | None,
        index_problem: Tensor,
    ) -> tuple[Batch, Tensor]:
        """The batch, and what is wrong with it: a bool on the device for each of `CHECKED` but the last."""
        all_log_batch = all_gather(log_batch.T).T
        checked = (pairs.all_image, pairs.all_text, taus, all_log_batch)
        problems = torch.cat([~are_finite(*checked), index_problem[None]])
        batch = Batch(
            image=pairs.all_image,
            text=pairs.all_text,
            positives=blocks.all_positives,
            log_batch=all_log_batch,
            tau=taus,
            index=index,
            finite=~problems.any(),
        )
        return batch, problems

    def _gradients(
        self, pairs: Pairs, blocks: SimilarityBlocks, tau: Tensor, taus: Tensor, log_batch: Tensor,
        inputs: list[Tensor], alpha: Tensor, all_alpha: Tensor,
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """This process's part of the gradient of the global value, by input; and of its anchors
        tau_i * exp(-alpha_i) * dg_i/dtau_i, with what alpha's own dependence on tau_i adds."""
        batch = all_alpha.shape[1]
        image, text, by_tau, learned = self.through_alpha(pairs, inputs, log_batch, alpha, batch)
        alpha = alpha.detach()
        share = world_size()  # DistributedDataParallel averages over processes, while their parts add up
        scale = self.temperature.scale(taus) / taus  # of what is computed below, which has the factor tau_i
        if taus.dim():
            factor: Tensor | int = share
            own = local_part(scale, pairs)
            tau_terms = blocks.add_gradients((image, text), taus, alpha - own.log(), all_alpha - scale.log())
            tau_terms = tau_terms / own + by_tau * batch
        else:
            factor = scale * share
            tau_terms = blocks.add_gradients((image, text), taus, alpha, all_alpha)
        gradients = [(pairs.image, image.mul_(factor)), (pairs.text, text.mul_(factor))]
        gradients += [(parameter, gradient * factor) for parameter, gradient in learned]
        log_values = self.objective.log_values(log_batch, alpha)
        tau_gradient = self.temperature.gradient(taus, log_values, tau_terms, batch)
        if tau_gradient is not None:
            gradients.append((tau, tau_gradient * share + by_tau * factor))
        return gradients, tau_terms

    def through_alpha(
        self, pairs: Pairs, inputs: list[Tensor], log_batch: Tensor, alpha: Tensor, batch: int
    ) -> tuple[Tensor, Tensor, Tensor, list[tuple[nn.Parameter, Tensor]]]:
        """What comes through alpha of the gradient of the sum over sides of mean_i tau_i * log_value_i: in image and
        text, (b, d) each, in tau, and pairs (parameter, gradient) of what the normalizer leaves to autograd.

        Args:
            inputs: image, text, s_ii and temperatures of this process, leaves of alpha's graph.
            log_batch: L, (2, b).
            alpha: (2, b), with its graph.
            batch: B.
        """
        image, text, positives, taus = inputs
        slopes = self.objective.alpha_gradient(log_batch, alpha.detach())
        if slopes is None or not alpha.requires_grad:
            return torch.zeros_like(image), torch.zeros_like(text), torch.zeros_like(taus), []
        parameters = [parameter for parameter in self.normalizer.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(
            alpha, [*inputs, *parameters], slopes * taus.detach() / batch, allow_unused=True, materialize_grads=True
        )
        by_image, by_text, by_positive, by_tau, *by_parameter = found
        # Not in place: autograd may have given one tensor for several inputs.
        by_image = torch.addcmul(by_image, by_positive[:, None], pairs.text.detach())
        by_text = torch.addcmul(by_text, by_positive[:, None], pairs.image.detach())
        return by_image, by_text, by_tau, list(zip(parameters, by_parameter, strict=True))

    def diagnostics(self) -> dict[str, Tensor]:
        """What a log line should carry of the last call: 0-d tensors, some on the device. No communication.

        `max_weight` and `effective_anchors` describe the weights w_i = exp(L_i - alpha_i) of all 2 B anchors of the
        global batch: the largest, and (sum w)^2 / sum w^2, the number of anchors that share the gradient, 1 to 2 B.
        """
        if self._last is None:
            return {}
        taus, log_batch, alpha = self._last
        deviation, mean = torch.std_mean(alpha, dim=1)
        log_weights = (log_batch - alpha).flatten()
        return {
            **self.temperature.diagnostics(taus),
            "alpha_image_mean": mean[0],
            "alpha_image_std": deviation[0],
            "alpha_text_mean": mean[1],
            "alpha_text_std": deviation[1],
            "max_weight": log_weights.max().exp(),
            "effective_anchors": (2 * log_weights.logsumexp(dim=0) - (2 * log_weights).logsumexp(dim=0)).exp(),
            **self.probe.diagnostics(),
            **self.normalizer.diagnostics(log_batch, alpha),
        }

    def index_reason(self) -> str:
        if self.normalizer.needs_index:
            return f"the {self.normalizer.name} normalizer"
        return f"the {self.temperature.name} temperature"

    def diagnostics_state(self) -> dict[str, Tensor | int]:
        return self.probe.state()

    def load_diagnostics_state(self, state: dict[str, Tensor | int]) -> None:
        self.probe.load_state(state)

    def full_state(self) -> dict[str, Tensor | int | str]:
        state = {f"state.{name}": value for name, value in self.normalizer.full_state().items()}
        state |= {f"temperature.{name}": value for name, value in self.temperature.full_state().items()}
        return {"normalizer": self.normalizer.name, **super().full_state(), **state}

    def load_full_state(self, state: dict[str, Tensor | int | str]) -> None:
        super().load_full_state(state)
        if state["normalizer"] != self.normalizer.name:
            raise ValueError(f"normalizer: {self.normalizer.name!r} where the state is of {state['normalizer']!r}")
        for prefix, part in (("state.", self.normalizer), ("temperature.", self.temperature)):
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            part.load_full_state(own)  # type: ignore[arg-type]  # tensors, as the part gave them
