"""CyCLIP: OpenCLIP's softmax loss and two terms that make the similarities consistent.

Goel et al. 2022, arXiv 2205.14459, Section 3; a baseline of isogclr.txt:

    L = L_CLIP + lambda_1 / B * sum_jk (<image_j, image_k> - <text_j, text_k>)^2       in-modal
               + lambda_2 / B * sum_jk (<image_j, text_k> - <text_j, image_k>)^2       cross-modal

over all pairs j, k of the global batch, B pairs, both lambdas 0.25. The similarities of the two terms are cosines,
without the temperature.
"""

import torch
from open_clip.loss import ClipLoss
from torch import Tensor

from open_clip_ext.distributed import rank, world_size
from open_clip_ext.losses.base import Loss
from open_clip_ext.options import Option, not_negative
from open_clip_ext.pairs import Pairs, scale_gradient
from open_clip_ext.streaming import all_finite
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
        """The value is that of this process's anchors, as OpenCLIP's with `local_loss`."""
        clip_loss = ClipLoss(local_loss=True, gather_with_grad=True, rank=rank(), world_size=world_size())
        contrastive = clip_loss(image, text, logit_scale)
        pairs = Pairs.gather(image, text)
        # The sum over jk is symmetric: with k held constant, anchor j gets half of its gradient.
        anchors = [scale_gradient(features, 2.0) for features in (image, text)]
        inmodal, crossmodal = consistency(*anchors, pairs.all_image, pairs.all_text)
        checked = (image, text, logit_scale)
        self.note(torch.stack([~all_finite(tensor) for tensor in checked]))
        self._last = tuple(x.detach() for x in (contrastive, inmodal, crossmodal, logit_scale.reciprocal()))
        return contrastive + self.inmodal * inmodal + self.crossmodal * crossmodal

    def diagnostics(self) -> dict[str, Tensor]:
        names = ("clip", "inmodal_consistency", "crossmodal_consistency", "tau")
        return dict(zip(names, self._last, strict=True)) if self._last is not None else {}


def consistency(image: Tensor, text: Tensor, all_image: Tensor, all_text: Tensor) -> tuple[Tensor, Tensor]:
    """In-modal and cross-modal inconsistency of b anchors (b, d) with all B samples (B, d): the mean over anchors of
    the sum over samples of the squared difference, both 0-d."""
    inmodal = image @ all_image.T - text @ all_text.T
    crossmodal = image @ all_text.T - text @ all_image.T
    return inmodal.square().sum(dim=1).mean(), crossmodal.square().sum(dim=1).mean()
