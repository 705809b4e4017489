"""Checkpoints within an epoch, between two optimizer steps, and how a run resumes from one.

They are OpenCLIP's own files with the number of completed epochs and, in our entry, the position in the next one:

    order       what the order of the data depends on, besides data and epoch, by flag
    position    batches   completed in the epoch, per process
                of        batches of the whole epoch
                samples   that left each loader worker's stream, (processes, workers); (1, 0) with a sampler
                shown     state of the loss's diagnostics

The order of an epoch is a function of its number (see `seeding`), so the rest of it is the same as in an
uninterrupted run: a sampler skips indices, a worker's stream skips samples before they are decoded.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from open_clip_ext.distributed import all_gather
from open_clip_ext.errors import InputError, Stopped
from open_clip_ext.options import option
from training_ext.context import Run
from training_ext.data.checkpoint import order_of
from training_ext.data.loss import TrainingLoss
from training_ext.data.seeding import Start
from training_ext.feature import Epoch, Feature
from training_ext.features.stopping import StopRequest


class Resume(Feature):
    """Saves checkpoints within epochs, and ends the run at one after SIGTERM or Ctrl-C."""

    save_every_steps: int | None = option(
        None, "save checkpoints also within epochs, for --resume latest; the newest is kept until the epoch's own",
        valid=lambda steps: steps >= 1, expected="at least 1", metavar="STEPS",
    )  # fmt: skip

    def __init__(self, run: Run):
        super().__init__(run)
        self._request: StopRequest | None = None
        self._loss: TrainingLoss | None = None
        self._epoch: Epoch

    def check(self, metrics: list[str]) -> None:
        if self.save_every_steps is None:
            return
        args = self.run.args
        if not args.uses_ext_loss:
            wrong = f"--loss {args.loss}, with which OpenCLIP's order of the data cannot be repeated"
        elif not self.run.keeps_files:
            wrong = f"--logs {args.logs}, which writes no files; give a folder"
        elif not self.run.trains:
            raise InputError(f"{self.save_every_steps} without training; give --train-data", "--save-every-steps")
        else:
            return
        raise InputError(f"{self.save_every_steps} with {wrong}", "--save-every-steps")

    def loss_built(self, loss: TrainingLoss) -> None:
        self._loss = loss
        if self.run.keeps_files:
            self._request = StopRequest()

    @contextmanager
    def epoch(self, epoch: Epoch) -> Iterator[None]:
        self._epoch = epoch
        if self._loss is None:
            yield
            return
        self._loss.loader.start_at(None if epoch.saved is None else self._start_from(epoch.saved, self._loss))
        yield
        self._loss.loader.start_at(None)

    def _start_from(self, saved: dict[str, Any], loss: TrainingLoss) -> Start | None:
        """Where this process resumes, also logged; None at the start of an epoch.

        If the order of the data has changed, the run resumes after the same fraction of the epoch.
        """
        position, before = saved.get("position"), saved.get("order")
        if before is None:  # in files from before `position` existed
            return None
        args, whole, order = self.run.args, self._epoch.batches, order_of(self.run.args, loss.loader.streams)
        changed = [f"{name} {old}, now {order.get(name)}" for name, old in before.items() if order.get(name) != old]
        if changed and self.run.is_first:
            logging.warning(f"The order of the data changes: the checkpoint was written with {'; '.join(changed)}")
        if position is None:
            return None
        batches, workers = position["batches"], loss.loader.streams
        if position["of"] != whole and self.run.is_first:
            steps = self.run.steps(position["of"]), self.run.steps(whole)
            logging.warning("The length of an epoch changes: %d steps in the checkpoint, now %d", *steps)
        if not changed and batches < whole:
            samples = position["samples"][args.rank].tolist() if workers else []
            loss.load_diagnostics_state(position["shown"])
        else:
            batches = self.run.steps(batches * whole // position["of"]) * args.accum_freq
            samples = [len(range(worker, batches, workers)) * args.batch_size for worker in range(workers)]
        logging.info(f"=> resuming after step {self.run.steps(batches)} of {self._epoch.steps} in this epoch")
        return Start(self._epoch.seed, batches, whole, samples)

    def step_done(self, step: int, numbers: dict[str, float]) -> None:
        if self._request is None:
            return
        assert self._loss is not None
        steps, every = self._epoch.steps, self.save_every_steps
        stops = self._request.agreed(at_once=step == steps)  # an evaluation may follow the last step
        is_due = every is not None and (self._epoch.seed * steps + step) % every == 0
        if not (stops or is_due or (self._epoch.saves_last and step == steps)):
            return
        order = order_of(self.run.args, self._loss.loader.streams)
        self._epoch.save({"order": order, "position": self._position(step * self.run.args.accum_freq, self._loss)})
        if self.run.args.distributed:
            dist.barrier()  # the file exists before any process ends
        if stops:
            raise Stopped(
                stops,
                f"after step {step} of {steps} of an epoch; the checkpoint is saved, and --name {self.run.args.name} "
                "--resume latest resumes there",
            )

    def _position(self, batches: int, loss: TrainingLoss) -> dict[str, Any]:
        own = torch.tensor([loss.loader.numbers], dtype=torch.int64, device=loss.device)
        samples = all_gather(own).cpu() if loss.loader.streams else own.cpu()
        shown = loss.loss.diagnostics_state()
        return {"batches": batches, "of": self._epoch.batches, "samples": samples, "shown": shown}

    def end(self, trained: bool) -> None:
        if self._request is not None:
            self._request.close()
