"""One run: what the seams of `hooks` share, and what each puts in OpenCLIP's place."""

import copy
import logging
import math
import os
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import open_clip_train.main
import torch
import torch.distributed as dist
from open_clip_train.distributed import broadcast_object, is_master
from open_clip_train.train import evaluate
from torch.utils.data import IterableDataset

from open_clip_ext.distributed import plain_name
from open_clip_ext.losses import Loss, NonFiniteError
from open_clip_ext.options import flag_of
from training_ext import checkpoint
from training_ext.data import DataRows, RowLoader, RowTokenizer, WithRow, shapes_dataset, trains
from training_ext.loading import load_resumed
from training_ext.loss import TrainingLoss, build_loss
from training_ext.monitor import Monitor, known_metrics
from training_ext.optimizer import TemperatureGroup
from training_ext.params import starts_from_weights, trains_logit_scale
from training_ext.preflight import check_alike
from training_ext.seeding import AT_EPOCH, GlobalRandom, SeededEpochs, WorkerSeed, seed_all
from training_ext.shards import ShardRows
from training_ext.statistics_recovery import StatisticsRecovery, remove_unfinished
from training_ext.temperature_sheet import write_sheet
from training_ext.zero_shot import classify_scenes

RUN, TRAIN_DATA, VAL_DATA = "run", "train data", "validation data"


