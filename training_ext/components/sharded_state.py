"""Save and resume the loss's state where OpenCLIP 4 writes a checkpoint as a folder of FSDP's shards."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from training_ext.core.component import Component
from training_ext.core.files import atomic_save
from training_ext.core.hosts import release
from training_ext.core.older import of_today
from training_ext.core.plan import trains
from training_ext.core.seam import Seam
from training_ext.data import checkpoint, checkpoint_files

SEAMS = (
    Seam(
        "open_clip_train.main", "save_sharded_checkpoint",
        why="our state is saved in the folder of the shards",
        contract="main calls save_sharded_checkpoint(task, optimizer, folder, ...) on every process; the folder is a "
        "checkpoint once its file .metadata is there",
        replacement=lambda original, component: partial(component.save, original),
    ),
    Seam(
        "open_clip_train.main", "load_sharded_checkpoint",
        why="our state is loaded from the folder of the shards",
        contract="main loads a folder of --resume by load_sharded_checkpoint(task, folder, ...), which returns the "
        "epochs that are done, before it creates the data",
        replacement=lambda original, component: partial(component.load, original),
    ),
)


class ShardedState(Component):
    name = "sharded_state"
    may_be_off = False
    seams = SEAMS if release() >= (4, 0) else ()

    def wanted(self) -> bool:
        return self.args.uses_ext_loss and bool(getattr(self.args, "fsdp", False))

    def save(
        self, original: Callable, task: Any, optimizer: torch.optim.Optimizer, folder: str, **kwargs: Any
    ) -> None:
        """Write our entry into the folder before OpenCLIP's file that makes it a complete checkpoint."""
        if self.plan.is_first and (entry := self.training.state.entry) is not None:
            os.makedirs(folder, exist_ok=True)
            atomic_save(torch.save, entry, os.path.join(folder, checkpoint.SHARDED))
        original(task, optimizer, folder, **kwargs)
        if self.plan.is_first:
            checkpoint_files.replace_older(folder)

    def load(self, original: Callable, task: Any, folder: str, **kwargs: Any) -> int:
        entry = checkpoint.read_sharded_entry(folder)
        entry = None if entry is None else of_today(entry)
        epoch = original(task, folder, **kwargs)
        if trains(self.args):
            self.training.state.check_entry(os.fspath(folder), entry)
            self.training.state.restore(entry, os.fspath(folder), epoch)
        return epoch
