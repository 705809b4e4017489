"""The gradient of the network's objective in its prototypes.

The objective is the mean over anchors, summed over both directions (`objectives`; NeuCLIP, Eq. 12). With
x_ij = l(cos(e_i, W_j) - s_ii) / tau, the objective's weight c_i, and f'_i its value's derivative in alpha_i,

    G_j = (1/B) sum_i c_i f'_i exp(x_ij - log m - alpha_i) l'_ij / tau * e_i      in W_j / |W_j|, (d,)
    gradient_j = G_j / |W_j| - <G_j, W_j> W_j / |W_j|^3                           in W_j, (d,)

An anchor needs all prototypes but no other anchor, so one pass over blocks of anchors computes alpha and gradient.

Shapes: m prototypes in use per direction, k of them on this process; d = embedding dimension; B = global batch, r
anchors in a block.
"""

import math

import torch
from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import log_sum_over_processes, world_size
from open_clip_ext.kernels.log_sum import LEFT_OUT, Keys, constants_of, exponents_of
from open_clip_ext.kernels.streaming import exp_, highest, parts
from open_clip_ext.objectives import Objective
from open_clip_ext.surrogates import Surrogate, is_linear

CPU_PROTOTYPES = 256  # per direction, so that G_j stays in the cache until gradient_j is computed from it


class PrototypeGradient:
    """Computes the gradient in the prototypes at each of the updates in a step.

    The updates share anchors and buffers: on a CPU new memory costs as much time as a pass over it.

    Args:
        batch: the global batch, from `Batch.or_zeros`.
        objective: what the network minimizes.
        surrogate: l.
        eps: eps of Eq. 1.
        active: m, prototypes in use.
        own_active: k, those on this process.
        split: whether the prototypes are sharded over processes.
        counts: number of prototypes in each anchor's mean, (B,), or in all; if it is 0, alpha is L and the gradient 0.
        keys: of all anchors and of this process's prototypes, if they have any; prototypes with the anchor's key are
            left out of its mean.
    """

    def __init__(
        self, batch: Batch, objective: type[Objective], surrogate: Surrogate, eps: float,
        active: int, own_active: int, split: bool, counts: Tensor | int, keys: Keys | None = None,
    ):
        self.batch, self.objective, self.surrogate, self.split = batch, objective, surrogate, split
        self.log_eps = batch.all_positives.new_full((), math.log(eps))
        self.keys = keys
        self.counted = counts > 0
        log_counts = math.log(counts) if isinstance(counts, int) else counts.clamp(min=1).log()
        self.shift = -log_counts - constants_of(batch.all_positives, batch.all_tau, surrogate)  # (2, B)
        self.anchor_weight = objective.weight(batch.all_tau) * batch.finite / batch.size  # in the mean, (2, B)
        self.anchors = torch.stack([batch.all_image, batch.all_text]).masked_fill_(~batch.finite, 0.0)
        if is_linear(surrogate):
            self.anchors.div_(batch.all_tau[:, :, None])
        # Every process needs the same parts, though their numbers of prototypes may differ by one.
        columns = -(-active // world_size()) if split else active
        self.parts = parts(batch.size, 2 * columns, batch.all_image.device, least=2)
        size = self.parts[0].stop - self.parts[0].start
        self.similarities = self.anchors.new_empty(2 * own_active * size)
        self.at_once = CPU_PROTOTYPES if batch.all_image.device.type == "cpu" else max(1, own_active)
        self.most_vectors = max(size, min(self.at_once, own_active))

    def write(self, gradient: Tensor, prototypes: Tensor, lengths: Tensor) -> Tensor:
        """Write the gradient into `gradient`, (2, k, d); 0 if the batch is not finite.

        Args:
            prototypes: (2, k, d).
            lengths: their norms, (2, k), with 1 in place of 0.

        Returns:
            alpha of all anchors, (2, B).
        """
        inverse_lengths = lengths.reciprocal()[:, :, None]
        minus_cubes = inverse_lengths.pow(3).neg_()
        alpha = torch.empty_like(self.batch.all_log_batch)
        # For a block's weighted anchors, then for products of gradient and prototypes; not kept, since on a GPU the
        # optimizer's step needs the same memory.
        memory = self.anchors.new_empty(2, self.most_vectors, self.anchors.shape[2])
        for part in self.parts:
            shape = (*lengths.shape, part.stop - part.start)
            similarities = self.similarities[: math.prod(shape)].view(shape)
            torch.bmm(prototypes, self.anchors[:, part].mT, out=similarities).mul_(inverse_lengths)
            alpha[:, part] = self._add(gradient, similarities.mT, part, memory)
        pieces = (tensor.split(self.at_once, dim=1) for tensor in (gradient, prototypes, inverse_lengths, minus_cubes))
        for slopes, vectors, inverses, cubes in zip(*pieces, strict=True):
            radial = torch.mul(slopes, vectors, out=memory[:, : slopes.shape[1]]).sum(2, keepdim=True)
            slopes.mul_(inverses).addcmul_(vectors, radial.mul_(cubes))
        return alpha

    def _add(self, gradient: Tensor, similarities: Tensor, part: slice, memory: Tensor) -> Tensor:
        """Add the part of G that comes from the anchors of one block.

        Args:
            similarities: (2, r, k), divided by tau if l is linear; overwritten.
            memory: (2, at least r, d), for the weighted anchors.

        Returns:
            alpha of these anchors, (2, r).
        """
        tau, log_batch = self.batch.all_tau[:, part], self.batch.all_log_batch[:, part]
        exponents, slope = exponents_of(similarities, self.batch.all_positives[part], tau, self.surrogate)
        if self.keys is not None:
            exponents.masked_fill_(self.keys[0][part, None] == self.keys[1], LEFT_OUT)
        peak = highest(exponents, 2)
        probs = exp_(exponents.sub_(peak))
        peak = peak[:, :, 0] + self.shift[:, part]
        log_mean = probs.sum(2).log_().add_(peak)
        if self.split:
            log_mean = log_sum_over_processes(log_mean)
        alpha = torch.logaddexp(log_mean, self.log_eps)
        if isinstance(self.counted, Tensor):
            alpha = torch.where(self.counted[part], alpha, log_batch)
        # From exp(x - peak) to d alpha / dx = exp(x - log m - alpha).
        factor = (peak - alpha).exp_()
        factor *= self.objective.slope(log_batch, alpha).mul_(self.anchor_weight[:, part])
        if not is_linear(self.surrogate):
            probs.mul_(slope)
            factor /= tau
        weighted = torch.mul(self.anchors[:, part], factor[:, :, None], out=memory[:, : factor.shape[1]])
        gradient.baddbmm_(probs.mT, weighted, beta=0 if part.start == 0 else 1)
        return alpha
