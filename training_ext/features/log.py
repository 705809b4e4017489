"""The log of a training with --loss: a short line for each logged step, and every number in metrics.jsonl.

OpenCLIP's loop logs a line with all numbers, and passes the same numbers by name to TensorBoard's writer. `RunLog`
stands in for the writer to receive them, and logs its own line in place of OpenCLIP's.
"""

import logging
import math
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from open_clip_train.distributed import is_master

from open_clip_ext.losses import NonFiniteError
from open_clip_ext.metrics_file import EVAL, FILE, MetricsFile
from open_clip_ext.surrogates import PowerHinge
from training_ext.core.loss import TrainingLoss
from training_ext.feature import Epoch
from training_ext.openclip.hosts import host

# These change or are measured once per epoch, so they are shown in the line at its end.
ONCE = ("gamma", "rho", "unvisited", "queued", "prototypes", "effective_negatives", "negatives_kl")
FEW_WITHIN = 0.01  # of the log-normalizer of a hinge with negatives as similar as their positives


class RunLog:
    """The log of one run, on every process; only process 0 writes.

    Args:
        args: as `params.parse_args` gives them. Without --loss OpenCLIP's lines are logged unchanged.
    """

    def __init__(self, args: Namespace):
        self.args = args
        self._loss: TrainingLoss | None = None
        self.loss_name: str | None = None  # name of the value that this package's loss minimises in this epoch
        self._file: MetricsFile | None = None
        self._full = False
        self._epoch: Epoch | None = None
        self._numbers: dict[str, float] = {}
        self._latest: dict[str, Any] = {}
        self._step = 0  # number of the latest logged step in the epoch
        self._done = 0  # steps of this run in earlier epochs
        self._came_in_at = 0  # step of the present epoch at which this run started
        self._began: float | None = None
        self._since = 0.0  # start of the epoch's steps; after them their duration
        self._last: tuple[int, float] = 0, 0.0  # step and time of the latest line
        self._losses: list[float] = []
        self._has_explained = self._has_warned = False
        self._quiet = False
        self._file_only = False
        self._held: list[tuple[Any, ...]] | None = None

    # Lines of OpenCLIP's main

    def of_main(self, original: Callable, message: Any, *args: Any) -> None:
        """Replaces `logging.info` in OpenCLIP's main."""
        if self._held is not None:
            self._held.append((message, *args))
        elif self._file_only:
            record = logging.LogRecord("root", logging.INFO, "", 0, message, args, None)
            for handler in logging.root.handlers:
                if isinstance(handler, logging.FileHandler):
                    handler.handle(record)
        else:
            original(message, *args)

    def has_model(self, model: torch.nn.Module) -> None:
        """Log the model's size; main then prints its structure and all flags, which go to the file only."""
        if self.args.loss is None or self.args.log_all or self._file_only or not is_master(self.args):
            return
        sizes = [parameter.numel() for parameter in model.parameters()]
        logging.info(f"{self.args.model}: {sum(sizes):,} parameters; its structure and all flags: {self.args.log_path}")
        self._file_only = True

    def has_start(self) -> None:
        """The next lines of main go to the terminal again."""
        self._file_only = False

    def hold(self) -> None:
        """Hold back main's line that an epoch begins, so that the lines before training come first."""
        if self.args.loss is not None and self._held is None:
            self._held = []

    def release(self) -> None:
        """Log the lines that were held back."""
        held, self._held = self._held, None
        for line in held or ():
            logging.info(*line)

    # Lines of OpenCLIP's loop

    def begin(self, loss: TrainingLoss) -> None:
        """Start the log of a training with one of this package's losses."""
        self._loss = loss
        if is_master(self.args) and not self.args.log_all and self.args.save_logs:
            logging.info(f"All numbers are in {self.path}")

    def of_loop(self, original: Callable, message: Any, *args: Any) -> None:
        """Replaces `logging.info` in OpenCLIP's epochs and evaluations."""
        if not self._quiet and (self._epoch is None or self._has_open_clips_lines):
            original(message, *args)

    @property
    def in_epoch(self) -> bool:
        """Whether an epoch of a training with --loss, or of its recovery, is in progress."""
        return self._epoch is not None

    @property
    def _has_open_clips_lines(self) -> bool:
        """Whether OpenCLIP's own lines are logged in place of ours; a recovery has ours only."""
        return self.args.log_all and self._epoch is not None and self._epoch.is_training

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Log no lines of an evaluation that repeats an earlier one."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    @contextmanager
    def epoch(self, epoch: Epoch) -> Iterator[Any]:
        """Log an epoch of OpenCLIP's; yields the `tb_writer` to pass to it."""
        if self.args.loss is None:
            yield epoch.tensorboard
            return
        self._epoch, self._losses, self._step, self._came_in_at = epoch, [], 0, 0
        self._numbers = {}
        if self._loss is not None:
            self.loss_name = self._loss.name
        yield self
        self._done += epoch.steps - self._came_in_at
        self._epoch = None
        if is_master(self.args) and self._losses:
            self._tell_epoch(epoch)

    def steps(self, numbered: Iterable[tuple[int, Any]], first: int) -> Iterator[tuple[int, Any]]:
        """Yield the numbered batches of an epoch; when OpenCLIP asks for the next, the step before is logged.

        Args:
            first: number of the first batch.
        """
        self._since = time.monotonic()
        self._began = self._began or self._since
        self._came_in_at = self._step = first // self.args.accum_freq
        self._last = self._step, self._since
        for item in numbered:
            yield item
            self._write()
        self._since = time.monotonic() - self._since

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """The method of TensorBoard's writer."""
        assert self._epoch is not None
        self._numbers[name.removeprefix("train/")] = value
        self._step = step - self._epoch.first + 1
        if self._epoch.tensorboard is not None:
            self._epoch.tensorboard.add_scalar(name, value, step)

    def _write(self) -> None:
        """Log the step and write its numbers, if OpenCLIP has logged it."""
        if not self._numbers or self._epoch is None:
            return
        epoch, now = self._epoch, time.monotonic()
        global_batch = self.args.batch_size * self.args.accum_freq * self.args.world_size
        step_before, time_before = self._last
        throughput = (self._step - step_before) * global_batch / max(now - time_before, 1e-9)
        self._last = self._step, now
        numbers, self._numbers = self._numbers, {}
        numbers["throughput"] = throughput  # OpenCLIP's samples_per_second covers the last step only
        numbers.setdefault("tau", 1 / numbers[host().scale_name])
        loss = numbers[self.loss_name or "loss"]
        if not math.isfinite(loss):  # with this package's losses an earlier check has named the tensor
            raise NonFiniteError(f"step {epoch.before + self._step}: the loss is {loss}; training cannot continue")
        self._losses.append(loss)
        self._add(
            epoch.stage, epoch.number, self._step, steps=epoch.steps,
            samples=(epoch.before + self._step) * global_batch, **numbers,
        )
        if self._has_open_clips_lines:
            return
        # OpenCLIP 4.x's task loop reports numbers more often than it logs a line.
        if (self._step - 1) % self.args.log_every_n_steps == 0 or self._step == epoch.steps:
            if "normalizer_mse" in numbers and not self._has_explained:
                self._has_explained = True
                logging.info("From here on, error is the estimated log-normalizers' / the minibatch's")
            line = [f"{epoch.title} {self._step}/{epoch.steps}", *self._shown(numbers), self._left(now)]
            logging.info(" ".join(line))

    def _shown(self, numbers: dict[str, float]) -> Iterator[str]:
        yield f"loss {self._losses[-1]:.4g} lr {numbers['lr']:.2g} tau {numbers['tau']:.3g}"
        if "normalizer_mse" in numbers:
            yield f"error {numbers['normalizer_mse']:.2g}/{numbers['minibatch_mse']:.2g}"
        yield f"{numbers['throughput']:.0f}/s"

    def _left(self, now: float) -> str:
        """Estimated time left, at the mean pace so far, with evaluations and checkpoints."""
        assert self._epoch is not None and self._began is not None
        done = self._done + self._step - self._came_in_at
        return f"left {duration((now - self._began) / done * (self._epoch.steps - self._step + self._epoch.ahead))}"

    def _tell_epoch(self, epoch: Epoch) -> None:
        numbers = self._latest
        once = [f"{name} {numbers[name]:.3g}" for name in ONCE if name in numbers]
        mean = sum(self._losses) / len(self._losses)
        logging.info(" ".join([f"{epoch.title} took {duration(self._since)}: mean loss {mean:.4g}", *once]))
        has_hinge = getattr(self.args, "surrogate", None) == PowerHinge.name and epoch.is_training
        if has_hinge and not self._has_warned:
            alpha = max(numbers["alpha_image_mean"], numbers["alpha_text_mean"])
            if alpha < FEW_WITHIN * self.args.margin**self.args.margin_power / numbers["tau"]:
                self._has_warned = True
                logging.warning(
                    f"Hardly any negative is within --margin {self.args.margin:g} of its positive, and the others have "
                    f"no gradient (mean log-normalizer {alpha:.2g}): a small loss says little here"
                )

    # Evaluations

    def evaluated(self, epoch: int, metrics: dict[str, float]) -> None:
        """Write the metrics of the evaluation after `epoch` epochs; on process 0."""
        if self.args.loss is not None:
            self._add(EVAL, epoch, 0, **{name: value for name, value in metrics.items() if name != "epoch"})

    def _add(self, stage: str, epoch: int, step: int, **numbers: Any) -> None:
        self._latest = numbers
        if not self.args.save_logs or self._full:
            return
        try:
            self._file = self._file or MetricsFile(os.path.dirname(self.path))
            self._file.add({"stage": stage, "epoch": epoch, "step": step, "time": round(time.time(), 3), **numbers})
        except OSError as error:  # do not lose the training for a log
            self._full = True
            logging.warning(f"No more lines are added to {self.path}: {error.strerror}")

    @property
    def path(self) -> str:
        """Path of the file with all numbers."""
        return os.path.join(self.args.logs, self.args.name, FILE)

    def close(self) -> None:
        self.release()
        if self._file is not None:
            self._file.close()


def duration(seconds: float) -> str:
    """A duration as short text: 45s, 12m05s, 34h02m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes}m{seconds:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"
