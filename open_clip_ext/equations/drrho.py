"""DRRho-CLIP, arXiv 2505.06699, from the authors' code: subtract the gaps of a frozen reference model."""

from torch import Tensor

from open_clip_ext.equations.basics import gaps
from open_clip_ext.equations.sogclr import sogclr


def drrho_gaps(e1: Tensor, e2: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    """DRRho-CLIP: each negative's gap minus the reference model's, (2, B, B - 1). Fast: `GlobalContrastiveLoss`.

    Args:
        r1, r2: the reference's embeddings of the same images and texts, (B, d'), constants.
    """
    return gaps(e1, e2) - gaps(r1, r2)


drrho_clip = sogclr  # with g over `drrho_gaps`, and FastCLIP's gamma
