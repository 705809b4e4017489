"""State per sample: one row for each of the data set's n samples, sharded over the processes.

Parts with such state derive from `RowState`, which stores it in `ShardedRows`. In a checkpoint a column is a
tensor (n, 2), whatever the world size; within `rows_in_files` every process writes its own rows beside it.

Shapes: B = samples of the global batch, W = world size, n = rows, c = values of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from open_clip_ext import row_files
from open_clip_ext.batch import Batch
from open_clip_ext.distributed import LocalTensors, gather_rows, rank, wait_for_others, world_size
from open_clip_ext.options import Part, option


class RowState(Part, nn.Module):
    """Base of the parts with state per sample: `columns` and `new_rows` are all that a subclass declares.

    Each column has two values per sample, for its image and its text. Sharding, device and checkpoints need nothing in
    the subclass. docs/extending.md shows a complete one.

    Args:
        num_samples: n, at least 1.
        device: where the rows are kept, unless `rows_on` says otherwise.
        options: see the class's body.
    """

    needs_index = True
    rows_on: str = option(
        "device", "where rows per sample are kept: beside the model, or in host memory", choices=("device", "host")
    )

    @property
    def columns(self) -> Mapping[str, float]:
        """Name in the checkpoint and value before the first visit of each column; may depend on options."""
        raise NotImplementedError

    def new_rows(self, old: dict[str, Tensor], estimate: Tensor) -> dict[str, Tensor]:
        """The columns after a step, (B, 2) each.

        Args:
            old: the columns of the batch's samples before the step, (B, 2) each; on a sample's first visit they have
                the value that `columns` gives.
            estimate: the batch's estimate for its samples, (B, 2); equal for samples of the same row.
        """
        raise NotImplementedError

    def __init__(self, num_samples: int, device: torch.device | str = "cpu", **options: Any):
        super().__init__(**options)
        self.num_samples = num_samples
        fill = [value for value in self.columns.values() for _ in range(2)]
        self.rows = ShardedRows(num_samples, len(fill), fill, device, on_host=self.rows_on == "host")

    def lookup(self, batch: Batch) -> Tensor:
        """All columns of the global batch's samples, side by side, (B, c)."""
        assert batch.index is not None
        return self.rows.lookup(batch.index)

    def write(self, batch: Batch, old: Tensor, estimate: Tensor) -> Tensor:
        """Write the batch's `new_rows`, unless something of the batch is not finite, and return all columns, (B, c).

        Args:
            old: the result of `lookup`.
            estimate: (B, 2).
        """
        assert batch.index is not None
        new = self.new_rows(dict(zip(self.columns, old.split(2, dim=1), strict=True)), estimate)
        columns = [new[name] for name in self.columns]
        both = torch.where(batch.finite, torch.cat(columns, dim=1) if len(columns) > 1 else columns[0], old)
        self.rows.assign(batch.index, both)
        return both

    @property
    def _table(self) -> str:
        """Key of all columns together in a state whose rows are in files."""
        return "rows" if len(self.columns) > 1 else next(iter(self.columns))

    def full_state(self) -> dict[str, Any]:
        table = self.rows.gather()
        if isinstance(table, Tensor):
            tables = {name: part.contiguous() for name, part in zip(self.columns, table.split(2, dim=1), strict=True)}
        else:
            tables = {} if table is None else {self._table: table}
        return {**super().full_state(), **tables}

    def check_state(self, state: dict[str, Any], dimension: int = 0) -> None:
        super().check_state(state, dimension)
        if self._table not in state and (missing := [name for name in self.columns if name not in state]):
            raise ValueError(f"state: no {missing[0]!r} per sample, which {self.name!r} keeps")
        self.rows.check(self._table_of(state))

    def load_full_state(self, state: dict[str, Any]) -> None:
        super().load_full_state(state)
        self.rows.load(self._table_of(state))

    def _table_of(self, state: dict[str, Any]) -> Any:
        return state[self._table] if self._table in state else torch.cat([state[name] for name in self.columns], dim=1)


def bytes_per_row(module: nn.Module) -> dict[str, int]:
    """Bytes that a loss keeps per sample, on one of the processes, by name of its part."""
    tables = {name: part for name, part in module.named_modules() if isinstance(part, ShardedRows)}
    return {name: table.rows[0].nbytes for name, table in tables.items()}


