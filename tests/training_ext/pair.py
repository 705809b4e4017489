"""Processes that train together, started once for all tests: they take longer to import than to train."""

import contextlib
import gc
import importlib
import io
import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from unittest.mock import patch

from ports import free_ports


@dataclass
class Ended:
    """What a command left: its exit code, or the exception's text, and what it wrote to stderr."""

    code: int | str
    stderr: str


def serve(rank: int, processes: int, pipe) -> None:
    import torch
    import torch.distributed as dist
    from conftest import run_main

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    multiprocessing.set_start_method("fork", force=True)  # of loaders' workers, as in a process started by torchrun
    # NCCL refuses two processes of one host on one GPU.
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(processes), NCCL_HOSTID=str(rank))
    while (job := pipe.recv()) is not None:
        module, arguments, folder, local_rank, port, patches = job
        os.environ.update(MASTER_PORT=str(port), LOCAL_RANK=str(local_rank))
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr), contextlib.ExitStack() as stack:
            for target, value in patches.items():
                stack.enter_context(patch(target, value))
            try:
                code = run_main(importlib.import_module(module).main, arguments, Path(folder))
            except BaseException as error:
                code = repr(error)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        # The group goes here: collected in a loader's forked worker, where its threads do not exist, it would crash.
        gc.collect()
        pipe.send(Ended(code, stderr.getvalue()))


class Pair:
    """pair(arguments, folder) -> what each of the two processes left; `arguments` one command line, or one for each.

    Args:
        number: of the processes, if not two.
        module: whose `main` it is.
        local_ranks: of the processes; all 0 on as many machines.
        patches: values by the name that they replace in all.
    """

    def __init__(self, number: int = 2):
        self.number = number
        self.pipes, self.processes = [], []

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.number):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            self.processes.append(context.Process(target=serve, args=(rank, self.number, theirs)))
            self.processes[-1].start()

    def __call__(
        self,
        arguments: str | list[str],
        folder: Path,
        module: str = "open_clip_ext.main",
        local_ranks: Sequence[int] | None = None,
        **patches: object,
    ) -> list[Ended]:
        if not self.processes:
            self.start()
        each = [arguments] * self.number if isinstance(arguments, str) else arguments
        port = free_ports()
        for pipe, own, local_rank in zip(self.pipes, each, local_ranks or range(self.number), strict=True):
            pipe.send((module, own, str(folder), local_rank, port, patches))
        ended: dict[Connection, Ended] = {}
        while len(ended) < self.number:
            # A process whose other has failed may wait for it: not for longer than this.
            ready = wait([pipe for pipe in self.pipes if pipe not in ended], timeout=120 if ended else 600)
            if not ready:
                self.close()
                raise AssertionError(f"a process hangs; of the others: {[*ended.values()]}")
            ended |= {pipe: pipe.recv() for pipe in ready}
        in_order = [ended[pipe] for pipe in self.pipes]
        if any(process.code not in (0, 130, 143) for process in in_order):
            self.close()  # threads of a group that has failed may abort later
        return in_order

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []
