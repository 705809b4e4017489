"""A normalizer-prediction network (NPN): what NeuCLIP's Algorithm 1 does with any network.

Each step: every T_r steps a restart; T_u optimiser steps on the network's objective (`objectives`) with embeddings, L
and tau held fixed; then alpha. With `npn_joint`, Algorithm 3 instead: the encoders' gradient and the network's are
taken at the same point, and both move by one step. As printed: `equations.neuclip_w`.

Readings fixed here, where the paper is silent:

- T_r is the paper's 500 steps, which are 0.11 to 0.19 passes over CC3M, CC12M and DFN-14M, 0.013 over DFN-192M and
  0.0026 over DFN-1B, but at most a fifth of a pass where its length is known: with 2 passes between restarts the
  network lags behind the encoders (`docs/results.md`). A fifth that is a single step would leave no network to train:
  then T_r is a whole pass (300 generated scenes, batch 64, 6 epochs: an error of 0.03 in place of 0.14). What a
  training began with it keeps, from checkpoint to checkpoint, unless another is given.
- AdaGrad's rate is the paper's 1.0 in trainings of 77,000 steps and more, as all of the paper's are, and
  sqrt(steps / 77,000) in shorter ones where their length is known: its steps shrink with the root of their number, so
  that a short training ends with steps as small as the paper's. At 1.0 a short one fits each batch's own estimates
  (300 and 10,000 generated scenes: `docs/settings.md`).
- The optimiser's state is kept across restarts, as a restart that only writes the weights does; `npn_reset_optimizer`
  forgets it.
- The network's gradient has Eq. 12's factor tau (Algorithm 1, line 7). AdaGrad and Adam are blind to a constant
  factor, not to one that moves: their accumulators remember earlier gradients, and without the factor the gradient
  grows as 1 / tau. On 8,000 generated pairs, AdaGrad at 1.0, two seeds: while tau falls from 0.06 to 0.04, in epochs
  2 to 4 of 5, the error of the log-normalizers is 5 to 33 % larger without it; in the last, where tau stands, 10 %
  smaller and 8 % larger.
- Every process updates the same network on all B anchors: the gathered embeddings are at hand, so that no gradient
  travels. At each restart process 0 sends its network, so that processes whose hardware rounds otherwise do not drift
  apart.
- Joint: an AdamW of the network's own with a constant learning rate, 1e-3 unless told otherwise. AdamW treats each
  number alone, so that it and the encoders' together are one AdamW. There are no restarts after the first, and T_u = 1.
"""

import inspect
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import rank, world_size
from open_clip_ext.normalizers.base import Normalizer
from open_clip_ext.objectives import NETWORK_OBJECTIVES
from open_clip_ext.options import Derived, not_negative, option, positive, refuse_unused

OPTIMIZERS = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}

MOMENTS = {"adagrad": 1, "adam": 2, "adamw": 2, "sgd": 0}  # numbers that each keeps per parameter

PAPER_RESTART_EVERY = 500
PAPER_STEPS = 77_000  # of the paper's shortest training, 23 epochs of 13.7M pairs in batches of 4,096


