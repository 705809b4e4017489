"""Prototypes divided over processes: process r keeps the places r, r + W, r + 2W, ... and all of them predict together.

The log-sum-exp over m prototypes is that over processes of each one's own part, so that an update of the network sends
2 B numbers per process instead of a gradient of 2 m d. The encoders' gradient through alpha is a sum over processes,
too: 2 B (d + 2) numbers once per step.

Shapes: m prototypes a side, k of them active, k_r of those on this process; B pairs of all processes, b of this one.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import all_gather, log_sum_over_processes, rank, wait_for_others, world_size
from open_clip_ext.kernels.log_sum import Keys, log_sums
from open_clip_ext.normalizers.ring import EmbeddingRing
from open_clip_ext.surrogates import Surrogate


def own_part(tensor: Tensor, dim: int) -> Tensor:
    """This process's places of what is whole along `dim`."""
    places = torch.arange(rank(), tensor.shape[dim], world_size(), device=tensor.device)
    return tensor.index_select(dim, places)


def whole(part: Tensor, size: int, dim: int) -> Tensor | None:
    """Put the parts of all processes together along `dim` of length `size`, on the CPU of process 0; None elsewhere.

    Every process must call it. Process 0 holds one other part at a time beside the whole.
    """
    wait_for_others()
    if rank() != 0:
        dist.send(part.contiguous(), dst=0)
        return None
    shape = [*part.shape]
    shape[dim] = size
    result = torch.empty(shape, dtype=part.dtype)
    for owner in range(world_size()):
        places = torch.arange(owner, size, world_size())
        if owner > 0:
            shape[dim] = len(places)
            part = part.new_empty(shape)
            dist.recv(part, src=owner)
        result.index_copy_(dim, places, part.cpu())
    return result


class ShardedRing(EmbeddingRing):
    """The process's own places of the latest m pairs of embeddings, (2, m_r, d)."""

    @property
    def own_capacity(self) -> int:
        return len(range(rank(), self.capacity, world_size()))

    @property
    def own_active(self) -> int:
        """k_r, own places that were filled; places fill in order."""
        return len(range(rank(), self.active, world_size()))

    def push(self, batch: Batch) -> Tensor:  # type: ignore[override]  # its own places are no slices
        """As `EmbeddingRing.push`; a batch that is not finite leaves what was there, or unit vectors; own places."""
        latest = torch.stack([batch.all_text, batch.all_image])[:, -self.capacity :]
        count = latest.shape[1]
        places = (torch.arange(count) + self.head) % self.capacity
        own = (places % world_size() == rank()).nonzero()[:, 0]
        places = (places[own] // world_size()).to(latest.device)
        earlier = self.rows[:, places]
        unit = torch.zeros_like(earlier)
        unit[:, :, 0] = 1.0
        earlier = torch.where((earlier == 0).all(dim=2, keepdim=True), unit, earlier)
        self.rows[:, places] = torch.where(batch.finite, latest[:, own.to(latest.device)], earlier)
        if batch.keys is not None:
            if self.keys is None:
                self.keys = self.unlike_keys(latest.device)
            self.keys[places] = batch.keys[-count:][own.to(latest.device)]
        self.head = (self.head + count) % self.capacity
        self.active = min(self.active + count, self.capacity)
        return places


class ShardedLogSum(torch.autograd.Function):
    """log sum_j' exp(l(cos(e_i, W_j') - s_ii) / tau) over the prototypes of all processes, for this process's anchors.

    Takes this process's `image` and `text` (b, d), `positives` (b,) and `tau` (2, b), whose gradients it gives; and
    without gradient the batch, its prototypes (2, k_r, d), their lengths (2, k_r), l, and the keys of `log_sums`.
    """

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, positives: Tensor, tau: Tensor,
        batch: Batch, prototypes: Tensor, lengths: Tensor, surrogate: Surrogate,
        keys: Keys | None,
    ) -> Tensor:
        anchors = (batch.all_image, batch.all_text, batch.all_positives, batch.all_tau)
        own, derivatives = log_sums(*anchors, prototypes, surrogate, lengths, keys=keys)
        assert derivatives is not None
        grad_anchor, grad_positive, grad_tau = derivatives
        log_total = log_sum_over_processes(own)
        partial = torch.cat([grad_anchor, grad_positive[:, :, None], grad_tau[:, :, None]], dim=2)
        ctx.save_for_backward(partial, (own - log_total).exp())
        ctx.local = batch.local
        return log_total[:, batch.local]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        partial, probs = ctx.saved_tensors
        slopes = probs * all_gather(grad_output.T).T
        # In place, as in `log_sum`: autograd itself refuses to come here twice.
        summed = _sum_of_own(partial.mul_(slopes[:, :, None]), ctx.local)
        image, text = summed[:, :, :-2]
        return image, text, summed[:, :, -2].sum(dim=0), summed[:, :, -1], None, None, None, None, None


def _sum_of_own(partial: Tensor, local: slice) -> Tensor:
    """Sum (2, B, c) over processes; this process's anchors of it, (2, b, c)."""
    if dist.get_backend() == "nccl":
        by_process = partial.transpose(0, 1).contiguous()
        own = by_process.new_empty(local.stop - local.start, *by_process.shape[1:])
        dist.reduce_scatter_tensor(own, by_process)
        return own.transpose(0, 1)
    dist.all_reduce(partial)  # gloo has no reduce-scatter
    return partial[:, local]
