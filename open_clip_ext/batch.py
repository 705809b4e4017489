"""A global batch, as one process sees it.

Shapes: b = pairs of this process, B = pairs of all processes, d = embedding dimension. What exists for both directions
is stacked in front, images as anchors first: (2, b) or (2, B).
"""

import copy
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from open_clip_ext.distributed import all_gather, rank, world_size


@dataclass
class Batch:
    """The embeddings of an optimiser step, their temperatures, and what the batch says of the normalizers.

    Names without `all_` are of this process alone; the loss may give them a graph. Names with `all_` are of all
    processes in the order of ranks, equal everywhere and without graph.

    Args:
        image, text: unit vectors, (b, d).
        positives: s_ii, (b,).
        tau: temperatures, (2, b).
        all_image, all_text: (B, d).
        all_positives: (B,).
        all_tau: (2, B).
        offset: position of this process's first pair among the B.
        index: rows of all samples in the data set, (B,) int64, or None.
        keys: of all samples, (B,) int64, or None: those with the same key are not one another's negatives.

    Attributes:
        all_log_batch: L = log(eps + g) over the batch, (2, B).
        finite: 0-d bool on the device, False if any of it is not finite or a row is out of range: then nothing of it
            may enter a state.
    """

    image: Tensor
    text: Tensor
    positives: Tensor
    tau: Tensor
    all_image: Tensor
    all_text: Tensor
    all_positives: Tensor
    all_tau: Tensor
    offset: int = 0
    index: Tensor | None = None
    keys: Tensor | None = None
    all_log_batch: Tensor = field(init=False)
    finite: Tensor = field(init=False)

    @classmethod
    def of_process(
        cls, image: Tensor, text: Tensor, tau: Tensor, index: Tensor | None = None, log_batch: Tensor | None = None
    ) -> "Batch":
        """This process's pairs as if there were no others; `tau` is 0-d or (2, b), `log_batch` L, (2, b), if known."""
        batch = cls._of(image, text, image.detach(), text.detach(), tau, 0, index)
        if log_batch is not None:
            batch.all_log_batch = log_batch
            batch.finite = torch.ones((), dtype=torch.bool, device=image.device)
        return batch

    @classmethod
    def gather(cls, image: Tensor, text: Tensor, all_tau: Tensor, index: Tensor | None = None) -> "Batch":
        """The pairs of all processes; `all_tau`, 0-d or (2, B), and `index` are known everywhere."""
        if world_size() == 1:
            return cls.of_process(image, text, all_tau, index)
        both = all_gather(torch.cat([image.detach(), text.detach()], dim=1))
        all_image, all_text = both.chunk(2, dim=1)
        return cls._of(image, text, all_image, all_text, all_tau, rank() * image.shape[0], index)

    @classmethod
    def _of(
        cls, image: Tensor, text: Tensor, all_image: Tensor, all_text: Tensor, tau: Tensor, offset: int,
        index: Tensor | None,
    ) -> "Batch":
        all_positives = (all_image * all_text).sum(dim=1)
        all_tau = tau.detach().expand(2, len(all_positives))
        own = slice(offset, offset + len(image))
        return cls(
            image, text, all_positives[own], all_tau[:, own], all_image, all_text, all_positives, all_tau, offset, index
        )

    def set_tau(self, all_tau: Tensor) -> None:
        """Take other temperatures, 0-d or (2, B), known on every process."""
        self.all_tau = all_tau.detach().expand(2, self.size)
        self.tau = self.all_tau[:, self.local]

    @property
    def size(self) -> int:
        """B."""
        return len(self.all_positives)

    @property
    def local(self) -> slice:
        """This process's places among the B."""
        return slice(self.offset, self.offset + len(self.image))

    @property
    def log_batch(self) -> Tensor:
        """L of this process's anchors, (2, b)."""
        return self.all_log_batch[:, self.local]

    def leaves(self, requires_grad: bool) -> "Batch":
        """The same with `image`, `text`, `positives` and `tau` as inputs that do not depend on one another."""
        other = copy.copy(self)
        for name in ("image", "text", "positives", "tau"):
            setattr(other, name, getattr(self, name).detach().requires_grad_(requires_grad))
        return other

    def or_zeros(self) -> "Batch":
        """Replace a non-finite batch by zeros (temperatures by 1), so that sums over it stay finite."""
        other = copy.copy(self)
        for name in ("all_image", "all_text", "all_positives", "all_tau", "all_log_batch"):
            instead = 1.0 if name == "all_tau" else 0.0
            setattr(other, name, torch.where(self.finite, getattr(self, name), instead))
        return other


def add_eps(log_values: Tensor, eps: float) -> Tensor:
    """log(eps + exp(log_values))."""
    log_eps = torch.full((), math.log(eps), dtype=log_values.dtype, device=log_values.device)
    return torch.logaddexp(log_values, log_eps)


def log_mean_of_directions(log_values: Tensor) -> Tensor:
    """log of the mean of exp(log_values) over both directions, the same for both; (2, b) to (2, b)."""
    return (log_values.logsumexp(dim=0) - math.log(2)).expand_as(log_values)
