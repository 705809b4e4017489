"""The passes of `similarities` and `chunked` on a GPU: each tile's product and pass are one kernel of `tile_kernels`.

Factors have 16 bits: those of bfloat16 where that is asked for, else float16's, which has TF32's digits; embeddings are
multiplied by 2^8 and weights by a power of two so that none is too small for it. Sums are float32. The weights of
`TILE` are in memory, 128 MiB, and the products with them are cuBLAS's.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import normalize

from open_clip_ext.batch import Batch
from open_clip_ext.kernels import tile_kernels
from open_clip_ext.kernels.chunked import Pairs
from open_clip_ext.kernels.similarities import Block, SimilarityBlocks
from open_clip_ext.kernels.streaming import tiles
from open_clip_ext.surrogates import Identity, Surrogate

TILE = 8192, 8192  # rows and columns whose weights are in memory at a time; few enough for the kernels' positions
# Rows, columns and depth of a program's tile, its warps, and the stages of its loads.
SIZES = dict.fromkeys(("sums", "weights", "sigmoids"), (128, 128, 64, 4, 3))
JOIN = 64, 32  # parts and anchors of a program of `join`
FACTOR = 2.0**8  # of embeddings, whose elements are at most 1
UNIT, LOG2_E = tile_kernels.UNIT.value, tile_kernels.LOG2_E.value
# Largest deviation from the single operations in `deviation`: they round each factor to TF32 or bfloat16, by at most
# 2^-10 or 2^-9, and sums of many such errors are far smaller.
BOUND = 2**-9


class Launch:
    """A kernel on a block's slices of rows (m, d) and columns (n, d).

    Args:
        offset: of the column that is row 0's own pair.

    Attributes:
        counts: numbers of tiles of rows and of columns, by which the kernel writes its parts.
    """

    def __init__(self, kernel: Any, rows: Tensor, columns: Tensor, offset: int):
        self.kernel, self.rows, self.columns, self.offset = kernel, rows, columns, offset
        self.height, self.width, self.depth, self.warps, self.stages = SIZES[kernel.__name__]
        self.counts = triton.cdiv(len(rows), self.height), triton.cdiv(len(columns), self.width)

    def parts(self, dim: int, sums: int = 2) -> Tensor:
        """Memory for the parts of so many sums along `dim`, (sums, tiles, anchors)."""
        anchors = self.columns if dim == 0 else self.rows
        return torch.empty(sums, self.counts[dim], len(anchors), device=anchors.device)

    def view(self, memory: Tensor) -> Tensor:
        """The first m * n elements of `memory`, (m, n)."""
        return memory[: len(self.rows) * len(self.columns)].view(len(self.rows), -1)

    def __call__(self, **arguments: Any) -> None:
        rows, columns = self.rows, self.columns
        assert all(one.is_contiguous() for one in arguments.values() if isinstance(one, Tensor))
        with torch.cuda.device_of(rows):
            self.kernel[(self.counts[0] * self.counts[1],)](
                rows, columns, rows.stride(0), columns.stride(0), len(rows), len(columns), self.offset, **arguments,
                D=rows.shape[1], BM=self.height, BN=self.width, BK=self.depth,
                num_warps=self.warps, num_stages=self.stages,
            )  # fmt: skip


class Sums:
    """What `sums` finds of anchors, (2, b): the highest exponent and the other sums, in its order."""

    def __init__(self, count: int, like: Tensor):
        self.values = like.new_zeros(count, 2, like.shape[-1])
        self.values[0] = tile_kernels.LEAST.value

    def add(self, parts: Tensor, side: int, anchors: slice) -> None:
        """Merge the parts (sums, tiles, anchors) of the `anchors` of a side."""
        count, tile_count, number = parts.shape
        values = [self.values[at, side, anchors] if at < count else None for at in range(3)]
        with torch.cuda.device_of(parts):
            tile_kernels.join[(triton.cdiv(number, JOIN[1]),)](
                parts, *values, tile_count, number,
                ROUNDS=triton.cdiv(tile_count, JOIN[0]), BT=JOIN[0], BM=JOIN[1],
            )  # fmt: skip


def half(factor: Tensor, low: bool = False) -> Tensor:
    """`FACTOR` times the embeddings, in 16 bits."""
    if low and not factor.is_cuda:  # Triton's interpreter has no bfloat16
        return (factor * FACTOR).bfloat16().to(factor.dtype)
    rounded = torch.empty(factor.shape, dtype=torch.bfloat16 if low else torch.float16, device=factor.device)
    return torch.mul(factor, FACTOR, out=rounded)


def add_product(
    gradient: Tensor, weights: Tensor, vectors: Tensor, unit: Tensor, factor: float, is_first: bool
) -> None:
    """Add unit * factor * weights @ vectors; factors of 16 bits, sums of float32. `gradient` is empty if `is_first`."""
    if is_first:
        gradient.zero_()
    if gradient.is_cuda:
        product = torch.mm(weights, vectors, out_dtype=gradient.dtype)
    else:
        product = weights.to(gradient.dtype) @ vectors.to(gradient.dtype)
    gradient.addcmul_(product, unit, value=factor / FACTOR)


def log2_factor_of(log2_largest: Tensor) -> Tensor:
    """The exponent of the power of two by which weights are multiplied, so that the largest sum of two is at most 2^14
    of float16's 2^16: a bound may itself be half of one."""
    return 13 - log2_largest.clamp(min=-100).ceil()


