"""Optimizer statistics recovery (OSR), TuneCLIP's first stage: TuneCLIP, Section 4.1, Algorithm 1.

A pretrained model comes without the state of its optimizer. Started from zero, Adam's moments and the moving averages
of the normalizers are wrong at first, and the first epoch of fine-tuning makes the model worse. So E epochs go over the
data with the weights standing still at omega_0 and move only

    u_i <- (1 - gamma) u_i + gamma Phi(omega_0, i, B)    (n, 2): one per sample and side, kept by the loss as log u
    m <- beta_1 m + (1 - beta_1) g                       as each parameter
    v <- beta_2 v + (1 - beta_2) g^2                     as each parameter

Phi(omega, i, B) = (1 / |B|) sum over j != i in B of exp(l(s_ij - s_ii) / tau) (before Eq. 2; l is a hinge in
Algorithm 2) is the loss's own estimate of anchor i's normalizer from the batch, g the gradient that the loss gives with
u (Eq. 4).

They are OpenCLIP's own epochs with every learning rate 0, at which AdamW moves nothing but the sign of a zero; that is
checked after the first step and after each epoch, and zeros and BatchNorm's buffers are put back, so that model and
buffers are what they were to the last bit. What is recovered is whatever the loss keeps (a table, a network,
temperatures' momentum), and with OpenCLIP's own losses the moments alone.

Readings fixed here:

- Adam's step counter goes with the moments. m and v are sums over t steps, which bias correction divides by
  1 - beta^t; a counter reset to 0 would multiply the recovered m by 1 / (1 - beta_1) = 10 in the first step.
- The loss's schedules (gamma) run on one clock from the start of the recovery; a broken epoch counts as a whole one.
- The recovery's data come in other orders than those of the training's epochs.
- Phi divides by B - 1, the number of negatives, as everywhere here. The paper divides by B; the factor (B - 1) / B, the
  same for all samples, cancels in the gradients but for eps.
"""

import hashlib
import logging
import os
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import islice
from math import ceil, floor
from typing import Any

import torch
from open_clip_train.distributed import broadcast_object
from torch import Tensor

from open_clip_ext.errors import InputError
from open_clip_ext.losses import NonFiniteError
from training_ext import recovered
from training_ext.checkpoint import keeps_files, plain_name
from training_ext.data import DataRows
from training_ext.loss import TrainingLoss, build_loss

FIRST_EPOCH = 1 << 20  # the recovery's epochs are numbered from here, where numbers seed the order of the data
OPEN_CLIPS_LINE = re.compile(r"Train Epoch: (?P<epoch>\d+) (?P<rest>\[ *(?P<seen>\d+)/(?P<of>\d+) .*)")
UNFINISHED = "recovery.state"  # in the experiment's folder; not *.pt, which `--resume latest` would pick


