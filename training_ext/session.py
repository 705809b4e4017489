"""`Session`: the state of one run, and the functions that replace OpenCLIP's (see `seams`)."""

import logging
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from open_clip_train.distributed import broadcast_object, is_master

from open_clip_ext.errors import InputError
from open_clip_ext.metrics_file import TRAIN
from open_clip_ext.options import flag_of
from open_clip_ext.recovery import digest_of
from training_ext.context import Run
from training_ext.core.component import Components, is_resumed
from training_ext.core.hosts import installed
from training_ext.core.loss import TrainingLoss as TrainingLossOf
from training_ext.core.loss import add_losses
from training_ext.core.optimizer import GivenSettings, regroup
from training_ext.core.state import KEY, check_components, export, gather_components, load_components
from training_ext.core.temperature import TemperatureGroup, train_temperature, trains_logit_scale
from training_ext.data import checkpoint, checkpoint_files
from training_ext.data.data_seams import DataSeams
from training_ext.data.keys import key_argument
from training_ext.data.loss import TrainingLoss, build_loss, samples_per_epoch
from training_ext.data.rows import DataRows
from training_ext.data.seeding import AT_EPOCH, seed_all
from training_ext.data.shards import shard_urls
from training_ext.data.usable import SampleWatch
from training_ext.evaluations import Evaluations
from training_ext.feature import Epoch, Feature, NewTraining
from training_ext.flags.alike import check_alike
from training_ext.flags.preflight import keep_others_out
from training_ext.openclip.loading import load_checkpoint
from training_ext.run import Features
from training_ext.saving import Saving

IMAGENET_V2 = "imagenet-v2"


