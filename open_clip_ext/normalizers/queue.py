"""A queue of the latest m embeddings, with no training and no state per sample. Not from a paper.

XBM, MoCo and ALBEF put such embeddings into each anchor's softmax as further negatives (docs/neighbours.md).

    alpha_1i = logaddexp(log eps, logsumexp_j(l(e_1i . q_j - s_ii) / tau) - log k)

over the k queued texts q_j (for text anchors, images) from outside the step's own batch, which contains the anchor's
own positive: its gap of 0 would hide every log-normalizer below -log k. Where none is left, since the queue holds only
the batch or pairs with the anchor's key, alpha is the batch's own estimate. In plain PyTorch, with the mixing:
`equations.queue_alpha`, `equations.queue`.

If n, the number of samples, is known, the queue holds at most n. A queue of at least half of the data starts every
epoch empty, since the previous epoch's entries include stale copies of the batch's own samples and thus of the anchors'
positives. (300 samples in batches of 64, two seeds, mean over the second half of 40 epochs: the error of the
log-normalizers is 0.93 with this rule and 1.27 without it; without mixing, 1.52 and 2.27.)

Shapes: m = length of the queue, d = embedding dimension, B = global batch.
"""

from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch, log_mean
from open_clip_ext.distributed import on_first
from open_clip_ext.errors import InputError
from open_clip_ext.kernels.log_sum import Keys, log_sum, number_of_equals
from open_clip_ext.normalizers.ring import EmbeddingRing, RingNormalizer
from open_clip_ext.options import AT_LEAST_1, option
from open_clip_ext.surrogates import Surrogate


class Queue(RingNormalizer):
    """Estimates normalizers over a ring buffer of 2 * m * d float32."""

    name = "queue"
    size = "queue_size"
    allows_reference = True
    queue_size: int = option(4096, "m, pairs of embeddings that the queue holds", in_state=True, **AT_LEAST_1)

    def __init__(self, eps: float = 1e-14, surrogate: Surrogate | None = None, **options: Any):
        super().__init__(eps, surrogate, **options)
        self.num_in_data: int | None = None  # n, if known
        self.epoch = -1
        self._epoch_of_ring = -1  # of the last push

    def memory(self, dimension: int, processes: int) -> dict[str, int]:
        return {"queue of embeddings": 4 * 2 * self.capacity * dimension}

    def limit_to(self, num_samples: int) -> None:
        super().limit_to(num_samples)
        self.num_in_data = num_samples
        self.follows_epochs = 2 * self.capacity >= num_samples  # it then starts every epoch empty

    def check_batch(self, size: int) -> None:
        if self.queue_size <= size:
            raise InputError(
                f"{self.queue_size} holds nothing beside a global batch of {size} pairs; give several times {size}, or "
                "use the normalizer batch", "queue_size",
            )
        if self.num_in_data is not None and self.num_in_data < 2 * size:
            raise InputError(
                f"{self.num_in_data} samples in global batches of {size} pairs leave nothing to queue; lower the global"
                f" batch to at most {self.num_in_data // 2} pairs, or use the normalizer batch",
                "queue_size",
            )

    def materialize(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        self.check_memory(dimension, device, 1)
        self.ring = EmbeddingRing(self.capacity, dimension, device, dtype)

    @torch.no_grad()
    def update(self, batch: Batch) -> list[slice]:
        """Push the batch into the ring; return the slices of the ring that it fills."""
        self.check_batch(batch.size)
        if self.follows_epochs and self.epoch != self._epoch_of_ring:
            self.ring.active = self.ring.head = 0
        self._epoch_of_ring = self.epoch
        return self.ring.push(batch)

    def forward(self, batch: Batch, updated: Any = None) -> Tensor:
        slices = free_places(updated or [], self.ring.active)
        num_vectors = sum(some.stop - some.start for some in slices)
        if num_vectors == 0:
            return batch.log_batch
        inputs = (batch.image, batch.text, batch.positives, batch.tau)
        keys: Keys | None = None
        counts: Tensor | int = num_vectors
        if batch.keys is not None and self.ring.keys is not None:
            keys = batch.keys[batch.local], self.ring.keys
            same = number_of_equals(keys[0], torch.cat([self.ring.keys[some] for some in slices]))
            counts = (num_vectors - same).to(batch.positives)
        log_total = log_sum(*inputs, self.ring.rows, self.surrogate, slices=slices, keys=keys)
        return log_mean(log_total, counts, self.eps, batch.log_batch)

    def diagnostics(self, log_batch: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        return {"queued": torch.tensor(float(self.ring.active))}

    def full_state(self) -> dict[str, Tensor]:
        if not hasattr(self, "ring"):
            return {}
        return on_first(self.ring.state() | {"epoch": torch.tensor(self._epoch_of_ring)})

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        if "ring" not in state:
            return
        self.ring.restore(state)
        self._epoch_of_ring = int(state["epoch"])


def free_places(places: list[slice], size: int) -> list[slice]:
    """Slices of 0 .. size - 1 that are not in `places`, which are slices that do not overlap."""
    places = sorted(places, key=lambda some: some.start)
    ends, starts = [0, *(some.stop for some in places)], [*(some.start for some in places), size]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