class NetworkNormalizer(Normalizer):
    """Base of the networks.

    A network overrides `_make`, `_named`, `_restart`, `_gradient_setter` and `forward`, and `_extra_state` and
    `_restore_extra` if it keeps more than parameters.
    """

    differentiable = True
    default_optimizer = "adam"
    npn_restart_every: int | None = option(
        Derived(f"{PAPER_RESTART_EVERY}, at most a fifth of a pass over the data"),
        "T_r, steps between restarts of the network; 0: never after the first",
        valid=not_negative, expected="at least 0",
    )
    npn_updates: int = option(10, "T_u, updates of the network per step", valid=not_negative, expected="at least 0")
    npn_opt: str | None = option(
        Derived("adagrad for prototypes, adam for mlp, adamw if joint"), "optimiser of the network",
        choices=tuple(OPTIMIZERS), in_state=True,
    )
    npn_lr: float | None = option(
        Derived(
            f"1.0 for prototypes by adagrad, but sqrt(steps / {PAPER_STEPS:,}) in trainings of fewer steps; else 1e-3"
        ),
        "learning rate of the network", valid=positive, expected="a number > 0",
    )
    npn_wd: float = option(0.0, "weight decay of the network", valid=not_negative, expected="a number >= 0")
    npn_initial_accumulator: float = option(
        0.0, "start of AdaGrad's accumulators; above 0 its first steps are smaller",
        valid=not_negative, expected="a number >= 0",
    )
    npn_reset_optimizer: bool = option(False, "forget the optimiser's state at each restart of the network")
    npn_objective: str = option("unified", "what the network minimises", choices=tuple(NETWORK_OBJECTIVES))
    npn_joint: bool = option(
        False, "one step on the encoders and the network together, no restarts", in_state=True
    )

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._fits_epoch = self.npn_restart_every is None and not self.npn_joint
        self.restart_every = PAPER_RESTART_EVERY if self.npn_restart_every is None else self.npn_restart_every
        if self.npn_joint:
            self.restart_every = 0
        self.updates = 1 if self.npn_joint else self.npn_updates
        self.optimizer_name, lr = self._optimizer(self.npn_opt, self.npn_lr, self.npn_joint)
        self.reset_optimizer = self.npn_reset_optimizer
        self.objective = NETWORK_OBJECTIVES[self.npn_objective]
        self.joint = self.npn_joint
        self._fits_length = lr is None
        self._optimizer_settings = dict(lr=1.0 if lr is None else lr, weight_decay=self.npn_wd)
        if self.optimizer_name == "adagrad":
            self._optimizer_settings["initial_accumulator_value"] = self.npn_initial_accumulator
        self.dimension = 0  # d, once there is a state
        self.optimizer: torch.optim.Optimizer  # made with the parameters
        self.steps = 0
        self.objective_before: Tensor | None = None

    @classmethod
    def _optimizer(cls, name: str | None, lr: float | None, joint: bool) -> tuple[str, float | None]:
        """The optimiser and its learning rate, from what is given of them; None for one that fits the training."""
        name = name or ("adamw" if joint else cls.default_optimizer)
        return name, lr or (None if name == cls.default_optimizer == "adagrad" else 1e-3)

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, given: Collection[str]) -> None:
        if settings["npn_joint"]:
            names = ("npn_updates", "npn_restart_every", "npn_reset_optimizer")
            refuse_unused(given, names, "with npn_joint")
        elif settings["npn_restart_every"] == 0:
            refuse_unused(given, ["npn_reset_optimizer"], "where the network never restarts")
        joint = settings["npn_joint"]
        settings["npn_opt"], settings["npn_lr"] = cls._optimizer(settings["npn_opt"], settings["npn_lr"], joint)
        if settings["npn_opt"] != "adagrad":
            refuse_unused(given, ["npn_initial_accumulator"], f"with npn_opt {settings['npn_opt']!r}")

    def set_steps_per_epoch(self, steps: int, epochs: int | None = None) -> None:
        if self._fits_length and epochs is not None:
            self._optimizer_settings["lr"] = min(1.0, math.sqrt(steps * epochs / PAPER_STEPS))
        if self._fits_epoch:
            fifth = steps // 5
            self.restart_every = min(PAPER_RESTART_EVERY, fifth if fifth > 1 else steps)

    def description(self) -> str:
        often = f"every {self.restart_every} steps" if self.restart_every > 0 else "at the first step only"
        return f"{self.name} (restarted {often}, {self.optimizer_name} at {self._optimizer_settings['lr']:.2g})"

    # What a network is

    def _make(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make parameters and whatever else is kept for embeddings of `dimension`."""
        raise NotImplementedError

    def _named(self) -> dict[str, Tensor]:
        """The parameters by name, without graph, once they are made."""
        raise NotImplementedError

    def _restart(self, batch: Batch) -> None:
        """Write the parameters anew."""
        raise NotImplementedError

    def _observe(self, batch: Batch) -> None:
        """See each batch, before restarts and updates."""

    def _gradient_setter(self, batch: Batch) -> Callable[[], Tensor]:
        """For the updates of a step, what writes the objective's gradient to the parameters' `grad`, 0 if the batch is
        not finite, and returns alpha, (2, B).

        The batch comes here finite in any case (`Batch.or_zeros`).
        """
        raise NotImplementedError

    def _extra_state(self) -> dict[str, Tensor]:
        return {}

    def _restore_extra(self, state: dict[str, Tensor]) -> None:
        """Take over what `_extra_state` gave."""

    # Algorithms 1 and 3

    def materialize(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        self._make(dimension, device, dtype)
        self.dimension = dimension
        self._new_optimizer()

    @torch.no_grad()
    def update(self, batch: Batch) -> None:
        if self.joint and self.steps > 0:
            self.optimizer.step()
        self._observe(batch)
        if self.steps == 0 or (self.restart_every > 0 and self.steps % self.restart_every == 0):
            self._restart(batch)
            if self.reset_optimizer:
                self._new_optimizer()
            self._broadcast()
        if self.updates > 0:
            self._train(batch.or_zeros())
        self.steps += 1

    def _train(self, batch: Batch) -> None:
        set_gradient = self._gradient_setter(batch)
        for update in range(self.updates):
            alpha = set_gradient()
            if update == 0:
                self.objective_before = self.objective.value(batch.all_log_batch, alpha).mean(dim=1).sum()
            if not self.joint:
                self.optimizer.step()

    def _new_optimizer(self) -> None:
        parameters = list(self._named().values())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = OPTIMIZERS[self.optimizer_name]
        settings = dict(self._optimizer_settings)
        # One pass over the memory in place of several. On CUDA torch has it for Adam, but not for AdaGrad.
        if parameters[0].device.type == "cpu" and "fused" in inspect.signature(optimizer).parameters:
            settings["fused"] = True
        self.optimizer = optimizer(parameters, **settings)

    def _broadcast(self) -> None:
        if world_size() == 1:
            return
        for parameter in self._named().values():
            for tensor in (parameter, *self.optimizer.state[parameter].values()):
                if tensor.device == parameter.device:
                    dist.broadcast(tensor, 0)

    def diagnostics(self, log_batch: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        after = self.objective.value(log_batch, alpha).mean(dim=1).sum()
        name = f"npn_{self.objective.name.replace('-', '_')}"
        shown = {f"{name}_after": after}
        return shown if self.objective_before is None else {f"{name}_before": self.objective_before, **shown}

    # State

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "NetworkNormalizer":
        """Of `Module.to`: the optimizer's state goes with the parameters."""
        state = {name: fn(value) if value.is_floating_point() else value for name, value in self._state().items()}
        super()._apply(fn, recurse)
        if state:
            like = next(value for value in state.values() if value.is_floating_point())
            self.materialize(self.dimension, like.device, like.dtype)
            self._restore(state)
        return self

    def full_state(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._state().items()} if rank() == 0 else {}

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        if not state:
            return
        others = {key.split(":")[0] for key in state if ":" in key} - {self.optimizer_name, "pending"}
        if others:
            raise ValueError(f"npn_opt: {self.optimizer_name!r} where the state is of {others.pop()!r}")
        if self.joint != any(key.startswith("pending:") for key in state):
            raise ValueError(f"npn_joint: {self.joint} where the state is of {not self.joint}")
        self._restore(state)

    def _restore(self, state: dict[str, Tensor]) -> None:
        """Take over what `_state` gave; the caller's tensors stay its own."""
        self._restore_extra(state)
        self.steps = int(state["steps"])
        if self._fits_epoch:
            self.restart_every = int(state["restart_every"])
        moments: dict[int, dict[str, Tensor]] = {}
        for i, (name, parameter) in enumerate(self._named().items()):
            parameter.copy_(state[name])
            if self.joint:
                assert parameter.grad is not None
                parameter.grad.copy_(state[f"pending:{name}"])
            prefix = f"{self.optimizer_name}:{name}:"
            own = {key.removeprefix(prefix): v.clone() for key, v in state.items() if key.startswith(prefix)}
            if own:
                moments[i] = own
        if moments:
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})

    def _state(self) -> dict[str, Tensor]:
        if not self.dimension:
            return {}
        parameters = self._named()
        numbers = {"steps": self.steps, "restart_every": self.restart_every}
        state = {name: torch.tensor(number) for name, number in numbers.items()} | parameters
        for name, parameter in parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                state[f"{self.optimizer_name}:{name}:{key}"] = value
            if self.joint:
                assert parameter.grad is not None
                state[f"pending:{name}"] = parameter.grad
        return {name: value.detach().clone() for name, value in (state | self._extra_state()).items()}
