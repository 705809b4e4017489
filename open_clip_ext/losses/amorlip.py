"""AmorLIP: networks learn log Z of every embedding, and the encoders divide by a slow copy of them.

AmorLIP, Eq. 1-12 and Algorithm 1; there and here tau is OpenCLIP's logit_scale, an *inverse* temperature, written s
below, and B pairs include the anchor's own:

    Z_1i = mean_j exp(s <image_i, text_j>),    Z_2i with the sides swapped                                    Eq. 2
    Stage I    networks lambda_1 and lambda_2 learn log Z                                   Eq. 8-12, see `amortization`
    Stage II   -2 s mean_i <image_i, text_i> + mean_ij exp(s <image_i, text_j>) (1 / lambda_1i + 1 / lambda_2j)   Eq. 6
               divided by the constant s, plus rho / s                                                        Appendix C

with lambda of stage II the target network, a constant. As printed: `equations.amorlip_z`, `equations.amorlip`. Stage I
sees the global batch; stage II only this process's pairs, so that nothing is gathered on steps without stage I.

Shapes: b pairs on each of W processes, B = W b; d = embedding dimension; what exists per side is (2, b), images first.

Readings fixed here, where the paper is silent or its released code differs:

- rho becomes `rho_annealed` from epoch `rho_annealed_from` on, by default in the last quarter of the training: Appendix
  C's setting for CC3M. For CC12M it has -8.5 in the last third (`amorlip-paper`); the released command has 8.5 in the
  first third and -8.5 in the other two (`amorlip-released`).
- The paper mentions no gradient clipping; the released command clips at 1.0, the encoders and the networks each.
  `amorlip-released` sets OpenCLIP's `--grad-clip-norm`, which clips the encoders alone.
- The released code ends the network's updates of a step once five in a row changed its objective by less than 0.005.
  With the three updates of every published setting that cannot happen, so it is left out.
- Stage II estimates Z / lambda from b local pairs. The anchor's own pair counts there what it counts in Z, 1 / B, and
  the b - 1 negatives stand for B - 1: a plain mean over b pairs would count the positive W times, and push it away.
- exp(s <.,.>) / lambda, averaged over an anchor's pairs, is bounded by exp(10). At the exact lambda it is at most
  n / b, exp(8.3) at the paper's largest scale; a network that is far off for an anchor must not decide the step.
- The released command divides by Z_comb instead of the target network (`amor_denominator combined`; this gathers on
  every step), counts the positive in Z by 1e-3 (`amor_positive_weight`) and lets beta's cosine end after half of the
  epochs (`amor_beta_epochs`). The first two are the defaults here; `amorlip-paper` has the paper's form. On 20,000
  generated pairs with batches of 64 the recipe reaches R@1 82 / 80, the paper's form 60 / 59 and, with its setting for
  CC12M, 24 / 25, because the network's output becomes a constant; each of the two changes alone 67 and 49.
- `amor_target negatives` is Table 3's "Neg.": the network fits the negatives' share of Z and the positive's is added.
"""

import math
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import all_gather, world_size
from open_clip_ext.errors import InputError
from open_clip_ext.kernels.autograd import attach_gradients
from open_clip_ext.kernels.similarities import SimilarityBlocks
from open_clip_ext.kernels.streaming import are_finite
from open_clip_ext.losses.amortization import DIVERGENCES, Amortization
from open_clip_ext.losses.base import GRADIENTS, Loss
from open_clip_ext.networks import WIDTH
from open_clip_ext.options import Derived, not_negative, option, positive, refuse_unused
from open_clip_ext.surrogates import Identity
from open_clip_ext.temperatures import RHO, LearnedLogitScale

MAX_LOG_RATIO = 10.0
AT_LEAST_1: dict[str, Any] = dict(valid=lambda value: value >= 1, expected="at least 1")
NOT_NEGATIVE: dict[str, Any] = dict(valid=not_negative, expected="a number >= 0")


