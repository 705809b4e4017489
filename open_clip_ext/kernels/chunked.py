"""CLIP's and SigLIP's loss of a global batch and their gradients, tile by tile: no b x B matrix is ever stored.

With l_ij = scale * <image_i, text_j> + bias both are sums over pairs, whose derivatives in l_ij are

    CLIP     (exp(l_ij - r_i) + exp(l_ij - c_j) - 2 [i = j]) / 2B       r_i, c_j: log-sum-exp of row i, of column j
    SigLIP   (sigmoid(l_ij) - [i = j]) / B

A learned pair's own weight is small, and as a difference it would be lost in rounding: it is computed as the sum of the
negatives' softmax, or as -sigmoid(-l_ii). Likewise the value.

CLIP takes two passes over the tiles, one for r and c and one for the gradient, SigLIP one. A process computes the rows
of its own images against all texts, and of its own texts against all images: all that its gradients need, so that the
backward pass sends nothing. With one process the first of the two blocks serves both directions.

Shapes: b pairs of this process, B of all, d = dimension of the embeddings.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import softplus

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import all_gather, gather_values
from open_clip_ext.kernels.choice import HAS_OUT_DTYPE, fused_kernels
from open_clip_ext.kernels.positives import SeveralPositives
from open_clip_ext.kernels.streaming import add_exp_, add_sum_, exp_, tiles


@dataclass
class Tile:
    """A tile of a block of logits.

    Attributes:
        logits: (r, c), which may be overwritten.
        buffer: memory of the same shape.
        row, column: slices of the block's rows and columns.
        positives: slice of the block's rows whose positives are in the tile; they lie on its diagonal `shift`.
    """

    logits: Tensor
    buffer: Tensor
    row: slice
    column: slice
    positives: slice
    shift: int


class Pairs:
    """The logits of this process's pairs in `blocks` (rows (b, d), columns (B, d)), and the gradients of its features.

    Args:
        batch: the embeddings; its temperatures are not used.
        scale: 0-d, of their dtype; `bias`: the same, or None.
        low: whether matrix products have bfloat16 factors and float32 sums. A device without such a product, as a CPU,
            rounds the factors to bfloat16 and multiplies in their dtype.
    """

    def __init__(self, batch: Batch, scale: Tensor, bias: Tensor | None = None, low: bool = False):
        image, text = batch.image.detach(), batch.text.detach()
        self.image, self.scale, self.bias = image, scale, bias
        self.low, self.native = low, low and image.device.type == "cuda" and HAS_OUT_DTYPE
        self.size, self.offset = batch.size, batch.offset
        self.gradients = torch.empty_like(image), torch.empty_like(text)
        sides = [(image, text)]
        if len(image) < batch.size:
            sides = [(image, batch.all_text), (text, batch.all_image)]
        self.blocks = [(self._rounded(rows), self._rounded(columns)) for rows, columns in sides]
        self.slices = tiles(len(image), [slice(0, self.size)], image.device)
        self._only_tile: dict[int, Tile] = {}  # of the block of `sums`'s last side, if there are no others

    def _rounded(self, factor: Tensor) -> Tensor:
        if not self.low:
            return factor
        return factor.bfloat16() if self.native else factor.bfloat16().to(factor.dtype)

    @cached_property
    def _memory(self) -> Tensor:
        """Allocated once for all tiles: on a CPU new memory costs as much time as a pass over it."""
        height, width = (slices[0].stop for slices in self.slices)
        return self.image.new_empty(2, height * width)

    def _tiles(self, side: int) -> Iterator[Tile]:
        """Yield the block's tiles; they share memory, so each is used before the next."""
        rows, columns = self.blocks[side]
        for row in self.slices[0]:
            row_vectors = rows[row] if self.low else rows[row] * self.scale  # a pass less over the tiles
            for column in self.slices[1]:
                column_vectors = columns[column]
                size = len(row_vectors) * len(column_vectors)
                logits, buffer = (memory[:size].view(len(row_vectors), -1) for memory in self._memory)
                if self.native:
                    logits = torch.mm(row_vectors, column_vectors.T, out_dtype=logits.dtype)
                else:
                    torch.mm(row_vectors, column_vectors.T, out=logits)
                if self.low:
                    logits.mul_(self.scale)
                if self.bias is not None:
                    logits.add_(self.bias)
                shift = self.offset + row.start - column.start
                start = row.start + max(0, -shift)
                positives = slice(start, start + logits.diagonal(shift).numel())
                yield Tile(logits, buffer, row, column, positives, shift)

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each anchor the highest logit of its negatives and the sum of their exponentials over that of the highest,
        (2, b) each; and the logit of each pair, (b,)."""
        # The first tile of an anchor has a negative: a tile's size is above 1, as is a batch's.
        peaks = self.scale.new_empty(2, len(self.image))
        totals, positives = torch.empty_like(peaks), torch.empty_like(peaks[0])
        is_only_tile = len(self.slices[0]) == len(self.slices[1]) == 1
        for side in range(len(self.blocks)):
            for tile in self._tiles(side):
                positive_logits = tile.logits.diagonal(tile.shift)
                positives[tile.positives] = positive_logits
                positive_logits.fill_(-math.inf)
                if len(self.blocks) == 1:
                    of_columns = peaks[1, tile.column], totals[1, tile.column]
                    add_exp_(*of_columns, tile.logits, 0, tile.buffer, tile.row.start == 0)
                memory = tile.buffer if is_only_tile else tile.logits
                add_exp_(peaks[side, tile.row], totals[side, tile.row], tile.logits, 1, memory, tile.column.start == 0)
        if is_only_tile:
            self._only_tile[side] = tile
        return peaks, totals, positives

    def add_softmax(
        self, highest: Tensor, factors: Tensor, all_highest: Tensor, all_factors: Tensor, positive_weights: Tensor,
        largest: Callable[[], Tensor],
    ) -> None:
        """Add the gradient whose weights are exp(l_ij - highest_i) factor_i of both of a pair's anchors together, those
        of all processes in (2, B), and of a positive `positive_weights`, (b,).

        Args:
            largest: gives an upper bound of an anchor's part of a weight, 0-d.
        """
        for side in reversed(range(len(self.blocks))):
            for tile in [self._only_tile.pop(side)] if side in self._only_tile else self._tiles(side):
                # With exp(l - r) instead all weights of an anchor would be off by the same rounding of r.
                rows = exp_(torch.sub(tile.logits, highest[side, tile.row, None], out=tile.buffer))
                columns = exp_(tile.logits.sub_(all_highest[1 - side, tile.column]))
                weights = rows.mul_(factors[side, tile.row, None]).addcmul_(columns, all_factors[1 - side, tile.column])
                weights.diagonal(tile.shift).copy_(positive_weights[tile.positives])
                self._add(side, tile.row, tile.column, self._rounded(weights))

    def add_sigmoid(self) -> tuple[Tensor, Tensor]:
        """Add the gradient of -log sigmoid(l_ij) of the positives and -log sigmoid(-l_ij) of the others; return the
        sums of these values and of their derivatives in l_ij for this process's images, 0-d each."""
        values, all_weights = self.image.new_empty(2, len(self.image))
        zero = torch.zeros_like(self.scale)
        for side in range(len(self.blocks)):
            for tile in self._tiles(side):
                tile.logits.diagonal(tile.shift).neg_()
                is_first = tile.column.start == 0
                if side == 0:  # the other block has the same pairs, on another process
                    add_sum_(values[tile.row], torch.logaddexp(tile.logits, zero, out=tile.buffer), 1, is_first)
                weights = tile.logits.sigmoid_()
                weights.diagonal(tile.shift).neg_()
                if side == 0:
                    add_sum_(all_weights[tile.row], weights, 1, is_first)
                self._add(side, tile.row, tile.column, self._rounded(weights))
        return values.sum(), all_weights.sum()

    def difference(self, logits: Tensor, others: Tensor) -> Tensor:
        """logits - others, of those of `sums`, in the unit of the base e's."""
        return logits - others

    def _add(self, side: int, row: slice, column: slice, weights: Tensor) -> None:
        """Add the weighted columns to the rows' gradient; with one block, the weighted rows to the columns', too."""
        rows, columns = self.blocks[side]
        self._add_product(self.gradients[side][row], weights, columns[column], column.start == 0)
        if len(self.blocks) == 1:
            self._add_product(self.gradients[1][column], weights.T, rows[row], row.start == 0)

    def _add_product(self, gradient: Tensor, weights: Tensor, vectors: Tensor, is_first: bool) -> None:
        """Add weights @ vectors to `gradient`, which is empty if `is_first`."""
        if not self.native:
            gradient.addmm_(weights, vectors, beta=0 if is_first else 1)
        elif is_first:
            gradient.copy_(torch.mm(weights, vectors, out_dtype=gradient.dtype))
        else:
            gradient.add_(torch.mm(weights, vectors, out_dtype=gradient.dtype))

    def finish(self, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return this process's part of the gradient in image, text and scale: `factor` times the sums so far."""
        grad_scale = (self.gradients[0] * self.image).sum() * factor
        torch._foreach_mul_(self.gradients, self.scale * factor)
        return *self.gradients, grad_scale


def make_pairs(batch: Batch, scale: Tensor, bias: Tensor | None, low: bool, kernels: str) -> Pairs:
    """`Pairs` by those kernels that the option `kernels` chooses for the batch; other arguments as there."""
    fused = fused_kernels(batch, kernels, "clip" if bias is None else "siglip", low)
    return (fused.FusedPairs if fused else Pairs)(batch, scale, bias, low)


def clip_loss(
    batch: Batch, scale: Tensor, low: bool = False, kernels: str = "auto"
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """CLIP's loss of the global batch, 0-d, and this process's part of its gradient in image and text, (b, d), and in
    the scale, 0-d. In plain PyTorch: `equations.clip`."""
    pairs = make_pairs(batch, scale, None, low, kernels)
    peaks, totals, positives = pairs.sums()
    highest = torch.maximum(peaks, positives)
    below, positives_below = pairs.difference(peaks, highest), pairs.difference(positives, highest)
    losses = softplus(totals.log() + (below - positives_below), threshold=40)  # below, log(1 + exp) to the last digit
    totals *= below.exp()
    factors = (totals + positives_below.exp()).reciprocal()
    positive_weights = -(totals * factors).sum(0)
    all_highest, all_factors, all_losses = gather_values(highest, factors, losses)

    def largest() -> Tensor:  # of 1 minus the positive's probability
        return -torch.expm1(-all_losses.max())

    pairs.add_softmax(highest, factors, all_highest, all_factors, positive_weights, largest)
    return all_losses.mean(), pairs.finish(1 / (2 * pairs.size))


def unicl_loss(
    keys: Tensor, batch: Batch, scale: Tensor, low: bool = False, kernels: str = "auto"
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """CLIP's loss and gradients where an anchor has several positives, the samples with its key; `keys`: (b,).

    In plain PyTorch: `equations.unicl`.
    """
    value, (grad_image, grad_text, grad_scale) = clip_loss(batch, scale, low, kernels)
    batch.keys = all_gather(keys.to(scale.device, non_blocking=True))
    several = SeveralPositives(batch)
    several.add_gradients((grad_image, grad_text), (scale / 2).expand(2, batch.size))
    value = value + scale * several.gaps.mean()
    return value, (grad_image, grad_text, grad_scale + several.gaps[:, batch.local].sum() / (2 * batch.size))


def siglip_loss(
    batch: Batch, scale: Tensor, bias: Tensor, low: bool = False, kernels: str = "auto"
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """SigLIP's loss of the global batch, 0-d, and this process's part of its gradient in image and text, (b, d), in the
    scale and in the bias, 0-d each. In plain PyTorch: `equations.siglip`."""
    pairs = make_pairs(batch, scale, bias, low, kernels)
    value, all_weights = pairs.add_sigmoid()
    value = all_gather(value[None]).sum() / pairs.size
    return value, (*pairs.finish(1 / pairs.size), all_weights / pairs.size)