class Session:
    """Args:
    args: as `params.parse_args` gives them.
    rows: of the train data, on process 0; the others get them from it.
    """

    def __init__(self, args: Namespace, rows: DataRows | None = None):
        self.args = args
        self.rows = rows
        self.loader: RowLoader
        self.loss: TrainingLoss | None = None
        self.temperature: TemperatureGroup | None = None
        self._logit_scale: torch.nn.Parameter
        self._seeded_epochs: SeededEpochs | None = None
        self._building = TRAIN_DATA
        self._epoch = 0
        self._recovering = False
        self.metrics: list[dict[str, float]] = []  # of every evaluation, on process 0
        self._monitor: Monitor | None = None
        self._tokenizer: Any = None
        self._transforms: Any = None
        self._restored: dict[str, Any] | None = None
        self._entry_to_save: dict[str, Any] | None = None

    @property
    def train_rows(self) -> DataRows:
        """`rows`, once every process has them."""
        assert self.rows is not None
        return self.rows

    # Start-up of the processes and the model

    def init_distributed(self, original: Callable, args: Any) -> Any:
        device = original(args)
        if args.distributed and (args.uses_ext_loss or args.osr_epochs > 0):
            check_alike(args, self.rows)
        return device

    @staticmethod
    def cpu_ready(original: Any) -> type:
        class DistributedDataParallel(original):
            def __init__(self, module: torch.nn.Module, device_ids: list | None = None, **kwargs: Any):
                on_cpu = next(module.parameters()).device.type == "cpu"
                super().__init__(module, device_ids=None if on_cpu else device_ids, **kwargs)

        return DistributedDataParallel

    def create_model(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        model, *transforms = original(*args, **kwargs)
        self._logit_scale = model.logit_scale
        if self.args.tau_init is not None:
            with torch.no_grad():
                model.logit_scale.fill_(-math.log(self.args.tau_init))
        if not trains_logit_scale(self.args):
            model.logit_scale.requires_grad_(False)
        if getattr(model, "logit_bias", None) is not None:
            model.logit_bias.requires_grad_(False)
        return model, *transforms

    # Optimizer

    def create_optimizer(self, original: Callable, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = original(*args, **kwargs)
        if trains_logit_scale(self.args):
            self.temperature = TemperatureGroup(
                optimizer, self._logit_scale, self.args.lr_tau, self.args.lr_tau_scheduler, self.args.lr
            )
        optimizer.register_state_dict_post_hook(self._add_entry)
        return optimizer

    def assign_learning_rate(self, original: Callable, optimizer: torch.optim.Optimizer, new_lr: float) -> None:
        if self.temperature is None:
            original(optimizer, new_lr)
        else:
            self.temperature.assign(original, optimizer, new_lr)

    def clamped(self, original: Callable) -> Callable:
        """What OpenCLIP clamps after each step: of its own losses the model's temperature, of ours a copy; ours is
        clamped here where it is learned, at `--tau-min`."""

        def unwrap(model: torch.nn.Module) -> Any:
            unwrapped = original(model)
            if not self._recovering:
                if not self.args.uses_ext_loss:
                    return unwrapped
                if trains_logit_scale(self.args):
                    unwrapped.logit_scale.clamp_(0, -math.log(self.args.tau_min))
            return SimpleNamespace(logit_scale=unwrapped.logit_scale.detach().clone())

        return unwrap

    # Checkpoints

    def _add_entry(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if self._entry_to_save is not None:
            state[checkpoint.KEY] = self._entry_to_save

    def load_checkpoint(self, path: str, **kwargs: Any) -> Any:
        loaded = load_resumed(path, **kwargs)
        entry = checkpoint.take_entry(loaded)
        if trains(self.args) and isinstance(loaded, dict) and "epoch" in loaded:
            # Remote files are first seen here; local ones were checked before anything was written.
            checkpoint.check_entry(entry, path, self.args, self.rows)
            self._restored = None if entry is None else entry["state"]
        return loaded

    # Data

    def get_data(self, original: Callable, args: Any, *rest: Any, **kwargs: Any) -> dict[str, Any]:
        self._tokenizer = kwargs.get("tokenizer")
        self._transforms = rest[0]
        if args.loss is not None and args.distributed:
            self.rows = broadcast_object(args, self.rows)
        if args.uses_ext_loss and args.train_num_samples is None and self.rows is not None:
            if self.rows.shards is not None:
                args.train_num_samples = self.rows.shards.num_listed(args.train_data)
        return original(args, *rest, **kwargs)

    def dataset_builder(self, original: Callable, scoped: Callable, path: str, dataset_type: str) -> Callable:
        """In place of get_dataset_fn: its builder, run with the seams of the data set's scope."""
        build = original(path, "synthetic" if dataset_type == "shapes" else dataset_type)

        def build_scoped(
            args: Namespace, transform: Callable, is_train: bool, tokenizer: Any = None, **kwargs: Any
        ) -> Any:
            self._building = TRAIN_DATA if is_train else VAL_DATA
            if is_train and args.uses_ext_loss and self.train_rows.shards is not None:
                tokenizer = RowTokenizer(tokenizer)
            with scoped(self, self._building):
                info = build(args, transform, is_train, tokenizer=tokenizer, **kwargs)
            if not is_train or not args.uses_ext_loss:
                return info
            if self._seeded_epochs is not None:
                self._seeded_epochs.shared_epoch = info.shared_epoch
            has_rows = self.train_rows.kind != "webdataset" or self.train_rows.shards is not None
            self.loader = RowLoader(info.dataloader, args.accum_freq, has_rows, self._seed_epoch)
            return replace(info, dataloader=self.loader)

        return build_scoped

    def synthetic(self, original: Callable) -> Callable:
        is_train = self._building == TRAIN_DATA
        if self.args.dataset_type == "shapes":
            original = shapes_dataset(self.args, is_train)
        return self.rowed(original) if is_train and self.args.uses_ext_loss else original

    def rowed(self, original: Callable) -> Callable:
        return lambda *args, **kwargs: WithRow(original(*args, **kwargs))

    def shard_rows(self, original: Callable) -> Callable | None:
        shards = self.train_rows.shards
        return ShardRows(shards, original) if shards is not None else original

    def seeded_shuffle(self, original: Callable) -> Callable:
        return partial(original, rng=GlobalRandom())

    def seeded_loader(self, original: Callable) -> Callable:
        def build(dataset: IterableDataset, **kwargs: Any) -> Any:
            self._seeded_epochs = SeededEpochs(dataset, self.args.seed, self.args.rank)
            return original(self._seeded_epochs, **kwargs)

        return build

    def seeded_shards(self, original: Callable) -> Callable:
        return partial(original, worker_seed=WorkerSeed(self.args.seed, self.args.rank))

    # Training

    def _seed_epoch(self, use: int) -> None:
        seed_all(self.args.seed, use, self._epoch, self.args.rank)

    def create_loss(self, args: Any) -> TrainingLoss:
        for flag in ("local_loss", "gather_with_grad"):
            if getattr(args, flag):
                what = f"{flag_of(flag)} makes no difference to --loss {args.loss}"
                logging.info(f"{what}: its gradients are exact without it.")
        loss = build_loss(args, self.train_rows.num_rows, args.device)
        if self._restored is not None:
            loss.load_full_state(self._restored)
            self._restored = None
        if loss.description():
            logging.info(f"Loss {args.loss}: {loss.description()}")
        self.loss = TrainingLoss(loss, self.loader, args.device)
        return self.loss

    def train_one_epoch(
        self, original: Callable, model: torch.nn.Module, data: dict[str, Any], loss: Any, epoch: int,
        optimizer: torch.optim.Optimizer, scaler: Any, scheduler: Callable, dist_model: Any, args: Namespace,
        **kwargs: Any,
    ) -> Any:
        self._entry_to_save = None
        if self._monitor is None and args.loss is not None:

            def run_still(loader: Any, number: int) -> None:
                """OpenCLIP's epoch over another loader, in the log alone, without a schedule of learning rates."""
                self._epoch = number
                if self.loss is None:
                    seed_all(args.seed, AT_EPOCH, number, args.rank)
                other_data = {**data, "train": replace(data["train"], dataloader=loader)}
                no_schedule, unlogged = (lambda step: None), self._unlogged()
                original(model, other_data, loss, number, optimizer, scaler, no_schedule, dist_model, unlogged)

            self._begin(run_still, model, data, epoch, optimizer, scaler, **kwargs)
        if args.osr_epochs > 0 and epoch > 0 and checkpoint.saves_after(args, epoch):
            remove_unfinished(args)
        self._epoch = epoch
        if self.loss is not None:
            self.loss.loss.set_epoch(math.ceil(args.osr_epochs) + epoch)
        result = original(model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, **kwargs)
        if self.loss is None:
            return result
        self._raise_if_not_finite(self.loss.loss, model)
        if checkpoint.saves_after(args, epoch + 1):
            state = self.loss.loss.full_state()
            if args.rank == 0:
                self._entry_to_save = checkpoint.make_entry(args, self.train_rows, state)
                taus = state.get("temperature.tau")
                if epoch + 1 == args.epochs and isinstance(taus, torch.Tensor):
                    self._show_temperatures(taus)
        return result

    def _show_temperatures(self, taus: torch.Tensor) -> None:
        """The training is done: nothing that goes wrong with a picture may take its checkpoint."""
        try:
            folder = os.path.join(self.args.logs, self.args.name)
            path = write_sheet(folder, taus, self.args, self.rows, self._transforms)
            logging.info(f"The samples with the largest and smallest temperatures: {path}")
        except Exception as error:
            logging.warning(f"No sheet of temperatures: {error!r}")

    def finish(self) -> None:
        """The training has ended well, its last checkpoint is there."""
        if self.args.osr_epochs > 0 and trains(self.args):
            remove_unfinished(self.args)

    def _begin(
        self, run_still: Callable, model: torch.nn.Module, data: dict[str, Any], epoch: int,
        optimizer: torch.optim.Optimizer, scaler: Any, tb_writer: Any = None,
    ) -> None:
        """Before the first epoch of a run: what the model is worth, and the recovery of its optimizer's statistics.

        The first epoch of a resumed training is not epoch 0, and has had both.
        """
        args = self.args
        self._monitor = Monitor(args, epoch)
        from_weights = starts_from_weights(args) or bool(args.resume)
        evaluates = bool(known_metrics(args))
        if epoch > 0:
            if is_master(args) and starts_from_weights(args) and evaluates and not self._monitor.start:
                logging.warning("The starting point is not known here: nothing is compared with it")
            return
        if from_weights and evaluates:
            with _kept_random_state(args.device):
                open_clip_train.main.evaluate(model, data, 0, args, tb_writer=tb_writer, tokenizer=self._tokenizer)
            self._wait()
        elif from_weights and is_master(args):
            logging.warning("Nothing is evaluated: nobody will see whether the model becomes worse; give --val-data")
        if args.osr_epochs > 0:
            self._recover(run_still, model, data, optimizer, scaler)
            if evaluates and args.osr_transfer != "none" and args.osr_load is None:
                with _kept_random_state(args.device):
                    metrics = evaluate(model, data, 0, self._unlogged(), tokenizer=self._tokenizer)
                self._monitor.check_unchanged(metrics)
                self._wait()

    def _recover(
        self, run_still: Callable, model: torch.nn.Module, data: dict[str, Any], optimizer: torch.optim.Optimizer,
        scaler: Any,
    ) -> None:
        args = self.args
        if args.osr_transfer == "none":
            logging.info("No statistics are recovered (--osr-transfer none); schedules go on as after a recovery")
            return
        recovery = StatisticsRecovery(args, self.train_rows, self.loss, model, optimizer, scaler)
        if args.osr_load is not None:
            recovery.load(args.osr_load)
            logging.info(f"=> loaded the recovered statistics '{args.osr_load}'")
        else:
            if is_master(args):
                logging.info(f"Recovering optimizer statistics for {args.osr_epochs:g} epochs; the weights stand still")
            self._recovering = True
            try:
                with _kept_random_state(args.device):
                    recovery.recover(run_still, data["train"].dataloader)
            finally:
                self._recovering = False
        recovery.hand_over()

    def _unlogged(self) -> Any:
        """The arguments of an epoch or an evaluation that belongs in the log alone."""
        args = copy.copy(self.args)
        args.save_logs = args.wandb = False
        return args

    def _wait(self) -> None:
        """For process 0, which alone evaluates."""
        if self.args.distributed and not self.args.horovod:
            dist.barrier()

    def evaluate(
        self, original: Callable, model: torch.nn.Module, data: dict[str, Any], epoch: int, args: Namespace,
        **kwargs: Any,
    ) -> dict[str, Any]:
        metrics = original(model, data, epoch, args, **kwargs)
        if metrics:
            self.metrics.append({name: float(value) for name, value in metrics.items()})
        if self._monitor is not None and metrics:
            if epoch == 0:
                self._monitor.begin(metrics)
            self._monitor.after(metrics, epoch, model)
        return metrics

    def zero_shot_eval(
        self, original: Callable, model: Any, data: dict[str, Any], epoch: int, args: Namespace, tokenizer: Any = None
    ) -> dict[str, float]:
        metrics = original(model, data, epoch, args, tokenizer=tokenizer)
        at = args.val_frequency and (epoch % args.val_frequency == 0 or epoch == args.epochs)
        if args.dataset_type == "shapes" and "val" in data and at:
            model = model.module if args.distributed and not args.horovod else model
            metrics = metrics | classify_scenes(model, data["val"].dataloader, args, tokenizer)
        return metrics

    @staticmethod
    def _raise_if_not_finite(loss: Loss, model: torch.nn.Module) -> None:
        """Nothing of a broken epoch may be saved; what its last step broke is seen in the parameters only."""
        loss.raise_if_not_finite()
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                name = plain_name(name)
                raise NonFiniteError(f"step {loss.steps}: {name} is not finite; training cannot go on from here")


@contextmanager
def _kept_random_state(device: str) -> Iterator[None]:
    """An evaluation more does not change what the training draws."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if str(device).startswith("cuda") else []):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
