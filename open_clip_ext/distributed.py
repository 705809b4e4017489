"""Helpers over torch.distributed, which communicate nothing where there is one process.

Shapes: b = samples of this process, W = world size, B = b * W.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

SOON, AT_LAST = timedelta(seconds=10), timedelta(minutes=5)  # after which `_wait` warns, and gives up

# torch 2.14 has new names, and warns of the old ones.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class LocalTensors(nn.Module):
    """Base of modules with tensors that may differ between processes.

    They are not buffers: DistributedDataParallel overwrites those with process 0's wherever it wraps the loss, too.

    Class attributes:
        local_tensors: names of the attributes, each a tensor or None, which `Module.to` then moves.
    """

    local_tensors: ClassVar[tuple[str, ...]]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for name in self.local_tensors:
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, fn(tensor))
        return self


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of DistributedDataParallel and torch.compile."""
    return name.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("_orig_mod.")


def all_gather(tensor: Tensor) -> Tensor:
    """Concatenate (b, ...) of every process along the first axis to (B, ...), in the order of ranks, detached."""
    if world_size() == 1:
        return tensor.detach()
    tensor = tensor.detach().contiguous()
    gathered = tensor.new_empty((world_size() * tensor.shape[0], *tensor.shape[1:]))
    getattr(dist, GATHER)(gathered, tensor)
    return gathered


def gather_values(*values: Tensor) -> tuple[Tensor, ...]:
    """Concatenate each of `values` (c, b) of every process along the second axis to (c, B), as `all_gather`."""
    if world_size() == 1:
        return tuple(value.detach() for value in values)
    gathered = all_gather(torch.cat([value.T for value in values], dim=1)).T
    return gathered.split([len(value) for value in values])


def all_gather_object(value: Any) -> list[Any]:
    """Values of all processes, in the order of ranks."""
    if world_size() == 1:
        return [value]
    every: list[Any] = [None] * world_size()
    dist.all_gather_object(every, value)
    return every


def object_of_first(value: Any) -> Any:
    """Process 0's value, on every process."""
    shared = [value]
    if world_size() > 1:
        dist.broadcast_object_list(shared)
    return shared[0]


def transportable(tensor: Tensor) -> Tensor:
    """`tensor` on a device that the process group can send from: NCCL, for example, sends nothing from host memory."""
    devices = [pair.split(":")[0] for pair in dist.get_backend_config().split(",")]
    return tensor if tensor.device.type in devices else tensor.to(devices[0])


def wait_for_others() -> None:
    """Make process 0 wait until every other process is ready to gather state, too.

    The others report in the process group's store. Otherwise one process's state could be matched with another's next
    training step, which fails without a useful message or hangs for half an hour.

    Raises:
        RuntimeError: a process has not called it within 5 minutes.
    """
    if world_size() == 1:
        return
    key = _report("gathering", "here")
    if rank() == 0:
        _wait(
            "gathering", key, "the loss's state_dict() or full_state(): process 0 waits for process {}; every process "
            "must call it, also where process 0 alone writes the file"
        )  # fmt: skip


def values_where_changed(name: str, value: int, message: str) -> list[int]:
    """Values of all processes, in the order of ranks, exchanged when a value has changed.

    Each process calls it only where its own value has changed, so that nothing is sent otherwise. It waits for the
    others, and warns after 10 seconds.

    Args:
        name: of the value.
        message: of the warning and the error, with {} for the numbers of the processes that have not called it.

    Raises:
        RuntimeError: with the message; a process has not called it within 5 minutes.
    """
    key = _report(name, str(value))
    _wait(name, key, message)
    return [int(_store().get(f"{key}{process}")) for process in range(world_size())]


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _report(name: str, value: str) -> str:
    """Set this process's value in the store, and return the key before a process's number."""
    # The count of reports is in the store, not in this process, which may have been in other groups before.
    key = f"open_clip_ext/{name} {_count(name, 1)}/"
    _store().set(f"{key}{rank()}", value)
    return key


def _count(name: str, more: int) -> int:
    """Add to the number of this process's reports, and return it."""
    return _store().add(f"open_clip_ext/{name}/{rank()}", more)


def _wait(name: str, key: str, message: str) -> None:
    """Wait until every process has reported; warn of those that have not.

    Raises:
        RuntimeError: one has not at last. Then this report is withdrawn, so that the next is counted as the others' is.
    """
    store, keys = _store(), [f"{key}{process}" for process in range(world_size())]
    for seconds in (SOON, AT_LAST):
        try:
            store.wait(keys, seconds)
            return
        except RuntimeError:  # a FileStore's is not a DistStoreError
            missing = ", ".join(other.removeprefix(key) for other in keys if not store.check([other]))
            if not missing:
                raise
            if seconds == SOON:
                logging.warning(message.format(missing))
    _count(name, -1)
    store.delete_key(f"{key}{rank()}")
    raise RuntimeError(message.format(missing))


def gather_rows(local_rows: Tensor, num_rows: int, chunk_rows: int) -> Tensor | None:
    """Assemble a table (num_rows, ...) on the CPU of process 0 from each process's rows r, r + W, r + 2W, ...

    Every process must call it; all but process 0 get None. Process 0 receives at most max(chunk_rows, W) rows at a
    time. This uses `gather`, since for send and receive NCCL would make a communicator for each pair of processes.
    """
    if (world := world_size()) == 1:
        return local_rows.to("cpu", copy=True)
    wait_for_others()
    shape = num_rows, *local_rows.shape[1:]
    table = torch.empty(shape, dtype=local_rows.dtype, device="cpu") if rank() == 0 else None
    most, step = -(-num_rows // world), -(-chunk_rows // world)
    for start in range(0, most, step):
        rows = slice(start, min(start + step, most))
        piece = local_rows.new_zeros(rows.stop - rows.start, *local_rows.shape[1:])
        piece[: len(local_rows[rows])] = local_rows[rows]  # the last process may have one row less
        piece = transportable(piece)
        received = None if table is None else [torch.empty_like(piece) for _ in range(world)]
        dist.gather(piece, received)
        if table is not None and received is not None:
            for owner, part in enumerate(received):
                target = table[owner::world][rows]
                target.copy_(part[: len(target)])
    return table


def log_sum_over_processes(log_sums: Tensor) -> Tensor:
    """log-sum-exp of (2, B) over processes, in the order of ranks, so that all get the same bits."""
    return all_gather(log_sums[None]).logsumexp(dim=0)


def on_first(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Copy `tensors` to the CPU of process 0, for a checkpoint; other processes, whose values may be None, get none."""
    if rank() > 0:
        return {}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items() if tensor is not None}
