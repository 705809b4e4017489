"""The log of a training with --loss: a short line for each logged step, and every number in metrics.jsonl."""

import logging
import math
import os
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from open_clip_train import train as open_clip_train

from open_clip_ext.losses import NonFiniteError
from open_clip_ext.metrics_file import EVAL, FILE, MetricsFile
from open_clip_ext.options import option
from open_clip_ext.surrogates import PowerHinge
from training_ext.core import hosts
from training_ext.core.component import Component
from training_ext.core.epoch import Epoch, Evaluation
from training_ext.data.metrics import duration, ranks_at_chance, recalls
from training_ext.data.usual import likely_cause
from training_ext.openclip.loading import take_warnings

# These change or are measured once per epoch, so they are shown in the line at its end.
ONCE = ("gamma", "rho", "unvisited", "queued", "prototypes", "effective_negatives", "negatives_kl")
AT_CHANCE = "loss_at_chance"
# Of B - 1 negatives, the effective number if the weights' variance is a tenth of their squared mean.
EVEN = 1 / 1.1
FEW_WITHIN = 0.01  # of the log-normalizer of a hinge with negatives as similar as their positives


@dataclass
class Numbers:
    """Stands for TensorBoard's writer in OpenCLIP's loop, to learn the numbers of the latest logged step.

    Attributes:
        latest: by name; empty if the step was not logged.
    """

    tensorboard: Any
    latest: dict[str, float] = field(default_factory=dict)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """The method of TensorBoard's writer."""
        self.latest[name.removeprefix("train/")] = value
        if self.tensorboard is not None:
            self.tensorboard.add_scalar(name, value, step)


