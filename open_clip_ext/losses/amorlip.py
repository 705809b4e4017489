"""AmorLIP: networks learn log Z of every embedding, and the encoders divide by their moving average.

AmorLIP, Eq. 1-12 and Algorithm 1. The paper's tau is OpenCLIP's logit_scale, an *inverse* temperature, written s below;
the mean over B pairs includes the anchor's own:

    Z_1i = mean_j exp(s <image_i, text_j>),    Z_2i with image and text swapped                               Eq. 2
    Stage I    lambda_1 and lambda_2 learn Z; the networks output log lambda                Eq. 8-12, see `amortization`
    Stage II   -2 s mean_i <image_i, text_i> + mean_ij exp(s <image_i, text_j>) (1 / lambda_1i + 1 / lambda_2j)   Eq. 6
               divided by the constant s, plus rho / s                                                        Appendix C

where lambda in stage II is the target network, a constant. Stage I sees the global batch, stage II only this process's
pairs; with `amor_denominator target` steps without stage I gather nothing. In plain PyTorch: `equations.amorlip_z`,
`equations.amorlip`.

Shapes: b pairs on each of W processes, B = W b; d = embedding dimension; values per anchor are (2, b), images first.

Readings fixed here, where the paper is silent or its released code differs:

- rho becomes `rho_annealed` in epoch `rho_annealed_from`, by default for the last quarter of the training, which is
  Appendix C's setting for CC3M. For CC12M the paper sets -8.5 in the last third (`amorlip-paper`); the released command
  sets 8.5 in the first third and -8.5 in the other two (`amorlip-released`).
- The paper mentions no gradient clipping. The released command clips the encoders and the networks separately at 1.0.
  `amorlip-released` sets OpenCLIP's `--grad-clip-norm`, which clips the encoders only.
- beta_t counts epochs from 1, as in Algorithm 1; the released code counts from 0 and is one epoch behind.
- The released code stops the network's updates of a step once five in a row have changed its objective by less than
  0.005. Every published setting makes three updates, so this never happens, and it is left out.
- Stage II estimates Z / lambda from b local pairs. The anchor's own pair has the same weight as in Z, 1 / B, and the
  b - 1 negatives stand for B - 1: a plain mean over b pairs would count the positive W times and push it away.
- exp(s <.,.>) / lambda, averaged over an anchor's pairs, is bounded by exp(10), so that an anchor with a very wrong
  network output does not dominate the step. With the exact lambda it is at most n / b: for CC12M exp(8.3) with the
  paper's batch on one process and exp(10.4) on eight. An anchor reaches this only if a single pair has all the weight.
- The released command divides by Z_comb instead of the target network (`amor_denominator combined`; this gathers on
  every step), weighs the positive in Z by 1e-3 (`amor_positive_weight`) and ends beta's cosine after half of the epochs
  (`amor_beta_epochs`). The first two are the defaults here; `amorlip-paper` has the paper's form, with which the
  network's output became a constant on generated data (`docs/evidence/scenes.md`).
- `amor_target negatives` is Table 3's "Neg.": the network fits the negatives' part of Z, and the positive's is added.
"""

import math
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import all_gather, world_size
from open_clip_ext.errors import InputError
from open_clip_ext.kernels.autograd import attach_gradients
from open_clip_ext.kernels.choice import KERNELS
from open_clip_ext.kernels.similarities import SimilarityBlocks, make_blocks
from open_clip_ext.kernels.streaming import largest
from open_clip_ext.losses.amortization import Amortization
from open_clip_ext.options import AT_LEAST_0, NOT_NEGATIVE, Derived, option
from open_clip_ext.surrogates import Identity
from open_clip_ext.temperatures import RHO, LearnedLogitScale

MAX_LOG_RATIO = 10.0


