"""CyCLIP: OpenCLIP's softmax loss and two terms that make the similarities consistent.

Goel et al. 2022, arXiv 2205.14459, Section 3; a baseline of iSogCLR:

    L = L_CLIP + lambda_1 / B * sum_jk (<image_j, image_k> - <text_j, text_k>)^2       in-modal
               + lambda_2 / B * sum_jk (<image_j, text_k> - <text_j, image_k>)^2       cross-modal

over all pairs j, k of the global batch, B pairs, both lambdas 0.25. The similarities of the two terms are cosines,
without the temperature. As printed: `equations.cyclip`.

With D = image - text, S = image + text, (B, d), and P = D S^T the two differences are (P + P^T) / 2 and (P - P^T) / 2,
so that the sums are, without any B x B numbers,

    in-modal, cross-modal = (<D^T D, S^T S> +- <M, M^T>) / 2        M = S^T D, (d, d)
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from open_clip_ext.distributed import all_gather, world_size
from open_clip_ext.losses.base import Loss
from open_clip_ext.options import Option, not_negative
from open_clip_ext.pairs import Pairs, SimilarityBlocks, attach_gradients
from open_clip_ext.streaming import are_finite
from open_clip_ext.surrogates import Identity
from open_clip_ext.temperature import LOGIT_SCALE_OPTIONS


class CyCLIPLoss(Loss):
    """The gradients are exact for the global batch once averaged over processes, whatever OpenCLIP's `local_loss` and
    `gather_with_grad` say.

    Args: see `options`; the others as in `Loss`.

    Raises:
        InputError: an argument is out of range.
    """

    name = "cyclip"
    options = (
        Option(
            "cyclip_inmodal", float, 0.25, "lambda_1, weight of the in-modal consistency",
            valid=not_negative, wanted="a number >= 0",
        ),
        Option(
            "cyclip_crossmodal", float, 0.25, "lambda_2, weight of the cross-modal consistency",
            valid=not_negative, wanted="a number >= 0",
        ),
    )
    optimizer_options = LOGIT_SCALE_OPTIONS

    def __init__(
        self,
        cyclip_inmodal: float = 0.25,
        cyclip_crossmodal: float = 0.25,
        accum_freq: int = 1,
        validate: bool = False,
    ):
        super().__init__(accum_freq, validate)
        for option, value in zip(self.options, (cyclip_inmodal, cyclip_crossmodal), strict=True):
            option.check(value)
        self.inmodal = cyclip_inmodal
        self.crossmodal = cyclip_crossmodal
        self._last: tuple[Tensor, ...] | None = None

    def compute(self, image: Tensor, text: Tensor, logit_scale: Tensor, index: Tensor | None, moves: bool) -> Tensor:
        """The value is equal on every process."""
        with torch.no_grad():
            pairs = Pairs.gather(image, text)
            contrastive, by_image, by_text, by_scale = clip_loss(pairs, logit_scale)
            inmodal, crossmodal = self._add_consistency(pairs, by_image, by_text)
            self.note(~are_finite(pairs.all_image, pairs.all_text, logit_scale))
            self._last = (contrastive, inmodal, crossmodal, logit_scale.reciprocal())
            value = contrastive + self.inmodal * inmodal + self.crossmodal * crossmodal
        share = world_size()  # DistributedDataParallel averages over processes, while their parts add up
        inputs = (image, by_image), (text, by_text), (logit_scale, by_scale)
        gradients = [(tensor, gradient.mul_(share)) for tensor, gradient in inputs]
        self.note_gradients(by_image, by_text)
        return attach_gradients(value, gradients)

    def _add_consistency(self, pairs: Pairs, by_image: Tensor, by_text: Tensor) -> tuple[Tensor, Tensor]:
        """The two sums over B, 0-d each; adds the gradient of their weighted sum to that in image and text, (b, d)."""
        batch = len(pairs.all_image)
        difference, total = pairs.all_image - pairs.all_text, pairs.all_image + pairs.all_text
        differences, totals, mixed = difference.T @ difference, total.T @ total, total.T @ difference
        both, apart = (differences * totals).sum(), (mixed * mixed.T).sum()
        # Of ((lambda_1 + lambda_2) both + (lambda_1 - lambda_2) apart) / (2 B) in this process's rows of D and S.
        own_difference, own_total = difference[pairs.local], total[pairs.local]
        by_both, by_apart = (self.inmodal + self.crossmodal) / batch, (self.inmodal - self.crossmodal) / batch
        by_difference, by_total = own_difference @ totals.mul_(by_both), own_total @ differences.mul_(by_both)
        if by_apart:
            by_difference.addmm_(own_total, mixed.T, alpha=by_apart)
            by_total.addmm_(own_difference, mixed, alpha=by_apart)
        by_image.add_(by_total).add_(by_difference)
        by_text.add_(by_total).sub_(by_difference)
        return (both + apart) / (2 * batch), (both - apart) / (2 * batch)

    def diagnostics(self) -> dict[str, Tensor]:
        names = ("clip", "inmodal_consistency", "crossmodal_consistency", "tau")
        return dict(zip(names, self._last, strict=True)) if self._last is not None else {}


def clip_loss(pairs: Pairs, logit_scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """L_CLIP of the global batch, 0-d, and this process's part of its gradient in image and text, (b, d), and in the
    logit scale, 0-d.

    For each anchor it is log(1 + sum_j exp((s_ij - s_ii) / tau)) over the negatives j, half of the mean of both sides.
    """
    tau = logit_scale.reciprocal()
    blocks = SimilarityBlocks(pairs, Identity())
    log_count = math.log(blocks.negatives)
    log_values = softplus(blocks.log_batch_normalizers(tau) + log_count)
    all_log_values = all_gather(log_values.T).T
    by_image, by_text = torch.zeros_like(pairs.image), torch.zeros_like(pairs.text)
    tau_terms = blocks.add_gradients((by_image, by_text), tau, log_values - log_count, all_log_values - log_count)
    for gradient in (by_image, by_text):
        gradient.mul_(logit_scale / 2)
    by_scale = tau_terms.sum() / (-2 * logit_scale * all_log_values.shape[1])
    return all_log_values.mean(dim=1).sum() / 2, by_image, by_text, by_scale
