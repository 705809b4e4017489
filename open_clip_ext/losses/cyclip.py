"""CyCLIP: OpenCLIP's softmax loss plus in-modal and cross-modal consistency.

Goel et al. 2022, arXiv 2205.14459, Section 3; a baseline in the iSogCLR paper:

    L = L_CLIP + lambda_1 / B * sum_jk (<image_j, image_k> - <text_j, text_k>)^2       in-modal
               + lambda_2 / B * sum_jk (<image_j, text_k> - <text_j, image_k>)^2       cross-modal

over all pairs j, k of the global batch of B, with both lambdas 0.25. The similarities of the two terms are cosines, not
divided by the temperature. In plain PyTorch: `equations.cyclip`. The global contrastive losses add the same terms by
`--consistency`.

With D = image - text, S = image + text, (B, d), and P = D S^T the two differences are (P + P^T) / 2 and (P - P^T) / 2.
Their sums of squares need no B x B matrix:

    in-modal, cross-modal = (<D^T D, S^T S> +- <M, M^T>) / 2        M = S^T D, (d, d)
"""

from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.kernels.choice import KERNELS
from open_clip_ext.kernels.chunked import clip_loss
from open_clip_ext.kernels.streaming import largest
from open_clip_ext.losses.base import Loss
from open_clip_ext.options import NOT_NEGATIVE, option
from open_clip_ext.temperatures import LearnedLogitScale


class CyCLIPLoss(Loss):
    """CyCLIP's loss of the global batch.

    Its gradients, once averaged over processes, are exact for the global batch, whatever OpenCLIP's `local_loss` and
    `gather_with_grad` say.

    Args: as in `Loss`; for the options see the class's body.

    Raises:
        InputError: an argument is out of range.
    """

    name = "cyclip"
    optimizer_options = LearnedLogitScale.options
    cyclip_inmodal: float = option(0.25, "lambda_1, weight of the in-modal consistency", **NOT_NEGATIVE)
    cyclip_crossmodal: float = option(0.25, "lambda_2, weight of the cross-modal consistency", **NOT_NEGATIVE)
    kernels: str = KERNELS

    def __init__(self, accum_freq: int = 1, validate: bool = False, **options: Any):
        super().__init__(accum_freq, validate, **options)
        self.inmodal = self.cyclip_inmodal
        self.crossmodal = self.cyclip_crossmodal
        self._last: tuple[Tensor, ...] | None = None

    def compute(
        self, image: Tensor, text: Tensor, logit_scale: Tensor, index: Tensor | None, update_state: bool
    ) -> Tensor:
        """The loss of the global batch; the value is equal on every process."""
        with torch.no_grad():
            batch = Batch.gather(image, text, logit_scale.reciprocal())
            contrastive, (grad_image, grad_text, grad_scale) = clip_loss(batch, logit_scale, kernels=self.kernels)
            inmodal, crossmodal = add_consistency(batch, grad_image, grad_text, self.inmodal, self.crossmodal)
            self.note(largest(batch.all_image, batch.all_text, logit_scale))
            self._last = (contrastive, inmodal, crossmodal, logit_scale.reciprocal())
            value = contrastive + self.inmodal * inmodal + self.crossmodal * crossmodal
        return self.attached(value, [(image, grad_image), (text, grad_text), (logit_scale, grad_scale)])

    def diagnostics(self) -> dict[str, Tensor]:
        names = ("clip", "inmodal_consistency", "crossmodal_consistency", "tau")
        return dict(zip(names, self._last, strict=True)) if self._last is not None else {}


def add_consistency(
    batch: Batch, grad_image: Tensor, grad_text: Tensor, inmodal: float, crossmodal: float, scale: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the two terms of the global batch without their lambdas, 0-d each; add the gradient of `scale` times the
    weighted terms to `grad_image` and `grad_text`, (b, d) each.

    Args:
        inmodal, crossmodal: lambda_1 and lambda_2.
    """
    difference, total = batch.all_image - batch.all_text, batch.all_image + batch.all_text
    differences, totals, mixed = difference.T @ difference, total.T @ total, total.T @ difference
    both, apart = (differences * totals).sum(), (mixed * mixed.T).sum()
    # Gradient of ((lambda_1 + lambda_2) both + (lambda_1 - lambda_2) apart) / (2 B) in this process's rows of D, S.
    own_difference, own_total = difference[batch.local], total[batch.local]
    scale = scale / batch.size
    grad_difference = own_difference @ totals.mul_((inmodal + crossmodal) * scale)
    grad_total = own_total @ differences.mul_((inmodal + crossmodal) * scale)
    if inmodal != crossmodal:
        mixed.mul_((inmodal - crossmodal) * scale)
        grad_difference.addmm_(own_total, mixed.T)
        grad_total.addmm_(own_difference, mixed)
    grad_image.add_(grad_total).add_(grad_difference)
    grad_text.add_(grad_total).sub_(grad_difference)
    return (both + apart) / (2 * batch.size), (both - apart) / (2 * batch.size)