def slices_of(batch: Batch) -> tuple[list[slice], list[slice]]:
    """Slices of this process's pairs and of all, by two of which a tile's weights are in memory."""
    return tiles(len(batch.image), [slice(0, batch.size)], batch.image.device, TILE)


class FusedBlocks(SimilarityBlocks):
    """`SimilarityBlocks` by kernels, for l(x) = x. The sums over an anchor's weights follow from those of the first
    pass."""

    def __init__(self, batch: Batch, surrogate: Surrogate, intra_modal: bool = False):
        super().__init__(batch, surrogate, intra_modal)
        self.slices = slices_of(batch)
        for block in self.blocks:
            block.rows, block.columns = half(block.rows), half(block.columns)
        self.inverse = (batch.all_tau / (LOG2_E * UNIT)).reciprocal().contiguous()
        self.positives = batch.all_positives / UNIT

    def _launches(self, kernel: Any) -> Iterator[tuple[Block, slice, slice, Launch, dict[str, Any]]]:
        """Yield blocks and their slices with the kernel, and the anchors' constants as its arguments."""
        batch = self.batch
        positives, inverse = self.positives[batch.local], self.inverse[:, batch.local]
        keys = None if batch.keys is None else batch.keys[batch.local]
        for block in self.blocks:
            for row in self.slices[0]:
                for column in self.slices[1]:
                    offset = batch.offset + row.start - column.start
                    launch = Launch(kernel, block.rows[row], block.columns[column], offset)
                    yield block, row, column, launch, dict(
                        row_positives=positives[row], column_positives=self.positives[column],
                        row_inverse=inverse[block.row_side, row],
                        column_inverse=self.inverse[block.column_side, column],
                        row_keys=None if keys is None else keys[row],
                        column_keys=None if batch.keys is None else batch.keys[column],
                    )  # fmt: skip

    @cached_property
    def _sums(self) -> Tensor:
        """What `sums` finds of this process's anchors, (3, 2, b)."""
        sums = Sums(3, self.batch.positives)
        for block, row, column, launch, constants in self._launches(tile_kernels.sums):
            row_parts, column_parts = launch.parts(1, 3), launch.parts(0, 3) if block.both_directions else None
            launch(**constants, row_parts=row_parts, column_parts=column_parts, own=None, MOMENTS=True)
            sums.add(row_parts, block.row_side, row)
            if column_parts is not None:
                sums.add(column_parts, block.column_side, column)
        return sums.values

    @cached_property
    def _log2_sums(self) -> Tensor:
        return self._sums[1].log2().add_(self._sums[0])

    def _log_sums(self) -> Tensor:
        return self._log2_sums / LOG2_E

    def _weights(
        self, all_shift: Tensor, sums: Tensor
    ) -> Iterator[tuple[Block, slice, slice, Tensor]]:
        batch = self.batch
        peaks, totals, moments = self._sums
        all_shift = torch.mul(all_shift, LOG2_E, out=torch.empty(all_shift.shape, device=all_shift.device))
        shift = all_shift[:, batch.local]
        at_peak = (peaks + shift).exp2_()
        torch.mul(at_peak, totals, out=sums[:, 0])
        torch.mul(at_peak, torch.addcmul(moments, peaks, totals).div_(LOG2_E), out=sums[:, 1])
        log2_sums = self._log2_sums
        if len(batch.image) < batch.size:  # those of all processes' anchors are at most
            log2_sums = LOG2_E * (batch.all_log_batch + self.log_negatives)
        log2_factor = log2_factor_of((log2_sums + all_shift).amax())
        self.weight_unit = (-log2_factor).exp2_()
        memory = self.blocks[0].rows.new_empty(math.prod(slices[0].stop for slices in self.slices))
        for block, row, column, launch, constants in self._launches(tile_kernels.weights):
            launch(
                **constants, row_shift=shift[block.row_side, row], column_shift=all_shift[block.column_side, column],
                row_factors=None, column_factors=None, own=None, log2_factor=log2_factor, out=launch.view(memory),
            )  # fmt: skip
            yield block, row, column, launch.view(memory)

    def _add_product(self, feature: Tensor, weights: Tensor, vectors: Tensor, is_first: bool) -> None:
        add_product(feature, weights, vectors, self.weight_unit, 1 / self.batch.size, is_first)


