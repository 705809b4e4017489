"""The global contrastive objective with its four replaceable parts.

neuclip.txt Eq. 1, estimated from one global batch:

    F = (1/n) sum_i [ tau * log(eps + g_1i) + tau * log(eps + g_2i) ] + 2 * tau * rho
    g_1i = mean over j != i of exp(l(s_ij - s_ii) / tau)      image i as anchor, all texts j
    g_2i = mean over j != i of exp(l(s_ji - s_ii) / tau)      text i as anchor, all images j

Both sides are summed and rho is on that scale, as in the papers; FastCLIP's released code halves the sum.
"""

import math

import torch
from torch import Tensor, nn

from open_clip_ext.distributed import all_gather, world_size
from open_clip_ext.errors import InputError
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
    scale_gradient,
)
from open_clip_ext.surrogates import Identity, PowerHinge
from open_clip_ext.temperature import Temperature


class NonFiniteError(ArithmeticError):
    """A tensor of the training step was NaN or infinite; the message names the step and the first such tensor."""


class GlobalContrastiveLoss(nn.Module):
    """A loss in place of open_clip's `ClipLoss`, called with the same arguments and the samples' rows.

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
        accum_freq: calls per optimiser step. OpenCLIP calls its loss that often on the same concatenated features;
            state moves on the first call, and the temperature's gradient is that of one call.
        validate: also check what needs a wait for the device (range of `index`, unit norms), on every call.

    Raises:
        InputError: the parts do not go together, or an argument is out of range.
    """

    options = (
        Option("loss_eps", float, 1e-14, "eps inside the logarithm of the loss", valid=positive, wanted="a number > 0"),
        Option(
            "mixing", float, 0.0, "share of the batch's own estimate mixed into every normalizer; bounds the weights",
            valid=lambda value: 0 <= value < 1, wanted="in [0, 1)",
        ),
    )
    CHECKED = ("image_features", "text_features", "logit_scale", "similarities", "index", "log-normalizers")

    def __init__(
        self,
        normalizer: Normalizer,
        temperature: Temperature,
        objective: type[Compositional] | type[Unified],
        surrogate: Identity | PowerHinge | None = None,
        mixing: float = 0.0,
        eps: float = 1e-14,
        accum_freq: int = 1,
        validate: bool = False,
    ):
        super().__init__()
        for option, value in zip(self.options, (eps, mixing), strict=True):
            option.check(value)
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
        self.accum_freq = accum_freq
        self.validate = validate
        self.steps = 0
        self._calls = 0
        self._first_problem: Tensor | None = None
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Tell schedules that epoch `epoch` (0-based) begins."""
        self._calls = 0
        self.normalizer.set_epoch(epoch)
        self.temperature.set_epoch(epoch)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        index: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Estimate of the global objective, 0-d float32, equal on every process, with its gradient.

        Args:
            image_features, text_features: (b, d) unit vectors of any float type, b equal on every process; computed in
                float32 whatever autocast says (float64 stays float64). On CUDA the matrix products follow
                `torch.backends.cuda.matmul.allow_tf32`, which OpenCLIP sets, as in its own loss.
            logit_scale: 1 / tau, one number (OpenCLIP's `logit_scale.exp()`).
            logit_bias: has no effect, since it cancels in s_ij - s_ii.
            index: rows of the samples, (b,) int64 in [0, n); needed if the normalizer has state per sample.

        Raises:
            ValueError: shapes, types or `index` do not fit; the message names the argument.
        """
        self._check(image_features, text_features, logit_scale, index)
        with torch.autocast(image_features.device.type, enabled=False):
            value = self._forward(image_features, text_features, logit_scale, index)
        return {"contrastive_loss": value} if output_dict else value

    @property
    def needs_index(self) -> bool:
        """Whether any part keeps state per sample."""
        return self.normalizer.needs_index or self.temperature.needs_index

    @property
    def num_samples(self) -> int:
        """n, of the part that keeps state per sample."""
        return (self.normalizer if self.normalizer.needs_index else self.temperature).num_samples

    def _forward(self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, index: Tensor | None):
        dtype = torch.promote_types(image_features.dtype, torch.float32)
        pairs = Pairs.gather(image_features.to(dtype), text_features.to(dtype))
        # Each of the accum_freq calls sees the whole batch, so each adds tau's whole gradient.
        tau = scale_gradient(logit_scale.reshape(()).to(dtype).reciprocal(), 1 / self.accum_freq)
        moves = self.training and self._calls % self.accum_freq == 0
        self._calls += self.training
        self.steps += moves
        with torch.no_grad():
            index, index_problem = self._global_index(index, image_features.device)
            taus = self.temperature.taus(tau, index)
            blocks = SimilarityBlocks(pairs, self.surrogate)
            log_batch = add_eps(blocks.log_batch_normalizers(taus), self.eps)
            batch, problems = self._global_batch(pairs, blocks, log_batch, taus, index, index_problem)
            if moves:
                self.normalizer.update(batch)

        positives = (pairs.image * pairs.text).sum(dim=1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.objective.needs_differentiable_normalizer):
            alpha = self.normalizer(pairs, positives, tau if taus.dim() == 0 else local_part(taus, pairs), batch)
            if self.mixing > 0:
                alpha = torch.logaddexp(math.log(self.mixing) + log_batch, math.log1p(-self.mixing) + alpha)
            alpha = alpha.maximum(log_batch - MAX_LOG_WEIGHT)

        with torch.no_grad():
            all_alpha = all_gather(alpha.T).T
            self._note(problems, all_alpha)
            self._last = (taus, batch.log_batch, all_alpha)
            log_values = self.objective.log_values(batch.log_batch, all_alpha)
            value = self.temperature.value(taus, log_values)
            gradients, tau_terms = self._gradients(pairs, blocks, tau, taus, log_batch, alpha, all_alpha)
            if moves and self.temperature.needs_index:
                all_tau_terms = all_gather(tau_terms.T).T
                per_anchor = log_values + self.temperature.rho + all_tau_terms
                self.temperature.update(index, taus, per_anchor, batch.finite)
        return attach_gradients(value, gradients)

    def _global_index(self, index: Tensor | None, device: torch.device) -> tuple[Tensor | None, Tensor]:
        """Rows of the global batch, and whether one of them is out of range, on the device."""
        if not self.needs_index:
            return None, torch.zeros((), dtype=torch.bool, device=device)
        index = all_gather(index.to(device, non_blocking=True))
        outside = ((index < 0) | (index >= self.num_samples)).any()
        return index.clamp(0, self.num_samples - 1), outside

    def _global_batch(self, pairs, blocks, log_batch, taus, index, index_problem) -> tuple[Batch, Tensor]:
        """The batch, and what is wrong with it: a bool on the device for each of `CHECKED` but the last."""
        all_log_batch = all_gather(log_batch.T).T
        checked = (pairs.all_image, pairs.all_text, taus, all_log_batch)
        problems = torch.stack([*(~tensor.isfinite().all() for tensor in checked), index_problem])
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

    def _gradients(self, pairs, blocks, tau, taus, log_batch, alpha, all_alpha):
        """This process's part of the gradient of the global value, by input; and tau_i * exp(-alpha_i) * dg_i/dtau_i
        of its anchors."""
        batch = all_alpha.shape[1]
        share = world_size()  # DistributedDataParallel averages over processes, while their parts add up
        image, text, tau_terms = blocks.gradients(taus, alpha, all_alpha)
        local_taus = local_part(taus, pairs)
        scale = self.temperature.scale(local_taus)
        if taus.dim() == 0:
            image, text = image * (scale / taus), text * (scale / taus)
        gradients = [(pairs.image, image * share), (pairs.text, text * share)]
        log_values = self.objective.log_values(log_batch, alpha)
        tau_gradient = self.temperature.gradient(taus, log_values, tau_terms, batch)
        if tau_gradient is not None:
            gradients.append((tau, tau_gradient * share))
        alpha_gradient = self.objective.alpha_gradient(log_batch, alpha)
        if alpha_gradient is not None:
            gradients.append((alpha, alpha_gradient * scale * (share / batch)))
        return gradients, tau_terms

    def diagnostics(self) -> dict[str, Tensor]:
        """What a log line should carry of the last call: 0-d tensors, some on the device. No communication."""
        if self._last is None:
            return {}
        taus, log_batch, alpha = self._last
        deviation, mean = torch.std_mean(alpha, dim=1)
        return {
            **self.temperature.diagnostics(taus),
            "alpha_image_mean": mean[0],
            "alpha_image_std": deviation[0],
            "alpha_text_mean": mean[1],
            "alpha_text_std": deviation[1],
            **self.normalizer.diagnostics(log_batch, alpha),
        }

    def _note(self, problems: Tensor, alpha: Tensor) -> None:
        """Remember, on the device, the first step at which something was wrong, and what."""
        problems = torch.cat([problems, ~alpha.isfinite().all()[None]]).long()
        now = torch.where(problems.any(), torch.stack([problems.new_full((), self.steps), problems.argmax()]), -1)
        if self._first_problem is None:
            self._first_problem = now
        else:
            self._first_problem = torch.where(self._first_problem[0] >= 0, self._first_problem, now)

    def raise_if_not_finite(self) -> None:
        """Raise NonFiniteError if any call so far met a NaN or an infinity, ValueError for a row out of range on the
        device. Waits for the device."""
        if self._first_problem is None:
            return
        step, which = self._first_problem.tolist()
        if step < 0:
            return
        if self.CHECKED[which] == "index":
            raise ValueError(f"index: step {step} has a row outside [0, {self.num_samples})")
        raise NonFiniteError(f"step {step}: {self.CHECKED[which]} is not finite; training cannot go on from here")

    def _check(self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, index: Tensor | None) -> None:
        if image_features.dim() != 2 or image_features.shape != text_features.shape:
            raise ValueError(
                "image_features and text_features must both be (b, d); got "
                f"{tuple(image_features.shape)} and {tuple(text_features.shape)}"
            )
        if image_features.shape[0] * world_size() < 2:
            raise ValueError("image_features: a global batch of 1 pair has no negatives; at least 2 are needed")
        if logit_scale.numel() != 1:
            raise ValueError(f"logit_scale must be one number, 1 / tau; got shape {tuple(logit_scale.shape)}")
        if index is None:
            if self.needs_index:
                part = f"{self.normalizer.name} normalizer"
                if not self.normalizer.needs_index:
                    part = f"{self.temperature.name} temperature"
                raise ValueError(f"index: the {part} needs the samples' rows, (b,) int64")
            return
        if index.dtype != torch.int64 or tuple(index.shape) != (image_features.shape[0],):
            raise ValueError(
                f"index must be int64 of shape ({image_features.shape[0]},); got {index.dtype} of {tuple(index.shape)}"
            )
        if self.needs_index and (self.validate or index.device.type == "cpu"):
            rows = self.num_samples
            low, high = index.min().item(), index.max().item()
            if low < 0 or high >= rows:
                raise ValueError(f"index: rows must lie in [0, {rows}); got {low if low < 0 else high}")
        if self.validate:
            for name, features in (("image_features", image_features), ("text_features", text_features)):
                if (features.detach().float().norm(dim=1) - 1).abs().max().item() > 0.02:
                    raise ValueError(f"{name} must be unit vectors; normalise them first")

    def full_state(self) -> dict[str, Tensor | int | str]:
        """The estimator's state as CPU tensors, numbers and strings, which `torch.load(weights_only=True)` reads.

        It does not depend on the number of processes: whole on process 0, without tensors elsewhere. Every process must
        call it. `state_dict()` contains it too, and then must be called by every process.
        """
        state = {f"state.{name}": value for name, value in self.normalizer.full_state().items()}
        state |= {f"temperature.{name}": value for name, value in self.temperature.full_state().items()}
        return {"normalizer": self.normalizer.name, "steps": self.steps, **state}

    def load_full_state(self, state: dict[str, Tensor | int | str]) -> None:
        """Take over what `full_state` gave on process 0; every process loads the whole.

        Raises:
            ValueError: it is the state of another normalizer or of other sizes.
        """
        if state["normalizer"] != self.normalizer.name:
            raise ValueError(f"normalizer: {self.normalizer.name!r} where the state is of {state['normalizer']!r}")
        for prefix, part in (("state.", self.normalizer), ("temperature.", self.temperature)):
            part.load_full_state({key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)})
        self.steps = int(state["steps"])

    get_extra_state, set_extra_state = full_state, load_full_state
