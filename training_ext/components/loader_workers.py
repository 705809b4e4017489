"""Keep loader workers alive after a signal that stops the run, since the step in progress still needs their batches."""

import os
import signal
from argparse import Namespace
from typing import Any

from torch.utils.data import DataLoader

from open_clip_ext.errors import STOPS
from training_ext.core.component import Component
from training_ext.data.seeding import shared_zeros


class LoaderWorkers(Component):
    """Has the workers of every loader of the run, in evaluations too, end with the run and not before.

    As a loader's `worker_init_fn` it has them ignore those signals, SIGTERM until the run has ended: a terminal signals
    the whole process group, and Slurm may do so. Workers end by themselves if their parent process is gone.
    """

    name = "loader_workers"

    def __init__(self, args: Namespace):
        super().__init__(args)
        self._has_ended = shared_zeros(args.workers)
        self._loaders: list[DataLoader] = []

    def wanted(self) -> bool:
        return self.args.uses_ext_loss  # with OpenCLIP's own losses a signal ends the run at once

    def data_built(self, data: dict[str, Any]) -> None:
        self.training.data.worker_init = self
        for info in data.values():
            self.workers_of(info.dataloader)

    def workers_of(self, loader: Any) -> None:
        """Let the workers of a loader of torch's or webdataset's, or in a `RowLoader`, outlive SIGTERM."""
        if isinstance(loader, DataLoader):
            loader.worker_init_fn = self
            self._loaders.append(loader)
        for inner in (getattr(loader, "loader", None), *getattr(loader, "pipeline", ())):
            if inner is not None:
                self.workers_of(inner)

    def __call__(self, worker: int) -> None:
        for number in STOPS:
            signal.signal(number, self._handle if number == signal.SIGTERM else signal.SIG_IGN)

    def _handle(self, *_: Any) -> None:
        if self._has_ended:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def end(self, completed: bool) -> None:
        """End the workers, and let SIGTERM end those that remain."""
        self._has_ended.fill_(1)
        for loader in self._loaders:
            # Left to the garbage collector, they are waited for in an order in which each takes 5 seconds.
            workers, loader._iterator = loader._iterator, None
            if workers is not None:
                workers._shutdown_workers()  # type: ignore[attr-defined]
