"""Base class of the normalizer-prediction networks (NPN), trained by NeuCLIP's Algorithm 1.

In each step: every T_r steps restart the network; make T_u optimizer steps on its objective (`objectives`) with
embeddings, L and tau fixed; compute alpha. With `npn_joint`, Algorithm 3 instead: the gradients of encoders and network
are taken at the same point, and both make one step. In plain PyTorch: `equations.neuclip_w`.

Readings fixed here, where the paper is silent:

- T_r is the paper's 500 steps, but at most a fifth of a pass over the data if its length is known: with 2 passes
  between restarts the network lags behind the encoders (`docs/results.md`). In the paper 500 steps are 0.11 to 0.19
  passes over CC3M, CC12M and DFN-14M, 0.013 over DFN-192M and 0.0026 over DFN-1B. If a fifth is a single step, every
  step would begin with a new network and nothing would be kept, so T_r is a whole pass (300 generated scenes, batch 64,
  6 epochs: an error of 0.03 instead of 0.14). A resumed training keeps its T_r unless another is given.
- AdaGrad's learning rate is the paper's 1.0 in trainings of at least 77,000 steps, about the paper's shortest, and
  sqrt(steps / 77,000) in shorter ones of known length: AdaGrad's steps shrink with the square root of their number, so
  a short training ends with steps as small as the paper's. At 1.0 a short one fits each batch's own estimates (300 and
  10,000 generated scenes: `docs/settings.md`).
- The optimizer's state is kept across restarts, as a restart writes only the weights; `npn_reset_optimizer` resets it.
- AdaGrad's first step moves every coordinate by the learning rate, however small the gradient is. At a temperature of
  0.01, that of a pretrained model, this makes the network useless: alpha falls to log eps, and the anchors' weights
  exp(L - alpha) rise to their bound, 2.7e5. So if a step's updates raise the network's objective, from the first to the
  last, by more than `npn_max_rise`, they are undone, and AdaGrad's accumulators are multiplied by 4. With features as
  of a pretrained model (positives 0.33, negatives 0.16 +- 0.03, B = 256, m = 1024) the first four steps are undone, and
  from the fifth on 240 to 480 of 512 anchors carry the gradient; otherwise 2 to 10 did. From scratch it does not
  happen: in 16 epochs of 100,000 icons the objective rose in the first step alone, by 2. With `npn_updates` 1 or
  another optimizer nothing is undone. A smaller rate is better still: in 500 further steps a trained model whose tau is
  0.01 lost 1.5 points of R@1 at a rate of 0.08 and 6 at 1.0, 13 if nothing was undone (`docs/settings.md`).
- The network's gradient has Eq. 12's factor tau (Algorithm 1, line 7). AdaGrad and Adam are invariant to a constant
  factor but not to a changing one: their accumulators remember earlier gradients, and without the factor the gradient
  grows as 1 / tau. On 8,000 generated pairs with AdaGrad at 1.0 and two seeds, the error of the log-normalizers without
  the factor is 5 to 33 % larger in epochs 2 to 4 of 5, while tau falls from 0.06 to 0.04; in the last, with tau
  constant, it is 10 % smaller and 8 % larger.
- Every process updates the same network on all B gathered anchors, so no gradient is communicated. At each restart
  process 0 broadcasts its network, against drift between processes whose hardware rounds differently.
- Joint: the network has its own AdamW with a constant learning rate, 1e-3 by default. Algorithm 3 has one AdamW for
  network and encoders, and the paper gives no settings for the network. There is no restart after the first, and T_u
  is 1.
"""

import inspect
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import copy_from_first, rank
from open_clip_ext.normalizers.base import Normalizer
from open_clip_ext.objectives import NETWORK_OBJECTIVES
from open_clip_ext.options import Derived, not_negative, option, positive, refuse_unused

OPTIMIZERS = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}

MOMENTS = {"adagrad": 1, "adam": 2, "adamw": 2, "sgd": 0}  # state values per parameter

HALF_THE_STEP = 4.0  # by which AdaGrad's accumulators are multiplied

PAPER_RESTART_EVERY = 500
PAPER_STEPS = 77_000  # about the paper's shortest training: 320M samples of DFN-14M (Table 1) in batches of 4,096


def adagrad_rate(steps: float) -> float:
    """AdaGrad's default learning rate in a training of so many steps."""
    return min(1.0, math.sqrt(steps / PAPER_STEPS))


