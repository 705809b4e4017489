"""An optimizer group for the temperature, with a learning rate of its own (`--lr-tau`)."""

import math
from argparse import Namespace
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from open_clip_ext import factory

LOW_TAU = 0.03  # FastCLIP's schedule: below it the temperature's learning rate is a third
LOW_TAU_FACTOR = 1 / 3
CHECK_EVERY = 100  # steps between readings of tau, which wait for the device


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, if FSDP shards it; then every process must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trains_logit_scale(args: Namespace) -> bool:
    """Whether this package's loss learns the temperature as the model's parameter; False for OpenCLIP's losses."""
    return args.uses_ext_loss and _has(args, "trains_logit_scale")


def train_temperature(model: torch.nn.Module, args: Namespace) -> None:
    """Freeze the model's temperature and its bias, unless the loss, one of this package's, learns them."""
    if not _has(args, "trains_logit_scale"):
        model.logit_scale.requires_grad_(False)
    if getattr(model, "logit_bias", None) is not None and not _has(args, "takes_bias"):
        model.logit_bias.requires_grad_(False)


def _has(args: Namespace, attribute: str) -> bool:
    return any(getattr(part, attribute, False) for part in factory.parts_of(args.loss, vars(args)))


class TemperatureGroup:
    """Moves `logit_scale` from OpenCLIP's groups to a last one of its own, without weight decay.

    OpenCLIP logs the learning rate of the first group, so the model's groups keep their places. Unmodified OpenCLIP
    cannot `--resume` an optimizer with the extra group.

    Args:
        optimizer: OpenCLIP's, before its first step.
        logit_scale: the model's parameter, log(1 / tau).
        lr: `--lr-tau`.
        schedule: `model`: the model's schedule, scaled; `fastclip`: no warm-up and no decay, but a third of `lr` while
            tau <= 0.03, checked every 100 steps.
        model_lr: `--lr`, the peak of the model's schedule.
    """

    def __init__(
        self, optimizer: Optimizer, logit_scale: torch.nn.Parameter, lr: float, schedule: str, model_lr: float
    ):
        self.logit_scale = logit_scale
        self.lr = lr
        self.schedule = schedule
        self.model_lr = model_lr
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter is not logit_scale]
        # `steps` and `tau_is_low` are in the optimizer's state, so that a resumed run equals an uninterrupted one.
        optimizer.add_param_group({"params": [logit_scale], "weight_decay": 0.0, "lr": lr, "steps": 0})
        self._optimizer = optimizer
        self.group["tau_is_low"] = self._tau_is_low()
        self.group["lr"] *= self._factor
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    @property
    def group(self) -> dict:
        """The group; looked up each time, since load_state_dict replaces it."""
        return self._optimizer.param_groups[-1]

    def _tau_is_low(self) -> bool:
        return whole(self.logit_scale.detach()).item() >= -math.log(LOW_TAU)

    def begin(self, skips_scheduler: bool) -> None:
        """Follow what was loaded after the group was made: before its first step the temperature, then its state."""
        if self.group["steps"] == 0:
            self.group["tau_is_low"] = self._tau_is_low()
        if self.group["steps"] == 0 or skips_scheduler:  # nobody calls `assign`
            self._set_rate()

    def _set_rate(self) -> None:
        self.group["lr"] = self.lr * self._factor

    def _after_step(self) -> None:
        self.group["steps"] += 1
        if self.schedule == "fastclip" and self.group["steps"] % CHECK_EVERY == 0:
            self.group["tau_is_low"] = self._tau_is_low()
            if self.group["lr"] != 0:  # where a recovery holds it
                self._set_rate()

    @property
    def _factor(self) -> float:
        return LOW_TAU_FACTOR if self.schedule == "fastclip" and self.group["tau_is_low"] else 1.0

    def assign(self, original: Callable[[Optimizer, float], None], optimizer: Optimizer, new_lr: float) -> None:
        """Replaces OpenCLIP's assign_learning_rate: `new_lr` for the model, the schedule's rate for the temperature."""
        original(optimizer, new_lr)
        if self.schedule == "model":
            self.group["lr"] = new_lr * self.lr / (self.model_lr or 1.0)  # of 0, every rate of the schedule is 0
        else:
            self.group["lr"] = self.lr * self._factor
