"""End a run after SIGTERM, which announces preemption: between two steps, the same on all processes."""

import multiprocessing
import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from open_clip_ext.distributed import world_size
from open_clip_ext.errors import InputError


class StopRequest:
    """Records a SIGTERM and agrees with the other processes on the step to stop after; every process creates one.

    The all-reduce is asynchronous: it starts after one step and is read after the next. It runs over gloo, so nothing
    waits for a GPU.

    Raises:
        InputError: gloo does not connect the processes.
    """

    def __init__(self) -> None:
        self.requested = False
        self._group: Any = _gloo_group() if world_size() > 1 else None
        self._asked: tuple[dist.Work, torch.Tensor] | None = None
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, self._request)

    def _request(self, *_: Any) -> None:
        self.requested = True

    def agreed(self, at_once: bool = False) -> bool:
        """Whether to stop after this step; every process calls it after each step.

        Args:
            at_once: wait for this step's all-reduce, for example at the end of an epoch, before a long pause.
        """
        if self._group is None:
            return self.requested
        earlier, self._asked = self._asked, self._ask()
        question = self._asked if at_once else earlier
        if question is None:
            return False
        work, anyone = question
        work.wait()
        return bool(anyone)

    def _ask(self) -> tuple[dist.Work, torch.Tensor]:
        anyone = torch.tensor(int(self.requested))
        work = dist.all_reduce(anyone, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        return work, anyone

    def close(self) -> None:
        """Restore the previous handler of SIGTERM."""
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)


def _gloo_group() -> Any:
    """A group over gloo, which chooses a network interface of its own, not NCCL's.

    Raises:
        InputError: the processes cannot reach each other through it.
    """
    try:
        return dist.new_group(backend="gloo")
    except RuntimeError as error:
        given = os.environ.get("GLOO_SOCKET_IFNAME", "")
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{given!r} does not connect the processes over gloo, which they use to agree on SIGTERM; set it to the "
            f"network interface between the machines, such as eth0: {reason}", "GLOO_SOCKET_IFNAME"
        ) from error


class Outlive:
    """A loader's `worker_init_fn`: its workers ignore SIGTERM until the run has ended.

    Slurm may signal the whole process group, and the step in progress still needs its batches. Workers end by
    themselves if their parent process is gone.
    """

    def __init__(self) -> None:
        self._running = multiprocessing.Value("b", 1, lock=False)
        self._loaders: list[DataLoader] = []

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, self._handle)

    def workers_of(self, loader: Any) -> None:
        """Let the workers of a loader of torch's or webdataset's, or in a `RowLoader`, outlive SIGTERM."""
        if isinstance(loader, DataLoader):
            loader.worker_init_fn = self
            self._loaders.append(loader)
        for inner in (getattr(loader, "loader", None), *getattr(loader, "pipeline", ())):
            if inner is not None:
                self.workers_of(inner)

    def _handle(self, *_: Any) -> None:
        if not self._running.value:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """End the workers, and let SIGTERM end those that remain."""
        self._running.value = 0
        for loader in self._loaders:
            # Left to the garbage collector, they are waited for in an order in which each takes 5 seconds.
            workers, loader._iterator = loader._iterator, None
            if workers is not None:
                workers._shutdown_workers()  # type: ignore[attr-defined]