class AmorLIPLoss(Loss):
    """Memory is allocated at the first batch: three networks of 2 * (2 f_d d^2 + ...) numbers and Adam's moments.

    Args: as in `Loss`; the options stand in the class's body.

    Raises:
        InputError: an argument is out of range; the message names it.
    """

    name = "amorlip"
    optimizer_options = LearnedLogitScale.options
    rho: float = RHO.with_default(6.5)
    rho_annealed: float = option(
        -8.0, "rho in the last part of the training", valid=math.isfinite, expected="a number"
    )
    rho_annealed_from: int = option(
        Derived("the last quarter", lambda epochs: epochs - max(epochs // 4, min(1, epochs - 1))),
        "first epoch of rho_annealed, from 0", valid=not_negative, expected="at least 0",
    )
    mlp_width: float = WIDTH
    amor_objective: str = option("l2-log", "what the network minimises", choices=tuple(DIVERGENCES))
    amor_l2_weight: float = option(0.1, "weight of l2-log beside another objective", **NOT_NEGATIVE)
    amor_updates: int = option(3, "T_lambda, updates of the network each time", **AT_LEAST_1)
    amor_online_every: int = option(8, "T_online, steps between updates of the network", **AT_LEAST_1)
    amor_target_every: int = option(2, "T_target, steps between updates of the target network", **AT_LEAST_1)
    amor_ema: float = option(
        0.999, "alpha, what the target network keeps of itself at each update",
        valid=lambda value: 0 <= value < 1, expected="in [0, 1)",
    )
    amor_beta: float = option(
        0.8, "beta_T, final share of the last epoch's network in the target",
        valid=lambda value: 0 <= value <= 1, expected="in [0, 1]",
    )
    amor_beta_epochs: int = option(
        Derived("all epochs", lambda epochs: epochs), "epochs of beta's cosine", **AT_LEAST_1
    )
    amor_reinit_every: int = option(
        1, "epochs between new networks; 0: never", valid=not_negative, expected="at least 0"
    )
    amor_lr: float = option(1e-3, "Adam's learning rate of the network", valid=positive, expected="a number > 0")
    amor_target: str = option(
        "all", "whether the network fits all of Z or the negatives' share", choices=("all", "negatives"), in_state=True
    )
    amor_denominator: str = option(
        "combined", "whether the encoders divide by the target network or by Z_comb", choices=("target", "combined")
    )
    amor_positive_weight: float = option(1e-3, "what the positive counts in Z", **NOT_NEGATIVE)
    least_pairs = 2
    CHECKED = ("image_features", "text_features", "logit_scale", "log Z", "log lambda", GRADIENTS)

    def __init__(self, accum_freq: int = 1, validate: bool = False, **options: Any):
        super().__init__(accum_freq, validate, **options)
        if self.amor_beta_epochs is None:
            raise InputError("the cosine of beta needs its length, or the number of epochs", "amor_beta_epochs")
        if self.rho_annealed_from is None:
            self.rho_annealed_from = sys.maxsize
        self.networks = Amortization(
            width=self.mlp_width, objective=self.amor_objective, l2_weight=self.amor_l2_weight,
            updates=self.amor_updates, online_every=self.amor_online_every, target_every=self.amor_target_every,
            ema=self.amor_ema, beta=self.amor_beta, beta_epochs=self.amor_beta_epochs,
            reinit_every=self.amor_reinit_every, lr=self.amor_lr,
        )
        self.fits_negatives = self.amor_target == "negatives"
        self.divides_by_combined = self.amor_denominator == "combined"
        weight = self.amor_positive_weight
        self.log_positive_weight = math.log(weight) if weight > 0 else -math.inf
        self._last: dict[str, Tensor] = {}

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, given: Collection[str]) -> None:
        if settings["amor_objective"] == "l2-log":
            refuse_unused(given, ["amor_l2_weight"], "with amor_objective 'l2-log'")

    def memory(self, dimension: int, processes: int) -> dict[str, int]:
        return self.networks.memory(dimension)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.networks.set_epoch(epoch)

    @property
    def current_rho(self) -> float:
        return self.rho if self.networks.epoch < self.rho_annealed_from else self.rho_annealed

    def compute(
        self, image: Tensor, text: Tensor, logit_scale: Tensor, index: Tensor | None, update_state: bool
    ) -> Tensor:
        """The value, an estimate of Eq. 5 with Appendix C's scale, is that of this process's pairs."""
        with torch.no_grad():
            scale = logit_scale.detach()
            batch = Batch.of_process(image, text, scale.reciprocal())
            blocks = SimilarityBlocks(batch, Identity())
            log_negatives = blocks.log_batch_normalizers()
            stage_1 = update_state and self.networks.due
            log_z = None
            if stage_1 or self.divides_by_combined or self.networks.online is None:
                everyone = Batch.gather(image, text, scale.reciprocal())
                log_z = self._log_partitions(everyone, scale, log_negatives)
            if update_state:
                if stage_1 and log_z is not None:
                    self.networks.update(everyone.all_image, everyone.all_text, all_gather(log_z.T).T)
                self.networks.step()
            log_lambda = self._log_denominators(batch, scale, log_z)
            value, gradients, log_lambda = self._stage_2(blocks, scale, log_negatives, log_lambda)
            self._watch(batch, scale, log_negatives, log_lambda)
            self.note_gradients(*gradients[:2])
        inputs = (image, text, logit_scale)
        return attach_gradients(value, list(zip(inputs, gradients, strict=True)))

    def _log_partitions(self, batch: Batch, scale: Tensor, log_negatives: Tensor) -> Tensor:
        """log Z of this process's anchors over all pairs, (2, b): Eq. 2, or its part that the networks fit.

        Args:
            batch: of all processes.
            log_negatives: log g over this process's pairs, (2, b).
        """
        if batch.size > len(batch.image):
            log_negatives = SimilarityBlocks(batch, Identity()).log_batch_normalizers()
        # Relative to the positive, whose own term is 1.
        log_sums = log_negatives + math.log(batch.size - 1)
        if not self.fits_negatives:
            log_sums = torch.logaddexp(log_sums, torch.full_like(log_sums, self.log_positive_weight))
        return log_sums + scale * batch.positives - math.log(batch.size)

    def _log_denominators(self, batch: Batch, scale: Tensor, log_z: Tensor | None) -> Tensor:
        """log lambda of this process's anchors, (2, b).

        Args:
            log_z: (2, b), or None where the target network suffices.
        """
        image, text = batch.all_image, batch.all_text
        # No network before any training.
        if log_z is not None and (self.divides_by_combined or self.networks.online is None):
            log_lambda = self.networks.log_combined(image, text, log_z)
        else:
            assert self.networks.target is not None
            log_lambda = self.networks.target(image, text)
        if self.fits_negatives:
            positives = scale * batch.positives + self._log_positive_share(batch.size)
            log_lambda = torch.logaddexp(log_lambda, positives.expand(2, -1))
        return log_lambda

    def _log_positive_share(self, size: int) -> float:
        """What the positive counts in a mean over the global batch, its logarithm.

        Args:
            size: b.
        """
        return self.log_positive_weight - math.log(size * world_size())

    def _stage_2(
        self, blocks: SimilarityBlocks, scale: Tensor, log_negatives: Tensor, log_lambda: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor]:
        """The value; the derivatives of Eq. 6 with Appendix C's scale in image and text, (b, d), and in s; and log
        lambda as it was used, (2, b).

        `add_gradients` differentiates exp(s (s_ij - s_ii) - alpha_i). With alpha_i = log lambda_i - s s_ii these are
        the terms of Eq. 6, whose lambda is a constant: what it takes off in s_ii is added back. That, the positive's
        own term and the alignment's -2 make r_1i + r_2i - 2, with r_ki the weighted mean of exp(s s_ij) / lambda_ki.

        Args:
            log_negatives: log g over this process's pairs, (2, b).
            log_lambda: (2, b).
        """
        image, text, positives = blocks.batch.all_image, blocks.batch.all_text, blocks.batch.positives
        size = len(positives)
        # The b - 1 negatives of this process stand for B - 1.
        log_share = math.log1p(-1 / (size * world_size()))
        log_means = log_negatives + log_share
        log_means = torch.logaddexp(log_means, torch.full_like(log_means, self._log_positive_share(size)))
        log_lambda = log_lambda.maximum(log_means + scale * positives - MAX_LOG_RATIO)
        relative = log_lambda - scale * positives
        alpha = relative - log_share
        grad_image, grad_text = torch.zeros_like(image), torch.zeros_like(text)
        tau_terms = blocks.add_gradients((grad_image, grad_text), alpha, alpha)
        excess = (log_means - relative).exp().sum(dim=0) - 2
        grad_image.addcmul_(excess[:, None], text, value=1 / size)
        grad_text.addcmul_(excess[:, None], image, value=1 / size)
        grad_similarity = (excess * positives).mean() - tau_terms.mean(dim=1).sum() / scale
        grad_scale = grad_similarity / scale - self.current_rho / scale.square()
        value = (log_lambda.mean(dim=1).sum() + self.current_rho) / scale - 2 * positives.mean()
        return value, (grad_image, grad_text, grad_scale), log_lambda

    def _watch(self, batch: Batch, scale: Tensor, log_negatives: Tensor, log_lambda: Tensor) -> None:
        checked = (batch.all_image, batch.all_text, scale, log_negatives, log_lambda)
        self.note(~are_finite(*checked))
        deviation, mean = torch.std_mean(log_lambda, dim=1)
        self._last = {
            "tau": scale.reciprocal(),
            "rho": torch.tensor(float(self.current_rho)),
            "amor_beta": torch.tensor(self.networks.current_beta),
            "log_lambda_image_mean": mean[0],
            "log_lambda_image_std": deviation[0],
            "log_lambda_text_mean": mean[1],
            "log_lambda_text_std": deviation[1],
        }

    def diagnostics(self) -> dict[str, Tensor]:
        before = self.networks.objective_before
        return self._last if before is None else {**self._last, "amor_objective": before}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AmorLIPLoss":
        self.networks.convert(fn)
        return super()._apply(fn, recurse)

    def full_state(self) -> dict[str, Tensor | int | str]:
        return {**super().full_state(), **self.networks.full_state()}

    def load_full_state(self, state: dict[str, Tensor | int | str]) -> None:
        super().load_full_state(state)
        self.networks.load_full_state(state)