class Session:
    """The state of one run, and the functions that replace OpenCLIP's.

    Args:
        rows: rows of the train data on process 0, which sends them to the others.
        flags: flags to save as the run's recipe, see `recipes.resolved_flags`.
        alone: until it ends no other run uses the folder, see `preflight.keep_others_out`.
    """

    def __init__(
        self, args: Namespace, rows: DataRows | None = None, flags: dict[str, Any] | None = None,
        alone: ExitStack | None = None,
    ):
        self.args = args
        self.components = Components.of(args)
        self.has_trained_components = any(map(is_resumed, self.components))
        if self.has_trained_components and getattr(args, "fsdp_checkpoint", "full") == "sharded":
            raise InputError("'sharded' would leave out the state of components; give full", "--fsdp-checkpoint")
        self.run = Run(args, self.components)
        self._adds_losses = False
        self._component_states: dict[str, Any] = {}
        self.features = Features(self.run)
        self._alone = alone if args.name is None else None  # of a run that gets its name later
        watch = next((feature for feature in self.features if isinstance(feature, SampleWatch)), SampleWatch())
        self.data = DataSeams(args, rows, watch)
        self.saving = Saving(self.run, self.data)
        self.evaluations = Evaluations(self.features, self.data, self.unwrapped)
        self._flags = flags
        self.loss: TrainingLoss | None = None
        self.temperature: TemperatureGroup | None = None
        self._has_model = False
        self._has_begun = False  # the first epoch of this run
        self.epoch: Epoch | None = None  # in progress
        self.told: list[str] = []  # warnings from before the log was there
        self.completed = False  # whether OpenCLIP's main has come to its end

    # Start-up of the processes and the model

    def init_distributed(self, original: Callable, args: Any) -> Any:
        device = original(args)
        if args.loss is not None and args.distributed and not args.horovod:
            check_alike(args, self.data.rows)
        return device

    def create_model(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self._has_model and self._alone is not None:
            self._keep_others_out(self._alone)
        model, *transforms = original(*args, **kwargs)
        if self._has_model:  # this one is frozen, to learn from
            if self.args.uses_ext_loss:
                self.saving.reference = digest_of(model.state_dict())
            return model, *transforms
        self._has_model = True
        for component in self.components:
            component.wrap_model(model)
        self._adds_losses = add_losses(model, self.components)
        self.features.tell(Feature.model_built, model)
        self._model = model
        if not self.args.uses_ext_loss:
            return model, *transforms
        if self.args.tau_init is not None:
            with torch.no_grad():
                model.logit_scale.fill_(-math.log(self.args.tau_init))
        if self.args.precision in ("pure_bf16", "pure_fp16") and not self.run.shards_model:
            # In 16 bits a step is less than the spacing of numbers, so tau and SigLIP's bias would not move.
            for parameter in (model.logit_scale, getattr(model, "logit_bias", None)):
                if parameter is not None:
                    parameter.data = parameter.data.float()
        train_temperature(model, self.args)
        return model, *transforms

    def _keep_others_out(self, until: ExitStack) -> None:
        """Refuse on every process, if process 0 finds another run in the folder."""
        refused = None
        try:
            keep_others_out(self.args, until)
        except InputError as error:
            refused = str(error)
        if self.args.distributed:
            refused = broadcast_object(self.args, refused)
        if refused is not None:
            raise InputError(refused)

    # Optimizer

    def enumerate(self, original: Callable, batches: Any) -> Iterable:
        """Replaces the loop's `enumerate`: a resumed epoch resumes at its step, and features are told of each step."""
        if self.epoch is None or self.args.loss is None:  # in OpenCLIP's evaluation, or without --loss
            return original(batches)
        return self._steps(self.epoch, original(batches, self.epoch.first_batch))

    def _steps(self, epoch: Epoch, numbered: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Yield the numbered batches of the epoch; OpenCLIP asks for the next one when its step is done.

        OpenCLIP's loop computes a learning rate for batches that are too few for a step, too, which after the last step
        may divide by zero; they are read, but not passed on.
        """
        for number, batch in numbered:
            if number >= epoch.steps * self.args.accum_freq:
                continue
            yield number, batch
            step, calls = divmod(number + 1, self.args.accum_freq)
            if calls:
                continue
            # On process 0, where OpenCLIP logs, `LogItems` does so. Wrong norms, and in `amorlip` NaN, are seen only on
            # the process that has them.
            if self.loss is not None and not self.run.is_first and (step - 1) % self.args.log_every_n_steps == 0:
                self.loss.loss.raise_if_not_finite()
            self.features.tell(Feature.step_done, step, epoch.numbers)
            epoch.numbers.clear()

    def create_optimizer(self, original: Callable, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = original(*args, **kwargs)
        inner = getattr(optimizer, "_base_optimizer", optimizer)  # timm's Lookahead calls no hooks of its own
        self.complete_optimizer(inner, self._model)
        inner.register_state_dict_post_hook(lambda optimizer, state: self.saving.add_to(state))
        return optimizer

    def complete_optimizer(self, optimizer: torch.optim.Optimizer, model: Any) -> None:
        """Give components and a learned temperature their groups, and keep what a checkpoint will replace.

        Args:
            model: without wrappers, with the parameters that are trained.
        """
        args = self.args
        regroup(optimizer, model, self.components)
        if trains_logit_scale(args):
            schedule = args.lr_tau, args.lr_tau_scheduler, args.lr
            self.temperature = TemperatureGroup(optimizer, model.logit_scale, *schedule)
        self._settings = GivenSettings(optimizer, args)

    def assign_learning_rate(self, original: Callable, optimizer: torch.optim.Optimizer, new_lr: float) -> None:
        new_lr = float(new_lr)  # before OpenCLIP 2.30 a NumPy scalar, which checkpoints may not contain
        assign = partial(installed().assign_model_rate, original)
        if self.temperature is None:
            assign(optimizer, new_lr)
        else:
            self.temperature.assign(assign, optimizer, new_lr)

    @property
    def in_training(self) -> bool:
        """Whether an epoch of the training is in progress, not of a recovery before it."""
        return self.epoch is not None and self.epoch.is_training

    def clamped(self, original: Callable) -> Callable:
        """Replaces `unwrap_model`, by which OpenCLIP finds the temperature that it clamps after each step.

        For this package's losses OpenCLIP gets a copy, and a learned temperature is clamped here, at `--tau-min`.
        """

        def unwrap(model: torch.nn.Module) -> Any:
            unwrapped = original(model)
            if self.in_training:
                if not self.args.uses_ext_loss:
                    return unwrapped
                if trains_logit_scale(self.args):
                    unwrapped.logit_scale.clamp_(0, -math.log(self.args.tau_min))
            return SimpleNamespace(logit_scale=unwrapped.logit_scale.detach().clone())

        return unwrap

    # Checkpoints

    def load_checkpoint(self, path: str, **kwargs: Any) -> Any:
        loaded = load_checkpoint(path, **kwargs)
        if self.run.trains and isinstance(loaded, dict) and "epoch" in loaded:
            of_components = loaded.pop(KEY, {})
            check_components(path, of_components, self.components)
            load_components(of_components, self.components)
        self.saving.take(loaded, path)
        return loaded

    # Data

    def get_data(self, original: Callable, args: Any, *rest: Any, **kwargs: Any) -> dict[str, Any]:
        for sentence in self.told if is_master(args) else ():
            logging.warning(sentence)
        self.evaluations.tokenizer, self.evaluations.transform = kwargs.get("tokenizer"), rest[0][1]
        if self._flags is not None and is_master(args) and not self.saving.is_done:
            self.saving.keep_recipe(self._flags)
        if args.loss is not None and args.distributed:
            self.data.rows = broadcast_object(args, self.data.rows)
            if (shards := self.data.shards) is not None:  # at another path on another machine
                self.data.rows = replace(self.data.known_rows, shards=shards.at(shard_urls(args.train_data)))
        if args.uses_ext_loss and args.train_num_samples is None and (shards := self.data.shards) is not None:
            args.train_num_samples = shards.num_listed(args.train_data)
        data = original(args, *rest, **kwargs)
        if args.uses_ext_loss:
            for info in data.values():
                self.data.workers.workers_of(info.dataloader)
        self.features.tell(Feature.data_built, data, self.data.rows)
        # OpenCLIP evaluates only validation data and ImageNet.
        if any(feature.metrics() for feature in self.features) and not set(data) & {"val", "imagenet-val", IMAGENET_V2}:
            data[IMAGENET_V2] = None
        return data

    # Training

    def create_loss(self, original: Callable, args: Any) -> Any:
        if not args.uses_ext_loss:
            return TrainingLossOf(original(args), True) if self._adds_losses else original(args)
        for flag in ("local_loss", "gather_with_grad"):
            if getattr(args, flag):
                what = f"{flag_of(flag)} makes no difference to --loss {args.loss}"
                logging.info(f"{what}: its gradients are exact without it.")
        rows = self.data.known_rows
        loss = build_loss(args, rows.num_rows, args.device, samples_per_epoch(args, rows))
        self.saving.load_into(loss)
        if loss.description():
            logging.info(f"Loss {args.loss}: {loss.description()}")
        self.loss = TrainingLoss(loss, self.data.loader, args.device, self._adds_losses, key_argument(args))
        self.features.tell(Feature.loss_built, self.loss)
        return self.loss

    def train_one_epoch(
        self, original: Callable, model: torch.nn.Module, data: dict[str, Any], loss: Any, epoch: int,
        optimizer: torch.optim.Optimizer, scaler: Any, scheduler: Callable, dist_model: Any, args: Namespace,
        tb_writer: Any = None,
    ) -> Any:
        def run_epoch(epoch: Epoch, data: dict[str, Any], scheduler: Callable, args: Namespace) -> Any:
            self.epoch, self.data.epoch = epoch, epoch.seed
            writer = epoch if args.loss is not None else epoch.tensorboard
            with self.features.epoch(epoch):
                result = original(
                    model, data, loss, epoch.seed, optimizer, scaler, scheduler, dist_model, args, tb_writer=writer
                )
            self.epoch = None
            return result

        def run_frozen(epoch: Epoch) -> None:
            if self.loss is None:
                seed_all(args.seed, AT_EPOCH, epoch.seed, args.rank)
            own = {**data, "train": replace(data["train"], dataloader=epoch.loader)}
            # It appears in the log only.
            unlogged = Namespace(**{**vars(args), "save_logs": False, "wandb": False, "trackio": False})
            run_epoch(epoch, own, lambda step: None, unlogged)

        saved = self.saving.begin_epoch()
        if not self._has_begun and args.loss is not None:
            self._has_begun = True
            self._settings.put_back()
            if self.temperature is not None:
                self.temperature.begin(args.skip_scheduler)
            resumed = epoch > 0 or (saved is not None and saved.get("position") is not None)
            self.features.tell(Feature.begin, resumed)
            if not resumed:
                self.evaluations.of_start(self.evaluated(model), data, tb_writer)
                self.features.tell(
                    Feature.before_training,
                    NewTraining(
                        model, optimizer, scaler, self.loss, data["train"].dataloader, self.data.rows,
                        self.saving.reference, run_frozen,
                    ),
                )
        if args.save_logs:  # only on the process that saves
            checkpoint_files.remove_folders(args.checkpoint_path)
        if self.loss is not None:
            self.loss.loss.set_epoch(math.ceil(args.epochs_before) + epoch)

        def save(place: dict[str, Any]) -> None:
            self.saving.begin_save(model, self.loss)
            self._component_states = gather_components(self.components)
            assert self.loss is not None
            name = checkpoint_files.name_of(args, epoch, place["position"])
            self.saving.prepare(self.loss, name, place["order"], place["position"])
            if args.rank == 0 or self.run.shards_model:
                content = self.content(epoch, model, optimizer, scaler)
                if args.rank == 0:
                    checkpoint_files.write(args, self.with_components(content), place["position"])
            self.saving.entry = None

        loader = data["train"].dataloader
        steps = self.run.steps(loader.num_batches)
        saves = args.loss is not None and self.run.saves_after(epoch + 1)
        saves_first = saves and bool(self.features.metrics(epoch + 1))  # OpenCLIP saves after the evaluation
        started = Epoch(
            TRAIN, epoch, args.epochs, epoch, loader, steps, before=epoch * steps,
            ahead=(args.epochs - epoch - 1) * steps, tensorboard=tb_writer, saved=saved, save=save,
            saves_last=saves_first,
        )
        result = run_epoch(started, data, scheduler, args)
        self._component_states = gather_components(self.components)
        if args.loss is not None:
            self.saving.begin_save(model, self.loss)
        if saves and self.loss is not None:
            order = checkpoint.order_of(args, self.data.loader.streams)
            self.saving.prepare(self.loss, f"epoch_{epoch + 1}.pt", order)
        elif saves_first and args.rank == 0 and not self.run.shards_model:
            path = self.run.checkpoint_after(epoch + 1)
            self.save_file(torch.save, self.content(epoch + 1, model, optimizer, scaler), path)
            logging.info(f"Saved before the evaluation: {path}")
        return result

    def content(
        self, epoch: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any
    ) -> dict[str, Any]:
        """The contents of OpenCLIP's checkpoint after `epoch` epochs."""
        content = {
            "epoch": epoch,
            "name": self.args.name,
            "state_dict": getattr(model, "_orig_mod", model).state_dict(),  # without torch.compile's prefix
            "optimizer": optimizer.state_dict(),
        }
        return content if scaler is None else {**content, "scaler": scaler.state_dict()}

    def with_components(self, content: dict[str, Any]) -> dict[str, Any]:
        """The contents with the states of components, if they have any."""
        return content | {KEY: self._component_states} if self._component_states else content

    def save_file(self, save: Callable, content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Replaces main's `torch.save`."""
        checkpoint_files.save_checkpoint(save, self.with_components(content), path, *args, **kwargs)
        export(save, content, path, self.components)

    def close(self) -> None:
        """End the run, after success or an error; temporary files are removed after the last checkpoint."""
        args = self.args
        self.data.workers.close()
        if self.completed and args.loss is not None and self.run.trains and args.save_logs:
            checkpoint_files.remove_folders(args.checkpoint_path)
        self.features.tell(Feature.end, self.completed and self._has_begun)
        for component in self.components:
            component.end(self.completed)

    @staticmethod
    def unwrapped(model: Any) -> torch.nn.Module:
        """The model within the DistributedDataParallel that is evaluated, if any."""
        return getattr(model, "module", model)

    def evaluated(self, model: torch.nn.Module) -> torch.nn.Module:
        """What OpenCLIP's `evaluate` takes for the model that it trains."""
        return model
