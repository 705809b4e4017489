"""End a run after a signal that announces preemption, or Ctrl-C: between two steps, the same on all processes."""

import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from open_clip_ext.distributed import rank, world_size
from open_clip_ext.errors import STOPS, InputError

SAME_KEY = 0.5  # seconds: launchers such as timeout(1) pass on a Ctrl-C that the run has had from the terminal, too


class StopRequest:
    """Records a signal of `STOPS` and agrees with the other processes on the step to stop after; all create one.

    The all-reduce is asynchronous: it starts after one step and is read after the next. It runs over gloo, so nothing
    waits for a GPU. A second Ctrl-C raises KeyboardInterrupt.

    Raises:
        InputError: gloo does not connect the processes.
    """

    def __init__(self) -> None:
        self.requested = 0  # number of the signal
        self._interrupted: float | None = None  # when, first
        self._group: Any = _gloo_group() if world_size() > 1 else None
        self._asked: tuple[Any, torch.Tensor] | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                # A shell's background jobs ignore Ctrl-C, and nohup's SIGHUP; None: it is faulthandler's.
                if number == signal.SIGTERM or signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._handlers[number] = signal.signal(number, self._request)

    def _request(self, number: int, *_: Any) -> None:
        self.requested = number
        if number != signal.SIGINT:
            return
        if self._interrupted is None:
            self._interrupted = time.monotonic()
            if rank() == 0:  # written at once: a log or a print may be what the signal interrupts
                os.write(2, b"open_clip_ext: stopping after this step or evaluation; Ctrl-C again ends at once\n")
        elif time.monotonic() - self._interrupted > SAME_KEY:
            raise KeyboardInterrupt

    def agreed(self, at_once: bool = False) -> int:
        """The number of the signal after which to stop now, or 0; every process calls it after each step.

        Args:
            at_once: wait for this step's all-reduce, for example at the end of an epoch, before a long pause.
        """
        if self._group is None:
            return self.requested
        anyone = torch.tensor(self.requested)
        asked = dist.all_reduce(anyone, dist.ReduceOp.MAX, group=self._group, async_op=True), anyone
        earlier, self._asked = self._asked, asked
        if (question := asked if at_once else earlier) is None:
            return 0
        question[0].wait()
        return int(question[1])

    def close(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._handlers.items():
            if handler is not None:
                signal.signal(number, handler)


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
            f"{given!r} does not connect the processes over gloo, which they use to agree on a stop; set it to the "
            f"network interface between the machines, such as eth0: {reason}", "GLOO_SOCKET_IFNAME"
        ) from error
