"""The similarities of a global batch, the normalizers it estimates, and the gradient for given log-normalizers.

Anchor i has the gaps x_ij = s_ij - s_ii to the B - 1 other pairs j, and the surrogate l(x_ij). Samples with the
anchor's own key, if there are keys, are not among its negatives. Everything is float32 in the log domain: at a
temperature of 0.01 the exponents reach 200, and exp overflows float32 beyond 88.

Shapes as in `batch`. Side 0 has images as anchors, side 1 texts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from open_clip_ext.batch import Batch, EqualRows
from open_clip_ext.kernels.choice import fused_kernels
from open_clip_ext.kernels.streaming import exp_, log_sum_exp_, parts
from open_clip_ext.surrogates import Surrogate, is_linear


@dataclass
class Block:
    """Similarities of this process's samples of one modality with all samples of a modality; never stored whole."""

    rows: Tensor  # their embeddings, (b, d)
    columns: Tensor  # (B, d)
    row_side: int  # 0 for images, 1 for texts
    column_side: int
    both_directions: bool = False  # with one process the columns' samples are its anchors, too

    def directions(self, part: slice) -> list[tuple[int, int, slice]]:
        """The anchors of a part of the rows: their side, the dimension along which their negatives lie, and which of
        the side's anchors they are."""
        rows, columns = (self.row_side, 1, part), (self.column_side, 0, slice(None))
        return [rows, columns] if self.both_directions else [rows]