class StandingWeights:
    """A copy, on the host, of what must be the same after the recovery."""

    def __init__(self, model: torch.nn.Module):
        self._parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        self._now = {plain_name(name): tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
        self._then = {name: tensor.to("cpu", copy=True) for name, tensor in self._now.items()}

    @torch.no_grad()
    def restore(self) -> str | None:
        """Put everything back to the last bit; the first parameter whose value had moved, or None."""
        first_moved = None
        for name, tensor in self._now.items():
            now, then = tensor.cpu(), self._then[name]
            if torch.equal(_bits(now), _bits(then)):
                continue
            # p - 0 * update turns -0.0 into 0.0
            if name in self._parameters and not torch.equal(now, then):
                first_moved = first_moved or name
            tensor.copy_(then)
        return first_moved

    def digest(self) -> str:
        total = hashlib.sha256()
        for name, tensor in sorted(self._then.items()):
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            total.update(_bits(tensor).numpy().data)
        return total.hexdigest()[:16]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


class ShortLoader:
    """The first `num_batches` batches of a train loader.

    Args:
        loader: with `num_batches` and `num_samples`.
        after_step: called when the optimizer has made its first step.
    """

    def __init__(self, loader: Any, num_batches: int, accum_freq: int, after_step: Callable[[], None]):
        self.num_samples = round(loader.num_samples * num_batches / loader.num_batches)
        self.num_batches = num_batches
        self._loader = loader
        self._accum_freq = accum_freq
        self._after_step = after_step

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(islice(self._loader, self.num_batches - getattr(self._loader, "first", 0))):
            if number == self._accum_freq:
                self._after_step()
            yield batch

    def __len__(self) -> int:
        return self.num_batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class ShownProgress(logging.Filter):
    """OpenCLIP's log lines during the recovery say so, and how long it still takes."""

    def __init__(self, steps: list[int], done: int):
        super().__init__()
        self.steps = steps
        self.epoch = self._first = done
        self._started = time.monotonic()

    def filter(self, record: logging.LogRecord) -> bool:
        line = OPEN_CLIPS_LINE.fullmatch(str(record.msg))
        if line and int(line["epoch"]) == FIRST_EPOCH + self.epoch:
            left = self._left(min(1.0, int(line["seen"]) / int(line["of"])))
            record.msg = f"Recovery Epoch: {self.epoch + 1}/{len(self.steps)} {line['rest']} Left: {left}"
        return True

    def _left(self, part: float) -> timedelta:
        """The time still needed when `part` of the epoch is done."""
        done = sum(self.steps[self._first : self.epoch]) + part * self.steps[self.epoch]
        left = sum(self.steps[self._first :]) - done
        return timedelta(seconds=round((time.monotonic() - self._started) * left / done))


class StatisticsRecovery:
    """Recovers, saves and hands over the optimizer's and the loss's statistics of a model that stands still.

    Args:
        args: as `params.parse_args` gives them, completed by OpenCLIP.
        rows: of the train data.
        loss: ours, or None for OpenCLIP's own.
        model, optimizer, scaler: as OpenCLIP trains them.
    """

    def __init__(
        self,
        args: Namespace,
        rows: DataRows,
        loss: TrainingLoss | None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: Any,
    ):
        self.args = args
        self.rows = rows
        self.loss = loss
        self.optimizer = optimizer
        self.scaler = scaler
        self.weights = StandingWeights(model)
        self.names: dict[Tensor, str] = {parameter: plain_name(name) for name, parameter in model.named_parameters()}

    # Algorithm 1

    def recover(self, run_epoch: Callable[..., None], loader: Any) -> None:
        """Run the epochs that are left and save what they recover.

        Args:
            run_epoch: OpenCLIP's epoch over a loader, by the epoch's number, with no schedule of learning rates; with
                the last two arguments of `midepoch.Interruptions.epoch`.
            loader: the train loader.
        """
        lengths = self._lengths(loader)
        saved = self._resume()
        done = 0 if saved is None else saved["done"]
        progress = ShownProgress(lengths, done)
        with self._standing_still(), _filtered(progress):
            for epoch in range(done, len(lengths)):
                progress.epoch = epoch
                if self.loss is not None:
                    self.loss.loss.set_epoch(epoch)
                short = ShortLoader(loader, lengths[epoch], self.args.accum_freq, self._check)
                run_epoch(short, FIRST_EPOCH + epoch, saved, partial(self._save_within, epoch))
                saved = None
                self._check()
                self._save(self._unfinished, epoch + 1)
        if self.args.osr_save:
            self._save(self.args.osr_save, len(lengths))

    def _lengths(self, loader: Any) -> list[int]:
        """Batches of each epoch: whole ones, and what is left of --osr-epochs, at least one step."""
        accum_freq = self.args.accum_freq
        whole = loader.num_batches // accum_freq * accum_freq
        rest = round((self.args.osr_epochs - floor(self.args.osr_epochs)) * whole / accum_freq) * accum_freq
        lengths = [whole] * floor(self.args.osr_epochs)
        if len(lengths) < ceil(self.args.osr_epochs):
            lengths.append(max(rest, accum_freq))
        return lengths

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        """Every learning rate 0; what the groups hold besides a step counter is put back after."""
        groups = self.optimizer.param_groups
        kept = [{name: value for name, value in group.items() if name not in ("params", "step")} for group in groups]
        for group in groups:
            group["lr"] = 0.0
        if self.loss is not None:
            self.loss.loss.hold_temperatures(True)
        try:
            yield
        finally:
            for group, values in zip(groups, kept, strict=True):
                group.update(values)
            if self.loss is not None:
                self.loss.loss.hold_temperatures(False)

    def _check(self) -> None:
        if self.loss is not None:
            self.loss.loss.raise_if_not_finite()
        for parameter, state in self.optimizer.state.items():
            for name, moment in state.items():
                if torch.is_tensor(moment) and not moment.isfinite().all():
                    raise NonFiniteError(
                        f"recovery of statistics: {name} of {self.names[parameter]} is not finite; the data or the "
                        "pretrained weights have a NaN or an infinity"
                    )
        instead = "so that statistics of standing weights cannot be recovered; use adamw, or --osr-epochs 0"
        if name := self.weights.restore():
            raise InputError(f"--opt: {self.args.opt} moves the weights ({name}) at learning rate 0, {instead}")
        first_moments = [state["exp_avg"] for state in self.optimizer.state.values() if "exp_avg" in state]
        # Without a gradient, as where a hinge leaves nothing to do, 0 is right.
        has_gradient = any(parameter.grad is not None and parameter.grad.any() for parameter in self.names)
        if first_moments and has_gradient and not any(moment.any() for moment in first_moments):
            raise InputError(f"--opt: the moments of {self.args.opt} stay 0 at learning rate 0, {instead}")

    # What the training takes over

    def hand_over(self) -> None:
        """Keep of what was recovered or loaded what --osr-transfer says; the rest is as if never recovered."""
        transfer = self.args.osr_transfer
        if transfer not in ("both", "moments"):
            self.optimizer.state.clear()
            for group in self.optimizer.param_groups:
                group.pop("step", None)
        if self.loss is not None and transfer not in ("both", "table"):
            del self.loss.loss  # two tables at a time may be one too many
            self.loss.loss = build_loss(self.args, self.rows.num_rows, self.args.device)

    # Files

    @property
    def _unfinished(self) -> str | None:
        """Where an interrupted recovery goes on from; None if the run keeps nothing."""
        return unfinished_path(self.args)

    def identity(self) -> dict[str, str]:
        trained = hashlib.sha256(" ".join(self._trained()).encode()).hexdigest()
        return {
            **recovered.identity(self.args, self.rows),
            "weights": f"digest {self.weights.digest()}",
            "trained parameters": f"{len(self._trained())}, digest {trained[:16]}",
        }

    def _trained(self) -> list[str]:
        """Names of the parameters in the optimizer's order."""
        return [self.names[p] for group in self.optimizer.param_groups for p in group["params"]]

    def _save_within(self, epoch: int, place: dict[str, Any]) -> None:
        self._check()
        self._save(self._unfinished, epoch, **place)

    def _save(self, path: str | None, done: int, **place: Any) -> None:
        """Every process calls it; process 0 writes.

        Args:
            done: whole epochs.
            place: within the next, as in `midepoch`.
        """
        if path is None:
            return
        state = self.loss.loss.full_state() if self.loss is not None else {}
        if self.args.rank != 0:
            return
        content = {
            "identity": self.identity(),
            "settings": recovered.settings(self.args),
            "epochs": self.args.osr_epochs,
            "done": done,
            "moments": {self.names[p]: dict(moments) for p, moments in self.optimizer.state.items()},
            "group_steps": [group["step"] for group in self.optimizer.param_groups if "step" in group],
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "loss_state": state,
            **place,
        }
        recovered.save(path, content)

    def load(self, path: str, flag: str = "--osr-load") -> dict[str, Any]:
        """Take over a file; what it says of how far the recovery went.

        Raises:
            InputError: it is of another model, data set, loss or optimizer.
        """
        content = recovered.read(path, flag)
        recovered.check(content, self.identity(), path, flag)
        if self.args.rank == 0:
            recovered.tell_differences(content, self.args, path)
        own = self.optimizer.state_dict()
        moments = content["moments"]
        own["state"] = {number: moments[name] for number, name in enumerate(self._trained()) if name in moments}
        for group, step in zip(own["param_groups"], content["group_steps"], strict=False):
            group["step"] = step
        self.optimizer.load_state_dict(own)
        if self.scaler is not None and content["scaler"]:
            self.scaler.load_state_dict(content["scaler"])
        if self.loss is not None:
            self.loss.loss.load_full_state(content["loss_state"])
        return {name: content.get(name) for name in ("done", "order", "position")}

    def _resume(self) -> dict[str, Any] | None:
        """What an interrupted run of this experiment has saved."""
        path = self._unfinished
        found = path is not None and os.path.exists(path)
        if self.args.distributed:
            found = broadcast_object(self.args, found)
        if path is None or not found:
            return None
        epochs = recovered.read(path, "--resume")["epochs"]
        if epochs != self.args.osr_epochs:
            raise InputError(
                f"--osr-epochs: {self.args.osr_epochs:g} where the interrupted recovery {path!r} has {epochs:g}; give "
                "that, or remove the file"
            )
        saved = self.load(path, "--resume")
        logging.info(f"=> resuming the recovery of statistics from '{path}' (epoch {saved['done']} of {ceil(epochs)})")
        return saved


def unfinished_path(args: Namespace) -> str | None:
    return os.path.join(args.logs, args.name, UNFINISHED) if keeps_files(args) else None


def remove_unfinished(args: Namespace) -> None:
    """The training's own checkpoint has come."""
    path = unfinished_path(args)
    if args.rank == 0 and path is not None:
        with suppress(FileNotFoundError):
            os.remove(path)


@contextmanager
def _filtered(filter_: logging.Filter) -> Iterator[None]:
    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(filter_)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(filter_)
