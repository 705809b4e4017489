"""SIGTERM, the warning that a machine will be taken away: the run ends between two steps, on all processes the same."""

import multiprocessing
import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from open_clip_ext.distributed import world_size


class StopRequest:
    """Remembers a SIGTERM; made by every process at the same time.

    The processes ask each other without waiting: what was asked after one step is answered after the next. The question
    goes over the hosts' network, so that nothing waits for a GPU.
    """

    def __init__(self) -> None:
        self.requested = False
        self._group: Any = dist.new_group(backend="gloo") if world_size() > 1 else None
        self._asked: tuple[dist.Work, torch.Tensor] | None = None
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, self._request)

    def _request(self, *_: Any) -> None:
        self.requested = True

    def agreed(self, at_once: bool = False) -> bool:
        """Whether to stop after this step; called by all processes after each.

        Args:
            at_once: wait for the answer to this step's question, where a long time passes before the next step.
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
        """SIGTERM does again what it did before."""
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)


class Outlive:
    """`worker_init_fn` of loaders: while the run goes on, SIGTERM does not end their workers.

    It comes to the whole process group where Slurm sends it, and the step in progress needs its batches. A worker whose
    process is gone ends by itself.
    """

    def __init__(self) -> None:
        self._running = multiprocessing.Value("b", 1, lock=False)

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, *_: Any) -> None:
        if not self._running.value:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """The run has ended."""
        self._running.value = 0
