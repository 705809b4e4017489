"""The global objective of a checkpoint's loss over embedded pairs: its log-normalizers and its gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch, log_mean_of_directions
from open_clip_ext.diagnostics import exact
from open_clip_ext.diagnostics.embeddings import Embeddings, Pairs
from open_clip_ext.losses import GlobalContrastiveLoss
from open_clip_ext.surrogates import Identity, Surrogate
from training_ext.report.embeddings import Embedded

EPS = 1e-14  # for losses that have none
AT_ONCE = 4096  # pairs whose temperatures are looked up together


@dataclass
class Objective:
    """The global objective of n pairs.

    Args:
        image, text: unit embeddings of the pairs, (n, d), in one tensor or in blocks.
        index: their rows in the data set, (n,).
        tau, scale: temperatures, and the factors of log(eps + g_i), 0-d or (2, n), on the device that computes.
        surrogate, eps, intra_modal, one_per_pair: as in the loss. With `one_per_pair` all log-normalizers are those of
            a pair, the log of the mean of g over its two directions.
    """

    image: Embeddings
    text: Embeddings
    index: Tensor
    tau: Tensor
    scale: Tensor
    surrogate: Surrogate
    eps: float = EPS
    intra_modal: bool = False
    one_per_pair: bool = False

    @classmethod
    def of(cls, loss: GlobalContrastiveLoss | None, embedded: Embedded, tau: Tensor) -> "Objective":
        """The objective over all embedded rows; for losses without parts (None) that of NeuCLIP's Eq. 1.

        Args:
            tau: the checkpoint's temperature, 0-d, on the device that computes.
        """
        image, text, index = embedded.image, embedded.text, embedded.rows
        if loss is None:
            return cls(image, text, index, tau, tau, Identity())
        parts: list[Tensor] = []
        for first, (images, texts) in Pairs(image, text, tau.device).chunks(AT_ONCE):
            batch = Batch.of_process(images, texts, tau, index[first : first + len(images)].to(tau.device))
            parts.append(loss.temperature.taus(tau, loss.temperature.lookup(batch)))
            if parts[0].dim() == 0:
                break
        taus = torch.cat(parts, dim=1) if parts[0].dim() else parts[0]
        scale = loss.temperature.scale(taus)
        return cls(image, text, index, taus, scale, loss.surrogate, loss.eps, loss.intra_modal, loss.one_per_pair)

    def tau_of(self, places: Tensor) -> Tensor:
        """Temperatures of the pairs at `places` (k,), (2, k), or 0-d if there is only one."""
        return self.tau[:, places] if self.tau.dim() else self.tau

    def exact(self, places: Tensor, tau: Tensor | None = None, **more: Any) -> Tensor:
        """Exact log-normalizers of the pairs at `places`, (2, k) float64, see `exact.exact_log_normalizers`.

        Args:
            tau: another temperature, 0-d.
        """
        return self._compute(exact.exact_log_normalizers, places, self.tau_of(places) if tau is None else tau, more)

    def minibatch(self, places: Tensor, **more: Any) -> Tensor:
        """Minibatch estimates, (2, k) float64, see `exact.minibatch_log_normalizers`."""
        return self._compute(exact.minibatch_log_normalizers, places, self.tau_of(places), more)

    def _compute(self, function: Callable, places: Tensor, tau: Tensor, more: dict[str, Any]) -> Tensor:
        found = function(
            self.image, self.text, places, tau, surrogate=self.surrogate, eps=self.eps, intra_modal=self.intra_modal,
            device=self.tau.device, **more,
        )
        return log_mean_of_directions(found) if self.one_per_pair else found

    def gradients(self, places: Tensor, alpha: Tensor) -> Tensor:
        """Gradients in the embeddings of the pairs at `places`, (2, k, d), see `exact.embedding_gradients`.

        Args:
            alpha: log-normalizers of all pairs, (2, n).
        """
        return exact.embedding_gradients(
            self.image, self.text, places, alpha, self.tau, self.scale, self.surrogate, self.intra_modal,
            device=self.tau.device,
        )

    def at(self, places: Tensor) -> "Objective":
        """The objective over the pairs at `places` (B,) only."""
        image, text = Pairs(self.image, self.text, self.tau.device).take(places)
        tau, scale = (values[:, places] if values.dim() else values for values in (self.tau, self.scale))
        settings = (self.surrogate, self.eps, self.intra_modal, self.one_per_pair)
        return Objective(image, text, self.index[places].to(self.tau.device), tau, scale, *settings)

    def batch(self, log_batch: Tensor | None = None) -> Batch:
        """All pairs as the batch of a step of one process, with their own estimates `log_batch`, (2, n).

        Only for embeddings in one tensor, see `at`.
        """
        assert isinstance(self.image, Tensor) and isinstance(self.text, Tensor)
        if log_batch is None:
            log_batch = self.exact(torch.arange(len(self.index))).float()
        return Batch.of_process(self.image, self.text, self.tau, self.index, log_batch)
