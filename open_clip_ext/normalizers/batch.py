"""The minibatch estimate: alpha_i = log(eps + g_i) over the batch itself.

The "Mini-batch Approximation" of NeuCLIP, Section 3, which is biased for small batches. It is the baseline with the
global objective and no state. In plain PyTorch: `equations.global_contrastive`; with the
unscaled temperature `equations.dcl`.
"""

from typing import Any

from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.normalizers.base import Normalizer


class BatchNormalizer(Normalizer):
    """The batch's own estimate, without state."""

    name = "batch"
    can_capture = True
    intra_modal = True
    allows_keys = True
    allows_reference = True

    def capture_state(self) -> tuple[Any, ...]:
        return ()

    def forward(self, batch: Batch, updated: Any = None) -> Tensor:
        return batch.log_batch
