"""The log-normalizers of a checkpoint's loss over embedded pairs: true ones, minibatch estimates and its own."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch, log_mean_of_directions
from open_clip_ext.diagnostics import exact
from open_clip_ext.diagnostics.embeddings import Pairs, full_precision
from open_clip_ext.losses import GlobalContrastiveLoss
from open_clip_ext.normalizers import Queue
from open_clip_ext.surrogates import Identity
from training_ext.tools.report.embeddings import Embedded

EPS = 1e-14  # for losses that have none
AT_ONCE = 4096  # pairs whose temperatures are looked up together
ESTIMATED_AT_ONCE = 1024  # anchors


class Objective:
    """The global objective over all embedded pairs; for losses without parts (None) that of NeuCLIP's Eq. 1.

    Shapes: n = embedded pairs, k = anchors. Log-normalizers are (2, k), images as anchors first. With
    `--negatives views` all of them are those of a pair, the log of the mean of g over its two directions.

    Args:
        tau: the checkpoint's temperature, 0-d, on the device that computes.

    Attributes:
        tau: temperatures, 0-d or (2, n).
    """

    def __init__(self, loss: GlobalContrastiveLoss | None, embedded: Embedded, tau: Tensor):
        self.loss = loss
        self.index = embedded.rows
        self.pairs = Pairs(embedded.image, embedded.text, tau.device)
        self.blocks = embedded.image, embedded.text
        self.surrogate = Identity() if loss is None else loss.surrogate
        self.eps = EPS if loss is None else loss.eps
        self.tau = tau
        if loss is not None:
            parts: list[Tensor] = []
            for start, (images, texts) in self.pairs.chunks(AT_ONCE):
                batch = Batch.of_process(images, texts, tau, self.index[start : start + len(images)].to(tau.device))
                parts.append(loss.temperature.taus(tau, loss.temperature.lookup(batch)))
                if parts[0].dim() == 0:
                    break
            self.tau = torch.cat(parts, dim=1) if parts[0].dim() else parts[0]

    def tau_of(self, places: Tensor) -> Tensor:
        """Temperatures of the pairs at `places` (k,), (2, k), or 0-d if there is only one."""
        return self.tau[:, places] if self.tau.dim() else self.tau

    def exact(self, places: Tensor, tau: Tensor | None = None, **more: Any) -> Tensor:
        """True log-normalizers of the pairs at `places`, (2, k) float64, see `exact.exact_log_normalizers`.

        Args:
            tau: another temperature, 0-d.
        """
        return self._compute(exact.exact_log_normalizers, places, self.tau_of(places) if tau is None else tau, more)

    def minibatch(self, places: Tensor, **more: Any) -> Tensor:
        """Minibatch estimates, (2, k) float64, see `exact.minibatch_log_normalizers`."""
        return self._compute(exact.minibatch_log_normalizers, places, self.tau_of(places), more)

    def _compute(self, function: Callable, places: Tensor, tau: Tensor, more: dict[str, Any]) -> Tensor:
        log_means = function(
            *self.blocks, places, tau, surrogate=self.surrogate, eps=self.eps, device=self.tau.device,
            intra_modal=self.loss is not None and self.loss.intra_modal, **more,
        )
        return log_mean_of_directions(log_means) if self.loss is not None and self.loss.one_per_pair else log_means

    @torch.no_grad()
    def estimates(self, loss: GlobalContrastiveLoss, places: Tensor, minibatch: Tensor, batch_size: int) -> Tensor:
        """alpha from the checkpoint's normalizer, (2, k) float64; NaN where it has no estimate.

        Every process computes all of them in the same order, since a normalizer may communicate.

        Args:
            minibatch: the anchors' L in batches of `batch_size`, the training's, (2, k), for normalizers that use it.
        """
        normalizer, queued, step = loss.normalizer, None, ESTIMATED_AT_ONCE
        if isinstance(normalizer, Queue) and normalizer.ring.active:
            texts, images = normalizer.ring.rows[:, : normalizer.ring.active]
            queued, step = nearest_pairs(self.pairs, images, texts), min(step, batch_size)
        parts = []
        with full_precision():
            for some, log_batch in zip(places.split(step), minibatch.split(step, dim=1), strict=True):
                if queued is not None and isinstance(loss.normalizer, Queue):
                    normalizer = queue_without(loss.normalizer, torch.isin(queued, some))
                log_batch = log_batch.to(self.tau)
                image, text = self.pairs.take(some)
                index, nothing = self.index[some].to(self.tau.device), log_batch.new_full(log_batch.shape, math.nan)
                batch = Batch.of_process(image, text, self.tau_of(some), index, nothing)
                alone = normalizer(batch)  # NaN where it uses the batch's own estimate, beside one of its own or not
                batch.all_log_batch = log_batch
                alpha = normalizer(batch)
                parts.append(alpha.where((alpha != log_batch) | ~alone.isnan(), math.nan).double().cpu())
        return torch.cat(parts, dim=1)


def nearest_pairs(pairs: Pairs, images: Tensor, texts: Tensor, chunk_mib: float = exact.CHUNK_MIB) -> Tensor:
    """The most similar of all pairs to each of images and texts (m, d), by the sum of both cosines, (m,) int64.

    A queue does not say which pairs it holds; their embeddings are those of slightly older weights.
    """
    images, texts = (side.to(pairs.device, torch.float32) for side in (images, texts))
    best = torch.full((len(images),), -math.inf, device=pairs.device)
    nearest = torch.zeros(len(images), dtype=torch.int64, device=pairs.device)
    with full_precision():
        for start, columns in pairs.chunks(exact.block_width(chunk_mib, len(images))):
            highest, column = torch.addmm(images @ columns[0].T, texts, columns[1].T).max(dim=1)
            nearest = torch.where(highest > best, column + start, nearest)
            best = torch.maximum(best, highest)
    return nearest.cpu()


def queue_without(queue: Queue, left_out: Tensor) -> Queue:
    """A copy of the queue without the entries that `left_out` (m,) bool marks.

    As in a training step, the pairs of the step's own batch are no negatives: with an anchor's own positive among them
    no log-normalizer could be below -log m.
    """
    rows = queue.ring.rows[:, : queue.ring.active][:, ~left_out.to(queue.ring.rows.device)]
    smaller = Queue(queue_size=max(1, rows.shape[1]), eps=queue.eps, surrogate=queue.surrogate)
    smaller.materialize(rows.shape[2], rows.device, rows.dtype)
    smaller.ring.rows[:, : rows.shape[1]] = rows
    smaller.ring.active = rows.shape[1]
    return smaller.eval()