class Log(Component):
    """Logs a step in a short line in place of OpenCLIP's, and writes its numbers; all on process 0."""

    name = "log"
    topic = "the run"
    needs_loss = True
    layer = -10  # a step is logged before another component ends the run at it

    log_all: bool = option(
        False,
        "log OpenCLIP's own lines, with every number, and the model's structure; otherwise these numbers go to "
        "metrics.jsonl, TensorBoard and W&B only",
    )

    def __init__(self, args: Namespace):
        super().__init__(args)
        self._written: Numbers | None = None
        self._file: MetricsFile | None = None
        self._is_full = False
        self._epoch: Epoch | None = None
        self._numbers: dict[str, float] = {}  # of the latest logged step
        self._losses: list[float] = []  # of this epoch's logged steps
        self._at_chance: list[float] = []  # what a model that has learned nothing would have had there
        self._last: tuple[int, float]  # step of the epoch and time of the latest line
        self._began: float | None = None  # when the first epoch of this run did
        self._done = 0  # steps of this run in earlier epochs
        self._has_warned = False

    # OpenCLIP's lines

    def model_built(self, model: torch.nn.Module) -> None:
        args = self.args
        for sentence in take_warnings() if self.plan.is_first else ():
            logging.warning(sentence)
        if args.loss is None or not self.plan.is_first:
            return
        for handler in logging.root.handlers:
            handler.addFilter(self._is_wanted)
            if not isinstance(handler, logging.FileHandler):
                handler.addFilter(self._fits_terminal)
        if not self.log_all:
            size = sum(parameter.numel() for parameter in model.parameters())
            logging.info(f"{args.model}: {size:,} parameters; its structure and all flags: {args.log_path}")

    def _is_wanted(self, record: logging.LogRecord) -> bool:
        """Leave out OpenCLIP's line of a step; with --log-all it stands in place of ours, except in a recovery."""
        epoch = self._epoch
        if epoch is None or (self.log_all and epoch.is_training) or record.levelno != logging.INFO:
            return True
        return record.pathname != open_clip_train.__file__

    def _fits_terminal(self, record: logging.LogRecord) -> bool:
        """Leave out the model's structure and the list of all flags, which are indented lines."""
        text = record.getMessage()
        is_of_page = text in ("Model:", "Params:") or text.startswith("  ") or "\n" in text
        return self.log_all or not is_of_page or record.pathname != hosts.installed().main().__file__

    # Our lines

    def begin(self, resumed: bool) -> None:
        if (loss := self.training.loss) is not None and loss.description():
            logging.info(f"Loss {self.args.loss}: {loss.description()}")
        if self.args.loss is not None and (path := self.plan.file(FILE)) and not self.log_all:
            error = "; error is the estimated log-normalizers' / the minibatch's" if self.args.normalizer else ""
            logging.info(f"All numbers are in {path}{error}")

    def epoch(self, epoch: Epoch, train: Callable[[Epoch], None]) -> None:
        if self.args.loss is None:
            return train(epoch)
        self._written = Numbers(epoch.writer)
        self._epoch, self._losses, self._at_chance = epoch, [], []
        began = time.monotonic()
        self._began = self._began or began
        skipped = self.training.skipped
        self._last = -1, began
        train(replace(epoch, writer=self._written))
        self._done += epoch.steps - self.plan.steps(epoch.first_batch)
        self._epoch = None
        if self._losses:
            self._tell_epoch(epoch, time.monotonic() - began)
            self._tell_skipped(epoch, self.training.skipped - skipped)

    def step_done(self, step: int) -> None:
        if self._written is None or not self._written.latest:
            return
        numbers, self._written.latest = self._written.latest, {}
        epoch, now = self._epoch, time.monotonic()
        assert epoch is not None
        first = self.plan.steps(epoch.first_batch)
        before, time_before = self._last
        # OpenCLIP's samples_per_second covers the last step only.
        throughput = (step - max(first, before)) * self.plan.global_batch / max(now - time_before, 1e-9)
        self._last = step, now
        numbers = {**numbers, "throughput": throughput}
        numbers.setdefault("tau", 1 / numbers[hosts.installed().SCALE])
        own = self.training.loss
        loss = numbers["loss" if own is None else own.value_name]
        self._losses.append(loss)
        if not math.isfinite(loss):
            # This package's losses have named the tensor at the end of the step.
            return self.training.check_finite(NonFiniteError(f"step {epoch.before + step}: the loss is {loss}"))
        self._numbers = numbers
        self._at_chance += [numbers[AT_CHANCE]] if AT_CHANCE in numbers else []
        samples = (epoch.before + step) * self.plan.global_batch
        self._add(epoch.stage, epoch.number, step, steps=epoch.steps, samples=samples, **numbers)
        # OpenCLIP 4.x's task loop reports numbers more often than it logs a line.
        is_due = (step - 1) % self.args.log_every_n_steps == 0 or step == epoch.steps
        if is_due and not (self.log_all and epoch.is_training):
            # At the mean pace so far, with evaluations and checkpoints.
            assert self._began is not None
            left = (now - self._began) / (self._done + step - first) * (epoch.steps - step + epoch.ahead)
            error = ""
            if "normalizer_mse" in numbers:
                error = f" error {numbers['normalizer_mse']:.2g}/{numbers['minibatch_mse']:.2g}"
            logging.info(
                f"{epoch.title} {step}/{epoch.steps} loss {loss:.4g} lr {numbers['lr']:.2g} tau {numbers['tau']:.3g}"
                f"{error} {throughput:.0f}/s left {duration(left)}"
            )

    def _tell_epoch(self, epoch: Epoch, seconds: float) -> None:
        numbers, args = self._numbers, self.args
        losses = [loss for loss in self._losses if math.isfinite(loss)]
        if not losses:
            raise NonFiniteError(f"{epoch.title}: the loss of every logged step is not finite")
        once = [f"{name} {numbers[name]:.3g}" for name in ONCE if name in numbers]
        mean = f"mean loss {sum(losses) / len(losses):.4g} of {len(losses)} logged step(s)"
        chance = f" ({sum(self._at_chance) / len(self._at_chance):.4g} at chance)" if self._at_chance else ""
        logging.info(" ".join([f"{epoch.title} took {duration(seconds)}: {mean}{chance}", *once]))
        if getattr(args, "surrogate", None) == PowerHinge.name and epoch.is_training and not self._has_warned:
            alpha = max(numbers["alpha_image_mean"], numbers["alpha_text_mean"])
            if alpha < FEW_WITHIN * args.margin**args.margin_power / numbers["tau"]:
                self._has_warned = True
                logging.warning(
                    f"Hardly any negative is within --margin {args.margin:g} of its positive, and the others have "
                    f"no gradient (mean log-normalizer {alpha:.2g}): a small loss says little here"
                )

    def _tell_skipped(self, epoch: Epoch, skipped: int) -> None:
        steps = epoch.steps - self.plan.steps(epoch.first_batch)
        if epoch.scaler is not None and skipped > max(3, steps // 100):
            scale = epoch.scaler.get_scale()
            logging.warning(
                f"{epoch.title}: the gradient scaler has skipped {skipped} of {steps} steps, whose gradients were not "
                f"finite; its scale is {scale:g}"
            )

    def evaluated(self, evaluation: Evaluation, metrics: dict[str, Any]) -> None:
        if self.args.loss is None:
            return
        epoch = evaluation.epoch
        values = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        self._add(EVAL, epoch, 0, **values)
        if math.isnan(values.get("clip_val_loss", 0)):  # in pure_fp16 its sum may be infinite, of a model that is not
            raise NonFiniteError(f"after epoch {epoch}: the model's embeddings of --val-data are not finite")
        if sentence := recalls(metrics):
            logging.info(f"After epoch {epoch}: {sentence}")
        if epoch > 0 and self._losses and self._is_even() and (ranks := ranks_at_chance(metrics)):
            logging.warning(f"After epoch {epoch} the model has learned nothing: {ranks}; {likely_cause(self.args)}")

    def _is_even(self) -> bool:
        """Whether an anchor's negatives have about equal weights, as if nothing were learned; True if not known."""
        args, effective = self.args, self._numbers.get("effective_negatives", math.inf)
        modalities = 1 if getattr(args, "negatives", None) in (None, "cross") else 2
        return effective >= EVEN * modalities * (self.plan.global_batch - 1)

    def _add(self, stage: str, epoch: int, step: int, **numbers: Any) -> None:
        path = self.plan.file(FILE)
        if path is None or self._is_full:
            return
        try:
            self._file = self._file or MetricsFile(os.path.dirname(path))
            self._file.add({"stage": stage, "epoch": epoch, "step": step, "time": round(time.time(), 3), **numbers})
        except OSError as error:  # do not lose the training for a log
            self._is_full = True
            logging.warning(f"No more lines are added to {path}: {error.strerror}")

    def end(self, trained: bool) -> None:
        for handler in logging.root.handlers:  # of a program that trains, too
            handler.removeFilter(self._is_wanted)
            handler.removeFilter(self._fits_terminal)
        if self._file is not None:
            self._file.close()
