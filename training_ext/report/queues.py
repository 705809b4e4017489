"""A checkpoint's queue without the pairs of a batch, which must not be their own negatives."""

import torch
from torch import Tensor

from open_clip_ext.diagnostics import exact
from open_clip_ext.normalizers import Normalizer, Queue
from training_ext.report.embeddings import Embedded


def nearest_places(normalizer: Normalizer, embedded: Embedded, device: torch.device | str) -> Tensor | None:
    """Positions in `embedded` of the pairs in a queue, (m,) int64; None for other normalizers and an empty queue."""
    if not isinstance(normalizer, Queue) or normalizer.ring.active == 0:
        return None
    texts, images = normalizer.ring.rows[:, : normalizer.ring.active]
    return exact.nearest_rows(embedded.image, embedded.text, images, texts, device)


def queue_without(queue: Queue, left_out: Tensor) -> Queue:
    """A copy of the queue without the entries that `left_out` (m,) bool marks.

    As in a training step, the pairs of the step's own batch are no negatives: with an anchor's own positive among them
    no log-normalizer could be below -log m.
    """
    kept = queue.ring.rows[:, : queue.ring.active][:, ~left_out.to(queue.ring.rows.device)]
    smaller = Queue(queue_size=max(1, kept.shape[1]), eps=queue.eps, surrogate=queue.surrogate)
    smaller.materialize(kept.shape[2], kept.device, kept.dtype)
    smaller.ring.rows[:, : kept.shape[1]] = kept
    smaller.ring.active = kept.shape[1]
    return smaller.eval()
