"""Several positives: samples with the same key are one another's (SupCon, arXiv 2004.11362; UniCL, arXiv 2204.03610).

An anchor's loss is the mean over its positives k in P_i, which contains i. The mean stands outside the logarithm, where
a positive's similarity is linear, if the surrogate is the identity:

    mean_k log sum_j exp((s_ij - s_ik) / tau) = log sum_j exp((s_ij - s_ii) / tau) + x_i / tau
    x_i = s_ii - mean_k s_ik

So x_i is all that a loss of one positive lacks. It takes means of embeddings and no similarities, and is exactly 0
where a key comes once.

In `clip-chunked` j runs over the batch with the positives, as in UniCL (`equations.unicl`). In a global loss a positive
is no negative, as the anchor's own is none: whatever estimates it, g_i is over the negatives alone. It is relative to
s_ii, so that no estimate depends on the positives that a batch happens to hold, and exp(x_i / tau) multiplies it
afterwards (`equations.unicl_shift`). The loss then estimates `equations.unicl_objective` with the data set's negatives
and the batch's positives. In its gradient x_i has the weight of the anchor's own positive, exp(-alpha_i) g_i, and with
`unified` also 1 - exp(L_i - alpha_i). So an anchor without negatives in its batch gets no gradient.

Shapes as in `batch`.
"""

import torch
from torch import Tensor

from open_clip_ext.batch import Batch, EqualRows


class SeveralPositives:
    """The gaps x of a batch with keys, (2, B), and their gradient.

    Args:
        batch: the embeddings and their keys; its temperatures are not used.
    """

    def __init__(self, batch: Batch):
        assert batch.keys is not None
        self.batch = batch
        self.equal = EqualRows(batch.keys)
        self.sides = batch.all_image, batch.all_text
        self.apart = [self._less_mean(side) for side in reversed(self.sides)]  # by side of the anchor
        self.gaps = torch.stack([(side * apart).sum(1) for side, apart in zip(self.sides, self.apart, strict=True)])

    def _less_mean(self, values: Tensor) -> Tensor:
        """Each of `values` (B, d) minus the mean over the samples with its key: exactly 0 where the key occurs once."""
        return values - self.equal.mean(values)

    def add_gradients(self, features: tuple[Tensor, Tensor], pulls: Tensor) -> None:
        """Add the gradient of mean_i pull_i * x_i, summed over both directions of the global batch.

        Args:
            features: where the gradients in this process's `image` and `text` are added, (b, d) each.
            pulls: constants of all anchors, (2, B).
        """
        local, size = self.batch.local, self.batch.size
        for side, feature in enumerate(features):
            other = 1 - side
            feature.addcmul_(pulls[side, local, None], self.apart[side][local], value=1 / size)
            # As a positive of the other side's anchors. The mean over a key is symmetric in its samples.
            as_positive = self._less_mean(pulls[other, :, None] * self.sides[other])
            feature.add_(as_positive[local], alpha=1 / size)
