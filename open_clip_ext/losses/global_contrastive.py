"""The global contrastive objective with four replaceable parts.

NeuCLIP, Eq. 1, estimated from one global batch:

    F = (1/n) sum_i [ tau * log(eps + g_1i) + tau * log(eps + g_2i) ] + 2 * tau * rho
    g_1i = mean over j != i of exp(l(s_ij - s_ii) / tau)      image i as anchor, all texts j
    g_2i = mean over j != i of exp(l(s_ji - s_ii) / tau)      text i as anchor, all images j

Both directions are summed, and rho has that scale, as in the papers; FastCLIP's released code halves the sum.
`consistency` adds CyCLIP's terms in this scale, with tau a constant: 2 * tau * consistency * (in-modal + cross-modal).
With a `positive_key` the anchor's loss is the mean of those with each of its positives as s_ii (`kernels.positives`).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from open_clip_ext.batch import Batch, add_eps, log_mean_of_directions
from open_clip_ext.diagnostics.online_error import OnlineError
from open_clip_ext.distributed import all_gather
from open_clip_ext.kernels.choice import KERNELS
from open_clip_ext.kernels.positives import SeveralPositives
from open_clip_ext.kernels.similarities import SimilarityBlocks, make_blocks
from open_clip_ext.kernels.streaming import largest
from open_clip_ext.losses.composed import ComposedLoss
from open_clip_ext.losses.cyclip import add_consistency
from open_clip_ext.normalizers.base import Normalizer
from open_clip_ext.objectives import MAX_LOG_WEIGHT, Objective
from open_clip_ext.options import NOT_NEGATIVE, POSITIVE, option
from open_clip_ext.surrogates import Identity, Surrogate, is_linear
from open_clip_ext.temperatures import Temperature


class GlobalContrastiveLoss(ComposedLoss):
    """Loss for the global contrastive objective (NeuCLIP, Eq. 1), made of four replaceable parts.

    Under torch.distributed each process passes its own b pairs. Once averaged over processes, as
    DistributedDataParallel does, the gradients are exact for the global batch of B pairs. They do not depend on
    OpenCLIP's `local_loss` and `gather_with_grad`.

    Args:
        normalizer: estimator of the log-normalizers; holds the state.
        temperature: temperature scheme; may hold state, too.
        objective: `Compositional` or `Unified`.
        surrogate: l, applied to a negative's similarity gap; None: the identity.
        accum_freq, validate: as in `Loss`.
        mixing: weight of the batch's own estimate, a constant, in every exp(alpha), in [0, 1); 0 uses the estimator
            alone. It bounds the weights exp(L - alpha) by 1 / mixing, as gamma does in a table. Not from a paper.
        loss_eps: eps of Eq. 1, > 0; it decides which easy anchors still get a gradient.
        negatives: `cross`: an anchor's negatives are of the other modality. `both`: also of its own, 2 (B - 1) in all;
            for two views of images in place of image and text (iSogCLR, Eq. 2-4 and 11), where each view of an image
            has its own row and temperature. `views`: the same, but with one s_i, u_i and tau_i per image, as in the
            paper: g_i and tau_i's gradient are means over the image's two views as anchors.
        consistency: weight of CyCLIP's in-modal and cross-modal terms (`losses.cyclip`), both lambdas. The terms are
            multiplied by 2 tau, a constant; tau is the mean where each sample has its own, and 1 where the objective
            lacks the factor tau. In plain PyTorch: `equations.consistency`.
        reference_gap: subtract from each gap s_ij - s_ii that of a frozen reference model (DRRho-CLIP), whose features
            every call then needs. In plain PyTorch: `equations.drrho_gaps`, `equations.drrho_clip`.

    Raises:
        InputError: the parts do not fit together, or an argument is out of range.
    """

    name = "global contrastive"
    loss_eps: float = option(1e-14, "eps inside the logarithm of the loss", **POSITIVE)
    mixing: float = option(
        0.0, "weight of the batch's own estimate in every normalizer; bounds the anchors' weights",
        valid=lambda value: 0 <= value < 1, expected="in [0, 1)",
    )
    negatives: str = option(
        "cross",
        "which samples are negatives: the other modality's, both's, or both's with one estimate and one temperature "
        "for an image's two views",
        choices=("cross", "both", "views"),
        in_state=True,
    )
    consistency: float = option(0.0, "weight of CyCLIP's consistency, times 2 tau", **NOT_NEGATIVE)
    reference_gap: bool = option(
        False, "subtract the similarity gaps of a frozen --distill-model (DRRho-CLIP)", in_state=True
    )
    kernels: str = KERNELS
    trains_logit_scale = False  # the temperature decides
    CHECKED = ("image_features", "text_features", "logit_scale", "similarities", "index", "log-normalizers")

    def __init__(
        self,
        normalizer: Normalizer,
        temperature: Temperature,
        objective: type[Objective],
        surrogate: Surrogate | None = None,
        accum_freq: int = 1,
        validate: bool = False,
        **options: Any,
    ):
        super().__init__(accum_freq, validate, **options)
        self._check_parts(normalizer, temperature, objective)
        self.normalizer = normalizer
        self.temperature = temperature
        self.objective = objective
        self.surrogate = self._own_surrogate = surrogate or Identity()
        self.eps = self.loss_eps
        self.takes_reference = self.reference_gap
        self.takes_keys = normalizer.allows_keys and self.negatives == "cross"
        self.takes_positives = self.takes_keys and is_linear(self.surrogate)  # the logarithm must let the positive out
        self.intra_modal = self.negatives != "cross"
        self.one_per_pair = self.negatives == "views"
        self.needs_index = normalizer.needs_index or temperature.needs_index
        if self.needs_index:
            self.num_samples = (normalizer if normalizer.needs_index else temperature).num_samples
        self.trains_logit_scale = temperature.trains_logit_scale
        self.reads_logit_scale = temperature.reads_logit_scale
        self.online_error = OnlineError(self.surrogate, self.eps, self.intra_modal, self.one_per_pair)
        # The temperature's rows and the result of the normalizer's update: a step's later calls reuse the first call's.
        self._of_step: tuple[Tensor | None, Any] = (None, None)
        self._last: tuple[Tensor, Tensor, Tensor] | None = None
        self._last_consistency: dict[str, Tensor] = {}

    @contextmanager
    def in_recovery(self, surrogate: Surrogate | None) -> Iterator[None]:
        parts = [part for part in (self, self.normalizer, self.online_error) if hasattr(part, "surrogate")]
        self.temperature.hold = True
        for part in parts:
            part.surrogate = surrogate or self._own_surrogate
        try:
            yield
        finally:
            self.temperature.hold = False
            for part in parts:
                part.surrogate = self._own_surrogate

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.online_error.restart()

    def compute(
        self, image: Tensor, text: Tensor, logit_scale: Tensor, index: Tensor | None, update_state: bool,
        key: Tensor | None = None, positive_key: Tensor | None = None,
    ) -> Tensor:
        """The loss of the global batch; the value is equal on every process."""
        tau = logit_scale.reciprocal()
        trains = self.training and torch.is_grad_enabled()
        with torch.no_grad():
            index, index_problem = self._global_index(index, image.device)
            rows, updated = self._of_step if trains else (None, None)
            batch = Batch.gather(image, text, tau, index)
            keys = key if positive_key is None else positive_key  # a positive is no negative
            if keys is not None:  # kernels read them one after another
                batch.keys = all_gather(keys.to(image.device, non_blocking=True)).contiguous()
            if update_state:
                self.temperature.observe(batch)
            if update_state or not trains:
                rows = self.temperature.lookup(batch)
            batch.set_tau(self.temperature.taus(tau, rows))
            blocks = make_blocks(batch, self.surrogate, self.kernels, self.intra_modal)
            self._complete(batch, blocks, index_problem)
            if update_state:
                updated = self._updated(batch)

        through_alpha = torch.is_grad_enabled() and self.objective.through_alpha
        inputs = batch.leaves(requires_grad=through_alpha)
        with torch.set_grad_enabled(through_alpha):
            alpha = self.mixed(self.normalizer(inputs, updated), batch.log_batch)
        with torch.no_grad():
            all_alpha = all_gather(alpha.T).T
            self.note(largest(all_alpha), ("log-normalizers",))
            self._graph.on_host(partial(self._remember, batch, all_alpha, update_state, (rows, updated)))
            values, slopes = self.objective.value_and_slope(batch.all_log_batch, all_alpha)
            if several := None if positive_key is None else SeveralPositives(batch):
                values = values + several.gaps / batch.all_tau
            if self.temperature.rho:
                values = values + self.temperature.rho
            value = self.temperature.value(batch.all_tau, values)
            gradients, tau_terms, consistency = self._gradients(
                blocks, tau, inputs, alpha, all_alpha, values, slopes, several
            )
            if update_state and rows is not None:
                per_anchor = values + all_gather(tau_terms.T).T
                if self.one_per_pair:
                    per_anchor = per_anchor.mean(dim=0).expand(2, -1)
                self.temperature.update(batch, rows, per_anchor)
        return self.attached(value if consistency is None else value + consistency, gradients)

    def _updated(self, batch: Batch) -> Any:
        """The result of the normalizer's update."""
        if not self._graph.capturing:
            return self.normalizer.update(batch)
        self._graph.on_host(partial(self.normalizer.replayed, batch))
        return self.normalizer.capture(batch)

    def _remember(
        self, batch: Batch, all_alpha: Tensor, update_state: bool, of_step: tuple[Tensor | None, Any]
    ) -> None:
        """Keep what later calls and the log need of this one."""
        self._last = (batch.all_tau, batch.all_log_batch, all_alpha)
        if update_state:
            self._of_step = of_step
            if batch.keys is None:  # it compares anchors with later samples and ignores keys
                self.online_error.observe(batch, all_alpha)

    def mixed(self, alpha: Tensor, log_batch: Tensor) -> Tensor:
        """Mix the batch's own estimate L into the estimator's alpha, (2, b), and bound exp(L - alpha)."""
        if self.mixing > 0:
            alpha = torch.logaddexp(math.log(self.mixing) + log_batch, math.log1p(-self.mixing) + alpha)
        if not alpha.requires_grad:
            return torch.maximum(alpha, log_batch - MAX_LOG_WEIGHT)
        # Its gradient would lack alpha's where the bound holds: the control variate of `unified`.
        return alpha + (log_batch - MAX_LOG_WEIGHT - alpha.detach()).clamp(min=0)

    def _global_index(self, index: Tensor | None, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Rows of the global batch, (B,), or None; and whether one is out of range, 0-d bool on the device."""
        if not self.needs_index or index is None:
            return None, None
        index = all_gather(index.to(device, non_blocking=True))
        inside = index.clamp(0, self.num_samples - 1)
        return inside, (inside != index).any()

    def _complete(self, batch: Batch, blocks: SimilarityBlocks, index_problem: Tensor | None) -> None:
        """Set the batch's L and `finite`, and note what is wrong with it."""
        log_batch = add_eps(blocks.log_batch_normalizers(), self.eps)
        if self.one_per_pair:
            log_batch = log_mean_of_directions(log_batch)
        batch.all_log_batch = all_gather(log_batch.T).T
        numbers = largest(batch.all_image, batch.all_text, batch.all_tau.log(), batch.all_log_batch)  # 1 / inf is 0
        batch.finite = (numbers < math.inf).all()
        self.note(numbers)
        if index_problem is not None:
            batch.finite = batch.finite > index_problem  # and not
            self.note(index_problem[None], ("index",))

    def _gradients(
        self, blocks: SimilarityBlocks, tau: Tensor, inputs: Batch, alpha: Tensor, all_alpha: Tensor, values: Tensor,
        slopes: Tensor | None, several: SeveralPositives | None,
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor | None]:
        """This process's part of the gradient of the global value.

        Args:
            inputs: leaves of alpha's graph.
            alpha: (2, b), with its graph.
            all_alpha, values: (2, B); values with rho.
            slopes: derivative of `values` in alpha, (2, B), if the objective is minimized through alpha.
            several: the anchors' positives, where they may have more than one.

        Returns:
            Pairs (input, gradient); tau_i times the derivative in tau_i of each local anchor's value, (2, b); the
            weighted consistency terms, 0-d, if there are any.
        """
        batch = blocks.batch
        image, text, grad_tau, learned = self.gradient_through_alpha(batch, inputs, alpha, slopes)
        scaled = self.temperature.scales_encoders  # the kernel's gradient has the factor tau_i
        all_alpha = all_alpha if scaled else all_alpha + batch.all_tau.log()
        pulls, tau_terms = blocks.add_gradients((image, text), all_alpha, are_empty=grad_tau is None)
        if grad_tau is not None:
            tau_terms = torch.add(tau_terms, grad_tau, alpha=batch.size)
        if several is not None:
            if slopes is not None:
                slope = slopes[:, batch.local]
                pulls = pulls + (slope if scaled else slope / batch.tau)
            several.add_gradients((image, text), all_gather(pulls.T).T)
            tau_terms = tau_terms - pulls * several.gaps[:, batch.local] / batch.tau
        if not scaled:
            tau_terms = tau_terms * batch.tau
        consistency = self._add_consistency(batch, image, text) if self.consistency else None
        gradients = [(batch.image, image), (batch.text, text)]
        # As the temperature's, a parameter's whole gradient is in each of the accum_freq calls.
        gradients += [(parameter, gradient / self.accum_freq) for parameter, gradient in learned]
        tau_gradient = self.temperature.gradient(batch.tau, values[:, batch.local], tau_terms, batch.size)
        if tau_gradient is not None:
            gradients.append((tau, tau_gradient))
        return gradients, tau_terms, consistency

    def _add_consistency(self, batch: Batch, grad_image: Tensor, grad_text: Tensor) -> Tensor:
        """Add the consistency terms' gradient, (b, d) each; return their weighted value, 0-d."""
        scale = self.temperature.scale(batch.all_tau).mean(dim=1).sum()
        terms = add_consistency(batch, grad_image, grad_text, self.consistency, self.consistency, scale)
        last = dict(zip(("inmodal_consistency", "crossmodal_consistency"), terms, strict=True))
        self._graph.on_host(partial(setattr, self, "_last_consistency", last))
        return scale * self.consistency * (terms[0] + terms[1])

    def gradient_through_alpha(
        self, batch: Batch, inputs: Batch, alpha: Tensor, slopes: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, list[tuple[nn.Parameter, Tensor]]]:
        """The gradient through alpha of mean_i scale(tau_i) * value_i, summed over both directions.

        Args:
            inputs: leaves of alpha's graph.
            alpha: (2, b), with its graph.
            slopes: derivatives of the values in alpha, (2, B), if there are any.

        Returns:
            Gradients in image and text, (b, d) each, and in tau, (2, b); pairs (parameter, gradient) of the
            normalizer's parameters that autograd trains. Without slopes the first two are empty, the third is None.
        """
        leaves = [inputs.image, inputs.text, inputs.positives, inputs.tau]
        if slopes is None or not alpha.requires_grad:
            return torch.empty_like(batch.image), torch.empty_like(batch.text), None, []
        slopes = slopes[:, batch.local] * self.temperature.scale(batch.tau) / batch.size
        parameters = [parameter for parameter in self.normalizer.parameters() if parameter.requires_grad]
        grads = torch.autograd.grad(alpha, [*leaves, *parameters], slopes, allow_unused=True, materialize_grads=True)
        grad_image, grad_text, grad_positive, grad_tau, *grad_parameters = grads
        # Not in place: autograd may return the same tensor for several inputs.
        grad_image = torch.addcmul(grad_image, grad_positive[:, None], batch.text.detach())
        grad_text = torch.addcmul(grad_text, grad_positive[:, None], batch.image.detach())
        return grad_image, grad_text, grad_tau, list(zip(parameters, grad_parameters, strict=True))

    @property
    def value_name(self) -> str:
        """The objective F depends on the temperature, the surrogate and the consistency, not on the estimator."""
        surrogate = "" if self.surrogate.name == "identity" else f"_{self.surrogate.name}"
        return f"objective_{self.temperature.name}{surrogate}{'_consistency' if self.consistency else ''}"

    def diagnostics(self) -> dict[str, Tensor]:
        """Values of the last call for the log: 0-d tensors, some on the device. No communication.

        `max_weight` is the largest weight w_i = exp(L_i - alpha_i) of the global batch's 2 B anchors;
        `effective_anchors` = (sum w)^2 / sum w^2 is the effective number of anchors in the gradient, from 1 to 2 B.
        `loss_at_chance` is the value if all similarities were equal, so that a log-normalizer is l(0) / tau.
        """
        if self._last is None:
            return {}
        taus, log_batch, alpha = self._last
        deviation, mean = torch.std_mean(alpha, dim=1)
        log_weights = (log_batch - alpha).flatten()
        chance = self.surrogate.value(torch.zeros_like(taus)) / taus + self.temperature.rho
        return {
            **({} if self.takes_reference else {"loss_at_chance": self.temperature.value(taus, chance)}),
            **self.temperature.diagnostics(taus),
            "alpha_image_mean": mean[0],
            "alpha_image_std": deviation[0],
            "alpha_text_mean": mean[1],
            "alpha_text_std": deviation[1],
            "max_weight": log_weights.max().exp(),
            "effective_anchors": (2 * log_weights.logsumexp(dim=0) - (2 * log_weights).logsumexp(dim=0)).exp(),
            **{name: term.clone() for name, term in self._last_consistency.items()},
            **self.online_error.diagnostics(),
            **self.normalizer.diagnostics(log_batch, alpha),
        }

    def diagnostics_state(self) -> dict[str, Tensor | int]:
        return self.online_error.state()

    def load_diagnostics_state(self, state: dict[str, Tensor | int]) -> None:
        self.online_error.load_state(state)

    def load_full_state(self, state: dict[str, Any]) -> None:
        super().load_full_state(state)
        self._of_step = (None, None)
