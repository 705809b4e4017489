"""One run: what the seams of `hooks` share, and what each puts in OpenCLIP's place."""

import copy
import logging
import math
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from open_clip_train.data import SharedEpoch
from open_clip_train.distributed import broadcast_object, is_master
from torch.utils.data import IterableDataset

from open_clip_ext.distributed import plain_name
from open_clip_ext.losses import NonFiniteError
from open_clip_ext.metrics_file import RECOVERY, TRAIN
from open_clip_ext.options import flag_of
from training_ext import checkpoint, midepoch, recipes
from training_ext.advice import advise
from training_ext.data import DataRows, LateSampler, RowLoader, RowTokenizer, WithRow, shapes_dataset, trains
from training_ext.evaluation import during_training
from training_ext.hosts import host
from training_ext.keep_best import Monitor, known_metrics
from training_ext.keys import find_keys
from training_ext.loading import decode_pairs, load_resumed
from training_ext.loss import TrainingLoss, build_loss
from training_ext.midepoch import Interruptions
from training_ext.optimizer import TemperatureGroup
from training_ext.osr.recovery import FIRST_EPOCH, StatisticsRecovery, remove_unfinished
from training_ext.params import starts_from_weights, trains_logit_scale
from training_ext.preflight import check_alike
from training_ext.rehearsal import train_temperature
from training_ext.run_log import Epoch, RunLog
from training_ext.seeding import AT_EPOCH, SampleStream, SeededEpochs, WorkerSeed, kept_random_state, seed_all
from training_ext.shards import ShardRows
from training_ext.skips import Complete, Decode, Skips, UsableLines, report_epoch
from training_ext.stopping import Outlive
from training_ext.summary import summary
from training_ext.temperature_sheet import write_sheet
from training_ext.zero_shot import classify_scenes

RUN, TRAIN_DATA, VAL_DATA = "run", "train data", "validation data"


