"""The passes of `similarities` and `chunked` on a GPU: each tile's product and pass are one kernel of `tile_kernels`.

The weights of a tile of `TILE` pairs are in memory, 256 MiB in float32, and the products with them are cuBLAS's.
"""

import math
from collections.abc import Iterator
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
from open_clip_ext.surrogates import PowerHinge, Surrogate, is_linear

TILE = 8192, 8192  # rows and columns whose weights are in memory at a time; few enough for the kernels' offsets
# By kernel and bytes of a factor: rows, columns and depth of a program's tile, its warps, and the stages of its loads.
SIZES = {
    ("sums", 4): (128, 128, 32, 8, 3), ("sums", 2): (128, 128, 64, 8, 3),
    ("weights", 4): (128, 128, 32, 8, 3), ("weights", 2): (128, 128, 64, 8, 3),
    ("sigmoids", 4): (128, 128, 32, 8, 3), ("sigmoids", 2): (128, 128, 64, 8, 3),
}  # fmt: skip
JOIN = 64, 32  # parts and anchors of a program of `join`


# Largest deviation from the single operations in `deviation`: either product rounds each factor to TF32, by at most
# 2^-10, or each weight to bfloat16, by 2^-9, and sums of many such errors are far smaller.
BOUND = 2**-9


class Launch:
    """A kernel on a block's slices of rows (m, d) and columns (n, d).

    Args:
        offset: of the column that is row 0's own pair.

    Attributes:
        counts: numbers of tiles of rows and of columns, by which the kernel writes its parts.
    """

    def __init__(self, kernel: Any, rows: Tensor, columns: Tensor, offset: int):
        self.kernel, self.offset = kernel, offset
        self.rows, self.columns = (side if side.stride(1) == 1 else side.contiguous() for side in (rows, columns))
        self.height, self.width, self.depth, self.warps, self.stages = SIZES[kernel.__name__, rows.element_size()]
        self.counts = triton.cdiv(len(rows), self.height), triton.cdiv(len(columns), self.width)

    def parts(self, dim: int) -> Tensor:
        """Memory for the parts of sums along `dim`, (2, tiles, anchors)."""
        anchors = self.columns if dim == 0 else self.rows
        return torch.empty(2, self.counts[dim], len(anchors), device=anchors.device)

    def view(self, memory: Tensor) -> Tensor:
        """The first m * n elements of `memory`, (m, n)."""
        return memory[: len(self.rows) * len(self.columns)].view(len(self.rows), -1)

    def __call__(self, is_exact: bool = False, **arguments: Any) -> None:
        """Run it; `is_exact`: round each product, where a sum with an unrounded one would not be 0 that is meant to."""
        rows, columns = self.rows, self.columns
        assert all(one.is_contiguous() for one in arguments.values() if isinstance(one, Tensor))
        with torch.cuda.device_of(rows):
            self.kernel[(self.counts[0] * self.counts[1],)](
                rows, columns, rows.stride(0), columns.stride(0), len(rows), len(columns), self.offset, **arguments,
                D=rows.shape[1], BM=self.height, BN=self.width, BK=self.depth,
                num_warps=self.warps, num_stages=self.stages, enable_fp_fusion=not is_exact,
            )  # fmt: skip


def join(parts: Tensor, peaks: Tensor, totals: Tensor) -> None:
    """Merge the parts of `sums`, (2, tiles, anchors), into peaks and totals, (anchors,)."""
    _, count, anchors = parts.shape
    with torch.cuda.device_of(parts):
        grid = (triton.cdiv(anchors, JOIN[1]),)
        tile_kernels.join[grid](parts, peaks, totals, count, anchors, BT=JOIN[0], BM=JOIN[1])


def slices_of(batch: Batch) -> tuple[list[slice], list[slice]]:
    """Slices of this process's pairs and of all, by two of which a tile's weights are in memory."""
    return tiles(len(batch.image), [slice(0, batch.size)], batch.image.device, TILE)


def powers(surrogate: Surrogate) -> dict[str, Any] | None:
    """The surrogate as arguments of the kernels, or None if they do not have it."""
    if is_linear(surrogate):
        return {"margin": None, "POWER": 1}
    if type(surrogate) is PowerHinge and surrogate.margin_power in (1, 2):
        return {"margin": float(surrogate.margin), "POWER": int(surrogate.margin_power)}
    return None


