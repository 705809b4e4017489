"""A checkpoint's queue without the pairs that it must not show to their own anchors."""

import torch
from torch import Tensor

from open_clip_ext.diagnostics import exact
from open_clip_ext.normalizers import Normalizer, Queue
from training_ext.embeddings import Embedded


def nearest_places(normalizer: Normalizer, embedded: Embedded, device: torch.device | str) -> Tensor | None:
    """Which of the embedded pairs a queue holds, (m,) int64; None for other normalizers and while it holds none."""
    if not isinstance(normalizer, Queue) or normalizer.ring.active == 0:
        return None
    texts, images = normalizer.ring.rows[:, : normalizer.ring.active]
    return exact.nearest_rows(embedded.image, embedded.text, images, texts, device)


def queue_without(queue: Queue, left_out: Tensor) -> Queue:
    """A queue of what is not `left_out` of this one, (m,) bool.

    As in a training step the pairs of the step's own batch must not count: an anchor's own positive would hide every
    log-normalizer below -log m.
    """
    kept = queue.ring.rows[:, : queue.ring.active][:, ~left_out.to(queue.ring.rows.device)]
    smaller = Queue(queue_size=max(1, kept.shape[1]), eps=queue.eps, surrogate=queue.surrogate)
    smaller.materialize(kept.shape[2], kept.device, kept.dtype)
    smaller.ring.rows[:, : kept.shape[1]] = kept
    smaller.ring.active = kept.shape[1]
    return smaller.eval()