class Session:
    """Args:
    args: as `params.parse_args` gives them.
    rows: of the train data, on process 0; the others get them from it.
    flags: to save as the run's recipe, see `recipes.resolved_flags`.
    """

    def __init__(self, args: Namespace, rows: DataRows | None = None, flags: dict[str, Any] | None = None):
        self.args = args
        self.rows = rows
        self._flags = flags
        self.log = RunLog(args)
        self._began = time.monotonic()
        self.skips = Skips(args.max_bad_samples, args.workers)
        self.loader: RowLoader
        self.loss: TrainingLoss | None = None
        self.temperature: TemperatureGroup | None = None
        self._logit_scale: torch.nn.Parameter
        self._seeded_epochs: SeededEpochs | None = None
        self._stream: SampleStream
        self._shared_epoch = SharedEpoch()
        self._outlive = Outlive()
        self._building = TRAIN_DATA
        self._epoch = 0
        self._recovering = False
        self.metrics: list[dict[str, float]] = []  # of every evaluation, on process 0
        self._monitor: Monitor | None = None
        self._interruptions: Interruptions | None = None
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
        if args.distributed and not args.horovod:
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
        self.log.has_model(model)
        if not self.args.uses_ext_loss:
            return model, *transforms
        self._logit_scale = model.logit_scale
        if self.args.tau_init is not None:
            with torch.no_grad():
                model.logit_scale.fill_(-math.log(self.args.tau_init))
        train_temperature(model, trains_logit_scale(self.args))
        return model, *transforms

    # Optimizer

    def enumerate(self, original: Callable, batches: Any) -> Iterable:
        """In place of the loop's `enumerate`: a resumed epoch goes on at its step, and each step is told when done."""
        first = getattr(batches, "first", 0) if self.args.uses_ext_loss else 0
        numbered = original(batches, first)
        return numbered if self.args.loss is None else self.log.steps(numbered, first)

    def create_optimizer(self, original: Callable, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = original(*args, **kwargs)
        if trains_logit_scale(self.args):
            self.temperature = TemperatureGroup(
                optimizer, self._logit_scale, self.args.lr_tau, self.args.lr_tau_scheduler, self.args.lr
            )
        optimizer.register_state_dict_post_hook(self._add_entry)
        return optimizer

    def assign_learning_rate(self, original: Callable, optimizer: torch.optim.Optimizer, new_lr: float) -> None:
        new_lr = float(new_lr)  # before OpenCLIP 2.30 a number of NumPy's, which no checkpoint is read with
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
        self.log.has_start()
        loaded = load_resumed(path, **kwargs)
        entry = checkpoint.take_entry(loaded)
        checkpoint.fit_names(loaded, self.args.distributed and not self.args.horovod)
        if trains(self.args) and isinstance(loaded, dict) and "epoch" in loaded:
            # Remote files are first seen here; local ones were checked before anything was written.
            checkpoint.check_entry(entry, path, self.args, self.rows)
            self._restored = entry
            if loaded["epoch"] >= self.args.epochs:
                logging.info(f"Nothing is left to train: {path!r} has {loaded['epoch']} of {self.args.epochs} epochs")
        return loaded

    # Data

    def get_data(self, original: Callable, args: Any, *rest: Any, **kwargs: Any) -> dict[str, Any]:
        self.log.has_start()
        self._tokenizer = kwargs.get("tokenizer")
        self._transforms = rest[0]
        if self._flags is not None and is_master(args):
            samples = args.train_num_samples if self.rows is None else self.rows.num_rows
            recipes.save(os.path.join(args.logs, args.name), args, self._flags, samples)
        if args.loss is not None and args.distributed:
            self.rows = broadcast_object(args, self.rows)
        if args.uses_ext_loss and args.train_num_samples is None and self.rows is not None:
            if self.rows.shards is not None:
                args.train_num_samples = self.rows.shards.num_listed(args.train_data)
        data = original(args, *rest, **kwargs)
        if "train" in data and not args.skip_scheduler and is_master(args):
            steps = data["train"].dataloader.num_batches // args.accum_freq * args.epochs
            if args.warmup > steps:
                logging.warning(f"--warmup {args.warmup}: the training has {steps} steps and does not reach --lr")
        return during_training.marked(data, args)

    @staticmethod
    def builder_of(original: Callable, path: str, dataset_type: str) -> Callable:
        return original(path, "synthetic" if dataset_type == "shapes" else dataset_type)

    def build_dataset(
        self, build: Callable, scoped: Callable, args: Namespace, transform: Callable, is_train: bool,
        tokenizer: Any = None, **kwargs: Any,
    ) -> Any:
        """OpenCLIP's data set, built with the seams of its scope."""
        self._building = TRAIN_DATA if is_train else VAL_DATA
        streams, has_rows = 0, True
        if is_train and args.uses_ext_loss and self.train_rows.kind == "webdataset":
            streams, has_rows = max(1, args.workers), self.train_rows.shards is not None
            tokenizer = RowTokenizer(tokenizer, has_rows)
        with scoped(self, self._building):
            info = build(args, transform, is_train, tokenizer=tokenizer, **kwargs)
        if is_train:
            self.skips.epoch_samples = info.dataloader.num_batches * args.batch_size
        if not is_train or not args.uses_ext_loss:
            return info
        loader = info.dataloader
        order = self._seeded_epochs or LateSampler(loader.sampler, args.batch_size)
        if isinstance(order, SeededEpochs):
            order.shared_epoch = info.shared_epoch
        else:
            loader.batch_sampler.sampler = order
            loader.worker_init_fn = self._outlive
        self.loader = RowLoader(loader, args.accum_freq, has_rows, streams, self._seed, order, find_keys(args))
        return replace(info, dataloader=self.loader)

    def synthetic(self, original: Callable) -> Callable:
        is_train = self._building == TRAIN_DATA
        if self.args.dataset_type == "shapes":
            original = shapes_dataset(self.args, is_train)
        return self.rowed(original) if is_train and self.args.uses_ext_loss else original

    def rowed(self, original: Callable) -> Callable:
        return lambda *args, **kwargs: WithRow(original(*args, **kwargs), self.args.seed, self._shared_epoch)

    def csv_lines(self, original: Callable) -> Callable:
        is_train = self._building == TRAIN_DATA

        def build(path: str, *args: Any, **kwargs: Any) -> UsableLines:
            rowed = lines = original(path, *args, **kwargs)
            if is_train and self.args.uses_ext_loss:
                rowed = WithRow(lines, self.args.seed, self._shared_epoch)
            return UsableLines(lines, rowed, path, self.skips if is_train else None)

        return build

    def complete(self, original: Callable) -> Callable:
        if host().builds_filter:
            return lambda **keys: Complete(original(**keys), self.skips)
        return Complete(original, self.skips)

    def shard_rows(self) -> Callable:
        shards = self.train_rows.shards if self.args.uses_ext_loss else None
        return ShardRows(shards, self.skips.skip_shard, self.skips.end_shard)

    def decode(self, original: Callable) -> Callable:
        if self._building == VAL_DATA:
            return decode_pairs(original)
        return Decode(original, self.skips, self.args.batch_size)

    def seeded_shuffle(self, original: Callable) -> Callable:
        self._stream = SampleStream(self.args.seed, self.args.rank)
        return lambda **kwargs: self._stream.shuffled_by(original(**kwargs, rng=self._stream.rng))

    def seeded_loader(self, original: Callable) -> Callable:
        def build(dataset: IterableDataset, **kwargs: Any) -> Any:
            self._seeded_epochs = SeededEpochs(dataset, self.args.seed, self.args.rank, self._stream)
            return original(self._seeded_epochs, **kwargs, worker_init_fn=self._outlive)

        return build

    def seeded_shards(self, original: Callable) -> Callable:
        return partial(original, worker_seed=WorkerSeed(self.args.seed, self.args.rank))

    # Training

    def _seed(self, use: int, *place: int) -> None:
        self._shared_epoch.set_value(self._epoch)
        seed_all(self.args.seed, use, self._epoch, self.args.rank, *place)

    def create_loss(self, original: Callable, args: Any) -> Any:
        if not args.uses_ext_loss:
            self.log.hold()
            return original(args)
        for flag in ("local_loss", "gather_with_grad"):
            if getattr(args, flag):
                what = f"{flag_of(flag)} makes no difference to --loss {args.loss}"
                logging.info(f"{what}: its gradients are exact without it.")
        loss = build_loss(args, self.train_rows.num_rows, args.device)
        if self._restored is not None:
            loss.load_full_state(self._restored.pop("state"))
        if loss.description():
            logging.info(f"Loss {args.loss}: {loss.description()}")
        if is_master(args):
            for sentence in advise(args, self.train_rows.num_rows, self.loader.num_batches // args.accum_freq):
                logging.warning(sentence)
        self.loss = TrainingLoss(loss, self.loader, args.device)
        self.log.begin(self.loss.name)
        self.log.hold()
        return self.loss

    def train_one_epoch(
        self, original: Callable, model: torch.nn.Module, data: dict[str, Any], loss: Any, epoch: int,
        optimizer: torch.optim.Optimizer, scaler: Any, scheduler: Callable, dist_model: Any, args: Namespace,
        tb_writer: Any = None,
    ) -> Any:
        self._entry_to_save = None
        saved, self._restored = self._restored, None
        if self.loss is not None and self._interruptions is None:
            self._interruptions = Interruptions(args, self.loss)
        if self._monitor is None and args.loss is not None:

            def run_still(
                loader: Any, number: int, batches: list[int], saved: dict[str, Any] | None, save: Callable
            ) -> None:
                """OpenCLIP's epoch over another loader, in the log alone, without a schedule of learning rates."""
                self._epoch = FIRST_EPOCH + number
                self.skips.begin_epoch()
                if self.loss is None:
                    seed_all(args.seed, AT_EPOCH, self._epoch, args.rank)
                other_data = {**data, "train": replace(data["train"], dataloader=loader)}
                no_schedule, unlogged = (lambda step: None), self._unlogged()
                with (
                    self._interruptible(self._epoch, loader.num_batches, saved, save),
                    self.log.epoch(self._recovery_epoch(number, batches, data)) as writer,
                ):
                    original(
                        model, other_data, loss, self._epoch, optimizer, scaler, no_schedule, dist_model, unlogged,
                        tb_writer=writer,
                    )

            begun = epoch > 0 or (saved is not None and saved.get("position") is not None)
            self._begin(run_still, model, data, begun, optimizer, scaler, tb_writer)
        if args.osr_epochs > 0 and epoch > 0 and checkpoint.saves_after(args, epoch):
            remove_unfinished(args)
        self.log.release()
        self._epoch = epoch
        if self.loss is not None:
            self.loss.loss.set_epoch(math.ceil(args.osr_epochs) + epoch)

        def save(place: dict[str, Any]) -> None:
            self._raise_if_not_finite(model)
            self._prepare_entry(**place)
            if args.rank == 0:
                midepoch.write(args, epoch, place["position"], model, optimizer, scaler)
            self._entry_to_save = None

        self.skips.begin_epoch()
        steps = data["train"].dataloader.num_batches // args.accum_freq
        shown = Epoch(
            TRAIN, epoch, args.epochs, epoch * steps, epoch * steps, steps, (args.epochs - epoch - 1) * steps, tb_writer
        )
        with (
            self._interruptible(epoch, data["train"].dataloader.num_batches, saved, save),
            self.log.epoch(shown) as writer,
        ):
            result = original(
                model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, tb_writer=writer
            )
        report_epoch(self.skips, args, epoch, data["train"].dataloader, tb_writer)
        if self._interruptions is not None:
            self._raise_if_not_finite(model)
            if checkpoint.saves_after(args, epoch + 1):
                taus = self._prepare_entry(self._interruptions.order).get("temperature.tau")
                if epoch + 1 == args.epochs and isinstance(taus, torch.Tensor):
                    self._show_temperatures(taus)
        return result

    def _recovery_epoch(self, number: int, batches: list[int], data: dict[str, Any]) -> Epoch:
        """Of a recovery of epochs of so many `batches`, before the training."""
        accum_freq = self.args.accum_freq
        steps = [some // accum_freq for some in batches]
        ahead = sum(steps[number + 1 :]) + self.args.epochs * (data["train"].dataloader.num_batches // accum_freq)
        first = (FIRST_EPOCH + number) * steps[number]
        return Epoch(RECOVERY, number, len(steps), first, sum(steps[:number]), steps[number], ahead, None)

    def _interruptible(self, *epoch: Any) -> AbstractContextManager[None]:
        return nullcontext() if self._interruptions is None else self._interruptions.epoch(*epoch)

    def _prepare_entry(self, order: dict[str, int], position: dict[str, Any] | None = None) -> dict[str, Any]:
        """Gather the state that only some processes hold, for the next checkpoint; called by every process."""
        assert self.loss is not None
        state = self.loss.loss.full_state()
        if self.args.rank == 0:
            self._entry_to_save = checkpoint.make_entry(self.args, self.train_rows, state, order, position)
        return state

    def _show_temperatures(self, taus: torch.Tensor) -> None:
        """The training is done: nothing that goes wrong with a picture may take its checkpoint."""
        try:
            folder = os.path.join(self.args.logs, self.args.name)
            path = write_sheet(folder, taus, self.args, self.rows, self._transforms)
            logging.info(f"The samples with the largest and smallest temperatures: {path}")
        except Exception as error:
            logging.warning(f"No sheet of temperatures: {error!r}")

    def close(self) -> None:
        """The run has ended, in whatever way."""
        self._outlive.close()
        if self._interruptions is not None:
            self._interruptions.close()
        self.log.close()

    def finish(self) -> None:
        """The training has ended well, its last checkpoint is there."""
        args = self.args
        if args.osr_epochs > 0 and trains(args):
            remove_unfinished(args)
        if args.loss is not None and trains(args) and args.save_logs:
            for line in summary(args, time.monotonic() - self._began):
                logging.info(line)

    def _begin(
        self, run_still: Callable, model: torch.nn.Module, data: dict[str, Any], begun: bool,
        optimizer: torch.optim.Optimizer, scaler: Any, tb_writer: Any,
    ) -> None:
        """Before the first epoch of a run: what the model is worth, and the recovery of its optimizer's statistics.

        A resumed training, that has `begun` before, has had both.
        """
        args = self.args
        self._monitor = Monitor(args, begun)
        from_weights = starts_from_weights(args) or bool(args.resume)
        evaluates = bool(known_metrics(args))
        if begun:
            if is_master(args) and starts_from_weights(args) and evaluates and not self._monitor.start:
                logging.warning("The starting point is not known here: nothing is compared with it")
            return
        if from_weights and evaluates:
            with kept_random_state(args.device):
                evaluate = host().main_module.evaluate
                evaluate(model, data, 0, args, tb_writer=tb_writer, tokenizer=self._tokenizer)
            self._wait()
        elif from_weights and is_master(args):
            logging.warning("Nothing is evaluated: nobody will see whether the model becomes worse; give --val-data")
        if args.osr_epochs > 0:
            self._recover(run_still, model, data, optimizer, scaler)
            if evaluates and args.osr_transfer != "none" and args.osr_load is None:
                with kept_random_state(args.device), self.log.quiet():
                    evaluate = host().train_module.evaluate
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
                with kept_random_state(args.device):
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
            self.log.evaluated(epoch, self.metrics[-1])
        if self._monitor is not None and metrics:
            if epoch == 0:
                self._monitor.begin(metrics)
            self._monitor.after(metrics, epoch, model, data)
        return metrics

    def zero_shot_eval(
        self, original: Callable, model: Any, data: dict[str, Any], epoch: int, args: Namespace, tokenizer: Any = None
    ) -> dict[str, float]:
        metrics = original(model, during_training.unmarked(data), epoch, args, tokenizer=tokenizer)
        if not args.val_frequency or (epoch % args.val_frequency and epoch != args.epochs):
            return metrics
        model = getattr(model, "module", model)
        if args.dataset_type == "shapes" and "val" in data:
            metrics = metrics | classify_scenes(model, data["val"].dataloader, args, tokenizer)
        if args.zeroshot_data is not None:
            metrics = metrics | during_training.score_epoch(model, self._transforms[1], tokenizer, epoch, args)
        return metrics

    def _raise_if_not_finite(self, model: torch.nn.Module) -> None:
        """Nothing of a broken epoch may be saved; what its last step broke is seen in the parameters only."""
        assert self.loss is not None
        loss = self.loss.loss
        loss.raise_if_not_finite()
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                name = plain_name(name)
                raise NonFiniteError(f"step {loss.steps}: {name} is not finite; training cannot go on from here")