class FusedBlocks(SimilarityBlocks):
    """`SimilarityBlocks` by kernels."""

    def __init__(self, batch: Batch, surrogate: Surrogate, intra_modal: bool = False):
        super().__init__(batch, surrogate, intra_modal)
        self.slices = slices_of(batch)
        self.inverse = batch.all_tau.reciprocal().contiguous()

    def _launches(self, kernel: Any) -> Iterator[tuple[Block, slice, slice, Launch, dict[str, Any]]]:
        """Yield blocks and their slices with the kernel, and the anchors' constants as its arguments."""
        batch, more = self.batch, powers(self.surrogate)
        assert more is not None
        local = self.inverse[:, batch.local]
        keys = None if batch.keys is None else batch.keys[batch.local]
        for block in self.blocks:
            for row in self.slices[0]:
                for column in self.slices[1]:
                    offset = batch.offset + row.start - column.start
                    yield block, row, column, Launch(kernel, block.rows[row], block.columns[column], offset), dict(
                        row_positives=batch.positives[row], column_positives=batch.all_positives[column],
                        row_inverse=local[block.row_side, row], column_inverse=self.inverse[block.column_side, column],
                        row_keys=None if keys is None else keys[row],
                        column_keys=None if batch.keys is None else batch.keys[column], **more,
                    )  # fmt: skip

    def _log_sums(self) -> Tensor:
        totals = torch.zeros_like(self.batch.tau, memory_format=torch.contiguous_format)
        peaks = torch.full_like(totals, torch.finfo(totals.dtype).min)
        for block, row, column, launch, constants in self._launches(tile_kernels.sums):
            row_parts, column_parts = launch.parts(1), launch.parts(0) if block.both_directions else None
            launch(**constants, row_parts=row_parts, column_parts=column_parts, own=None)
            join(row_parts, peaks[block.row_side, row], totals[block.row_side, row])
            if column_parts is not None:
                join(column_parts, peaks[block.column_side, column], totals[block.column_side, column])
        return totals.log_().add_(peaks)

    def _weights(
        self, shift: Tensor, all_shift: Tensor, sums: Tensor
    ) -> Iterator[tuple[Block, slice, slice, Tensor]]:
        shift, all_shift = shift.contiguous(), all_shift.contiguous()
        memory = sums.new_empty(math.prod(slices[0].stop for slices in self.slices))
        for block, row, column, launch, constants in self._launches(tile_kernels.weights):
            row_parts, column_parts = launch.parts(1), launch.parts(0) if block.both_directions else None
            launch(
                **constants, row_shift=shift[block.row_side, row], column_shift=all_shift[block.column_side, column],
                row_factors=None, column_factors=None, own=None, out=launch.view(memory),
                row_parts=row_parts, column_parts=column_parts,
            )  # fmt: skip
            sums[block.row_side, :, row] += row_parts.sum(1)
            if column_parts is not None:
                sums[block.column_side, :, column] += column_parts.sum(1)
            yield block, row, column, launch.view(memory)


class FusedPairs(Pairs):
    """`Pairs` by kernels."""

    def __init__(self, batch: Batch, scale: Tensor, bias: Tensor | None = None, low: bool = False):
        super().__init__(batch, scale, bias, low)
        self.slices = slices_of(batch)

    def _launches(self, kernel: Any) -> Iterator[tuple[int, slice, slice, Launch]]:
        for side, (rows, columns) in enumerate(self.blocks):
            for row in self.slices[0]:
                for column in self.slices[1]:
                    offset = self.offset + row.start - column.start
                    yield side, row, column, Launch(kernel, rows[row], columns[column], offset)

    @cached_property
    def _anchors(self) -> tuple[Tensor, Tensor]:
        """What logits, which are no gaps, have in place of the positives' similarities and 1 / tau, (B,)."""
        return self.image.new_zeros(self.size), self.scale.expand(self.size).contiguous()

    def _constants(self, row: slice, column: slice) -> dict[str, Any]:
        zeros, inverse = self._anchors
        return dict(
            row_positives=zeros[row], column_positives=zeros[column], row_inverse=inverse[row],
            column_inverse=inverse[column], row_keys=None, column_keys=None, margin=None, POWER=1,
        )  # fmt: skip

    @cached_property
    def _memory(self) -> Tensor:
        return self.blocks[0][0].new_empty(math.prod(slices[0].stop for slices in self.slices))

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        totals = self.image.new_zeros(2, len(self.image))
        peaks, positives = torch.full_like(totals, torch.finfo(totals.dtype).min), torch.empty_like(totals[0])
        for side, row, column, launch in self._launches(tile_kernels.sums):
            row_parts, column_parts = launch.parts(1), launch.parts(0) if len(self.blocks) == 1 else None
            launch(**self._constants(row, column), row_parts=row_parts, column_parts=column_parts, own=positives[row])
            join(row_parts, peaks[side, row], totals[side, row])
            if column_parts is not None:
                join(column_parts, peaks[1, column], totals[1, column])
        return peaks, totals, positives

    def add_softmax(
        self, highest: Tensor, factors: Tensor, all_highest: Tensor, all_factors: Tensor, positive_weights: Tensor
    ) -> None:
        shift, all_shift = (-one.contiguous() for one in (highest, all_highest))
        factors, all_factors = factors.contiguous(), all_factors.contiguous()
        for side, row, column, launch in self._launches(tile_kernels.weights):
            launch(
                is_exact=True, **self._constants(row, column), row_shift=shift[side, row],
                column_shift=all_shift[1 - side, column], row_factors=factors[side, row],
                column_factors=all_factors[1 - side, column], own=positive_weights[row], out=launch.view(self._memory),
                row_parts=None, column_parts=None,
            )  # fmt: skip
            self._add(side, row, column, launch.view(self._memory))

    def add_sigmoid(self) -> tuple[Tensor, Tensor]:
        assert self.bias is not None
        sums = self.image.new_zeros(2)
        for side, row, column, launch in self._launches(tile_kernels.sigmoids):
            row_parts = launch.parts(1) if side == 0 else None  # the other block has the same pairs, on another process
            launch(scale=self.scale, bias=self.bias, out=launch.view(self._memory), row_parts=row_parts)
            if row_parts is not None:
                sums += row_parts.sum((1, 2))
            self._add(side, row, column, launch.view(self._memory))
        return sums[0], sums[1]