class SimilarityBlocks:
    """The similarities that a process needs: its images against all texts and its texts against all images, as
    OpenCLIP's `local_loss` computes them; with one process one block serves both.

    They are computed in parts of a few rows (`streaming`), once for the batch's own normalizers and once for the
    gradient, which overwrites them. One part is in memory at a time, never b x B numbers.

    Args:
        batch: the embeddings and their temperatures.
        surrogate: l.
        intra_modal: whether samples of the anchor's own modality are negatives, too; this takes two more blocks.
    """

    def __init__(self, batch: Batch, surrogate: Surrogate, intra_modal: bool = False):
        self.batch = batch
        self.surrogate = surrogate
        image, text = batch.image.detach(), batch.text.detach()
        if len(image) == batch.size:
            self.blocks = [Block(image, text, 0, 1, both_directions=True)]
        else:
            self.blocks = [Block(image, batch.all_text, 0, 1), Block(text, batch.all_image, 1, 0)]
        if intra_modal:
            self.blocks += [Block(image, batch.all_image, 0, 0), Block(text, batch.all_text, 1, 1)]
        self.parts = parts(len(image), batch.size, image.device)
        self.negatives = (2 if intra_modal else 1) * (batch.size - 1)
        # Of each anchor of the batch, (B,), or of all alike.
        self.log_negatives: Tensor | float = math.log(self.negatives)
        if batch.keys is not None:
            same = EqualRows(batch.keys).count
            self.log_negatives = (batch.size - same).clamp(min=1).to(batch.positives).log()
        self._latest: tuple[Block, slice, Tensor] | None = None

    @cached_property
    def _memory(self) -> Tensor:
        return self._part_memory()

    def _part_memory(self) -> Tensor:
        """A buffer for any part's similarities: on a CPU new memory costs as much time as a pass over it."""
        rows = max(part.stop - part.start for part in self.parts)
        return self.batch.positives.new_empty(rows * self.batch.size)

    def _similarities(self, block: Block, part: slice) -> Tensor:
        """Similarities (rows of the part, B); the latest part's are cached."""
        if self._latest is not None and self._latest[0] is block and self._latest[1] == part:
            return self._latest[2]
        rows = block.rows[part]
        memory = self._memory[: len(rows) * len(block.columns)].view(len(rows), -1)
        self._latest = (block, part, torch.mm(rows, block.columns.T, out=memory))
        return memory

    def log_batch_normalizers(self) -> Tensor:
        """log g_i over the batch's negatives, (2, b): NeuCLIP, Eq. 1's g over the batch; with intra-modal negatives
        iSogCLR, Eq. 11. In plain PyTorch: `equations.batch_g`."""
        all_of_them = self.log_negatives
        return self._log_sums() - (all_of_them[self.batch.local] if isinstance(all_of_them, Tensor) else all_of_them)

    @property
    def _is_once(self) -> bool:
        """Whether all negatives of an anchor are in one part."""
        return len(self.blocks) == 2 or len(self.blocks) == len(self.parts) == 1

    def _log_sums(self) -> Tensor:
        """log-sum-exp of l / tau over each anchor's negatives, (2, b)."""
        batch = self.batch
        log_sums, once = torch.empty_like(batch.tau), self._is_once
        if not once:
            log_sums.fill_(-math.inf)
        memory = self._part_memory()
        for block in self.blocks:
            for part in self.parts:
                similarities = self._similarities(block, part)
                for side, dim, anchors in block.directions(part):
                    positives, tau, sums = batch.positives[anchors], batch.tau[side, anchors], log_sums[side, anchors]
                    of_part = self._log_sum(similarities, positives, tau, dim, part, memory, sums if once else None)
                    if not once:
                        torch.logaddexp(sums, of_part, out=sums)
        return log_sums

    def _leave_out(self, values: Tensor, part: slice, fill: float) -> None:
        """Overwrite with `fill` the pairs that are not negatives, in values (rows of the part, B)."""
        offset = self.batch.offset + part.start
        if self.batch.keys is None:
            values.diagonal(offset).fill_(fill)
        else:
            keys = self.batch.keys[offset : offset + len(values)]
            values.masked_fill_(keys[:, None] == self.batch.keys, fill)

    def _log_sum(
        self, similarities: Tensor, positives: Tensor, tau: Tensor, dim: int, part: slice, memory: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """log-sum-exp over the negatives, which lie along `dim`; the anchors lie along the other dimension."""
        gaps = torch.sub(similarities, positives.unsqueeze(dim), out=like(memory, similarities))
        exponents = self.surrogate.value(gaps).div_(tau.unsqueeze(dim))
        self._leave_out(exponents, part, torch.finfo(exponents.dtype).min)
        return log_sum_exp_(exponents, dim, out)

    def add_gradients(
        self, features: tuple[Tensor, Tensor], all_alpha: Tensor, are_empty: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Add the gradient of mean_i tau_i * exp(-alpha_i) (eps + g_i), summed over both directions of the global
        batch, with alpha constant (NeuCLIP, Eq. 4; iSogCLR, Eq. 14 and 21).

        A similarity has two weights, one with its row's sample as the anchor and one with its column's. Both come
        from the same part, so no gradient is sent between processes.

        Args:
            features: where the gradients in this process's `image` and `text` are added, (b, d) each.
            all_alpha: log-normalizers of all anchors, (2, B), at least L - MAX_LOG_WEIGHT + min(0, log tau).
            are_empty: whether `features` are memory that nothing was written into.

        Returns:
            Per anchor the sum of its negatives' weights, and tau_i * exp(-alpha_i) * dg_i/dtau_i, (2, b) each.
        """
        batch = self.batch
        all_shift = -self.log_negatives - all_alpha
        sums = all_alpha.new_empty(2, 2, len(batch.positives))  # by side of the anchor, as in `_weights_of_anchors`
        if are_empty and len(self.blocks) > 2:  # which overlap
            for feature in features:
                feature.zero_()
            are_empty = False
        written: set[tuple[int, int | None]] = set()  # sides and starts of slices
        for block, row, column, weights in self._weights(all_shift, sums):
            products = [(block.row_side, row, weights, block.columns[column])]
            if block.both_directions:
                products.append((block.column_side, column, weights.T, block.rows[row]))
            for side, some, factor, vectors in products:
                is_first = are_empty and (side, some.start) not in written
                written.add((side, some.start))
                self._add_product(features[side][some], factor, vectors, is_first)
        positive_weight = sums[:, 0].sum(0)
        for feature, partner in zip(features, (batch.text, batch.image), strict=True):
            feature.addcmul_(positive_weight[:, None], partner.detach(), value=-1 / batch.size)
        return sums[:, 0], -sums[:, 1]

    def _add_product(self, feature: Tensor, weights: Tensor, vectors: Tensor, is_first: bool) -> None:
        feature.addmm_(weights, vectors, beta=0 if is_first else 1, alpha=1 / self.batch.size)

    def _weights(
        self, all_shift: Tensor, sums: Tensor
    ) -> Iterator[tuple[Block, slice, slice, Tensor]]:
        """Yield the weights of all pairs of the blocks' slices of rows and columns, and add them up in `sums`; they
        share memory, so each is used before the next.

        Args:
            all_shift: as in `_weights_of_anchors`, of all anchors, (2, B).
            sums: by side of the anchor, (2, 2, b); overwritten.
        """
        batch, once = self.batch, self._is_once
        all_tau = batch.all_tau
        if len(self.blocks) > 1:
            all_tau = all_tau.contiguous()  # on a CPU addcdiv is slow with an expanded one
        if not once:
            sums.zero_()
        shift = all_shift[:, batch.local]
        memory, row_memory = self._part_memory(), self._part_memory()
        for block in reversed(self.blocks):
            row_side, column_side = block.row_side, block.column_side
            row_sums, column_sums = (
                sums[side] if once else torch.empty_like(sums[side]) for side in (row_side, column_side)
            )
            for part in reversed(self.parts):  # the last part of the first pass is still cached
                similarities = self._similarities(block, part)
                weights = self._weights_of_anchors(
                    similarities, batch.positives[part], batch.tau[row_side, part], shift[row_side, part], 1, part,
                    gaps=memory, out=row_memory, sums=row_sums[:, part],
                )
                # The columns' anchors of other processes are summed up there.
                column_weights = self._weights_of_anchors(
                    similarities, batch.all_positives, all_tau[column_side], all_shift[column_side], 0, part,
                    gaps=self._memory, out=memory, sums=column_sums if block.both_directions else None,
                )
                self._latest = None  # overwritten
                if block.both_directions and not once:
                    sums[column_side].add_(column_sums)
                yield block, part, slice(None), weights.add_(column_weights)
            if not once:
                sums[row_side].add_(row_sums)

    def _weights_of_anchors(
        self, similarities: Tensor, positives: Tensor, tau: Tensor, shift: Tensor, dim: int, part: slice,
        gaps: Tensor, out: Tensor, sums: Tensor | None,
    ) -> Tensor:
        """Weights exp(l / tau - alpha) dl/ds of a part's pairs in the gradient. The negatives lie along `dim`, the
        anchors along the other one.

        Args:
            shift: -alpha - log(number of negatives) of each anchor.
            gaps: buffer for intermediate values; may be the memory of `similarities`.
            out: buffer for the weights.
            sums: (2, anchors), for the sum of each anchor's weights and that of exp(l / tau - alpha) l / tau.
        """
        gaps = torch.sub(similarities, positives.unsqueeze(dim), out=like(gaps, similarities))
        slope = self.surrogate.slope(gaps)
        values, out = self.surrogate.value(gaps), like(out, similarities)
        tau, shift = tau.unsqueeze(dim), shift.unsqueeze(dim)
        if sums is None:
            torch.addcdiv(shift, values, tau, out=out)
        else:
            torch.add(values.div_(tau), shift, out=out)
        weights = exp_(out)
        self._leave_out(weights, part, 0.0)
        if sums is not None:
            torch.sum(values.mul_(weights), dim, out=sums[1])
        if isinstance(slope, Tensor) or slope != 1:
            weights.mul_(slope)
        if sums is not None:
            torch.sum(weights, dim, out=sums[0])
        return weights


def make_blocks(batch: Batch, surrogate: Surrogate, kernels: str, intra_modal: bool = False) -> SimilarityBlocks:
    """`SimilarityBlocks` by those kernels that the option `kernels` chooses for the batch; other arguments as there."""
    fused = fused_kernels(batch, kernels, "global") if is_linear(surrogate) else None
    return (fused.FusedBlocks if fused else SimilarityBlocks)(batch, surrogate, intra_modal)


def like(memory: Tensor, tensor: Tensor) -> Tensor:
    """A view of `memory` in the shape of `tensor`."""
    return memory[: tensor.numel()].view_as(tensor)
