"""A checkpoint's queue without the pairs that it must not show to their own anchors."""

import copy

import torch
from torch import Tensor

from open_clip_ext import exact
from open_clip_ext.normalizers import Normalizer, Queue
from training_ext.embeddings import Embedded


def nearest_places(normalizer: Normalizer, embedded: Embedded, device: torch.device | str) -> Tensor | None:
    """Which of the embedded pairs a queue holds, (m,) int64; None for other normalizers and while it holds none."""
    if not isinstance(normalizer, Queue) or normalizer.ring is None:
        return None
    texts, images = normalizer.ring.rows[:, : normalizer.ring.active]
    return exact.nearest_rows(embedded.image, embedded.text, images, texts, device)


def queue_without(queue: Queue, left_out: Tensor) -> Queue:
    """A queue of what is not `left_out` of this one, (m,) bool.

    As in a training step the pairs of the step's own batch must not count: an anchor's own positive would hide every
    log-normalizer below -log m.
    """
    smaller, ring = copy.copy(queue), copy.copy(queue.ring)
    assert ring is not None
    ring.rows = ring.rows[:, : ring.active][:, ~left_out.to(ring.rows.device)]
    ring.active = ring.rows.shape[1]
    smaller.ring = ring
    return smaller.eval()
