"""Helpers over torch.distributed: gathering without gradient, and tables whose rows are sharded over processes.

Shapes: b = samples of this process, W = world size, B = b * W, n = rows, c = columns.
With one process nothing here communicates.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from open_clip_ext.options import option

if TYPE_CHECKING:
    from open_clip_ext.row_files import RowFiles

SOON, AT_LAST = timedelta(seconds=10), timedelta(minutes=5)  # after which `wait_for_others` warns, and gives up

# torch 2.14 has new names, and warns of the old ones.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of DistributedDataParallel and torch.compile."""
    return name.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("_orig_mod.")


def all_gather(tensor: Tensor) -> Tensor:
    """Concatenate (b, ...) of every process along the first axis to (B, ...), in the order of ranks, detached."""
    tensor = tensor.detach().contiguous()
    if world_size() == 1:
        return tensor
    gathered = tensor.new_empty((world_size() * tensor.shape[0], *tensor.shape[1:]))
    getattr(dist, GATHER)(gathered, tensor)
    return gathered


def transportable(tensor: Tensor) -> Tensor:
    """`tensor` on a device that the process group can send from: NCCL, for example, sends nothing from host memory."""
    devices = [pair.split(":")[0] for pair in dist.get_backend_config().split(",")]
    return tensor if tensor.device.type in devices else tensor.to(devices[0])


def wait_for_others() -> None:
    """Make process 0 wait until every other process is ready to gather state, too.

    The others report in the process group's store. Otherwise one process's state could be matched with another's next
    training step, which fails without a useful message or hangs for half an hour.

    Raises:
        RuntimeError: a process has not come within 5 minutes.
    """
    if world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    # The count of gatherings is in the store, not in this process, which may have been in other groups before.
    key = f"open_clip_ext/gathering {store.add(f'open_clip_ext/gatherings/{rank()}', 1)}/"
    if rank() > 0:
        store.set(f"{key}{rank()}", "here")
        return
    keys = [f"{key}{other}" for other in range(1, world_size())]
    for seconds in (SOON, AT_LAST):
        try:
            store.wait(keys, seconds)
            return
        except RuntimeError:  # a FileStore's is not a DistStoreError
            missing = ", ".join(other.removeprefix(key) for other in keys if not store.check([other]))
            if not missing:
                raise
            message = (
                f"the loss's state_dict() or full_state(): process 0 waits for process {missing}; every process must "
                "call it, also where process 0 alone writes the file"
            )
            if seconds == SOON:
                logging.warning(message)
    raise RuntimeError(message)


def log_sum_over_processes(own: Tensor) -> Tensor:
    """log-sum-exp of (2, B) over processes, in the order of ranks, so that all get the same bits."""
    return all_gather(own[None]).logsumexp(dim=0)