class FusedPairs(Pairs):
    """`Pairs` by kernels."""

    unit = 1 / LOG2_E

    def __init__(self, batch: Batch, scale: Tensor, bias: Tensor | None = None, low: bool = False):
        super().__init__(batch, scale, bias, low)
        self.slices = slices_of(batch)

    def _rounded(self, factor: Tensor) -> Tensor:
        return half(factor, self.low)

    def _launches(self, kernel: Any) -> Iterator[tuple[int, slice, slice, Launch]]:
        for side, (rows, columns) in enumerate(self.blocks):
            for row in self.slices[0]:
                for column in self.slices[1]:
                    offset = self.offset + row.start - column.start
                    yield side, row, column, Launch(kernel, rows[row], columns[column], offset)

    @cached_property
    def _anchors(self) -> tuple[Tensor, Tensor]:
        """What logits, which are no gaps, have in place of the positives' similarities and 1 / tau, (B,)."""
        return self.image.new_zeros(self.size), (self.scale * (LOG2_E * UNIT)).expand(self.size).contiguous()

    def _constants(self, row: slice, column: slice) -> dict[str, Any]:
        zeros, inverse = self._anchors
        return dict(
            row_positives=zeros[row], column_positives=zeros[column], row_inverse=inverse[row],
            column_inverse=inverse[column], row_keys=None, column_keys=None,
        )  # fmt: skip

    @cached_property
    def _memory(self) -> Tensor:
        return self.blocks[0][0].new_empty(math.prod(slices[0].stop for slices in self.slices))

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        positives = self.image.new_empty(len(self.image))
        sums = Sums(2, positives)
        for side, row, column, launch in self._launches(tile_kernels.sums):
            row_parts, column_parts = launch.parts(1), launch.parts(0) if len(self.blocks) == 1 else None
            launch(
                **self._constants(row, column), row_parts=row_parts, column_parts=column_parts, own=positives[row],
                MOMENTS=False,
            )  # fmt: skip
            sums.add(row_parts, side, row)
            if column_parts is not None:
                sums.add(column_parts, 1, column)
        return sums.values[0], sums.values[1], positives

    def difference(self, logits: Tensor, others: Tensor) -> Tensor:
        return (logits - others).mul_(self.unit)

    def add_softmax(
        self, highest: Tensor, factors: Tensor, all_highest: Tensor, all_factors: Tensor, positive_weights: Tensor,
        largest: Callable[[], Tensor],
    ) -> None:
        shift, all_shift = (-one.contiguous() for one in (highest, all_highest))
        factors, all_factors = factors.contiguous(), all_factors.contiguous()
        log2_factor = log2_factor_of(largest().log2())
        self.weight_unit = (-log2_factor).exp2_()
        for side, row, column, launch in self._launches(tile_kernels.weights):
            launch(
                **self._constants(row, column), row_shift=shift[side, row], column_shift=all_shift[1 - side, column],
                row_factors=factors[side, row], column_factors=all_factors[1 - side, column],
                own=positive_weights[row], log2_factor=log2_factor, out=launch.view(self._memory),
            )  # fmt: skip
            self._add(side, row, column, launch.view(self._memory))

    def add_sigmoid(self) -> tuple[Tensor, Tensor]:
        sums = self.image.new_zeros(2)
        self.weight_unit = torch.full_like(self.scale, 1 / tile_kernels.SIGMOID_FACTOR.value)
        for side, row, column, launch in self._launches(tile_kernels.sigmoids):
            row_parts = launch.parts(1) if side == 0 else None  # the other block has the same pairs, on another process
            launch(scale=self.scale, bias=self.bias, out=launch.view(self._memory), row_parts=row_parts)
            if row_parts is not None:
                sums += row_parts.sum((1, 2))
            self._add(side, row, column, launch.view(self._memory))
        return sums[0] / LOG2_E, sums[1]

    def _add_product(self, gradient: Tensor, weights: Tensor, vectors: Tensor, is_first: bool) -> None:
        add_product(gradient, weights, vectors, self.weight_unit, 1.0, is_first)


