"""`TaskSession`: the state of one run of OpenCLIP 4.x's task loop."""

import math
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from open_clip.task import get_model_from_task, save_checkpoint, unwrap_model
from open_clip_train.train import TrainState

from training_ext.core.hosts.v4 import add_to_task
from training_ext.core.temperature import trains_logit_scale
from training_ext.data import checkpoint, checkpoint_files
from training_ext.data.rows import trains
from training_ext.data.tasks import LossTask
from training_ext.session import Session


class TaskSession(Session):
    """A `Session` whose model is in a task, and whose optimizer is in a TrainState."""

    _task: Any
    _state: TrainState

    # Model and optimizer

    def create_task(self, original: Callable, args: Namespace, model: torch.nn.Module, **kwargs: Any) -> Any:
        if self.args.uses_ext_loss:
            self._task = LossTask(model, kwargs.get("dist_model"), self.clamp)
        else:
            self._task = original(args, model=model, **kwargs)
            if self._adds_losses:
                add_to_task(self._task)
            clamp = self._task.clamp_logit_scale
            self._task.clamp_logit_scale = lambda *rest: clamp(*rest) if self.in_training else None
        return self._task

    def clamp(self, original: Callable) -> None:
        """Clamp a learned temperature at `--tau-min`, and leave any other alone."""
        if trains_logit_scale(self.args) and self.in_training:
            original(-math.log(self.args.tau_min))

    def create_task_optimizer(
        self, original: Callable, module: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> torch.optim.Optimizer:
        optimizer = original(module, *args, **kwargs)
        # By its name, since FSDP replaces the parameter that was created.
        self.complete_optimizer(optimizer, unwrap_model(module))
        return optimizer

    def model_rate(self, original: Callable, optimizer: torch.optim.Optimizer) -> float:
        """The learning rate to log: the largest except that of the temperature."""
        if self.temperature is None:
            return original(optimizer)
        return max(group["lr"] for group in optimizer.param_groups if group is not self.temperature.group)

    # Checkpoints

    def save_checkpoint(self, original: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
        saved = original(*args, **kwargs)
        self.saving.add_to(saved["optimizer"])
        return saved

    def content(
        self, epoch: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any
    ) -> dict[str, Any]:
        counters = {"global_step": self._state.global_step, "samples_seen": self._state.samples_seen}
        return self.save_checkpoint(
            save_checkpoint, self._task, optimizer, epoch, scaler=scaler, name=self.args.name, **counters
        )

    def save_sharded(
        self, original: Callable, task: Any, optimizer: torch.optim.Optimizer, folder: str, **kwargs: Any
    ) -> None:
        """Write our entry into the folder before OpenCLIP's file that makes it a complete checkpoint."""
        if self.saving.entry is not None:
            os.makedirs(folder, exist_ok=True)
            checkpoint.atomic_save(torch.save, self.saving.entry, os.path.join(folder, checkpoint.SHARDED))
        original(task, optimizer, folder, **kwargs)
        if self.args.rank == 0:
            checkpoint_files.remove_older(folder)

    def load_sharded(self, original: Callable, task: Any, folder: str, **kwargs: Any) -> int:
        entry = checkpoint.read_sharded_entry(folder)
        epoch = original(task, folder, **kwargs)
        if trains(self.args):
            self.saving.restore(entry, os.fspath(folder), epoch)
        return epoch

    # Training

    def train_state(
        self, original: Callable, state: TrainState, data: dict[str, Any], args: Namespace, tb_writer: Any = None
    ) -> None:
        """Run an epoch of a TrainState by `Session.train_one_epoch`, which takes model, loss and optimizer."""
        self._state = state
        if args.uses_ext_loss and self.loss is None:
            self._task.loss = self.create_loss(lambda args: None, args)

        def train_one_epoch(
            model: Any, data: dict[str, Any], loss: Any, epoch: int, optimizer: Any, scaler: Any, scheduler: Callable,
            dist_model: Any, args: Namespace, tb_writer: Any = None,
        ) -> None:
            # An epoch of the recovery of statistics gets its own counters, not the training's.
            own = state if epoch == state.epoch else replace(state, epoch=epoch, scheduler=scheduler, losses_ema={})
            original(own, data, args, tb_writer=tb_writer)

        self.train_one_epoch(
            train_one_epoch, state.task.trainable_module, data, self.loss, state.epoch, state.optimizer, state.scaler,
            state.scheduler, None, args, tb_writer=tb_writer,
        )

    def evaluated(self, model: torch.nn.Module) -> torch.nn.Module:
        return self._task

    @staticmethod
    def unwrapped(model: Any) -> torch.nn.Module:
        return get_model_from_task(model)
