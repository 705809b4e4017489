"""Before the first epoch of a training: evaluate the initial weights, and recover the optimizer's statistics."""

import copy
import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from open_clip_train.distributed import is_master

from open_clip_ext.metrics_file import RECOVERY
from training_ext.core.seeding import AT_EPOCH, kept_random_state, seed_all
from training_ext.feature import Epoch, Feature
from training_ext.features.recovery.recovery import FIRST_EPOCH, StatisticsRecovery
from training_ext.openclip.hosts import host, starts_from_weights

if TYPE_CHECKING:
    from training_ext.session import Session


@dataclass(frozen=True)
class BeforeTraining:
    """What a new training does before its first epoch; a resumed one has done it.

    Args:
        session: the run's session.
        train_one_epoch: OpenCLIP's function.
        model, data, loss, optimizer, scaler, dist_model, tb_writer: its arguments in the first epoch.
    """

    session: "Session"
    train_one_epoch: Callable
    model: torch.nn.Module
    data: dict[str, Any]
    loss: Any
    optimizer: torch.optim.Optimizer
    scaler: Any
    dist_model: Any
    tb_writer: Any

    @property
    def args(self) -> Namespace:
        return self.session.args

    def run(self) -> None:
        args, session = self.args, self.session
        from_weights = starts_from_weights(args) or bool(args.resume)
        evaluates = bool(session.features.metrics())
        if from_weights and evaluates:
            with kept_random_state(args.device):
                evaluate = host().main_module.evaluate
                evaluated = session.evaluated(self.model)
                evaluate(evaluated, self.data, 0, args, tb_writer=self.tb_writer, tokenizer=session.tokenizer)
            self._wait()
        elif from_weights and is_master(args):
            logging.warning("Nothing is evaluated, so you will not see whether the model gets worse; give --val-data")
        if args.osr_epochs > 0:
            self._recover()
            if evaluates and args.osr_transfer != "none" and args.osr_load is None:
                with kept_random_state(args.device), session.log.quiet():
                    evaluate = host().train_module.evaluate
                    evaluated = session.evaluated(self.model)
                    metrics = evaluate(evaluated, self.data, 0, self._unlogged(), tokenizer=session.tokenizer)
                if metrics:
                    session.features.tell(Feature.evaluated, 0, metrics, session.unwrapped(evaluated), self.data)
                self._wait()

    def _recover(self) -> None:
        args, session = self.args, self.session
        if args.osr_transfer == "none":
            logging.info("No statistics are recovered (--osr-transfer none); schedules continue as after a recovery")
            return
        rows = session.data.known_rows
        recovery = StatisticsRecovery(
            args, rows, session.loss, self.model, self.optimizer, self.scaler, session.reference
        )
        if args.osr_load is not None:
            recovery.load(args.osr_load)
            logging.info(f"=> loaded the recovered statistics '{args.osr_load}'")
        else:
            if is_master(args):
                logging.info(f"Recovering optimizer statistics for {args.osr_epochs:g} epochs; the weights are fixed")
            session.recovering = True
            try:
                with kept_random_state(args.device):
                    recovery.recover(self._run_frozen, self.data["train"].dataloader)
            finally:
                session.recovering = False
        recovery.hand_over()

    def _run_frozen(
        self, loader: Any, number: int, batches: list[int], saved: dict[str, Any] | None, save: Callable
    ) -> None:
        """Run OpenCLIP's epoch over `loader` without a schedule of learning rates; it appears in the log only."""
        args, session = self.args, self.session
        epoch = FIRST_EPOCH + number
        session.data.epoch = epoch
        if session.loss is None:
            seed_all(args.seed, AT_EPOCH, epoch, args.rank)
        data = {**self.data, "train": replace(self.data["train"], dataloader=loader)}
        steps = [session.run.steps(some) for some in batches]
        training = args.epochs * session.run.steps(self.data["train"].dataloader.num_batches)
        started = Epoch(
            RECOVERY, number, len(steps), epoch, loader, steps[number], first=epoch * steps[number],
            before=sum(steps[:number]), ahead=sum(steps[number + 1 :]) + training, tensorboard=None, saved=saved,
            save=save,
        )
        with session.features.epoch(started), session.log.epoch(started) as writer:
            self.train_one_epoch(
                self.model, data, self.loss, epoch, self.optimizer, self.scaler, lambda step: None, self.dist_model,
                self._unlogged(), tb_writer=writer,
            )

    def _unlogged(self) -> Any:
        """The run's arguments, changed so that an epoch or evaluation appears in the log only."""
        args = copy.copy(self.args)
        args.save_logs = args.wandb = args.trackio = False
        return args

    def _wait(self) -> None:
        """Wait for process 0, the only one that evaluates."""
        if self.args.distributed and not self.args.horovod:
            dist.barrier()
