"""A queue of the latest embeddings in place of NeuCLIP's prototypes, mixed with the batch; not from a paper."""

import torch
from torch import Tensor

from open_clip_ext.equations.basics import batch_g
from open_clip_ext.equations.neuclip import neuclip


def queue_alpha(
    texts: Tensor, images: Tensor, g: Tensor, e1: Tensor, e2: Tensor, tau: Tensor, mixing: float, eps: float
) -> Tensor:
    """The queue's log-normalizers mixed with the batch's, (2, B). Fast: `Queue`, `GlobalContrastiveLoss.mixing`.

    The batch's part is a constant.

    Args:
        texts, images: queued embeddings without the batch's own, (k, d) each, k >= 1.
        mixing: weight of the batch, in [0, 1).
    """
    above_positive = torch.stack([e1 @ texts.T, e2 @ images.T]) - (e1 * e2).sum(dim=1)[:, None]
    return (mixing * (eps + g).detach() + (1 - mixing) * (eps + batch_g(above_positive, tau))).log()


queue = neuclip  # with alpha from `queue_alpha`
