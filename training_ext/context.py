"""`Run`: one training as its command line describes it: processes, sizes, folder, and when it saves and evaluates."""

import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from training_ext.core.component import Component
from training_ext.data.rows import trains
from training_ext.openclip.hosts import host, shards_model
from training_ext.openclip.machine import global_batch


@dataclass(frozen=True)
class Run:
    """One run of the command; OpenCLIP's main completes `params.parse_args`' `args` before the model is built."""

    args: Namespace
    components: Sequence[Component] = ()

    def exported(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights as plain OpenCLIP loads them, without what components have added."""
        for component in self.components:
            weights = component.export(weights)
        return weights

    @property
    def trains(self) -> bool:
        return trains(self.args)

    @property
    def keeps_files(self) -> bool:
        """Whether the run may write anything."""
        return bool(self.args.logs) and self.args.logs.lower() != "none"

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which logs and writes."""
        return self.args.rank == 0

    @property
    def folder(self) -> str | None:
        """The run's folder, once it has a name; None without files."""
        args = self.args
        return os.path.join(args.logs, args.name) if self.keeps_files and args.name is not None else None

    def file(self, name: str) -> str | None:
        """Path of a file in the run's folder on the process that writes it, else None."""
        return os.path.join(self.args.logs, self.args.name, name) if self.args.save_logs else None

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step, over all processes."""
        return global_batch(self.args)

    @property
    def shards_model(self) -> bool:
        """Whether FSDP shards the model, so that every process takes part in a checkpoint."""
        return shards_model(self.args)

    def steps(self, batches: int) -> int:
        """Optimizer steps of this many batches of a process; OpenCLIP leaves out the batches of an incomplete one."""
        return batches // self.args.accum_freq

    def saves_after(self, epochs: int) -> bool:
        """Whether OpenCLIP writes a checkpoint once this many epochs are done."""
        return self.keeps_files and (self._numbers_after(epochs) or self.args.save_most_recent)

    def checkpoint_after(self, epochs: int) -> str:
        """Path of that checkpoint."""
        name = f"epoch_{epochs}.pt" if self._numbers_after(epochs) else host().main_module.LATEST_CHECKPOINT_NAME
        return os.path.join(self.args.checkpoint_path, name)

    def _numbers_after(self, epochs: int) -> bool:
        """Whether the checkpoint's name has the epoch."""
        every = self.args.save_frequency
        return epochs == self.args.epochs or (every > 0 and epochs % every == 0)
