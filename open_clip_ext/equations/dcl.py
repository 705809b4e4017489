"""DCL, arXiv 2110.06848: CLIP's loss without the positive in the denominator."""

import torch
from torch import Tensor


def dcl(e1: Tensor, e2: Tensor, tau: Tensor) -> Tensor:
    """DCL's loss, 0-d, with images and texts as the two views: the sum of the means of both directions.

    The negatives are of the other modality. Fast: `UnscaledTemperature` with `BatchNormalizer`, with the value of
    `fastclip_v0`: 2 log(B - 1) lower, since its g are means over the B - 1 negatives.
    """
    s = e1 @ e2.T / tau
    negatives = s.masked_fill(torch.eye(len(s), dtype=torch.bool, device=s.device), -torch.inf)
    return (-2 * s.diagonal() + negatives.logsumexp(dim=1) + negatives.logsumexp(dim=0)).mean()