class NetworkNormalizer(Normalizer):
    """Base class of the networks.

    A network overrides `_make`, `_named`, `_restart`, `_gradient_setter` and `forward`; and `_extra_state` and
    `_restore_extra` if it has state besides its parameters.
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
        Derived("adagrad for prototypes, adam for mlp, adamw if joint"), "optimizer of the network",
        choices=tuple(OPTIMIZERS), in_state=True,
    )
    npn_lr: float | None = option(
        Derived(
            f"1.0 for prototypes with adagrad, sqrt(steps / {PAPER_STEPS:,}) in trainings of fewer steps; else 1e-3"
        ),
        "learning rate of the network", valid=positive, expected="a number > 0",
    )
    npn_wd: float = option(0.0, "weight decay of the network", valid=not_negative, expected="a number >= 0")
    npn_initial_accumulator: float = option(
        0.0, "initial value of AdaGrad's accumulators; above 0 its first steps are smaller",
        valid=not_negative, expected="a number >= 0",
    )
    npn_reset_optimizer: bool = option(False, "reset the optimizer's state at each restart of the network")
    npn_max_rise: float = option(
        10.0, "undo a step's updates if they raise the network's objective by more, and halve AdaGrad's next ones; "
        "1e30: never, as in the paper",
        valid=not_negative, expected="a number >= 0",
    )
    npn_objective: str = option("unified", "what the network minimizes", choices=tuple(NETWORK_OBJECTIVES))
    npn_joint: bool = option(
        False, "train encoders and network together, one step each, without restarts (Algorithm 3)", in_state=True
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
        self.dimension = 0  # d, once known
        self.optimizer: torch.optim.Optimizer  # made with the parameters
        self.steps = 0
        self.objective_before: Tensor | None = None

    @classmethod
    def _optimizer(cls, name: str | None, lr: float | None, joint: bool) -> tuple[str, float | None]:
        """Fill in the optimizer and its learning rate; None for a rate that follows from the training's length."""
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
            unused = ["npn_initial_accumulator", "npn_max_rise"]
            refuse_unused(given, unused, f"with npn_opt {settings['npn_opt']!r}")

    def set_steps_per_pass(self, steps: int, passes: float | None = None) -> None:
        if self._fits_length and passes is not None:
            self._optimizer_settings["lr"] = adagrad_rate(steps * passes)
            if self.dimension:  # a state was loaded
                for group in self.optimizer.param_groups:
                    group["lr"] = self._optimizer_settings["lr"]
        if self._fits_epoch:
            fifth = steps // 5
            self.restart_every = min(PAPER_RESTART_EVERY, fifth if fifth > 1 else steps)

    def description(self) -> str:
        often = f"every {self.restart_every} steps" if self.restart_every > 0 else "at the first step only"
        return f"{self.name} (restarted {often}, {self.optimizer_name} at {self._optimizer_settings['lr']:.2g})"

    # What a network defines

    def _make(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate parameters and other state for embeddings of `dimension`."""
        raise NotImplementedError

    def _named(self) -> dict[str, Tensor]:
        """The parameters by name, without graph; called after `_make`."""
        raise NotImplementedError

    def _restart(self, batch: Batch) -> None:
        """Overwrite the parameters with new ones."""
        raise NotImplementedError

    def _observe(self, batch: Batch) -> None:
        """Called with each batch, before restarts and updates."""

    def _gradient_setter(self, batch: Batch) -> Callable[[], Tensor]:
        """A function for the updates of one step: it writes the objective's gradient to the parameters' `grad`, or 0 if
        `batch.finite` is False, and returns alpha, (2, B).

        Args:
            batch: from `Batch.or_zeros`, so that its values are finite.
        """
        raise NotImplementedError

    def _extra_state(self) -> dict[str, Tensor]:
        return {}

    def _restore_extra(self, state: dict[str, Tensor]) -> None:
        """Load the result of `_extra_state`."""

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
        restarts = self.steps == 0 or (self.restart_every > 0 and self.steps % self.restart_every == 0)
        if restarts:
            self._restart(batch)
            if self.reset_optimizer:
                self._new_optimizer()
            self._broadcast()
        if restarts and self._is_exact_for(batch):
            self.objective_before = None
            self.optimizer.zero_grad(set_to_none=False)
        elif self.updates > 0:
            self._train(batch.or_zeros())
        self.steps += 1

    def _is_exact_for(self, batch: Batch) -> bool:
        """Whether after a restart alpha equals the batch's own estimate. The gradient is then rounding error, which
        AdaGrad and Adam would scale up to full steps, so that no update is done."""
        return False

    def _train(self, batch: Batch) -> None:
        set_gradient = self._gradient_setter(batch)
        guarded = self.optimizer_name == "adagrad" and self.updates > 1
        before = [parameter.clone() for parameter in self._named().values()] if guarded else []
        for update in range(self.updates):
            alpha = set_gradient()
            if update == 0:
                self.objective_before = self._objective_of(batch, alpha)
            if not self.joint:
                self.optimizer.step()
        if guarded:
            assert self.objective_before is not None
            self._undo_if(self._objective_of(batch, alpha) > self.objective_before + self.npn_max_rise, before)

    def _objective_of(self, batch: Batch, alpha: Tensor) -> Tensor:
        """What the network minimizes, 0-d."""
        return self.objective.value(batch.all_log_batch, alpha).mean(dim=1).sum()

    def _undo_if(self, undo: Tensor, before: list[Tensor]) -> None:
        """Take back the parameters `before` the step's updates and halve AdaGrad's next ones if `undo`, 0-d bool."""
        if undo.device.type == "cpu" and not undo:  # elsewhere a look at it would wait for the device
            return
        for parameter, old in zip(self._named().values(), before, strict=True):
            parameter.copy_(torch.where(undo, old, parameter))
            self.optimizer.state[parameter]["sum"].mul_(torch.where(undo, HALF_THE_STEP, 1.0))

    def _new_optimizer(self) -> None:
        parameters = list(self._named().values())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = OPTIMIZERS[self.optimizer_name]
        settings = dict(self._optimizer_settings)
        # One pass over the memory instead of several. On CUDA torch has a fused Adam, but no fused AdaGrad.
        if parameters[0].device.type == "cpu" and "fused" in inspect.signature(optimizer).parameters:
            settings["fused"] = True
        self.optimizer = optimizer(parameters, **settings)

    def _broadcast(self) -> None:
        for parameter in self._named().values():
            copy_from_first((parameter, *self.optimizer.state[parameter].values()), parameter.device)

    def diagnostics(self, log_batch: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        after = self.objective.value(log_batch, alpha).mean(dim=1).sum()
        name = f"npn_{self.objective.name.replace('-', '_')}"
        shown = {f"{name}_after": after}
        return shown if self.objective_before is None else {f"{name}_before": self.objective_before, **shown}

    # State

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "NetworkNormalizer":
        """Move the optimizer's state together with the parameters (called by `Module.to`)."""
        # An optimizer's count of steps stays in host memory, where it waits for no device.
        state = {
            name: fn(value) if value.is_floating_point() and not name.endswith(":step") else value
            for name, value in self._state().items()
        }
        super()._apply(fn, recurse)
        if state:
            like = state[next(iter(self._named()))]
            self.materialize(self.dimension, like.device, like.dtype)
            self._restore(state)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Pickle drops the gradients of tensors; a joint network's is part of its state."""
        named = self._named() if self.dimension else {}
        return {**self.__dict__, "gradients": {name: parameter.grad for name, parameter in named.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        gradients = state.pop("gradients")
        super().__setstate__(state)
        for name, gradient in gradients.items():
            self._named()[name].grad = gradient

    def full_state(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._state().items()} if rank() == 0 else {}

    def check_state(self, state: dict[str, Tensor], dimension: int) -> None:
        if not state:
            return
        others = {key.split(":")[0] for key in state if ":" in key} - {self.optimizer_name, "pending"}
        if others:
            raise ValueError(f"npn_opt: {self.optimizer_name!r} where the state is of {others.pop()!r}")
        if self.joint != any(key.startswith("pending:") for key in state):
            raise ValueError(f"npn_joint: {self.joint} where the state is of {not self.joint}")

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        if state:
            self._restore(state)

    def _restore(self, state: dict[str, Tensor]) -> None:
        """Load the result of `_state`; copies the tensors."""
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
                # A deep copy of a parameter has no gradient.
                state[f"pending:{name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return {name: value.detach().clone() for name, value in (state | self._extra_state()).items()}
