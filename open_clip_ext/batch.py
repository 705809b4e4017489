"""A global batch, as one process sees it.

Shapes: b = pairs of this process, B = pairs of all processes, d = embedding dimension. Values of both directions are
stacked along the first axis, images as anchors first: (2, b) or (2, B).
"""

import copy
import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from open_clip_ext.distributed import all_gather, rank, world_size


@dataclass
class Batch:
    """The embeddings of an optimizer step, their temperatures, and the batch's own estimate of the normalizers.

    Tensors without `all_` in their names hold this process's pairs and may have an autograd graph. Tensors with `all_`
    hold the pairs of all processes in the order of ranks, are the same on every process, and have no graph.
    """

    image: Tensor  # unit vectors, (b, d)
    text: Tensor
    tau: Tensor  # temperatures, (2, b)
    all_image: Tensor  # (B, d)
    all_text: Tensor
    all_tau: Tensor  # (2, B)
    offset: int = 0  # position of this process's first pair among the B
    index: Tensor | None = None  # rows of all samples in the data set, (B,) int64
    keys: Tensor | None = None  # (B,) int64; samples with the same key are not each other's negatives
    all_log_batch: Tensor = field(init=False)  # L = log(eps + g) over the batch, (2, B)
    # 0-d bool on the device; False if a value is not finite or a row out of range, and then nothing of the batch may
    # enter the state. A network's optimizer still steps, with gradients of 0: Adam's momentum still moves the weights.
    finite: Tensor = field(init=False)

    @classmethod
    def of_process(
        cls, image: Tensor, text: Tensor, tau: Tensor, index: Tensor | None = None, log_batch: Tensor | None = None
    ) -> "Batch":
        """Make a batch of this process's pairs alone, without communication.

        Args:
            tau: 0-d or (2, b).
            log_batch: L, (2, b), if known.
        """
        batch = cls._of(image, text, image.detach(), text.detach(), tau, 0, index)
        if log_batch is not None:
            batch.all_log_batch = log_batch
            batch.finite = torch.ones((), dtype=torch.bool, device=image.device)
        return batch

    @classmethod
    def gather(cls, image: Tensor, text: Tensor, all_tau: Tensor, index: Tensor | None = None) -> "Batch":
        """Gather the pairs of all processes; `all_tau`, 0-d or (2, B), and `index` are the same on every process."""
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
        all_tau = tau.detach().expand(2, len(all_image))
        local = slice(offset, offset + len(image))
        return cls(image, text, all_tau[:, local], all_image, all_text, all_tau, offset, index)

    def set_tau(self, all_tau: Tensor) -> None:
        """Replace the temperatures by `all_tau`, 0-d or (2, B), the same on every process."""
        self.all_tau = all_tau.detach().expand(2, self.size)
        self.tau = self.all_tau[:, self.local]

    @property
    def size(self) -> int:
        """B, the number of pairs of all processes."""
        return len(self.all_image)

    @cached_property
    def all_positives(self) -> Tensor:
        """s_ii of all pairs, (B,)."""
        return (self.all_image * self.all_text).sum(dim=1)

    @cached_property
    def positives(self) -> Tensor:
        """s_ii of this process's pairs, (b,)."""
        return self.all_positives[self.local]

    @cached_property
    def equal_rows(self) -> "EqualRows":
        """Groups of samples with the same row; only for a batch with an `index`."""
        assert self.index is not None
        return EqualRows(self.index)

    @property
    def local(self) -> slice:
        """Slice of this process's pairs in the global batch."""
        return slice(self.offset, self.offset + len(self.image))

    @property
    def log_batch(self) -> Tensor:
        """L of this process's anchors, (2, b)."""
        return self.all_log_batch[:, self.local]

    def leaves(self, requires_grad: bool) -> "Batch":
        """A copy whose `image`, `text`, `positives` and `tau` are separate leaves of the autograd graph."""
        other = copy.copy(self)
        for name in ("image", "text", "positives", "tau"):
            setattr(other, name, getattr(self, name).detach().requires_grad_(requires_grad))
        return other

    def or_zeros(self) -> "Batch":
        """A copy in which s_ii and L are 0 and temperatures 1 if the batch is not finite; sums over it are finite.

        The embeddings stay as they are: a copy of them would take as much memory again.
        """
        other = copy.copy(self)
        for name in ("all_positives", "all_tau", "all_log_batch"):
            fill = 1.0 if name == "all_tau" else 0.0
            setattr(other, name, torch.where(self.finite, getattr(self, name), fill))
        return other


class EqualRows:
    """Groups equal entries of `index` (B,), with static shapes and without a host sync, unlike torch.unique.

    Attributes:
        group: number of each entry's group, in [0, B), (B,): its first entry's place in the sorted `index`.
        count: how often each entry occurs, (B,) int64.
    """

    def __init__(self, index: Tensor):
        ordered = index.sort().values
        self.group = torch.searchsorted(ordered, index)
        self.count = torch.searchsorted(ordered, index, right=True) - self.group

    def _sum(self, values: Tensor) -> Tensor:
        # index_put_ adds in a fixed order on CUDA, index_add_ does not.
        return torch.zeros_like(values).index_put_((self.group,), values, accumulate=True)[self.group]

    def mean(self, values: Tensor) -> Tensor:
        """Replace each of `values` (B, c) by the mean over its group."""
        return self._sum(values) / self.count[:, None]

    def log_mean_exp(self, values: Tensor) -> Tensor:
        """Replace each of `values` (B, c) by the log of the mean of exp over its group."""
        groups = self.group[:, None].expand_as(values)
        peak = torch.full_like(values, -math.inf).scatter_reduce_(0, groups, values, "amax")[self.group]
        return peak + self.mean((values - peak).exp()).log()


def add_eps(log_values: Tensor, eps: float) -> Tensor:
    """log(eps + exp(log_values))."""
    log_eps = torch.full((), math.log(eps), dtype=log_values.dtype, device=log_values.device)
    return torch.logaddexp(log_values, log_eps)


def log_mean(log_total: Tensor, counts: Tensor | int, eps: float, log_batch: Tensor) -> Tensor:
    """log(eps + exp(log_total) / counts), (2, b); L for anchors whose count is 0.

    Args:
        log_total: log of each anchor's sum, (2, b).
        counts: how many terms each sum has, (b,), or all have, at least 1.
        log_batch: L, (2, b).
    """
    if isinstance(counts, int):
        return add_eps(log_total - math.log(counts), eps)
    return torch.where(counts > 0, add_eps(log_total - counts.clamp(min=1).log(), eps), log_batch)


def log_mean_of_directions(log_values: Tensor) -> Tensor:
    """Log of the mean of exp(log_values) over both directions, repeated for each, (2, b)."""
    return (log_values.logsumexp(dim=0) - math.log(2)).expand_as(log_values)