@cache
def sample(dim: int, device: torch.device, is_alone: bool, has_keys: bool) -> Batch:
    """A batch of random pairs, on which every part of a kernel's tile matters; `is_alone`: as with one process."""
    # Tiles, and parts of tiles; a multiple of 16 as in most batches, so that these need no other compilation.
    pairs, generator = 304, torch.Generator().manual_seed(0)
    image, text = normalize(torch.randn(2, pairs, dim, generator=generator, device="cpu"), dim=2).to(device)
    tau = (0.5 + 0.5 * torch.rand(2, pairs, generator=generator, device="cpu")).to(device)
    local = slice(0, pairs) if is_alone else slice(100, 250)
    batch = Batch._of(image[local], text[local], image, text, tau, local.start, None)
    batch.all_log_batch = 2 / tau  # at least l / tau
    if has_keys:
        batch.keys = torch.arange(pairs, device=device) // 3
    return batch


def results_of_blocks(kind: type[SimilarityBlocks], batch: Batch) -> list[Tensor]:
    blocks = kind(batch, Identity())
    features, zeros = (torch.zeros_like(batch.image), torch.zeros_like(batch.text)), torch.zeros_like(batch.all_tau)
    return [blocks.log_batch_normalizers(), *blocks.add_gradients(features, zeros), *features]


def results_of_pairs(kind: type[Pairs], batch: Batch, is_sigmoid: bool, low: bool) -> list[Tensor]:
    scale = torch.full((), 2.0, device=batch.image.device)
    pairs = kind(batch, scale, -scale if is_sigmoid else None, low)
    zero = torch.zeros_like(scale)
    if is_sigmoid:
        return [*pairs.add_sigmoid(), *pairs.gradients]
    peaks, totals, positives = pairs.sums()
    highest, factors = torch.zeros_like(batch.all_tau), batch.all_tau
    local = highest[:, batch.local], factors[:, batch.local]
    positives = pairs.difference(positives, zero)
    pairs.add_softmax(*local, highest, factors, positives, lambda: 16 * factors.amax())
    return [pairs.difference(peaks, zero) + totals.log(), positives, *pairs.gradients]


@torch.no_grad()
def deviation(batch: Batch, name: str, low: bool) -> float:
    """Largest relative deviation of the kernels' results in a pass, of `choice.LEAST_PAIRS`, from those of the single
    operations, on `sample`."""
    image = batch.image
    random = sample(image.shape[1], image.device, len(image) == batch.size, batch.keys is not None)
    if name == "global":
        actual, expected = (results_of_blocks(one, random) for one in (FusedBlocks, SimilarityBlocks))
    else:
        actual, expected = (results_of_pairs(one, random, name == "siglip", low) for one in (FusedPairs, Pairs))
    errors = [(one - other).norm() / other.norm() for one, other in zip(actual, expected, strict=True)]
    return torch.stack(errors).max().item()
