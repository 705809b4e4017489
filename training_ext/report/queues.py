"""A checkpoint's queue without the pairs of a batch, which must not be their own negatives."""

import math

import torch
from torch import Tensor

from open_clip_ext.diagnostics import exact
from open_clip_ext.diagnostics.embeddings import Pairs, full_precision
from open_clip_ext.normalizers import Normalizer, Queue
from training_ext.report.objective import Objective


def nearest_places(normalizer: Normalizer, objective: Objective) -> Tensor | None:
    """Places in `objective` of the pairs in a queue, (m,) int64; None for other normalizers and an empty queue.

    A queue does not say which pairs it holds; their embeddings are those of slightly older weights.
    """
    if not isinstance(normalizer, Queue) or normalizer.ring.active == 0:
        return None
    texts, images = normalizer.ring.rows[:, : normalizer.ring.active]
    return nearest_pairs(Pairs(objective.image, objective.text, objective.tau.device), images, texts)


def nearest_pairs(pairs: Pairs, images: Tensor, texts: Tensor, chunk_mib: float = exact.CHUNK_MIB) -> Tensor:
    """The most similar of all pairs to each of images and texts (m, d), by the sum of both cosines, (m,) int64."""
    images, texts = (side.to(pairs.device, torch.float32) for side in (images, texts))
    best = torch.full((len(images),), -math.inf, device=pairs.device)
    nearest = torch.zeros(len(images), dtype=torch.int64, device=pairs.device)
    with full_precision():
        for first, columns in pairs.chunks(exact.block_width(chunk_mib, len(images))):
            highest, place = torch.addmm(images @ columns[0].T, texts, columns[1].T).max(dim=1)
            nearest = torch.where(highest > best, place + first, nearest)
            best = torch.maximum(best, highest)
    return nearest.cpu()


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