class ShardedRows(LocalTensors):
    """A table of n rows of c float32 values, sharded: process r keeps the rows r, r + W, r + 2W, ...

    A table that is made before torch.distributed starts has every row; its first use afterwards drops the other
    processes'.

    Args:
        num_rows: n, at least 1.
        columns: c.
        fill: value of a row that was never written, or one for each column.
        device: where the rows are kept; a lookup returns its values on the device of the index.
        on_host: keep the rows in host memory whatever `device` and `Module.to` say; each lookup then waits for a copy.
    """

    local_tensors = ("rows",)
    DTYPE = torch.float32  # of the rows; tests set float64, where rounding cannot hide an error

    def __init__(
        self,
        num_rows: int,
        columns: int,
        fill: float | Sequence[float],
        device: torch.device | str = "cpu",
        on_host: bool = False,
    ):
        super().__init__()
        self._on_host = on_host
        self.num_rows = num_rows
        self._processes = world_size()  # W when the rows were divided
        # Writes to rows of other processes go to an extra last row, so that shapes stay static.
        local_rows = len(range(rank(), num_rows, world_size())) + 1
        self.rows = torch.empty(local_rows, columns, dtype=self.DTYPE, device="cpu" if on_host else device)
        self.rows.copy_(torch.tensor(fill, dtype=self.DTYPE))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ShardedRows":
        """Move the rows as `Module.to` does, but keep their type."""

        def move(rows: Tensor) -> Tensor:
            moved = fn(rows)
            return moved if moved.dtype == rows.dtype else rows.to(moved.device)

        return self if self._on_host else super()._apply(move, recurse)

    def _divide(self) -> None:
        """Divide the rows if torch.distributed has started since they were made.

        Raises:
            RuntimeError: they were divided among another number of processes.
        """
        now = world_size()
        if self._processes == now:
            return
        if self._processes > 1:
            raise RuntimeError(
                f"the loss's rows are divided among {self._processes} processes, but now there are {now}; make a new "
                "loss and load the state into it"
            )
        with torch.inference_mode(False):  # whose tensors could never be trained
            self.rows = torch.cat([self.rows[:-1][rank() :: now], self.rows[-1:]])
        self._processes = now

    def _locate(self, index: Tensor) -> tuple[Tensor | None, Tensor]:
        """Which rows are this process's, None for all; their places among its own, on the rows' device."""
        self._divide()
        owned = None
        if world_size() > 1:
            owned = index % world_size() == rank()
            index = torch.where(owned, index // world_size(), self.rows.shape[0] - 1)
        return owned, index.to(self.rows.device)

    def lookup(self, index: Tensor) -> Tensor:
        """Values (B, c) of the rows `index` (B,), which must be the same on every process; one all-reduce."""
        owned, places = self._locate(index)
        values = self.rows[places].to(index.device)
        if owned is not None:
            values.masked_fill_(~owned[:, None], 0.0)
            dist.all_reduce(values)
        return values

    def assign(self, index: Tensor, values: Tensor) -> None:
        """Write `values` (B, c) to the rows `index` (B,); a row that occurs twice must have the same values twice."""
        _, places = self._locate(index)
        self.rows[places] = values.to(self.rows)

    def gather(self) -> Any:
        """The whole table (n, c) on the CPU of process 0, None elsewhere. Every process must call it.

        Within `rows_in_files` every process writes its rows, and a small dictionary stands for the table.
        """
        self._divide()
        if (files := row_files.current()) is None:
            return gather_rows(self.rows[:-1], self.num_rows, row_files.CHUNK_ROWS)
        wait_for_others()
        return files.write(self.rows[:-1], self.num_rows)

    def check(self, table: Any) -> None:
        """Raise ValueError unless `load` can load the table, InputError if a file of it is missing or damaged."""
        if isinstance(table, Tensor):
            shape = tuple(table.shape)
        elif (files := row_files.current()) is not None:
            shape = files.check(table)
        else:
            raise ValueError("table: its rows are in files; load it within rows_in_files(folder)")
        if shape != (needed := (self.num_rows, self.rows.shape[1])):
            raise ValueError(f"table: shape {shape} where {needed} is needed")

    def load(self, table: Any) -> None:
        """Load this process's rows from the result of `gather` on process 0, saved under any world size.

        Raises:
            ValueError: the table has another shape, or is in files and this is not within `rows_in_files`.
        """
        self._divide()
        self.check(table)
        if isinstance(table, Tensor):
            self.rows[:-1] = table[rank() :: world_size()].to(self.rows)
        elif (files := row_files.current()) is not None:
            files.read(table, self.rows[:-1], self.num_rows)