class AmorLIPLoss(Amortization):
    """AmorLIP's two stages as one loss.

    The first batch allocates the online and the target network, the second epoch the previous one, each of
    2 * (2 f_d d^2 + ...) parameters; the online one also has gradients and Adam's two moments.
    """

    name = "amorlip"
    optimizer_options = LearnedLogitScale.options
    rho: float = RHO.with_default(6.5)
    rho_annealed: float = option(-8.0, "rho in the last part of the training", valid=math.isfinite, expected="a number")
    rho_annealed_from: int = option(
        Derived("the last quarter", lambda epochs: epochs - max(epochs // 4, min(1, epochs - 1))),
        "first epoch of rho_annealed, counted from 0", **AT_LEAST_0,
    )
    amor_target: str = option(
        "all", "whether the network fits all of Z or the negatives' part", choices=("all", "negatives"), in_state=True
    )
    amor_denominator: str = option(
        "combined", "whether the encoders divide by the target network or by Z_comb", choices=("target", "combined")
    )
    amor_positive_weight: float = option(1e-3, "weight of the positive in Z", **NOT_NEGATIVE)
    kernels: str = KERNELS
    least_pairs = 2
    CHECKED = ("image_features", "text_features", "logit_scale", "log Z", "log lambda")

    def __init__(self, accum_freq: int = 1, validate: bool = False, **options: Any):
        super().__init__(accum_freq, validate, **options)
        if self.rho_annealed_from is None:
            raise InputError("rho needs the epoch of its change, or the number of epochs", "rho_annealed_from")
        self.fits_negatives = self.amor_target == "negatives"
        self.divides_by_combined = self.amor_denominator == "combined"
        weight = self.amor_positive_weight
        self.log_positive_weight = math.log(weight) if weight > 0 else -math.inf
        self._last: dict[str, Tensor] = {}

    @property
    def current_rho(self) -> float:
        return self.rho if self.current_epoch < self.rho_annealed_from else self.rho_annealed

    def compute(
        self, image: Tensor, text: Tensor, logit_scale: Tensor, index: Tensor | None, update_state: bool
    ) -> Tensor:
        """AmorLIP's loss; its value estimates Eq. 5, with Appendix C's scale, from this process's pairs."""
        with torch.no_grad():
            scale = logit_scale.detach()
            batch = Batch.of_process(image, text, scale.reciprocal())
            blocks = make_blocks(batch, Identity(), self.kernels)
            log_negatives = blocks.log_batch_normalizers()
            if update_state:
                self.begin_step()
            stage_1 = update_state and self.due
            log_z = None
            if stage_1 or self.divides_by_combined or self.online is None:
                everyone = Batch.gather(image, text, scale.reciprocal())
                log_z = self._log_partitions(everyone, scale, log_negatives)
            if update_state:
                if stage_1 and log_z is not None:
                    self.train_online(everyone.all_image, everyone.all_text, all_gather(log_z.T).T)
                self.end_step()
            log_lambda = self._log_denominators(batch, scale, log_z)
            value, gradients, log_lambda = self._stage_2(blocks, scale, log_negatives, log_lambda)
            self._watch(batch, scale, log_negatives, log_lambda)
            self.note_gradients(*gradients[:2])
        inputs = (image, text, logit_scale)
        return attach_gradients(value, list(zip(inputs, gradients, strict=True)))

    def _log_partitions(self, batch: Batch, scale: Tensor, log_negatives: Tensor) -> Tensor:
        """log Z of this process's anchors over all pairs, (2, b): Eq. 2, or the part of it that the networks fit.

        Args:
            batch: the pairs of all processes.
            log_negatives: log g over this process's pairs, (2, b).
        """
        if batch.size > len(batch.image):
            log_negatives = make_blocks(batch, Identity(), self.kernels).log_batch_normalizers()
        # Relative to the positive's exponential, so that the positive's own term is 1.
        log_sums = log_negatives + math.log(batch.size - 1)
        if not self.fits_negatives:
            log_sums = torch.logaddexp(log_sums, torch.full_like(log_sums, self.log_positive_weight))
        return log_sums + scale * batch.positives - math.log(batch.size)

    def _log_denominators(self, batch: Batch, scale: Tensor, log_z: Tensor | None) -> Tensor:
        """log lambda of this process's anchors, (2, b).

        Args:
            log_z: (2, b), or None if the target network suffices.
        """
        image, text = batch.all_image, batch.all_text
        # Before the first training step there is no network.
        if log_z is not None and (self.divides_by_combined or self.online is None):
            log_lambda = self.log_combined(image, text, log_z)
        else:
            assert self.target is not None
            log_lambda = self.target(image, text)
        if self.fits_negatives:
            positives = scale * batch.positives + (self.log_positive_weight - math.log(batch.size * world_size()))
            log_lambda = torch.logaddexp(log_lambda, positives.expand(2, -1))
        return log_lambda

    def _stage_2(
        self, blocks: SimilarityBlocks, scale: Tensor, log_negatives: Tensor, log_lambda: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor]:
        """Compute stage II, Eq. 6 with Appendix C's scale, and its gradients.

        `add_gradients` differentiates exp(s (s_ij - s_ii) - alpha_i). With alpha_i = log lambda_i - s s_ii these are
        the terms of Eq. 6, except for their derivative in s_ii, which Eq. 6 does not have, since lambda is a constant.
        Adding it back, together with the positive's own term and the alignment term's -2, gives the factor
        r_1i + r_2i - 2, where r_ki is the weighted mean of exp(s s_ij) / lambda_ki.

        Args:
            log_negatives: log g over this process's pairs, (2, b).
            log_lambda: (2, b).

        Returns:
            The value, 0-d; the gradients in image and text, (b, d) each, and in s, 0-d; and log lambda after the bound
            on the ratio, (2, b).
        """
        image, text, positives = blocks.batch.all_image, blocks.batch.all_text, blocks.batch.positives
        size = len(positives)
        # The b - 1 negatives of this process stand for B - 1, which have the weight (B - 1) / B in the mean.
        log_negative_weight = math.log1p(-1 / (size * world_size()))
        log_positive_weight = self.log_positive_weight - math.log(size * world_size())
        log_means = log_negatives + log_negative_weight
        log_means = torch.logaddexp(log_means, torch.full_like(log_means, log_positive_weight))
        log_lambda = log_lambda.maximum(log_means + scale * positives - MAX_LOG_RATIO)
        relative = log_lambda - scale * positives
        alpha = relative - log_negative_weight
        grad_image, grad_text = torch.empty_like(image), torch.empty_like(text)
        _, tau_terms = blocks.add_gradients((grad_image, grad_text), alpha, are_empty=True)
        excess = (log_means - relative).exp().sum(dim=0) - 2
        grad_image.addcmul_(excess[:, None], text, value=1 / size)
        grad_text.addcmul_(excess[:, None], image, value=1 / size)
        grad_similarity = (excess * positives).mean() - tau_terms.mean(dim=1).sum() / scale
        grad_scale = grad_similarity / scale - self.current_rho / scale.square()
        value = (log_lambda.mean(dim=1).sum() + self.current_rho) / scale - 2 * positives.mean()
        return value, (grad_image, grad_text, grad_scale), log_lambda

    def _watch(self, batch: Batch, scale: Tensor, log_negatives: Tensor, log_lambda: Tensor) -> None:
        checked = (batch.all_image, batch.all_text, scale, log_negatives, log_lambda)
        self.note(largest(*checked))
        deviation, mean = torch.std_mean(log_lambda, dim=1)
        self._last = {
            "tau": scale.reciprocal(),
            "rho": torch.tensor(float(self.current_rho)),
            "amor_beta": torch.tensor(self.current_beta),
            "log_lambda_image_mean": mean[0],
            "log_lambda_image_std": deviation[0],
            "log_lambda_text_mean": mean[1],
            "log_lambda_text_std": deviation[1],
        }

    def diagnostics(self) -> dict[str, Tensor]:
        return {**self._last, **super().diagnostics()}
