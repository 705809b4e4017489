"""The minibatch estimate: alpha_i = log(eps + g_i) over the batch itself.

The "Mini-batch Approximation" of NeuCLIP, Section 3, biased for small batches; the baseline that has the global
objective's form and no memory. As printed: `equations.global_contrastive`.
"""

from torch import Tensor

from open_clip_ext.normalizers.base import Batch, Normalizer
from open_clip_ext.pairs import Pairs


class BatchNormalizer(Normalizer):
    name = "batch"
    knows_both_sides = True

    def forward(self, pairs: Pairs, positives: Tensor, tau: Tensor, batch: Batch) -> Tensor:
        return batch.log_batch[:, pairs.local]