@cache
def sample(dim: int, device: torch.device, is_alone: bool, has_keys: bool) -> Batch:
    """A batch of random pairs, on which every part of a kernel's tile matters; `is_alone`: as with one process."""
    pairs, generator = 300, torch.Generator().manual_seed(0)  # tiles, and parts of tiles
    image, text = normalize(torch.randn(2, pairs, dim, generator=generator), dim=2).to(device)
    tau = (0.5 + 0.5 * torch.rand(2, pairs, generator=generator)).to(device)
    local = slice(0, pairs) if is_alone else slice(100, 250)
    batch = Batch._of(image[local], text[local], image, text, tau, local.start, None)
    if has_keys:
        batch.keys = torch.arange(pairs, device=device) // 3
    return batch


def results_of_blocks(kind: type[SimilarityBlocks], batch: Batch, surrogate: Surrogate) -> list[Tensor]:
    blocks = kind(batch, surrogate)
    features, zeros = (torch.zeros_like(batch.image), torch.zeros_like(batch.text)), torch.zeros_like(batch.all_tau)
    return [blocks.log_batch_normalizers(), *blocks.add_gradients(features, zeros[:, batch.local], zeros), *features]


def results_of_pairs(kind: type[Pairs], batch: Batch, is_sigmoid: bool, low: bool) -> list[Tensor]:
    scale = torch.full((), 2.0, device=batch.image.device)
    pairs = kind(batch, scale, -scale if is_sigmoid else None, low)
    if is_sigmoid:
        return [*pairs.add_sigmoid(), *pairs.gradients]
    peaks, totals, positives = pairs.sums()
    highest, factors = torch.zeros_like(batch.all_tau), batch.all_tau
    local = highest[:, batch.local], factors[:, batch.local]
    pairs.add_softmax(*local, highest, factors, positives)
    return [peaks + totals.log(), positives, *pairs.gradients]


_deviations: dict[tuple[Any, ...], float] = {}  # by what a kernel is compiled for


@torch.no_grad()
def deviation(batch: Batch, name: str, low: bool, surrogate: Surrogate | None) -> float:
    """Largest relative deviation of a kernel's results from those of the single operations, on `sample`."""
    image = batch.image
    of_batch = image.shape[1], image.device, len(image) == batch.size, batch.keys is not None
    kind = name, low, *of_batch, None if surrogate is None else (type(surrogate), *vars(surrogate).values())
    if kind not in _deviations:
        random = sample(*of_batch)
        if surrogate is None:
            actual, expected = (results_of_pairs(one, random, name == "siglip", low) for one in (FusedPairs, Pairs))
        else:
            actual, expected = (results_of_blocks(one, random, surrogate) for one in (FusedBlocks, SimilarityBlocks))
        errors = [(one - other).norm() / other.norm() for one, other in zip(actual, expected, strict=True)]
        _deviations[kind] = torch.stack(errors).max().item()
    return _deviations[kind]
