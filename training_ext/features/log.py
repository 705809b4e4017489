"""The log of a training with --loss: a short line for each logged step, and every number in metrics.jsonl."""

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from open_clip_ext.losses import NonFiniteError
from open_clip_ext.metrics_file import EVAL, FILE, MetricsFile
from open_clip_ext.options import option
from open_clip_ext.surrogates import PowerHinge
from training_ext.context import Run
from training_ext.data.loss import TrainingLoss
from training_ext.data.metrics import duration, ranks_at_chance
from training_ext.data.usual import unusual
from training_ext.feature import Epoch, Feature
from training_ext.openclip.hosts import host

# These change or are measured once per epoch, so they are shown in the line at its end.
ONCE = ("gamma", "rho", "unvisited", "queued", "prototypes", "effective_negatives", "negatives_kl")
AT_CHANCE = "loss_at_chance"
# Of B - 1 negatives, the effective number if the weights' variance is a tenth of their squared mean.
EVEN = 1 / 1.1
FEW_WITHIN = 0.01  # of the log-normalizer of a hinge with negatives as similar as their positives


class Log(Feature):
    """Logs a step in a short line in place of OpenCLIP's, and writes its numbers; all on process 0."""

    log_all: bool = option(
        False,
        "log OpenCLIP's own lines, with every number, and the model's structure; otherwise these numbers go to "
        "metrics.jsonl, TensorBoard and W&B only",
    )

    def __init__(self, run: Run):
        super().__init__(run)
        self._loss: TrainingLoss | None = None
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
        args = self.run.args
        if args.loss is None or not self.run.is_first:
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
        return record.pathname != host().train_module.__file__

    def _fits_terminal(self, record: logging.LogRecord) -> bool:
        """Leave out the model's structure and the list of all flags, which are indented lines."""
        text = record.getMessage()
        is_of_page = text in ("Model:", "Params:") or text.startswith("  ") or "\n" in text
        return self.log_all or not is_of_page or record.pathname != host().main_module.__file__

    # Our lines

    def loss_built(self, loss: TrainingLoss) -> None:
        self._loss = loss

    def begin(self, resumed: bool) -> None:
        if (path := self.run.file(FILE)) and not self.log_all:
            error = "; error is the estimated log-normalizers' / the minibatch's" if self.run.args.normalizer else ""
            logging.info(f"All numbers are in {path}{error}")

    @contextmanager
    def epoch(self, epoch: Epoch) -> Iterator[None]:
        if self.run.args.loss is None:
            yield
            return
        self._epoch, self._losses, self._at_chance = epoch, [], []
        began = time.monotonic()
        self._began = self._began or began
        self._last = -1, began
        yield
        self._done += epoch.steps - self.run.steps(epoch.first_batch)
        self._epoch = None
        if self._losses:
            self._tell_epoch(epoch, time.monotonic() - began)

    def step_done(self, step: int, numbers: dict[str, float]) -> None:
        if not numbers:
            return
        epoch, now = self._epoch, time.monotonic()
        assert epoch is not None
        first = self.run.steps(epoch.first_batch)
        before, time_before = self._last
        # OpenCLIP's samples_per_second covers the last step only.
        throughput = (step - max(first, before)) * self.run.global_batch / max(now - time_before, 1e-9)
        self._last = step, now
        self._numbers = numbers = {**numbers, "throughput": throughput}
        numbers.setdefault("tau", 1 / numbers[host().scale_name])
        loss = numbers["loss" if self._loss is None else self._loss.name]
        if not math.isfinite(loss):  # with this package's losses an earlier check has named the tensor
            raise NonFiniteError(f"step {epoch.before + step}: the loss is {loss}; training cannot continue")
        self._losses.append(loss)
        self._at_chance += [numbers[AT_CHANCE]] if AT_CHANCE in numbers else []
        samples = (epoch.before + step) * self.run.global_batch
        self._add(epoch.stage, epoch.number, step, steps=epoch.steps, samples=samples, **numbers)
        # OpenCLIP 4.x's task loop reports numbers more often than it logs a line.
        is_due = (step - 1) % self.run.args.log_every_n_steps == 0 or step == epoch.steps
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
        numbers, args = self._numbers, self.run.args
        once = [f"{name} {numbers[name]:.3g}" for name in ONCE if name in numbers]
        mean = sum(self._losses) / len(self._losses)
        chance = f" ({sum(self._at_chance) / len(self._at_chance):.4g} at chance)" if self._at_chance else ""
        logging.info(" ".join([f"{epoch.title} took {duration(seconds)}: mean loss {mean:.4g}{chance}", *once]))
        if getattr(args, "surrogate", None) == PowerHinge.name and epoch.is_training and not self._has_warned:
            alpha = max(numbers["alpha_image_mean"], numbers["alpha_text_mean"])
            if alpha < FEW_WITHIN * args.margin**args.margin_power / numbers["tau"]:
                self._has_warned = True
                logging.warning(
                    f"Hardly any negative is within --margin {args.margin:g} of its positive, and the others have "
                    f"no gradient (mean log-normalizer {alpha:.2g}): a small loss says little here"
                )

    def evaluated(
        self, epoch: int, metrics: dict[str, Any], model: torch.nn.Module, data: dict[str, Any]
    ) -> None:
        values = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        self._add(EVAL, epoch, 0, **values)
        if epoch > 0 and self._losses and self._is_even() and (ranks := ranks_at_chance(metrics)):
            cause = next(unusual(self.run.args), f"try a lower --lr ({self.run.args.lr:g}) or a longer --warmup")
            logging.warning(f"After epoch {epoch} the model has learned nothing: {ranks}. A likely cause: {cause}")

    def _is_even(self) -> bool:
        """Whether an anchor's negatives have about equal weights, as if nothing were learned; True if not known."""
        args, effective = self.run.args, self._numbers.get("effective_negatives", math.inf)
        modalities = 1 if getattr(args, "negatives", None) in (None, "cross") else 2
        return effective >= EVEN * modalities * (self.run.global_batch - 1)

    def _add(self, stage: str, epoch: int, step: int, **numbers: Any) -> None:
        path = self.run.file(FILE)
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