def copy_from_first(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Overwrite those of `tensors` that are on `device` by process 0's, against drift between processes whose hardware
    rounds differently."""
    if world_size() > 1:
        for tensor in tensors:
            if tensor.device == device:
                dist.broadcast(tensor, 0)


ROWS_ON = option(
    "device", "where rows per sample are kept: beside the model, or in host memory", choices=("device", "host")
)


class ShardedRows(nn.Module):
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

    rows: Tensor
    files: ClassVar["RowFiles | None"] = None  # within `rows_in_files`
    CHUNK = 1 << 22  # rows a process sends or writes at once when the table is saved: 32 MiB for two columns
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
        self.columns = columns
        self._processes = world_size()  # W when the rows were divided
        # Writes to rows of other processes go to an extra last row, so that shapes stay static.
        local_rows = self._rows_of(rank()) + 1
        self._fill = torch.tensor(fill, dtype=self.DTYPE).expand(columns)
        rows = torch.empty(local_rows, columns, dtype=self.DTYPE, device="cpu" if on_host else device)
        rows.copy_(self._fill)
        self.register_buffer("rows", rows, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ShardedRows":
        """Move the rows as `Module.to` does, but keep their type."""

        def move(rows: Tensor) -> Tensor:
            moved = fn(rows)
            return moved if moved.dtype == rows.dtype else rows.to(moved.device)

        return self if self._on_host else super()._apply(move, recurse)

    def _rows_of(self, owner: int) -> int:
        return len(range(owner, self.num_rows, world_size()))

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

    def _locate(self, index: Tensor) -> tuple[Tensor, Tensor]:
        self._divide()
        owned = index % world_size() == rank()
        local = torch.where(owned, index // world_size(), self.rows.shape[0] - 1)
        return owned, local

    def lookup(self, index: Tensor) -> Tensor:
        """Values (B, c) of the rows `index` (B,), which must be the same on every process; one all-reduce."""
        owned, local = self._locate(index)
        found = self.rows[local.to(self.rows.device)].to(index.device)
        values = torch.where(owned[:, None], found, 0.0)
        if world_size() > 1:
            dist.all_reduce(values)
        return values

    def assign(self, index: Tensor, values: Tensor) -> None:
        """Write `values` (B, c) to the rows `index` (B,); a row that occurs twice must have the same values twice."""
        _, local = self._locate(index)
        self.rows[local.to(self.rows.device)] = values.to(self.rows)

    def gather(self) -> Any:
        """The whole table (n, c) on the CPU of process 0, None elsewhere. Every process must call it.

        Within `rows_in_files` every process writes its rows, and a small dictionary stands for the table.
        """
        self._divide()
        wait_for_others()
        if self.files is not None:
            return self.files.write(self.rows[:-1], self.num_rows)
        table = torch.empty(self.num_rows, self.columns, dtype=self.rows.dtype) if rank() == 0 else None
        for owner in range(world_size()):
            for start in range(0, self._rows_of(owner), self.CHUNK):
                stop = min(start + self.CHUNK, self._rows_of(owner))
                if owner == 0:
                    chunk = self.rows[start:stop] if rank() == 0 else None
                elif rank() == owner:
                    dist.send(transportable(self.rows[start:stop].contiguous()), dst=0)
                    chunk = None
                elif rank() == 0:
                    chunk = transportable(self.rows.new_empty(stop - start, self.columns))
                    dist.recv(chunk, src=owner)
                if table is not None and chunk is not None:
                    table[owner :: world_size()][start:stop] = chunk.cpu()
        return table

    def check(self, table: Any) -> None:
        """Raise ValueError unless `load` can load the table, InputError if a file of it is missing or damaged."""
        if not isinstance(table, Tensor):
            if self.files is None:
                raise ValueError("table: its rows are in files; load it within rows_in_files(folder)")
            shape: tuple[int, ...] = self.files.check(table)
        else:
            shape = tuple(table.shape)
        if shape != (self.num_rows, self.columns):
            raise ValueError(f"table: shape {shape} where {(self.num_rows, self.columns)} is needed")

    def load(self, table: Any) -> None:
        """Load this process's rows from the result of `gather` on process 0, saved under any world size.

        Raises:
            ValueError: the table has another shape, or is in files and this is not within `rows_in_files`.
        """
        self._divide()
        self.check(table)
        if not isinstance(table, Tensor):
            assert self.files is not None
            self.files.read(table, self.rows[:-1], self.num_rows)
            return
        self.rows[:-1] = table[rank() :: world_size()].to(self.rows)


class EqualRows:
    """Groups equal entries of `index` (B,), with static shapes and without a host sync, unlike torch.unique.

    Attributes:
        group: number of each entry's group, in [0, B), (B,).
        count: how often each entry occurs, (B,) float32.
    """

    def __init__(self, index: Tensor):
        ordered, order = index.sort()
        is_new = torch.ones_like(ordered)
        is_new[1:] = (ordered[1:] != ordered[:-1]).long()
        self.group = torch.empty_like(index)
        self.group[order] = is_new.cumsum(0) - 1
        self.count = self._sum(torch.ones(len(index), device=index.device))

    def _sum(self, values: Tensor) -> Tensor:
        # index_put_ adds in a fixed order on CUDA, index_add_ does not.
        return torch.zeros_like(values).index_put_((self.group,), values, accumulate=True)[self.group]

    def mean(self, values: Tensor) -> Tensor:
        """Replace each of `values` (B, c) by the mean over its group."""
        return self._sum(values) / self.count[:, None].to(values)

    def log_mean_exp(self, values: Tensor) -> Tensor:
        """Replace each of `values` (B, c) by the log of the mean of exp over its group."""
        groups = self.group[:, None].expand_as(values)
        peak = torch.full_like(values, -math.inf).scatter_reduce_(0, groups, values, "amax")[self.group]
        return peak + self.mean((values - peak).exp()).log()
