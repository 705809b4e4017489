"""The normalizer-prediction network (NPN), trained by NeuCLIP's Algorithm 1: prototypes or an MLP.

In each step: every T_r steps restart the network; make T_u optimizer steps on its objective (`objectives`) with
embeddings, L and tau fixed; compute alpha. With `npn_joint`, Algorithm 3 instead: the gradients of encoders and network
are taken at the same point, and both make one step. In plain PyTorch: `equations.neuclip_w`.

Readings fixed here, where the paper is silent, with the measurements in `docs/evidence/flags.md`:

- T_r is the paper's 500 steps, but at most a fifth of a pass over the data if its length is known: with 2 passes
  between restarts the network lags behind the encoders. If a fifth is a single step, every step would begin with a new
  network and nothing would be kept, so T_r is a whole pass. A resumed training keeps its T_r unless another is given.
- AdaGrad's learning rate is the paper's 1.0 in trainings of at least 77,000 steps, about the paper's shortest, and
  sqrt(steps / 77,000) in shorter ones of known length: AdaGrad's steps shrink with the square root of their number, so
  a short training ends with steps as small as the paper's.
- The optimizer's state is kept across restarts, as a restart writes only the weights; `npn_reset_optimizer` resets it.
- AdaGrad's first step moves every coordinate by the learning rate, however small the gradient is. At the temperature of
  a pretrained model this makes the network useless: alpha falls to log eps, and the anchors' weights exp(L - alpha)
  rise to their bound. So if a step's updates raise the network's objective, from the first to the last, by more than
  `npn_max_rise`, they are undone, and AdaGrad's accumulators are multiplied by 4. With `npn_updates` 1 or another
  optimizer nothing is undone.
- The network's gradient has Eq. 12's factor tau (Algorithm 1, line 7). AdaGrad and Adam are invariant to a constant
  factor but not to a changing one: their accumulators remember earlier gradients, and without the factor the gradient
  grows as 1 / tau.
- Every process updates the same network on all B gathered anchors, so no gradient is communicated. At each restart
  process 0 broadcasts its network, against drift between processes whose hardware rounds differently.
- Joint: the network has its own AdamW with a constant learning rate, 1e-3 by default. Algorithm 3 has one AdamW for
  network and encoders, and the paper gives no settings for the network. There is no restart after the first, and T_u
  is 1.
"""

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import on_first
from open_clip_ext.normalizers.base import Normalizer
from open_clip_ext.objectives import NETWORK_OBJECTIVES
from open_clip_ext.options import AT_LEAST_0, NOT_NEGATIVE, POSITIVE, Derived, option, refuse_unused
from open_clip_ext.side_model import OPTIMIZERS, SideModel

HALF_THE_STEP = 4.0  # by which AdaGrad's accumulators are multiplied

PAPER_RESTART_EVERY = 500
PAPER_STEPS = 77_000  # about the paper's shortest training: 320M samples of DFN-14M (Table 1) in batches of 4,096


def adagrad_rate(steps: float) -> float:
    """AdaGrad's default learning rate in a training of so many steps."""
    return min(1.0, math.sqrt(steps / PAPER_STEPS))


class NPN(Normalizer):
    """Base class of the networks, which override `_make`, `_restart`, `_updates` and `forward`."""

    differentiable = True
    default_optimizer = "adam"
    npn_restart_every: int | None = option(
        Derived(f"{PAPER_RESTART_EVERY}, at most a fifth of a pass over the data"),
        "T_r, steps between restarts of the network; 0: never after the first", **AT_LEAST_0,
    )
    npn_updates: int = option(10, "T_u, updates of the network per step", **AT_LEAST_0)
    npn_opt: str | None = option(
        Derived("adagrad for prototypes, adam for mlp, adamw if joint"), "optimizer of the network",
        choices=tuple(OPTIMIZERS), in_state=True,
    )
    npn_lr: float | None = option(
        Derived(
            f"1.0 for prototypes with adagrad, sqrt(steps / {PAPER_STEPS:,}) in trainings of fewer steps; else 1e-3"
        ),
        "learning rate of the network", **POSITIVE,
    )
    npn_wd: float = option(0.0, "weight decay of the network", **NOT_NEGATIVE)
    npn_initial_accumulator: float = option(
        0.0, "initial value of AdaGrad's accumulators; above 0 its first steps are smaller", **NOT_NEGATIVE
    )
    npn_reset_optimizer: bool = option(False, "reset the optimizer's state at each restart of the network")
    npn_max_rise: float = option(
        10.0, "undo updates that raise the objective by more, halve the next; 1e30: never (the paper)", **NOT_NEGATIVE
    )
    npn_objective: str = option("unified", "what the network minimizes", choices=tuple(NETWORK_OBJECTIVES))
    npn_joint: bool = option(
        False, "one step for encoders and network together, without restarts (Algorithm 3)", in_state=True
    )

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._fits_epoch = self.npn_restart_every is None and not self.npn_joint
        self.restart_every = PAPER_RESTART_EVERY if self.npn_restart_every is None else self.npn_restart_every
        if self.npn_joint:
            self.restart_every = 0
        self.updates = 1 if self.npn_joint else self.npn_updates
        self.optimizer_name, lr = self._optimizer(self.npn_opt, self.npn_lr, self.npn_joint)
        self.objective = NETWORK_OBJECTIVES[self.npn_objective]
        self._fits_length = lr is None
        self._settings = dict(lr=1.0 if lr is None else lr, weight_decay=self.npn_wd)
        if self.optimizer_name == "adagrad":
            self._settings["initial_accumulator_value"] = self.npn_initial_accumulator
        self.network: SideModel  # known with the first batch
        self.split = False  # whether each process has a part of the parameters
        self.steps = 0
        self.objective_before: Tensor | None = None

    @classmethod
    def _optimizer(cls, name: str | None, lr: float | None, joint: bool) -> tuple[str, float | None]:
        """Fill in the optimizer and its learning rate; None for a rate that follows from the training's length."""
        name = name or ("adamw" if joint else cls.default_optimizer)
        return name, lr or (None if name == cls.default_optimizer == "adagrad" else 1e-3)

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, explicit: Collection[str]) -> None:
        if settings["npn_joint"]:
            names = ("npn_updates", "npn_restart_every", "npn_reset_optimizer")
            refuse_unused(explicit, names, "with npn_joint")
        elif settings["npn_restart_every"] == 0:
            refuse_unused(explicit, ["npn_reset_optimizer"], "where the network never restarts")
        joint = settings["npn_joint"]
        settings["npn_opt"], settings["npn_lr"] = cls._optimizer(settings["npn_opt"], settings["npn_lr"], joint)
        if settings["npn_opt"] != "adagrad":
            unused = ["npn_initial_accumulator", "npn_max_rise"]
            refuse_unused(explicit, unused, f"with npn_opt {settings['npn_opt']!r}")

    def set_steps_per_pass(self, steps: int, passes: float | None = None) -> None:
        if self._fits_length and passes is not None:
            self._settings["lr"] = adagrad_rate(steps * passes)
            if hasattr(self, "network"):  # a state was loaded
                self.network.set_lr(self._settings["lr"])
        if self._fits_epoch:
            fifth = steps // 5
            self.restart_every = min(PAPER_RESTART_EVERY, fifth if fifth > 1 else steps)

    def settings_of_length(self) -> dict[str, float]:
        return {"npn_lr": self._settings["lr"]} if self._fits_length else {}

    def description(self) -> str:
        often = f"every {self.restart_every} steps" if self.restart_every > 0 else "at the first step only"
        return f"{self.name} (restarted {often}, {self.optimizer_name} at {self._settings['lr']:.2g})"

    # What a network defines

    def _make(self, dimension: int, device: torch.device, dtype: torch.dtype, **training: Any) -> SideModel:
        """Allocate the parameters, with `training` for `SideModel`, and other state for embeddings of `dimension`."""
        raise NotImplementedError

    def _restart(self, batch: Batch) -> None:
        """Overwrite the parameters with new ones."""
        raise NotImplementedError

    def _observe(self, batch: Batch) -> None:
        """Called with each batch, before restarts and updates."""

    def _updates(self, batch: Batch) -> tuple[Callable[[], Tensor], Callable[[], None]]:
        """Functions for the updates of one step. The first writes the objective's gradient to the network's
        `gradients`, or 0 if `batch.finite` is False, and returns alpha, (2, B); the second makes the optimizer's step.

        Args:
            batch: from `Batch.or_zeros`; its embeddings may not be finite.
        """
        raise NotImplementedError

    def _is_exact_for(self, batch: Batch) -> bool:
        """Whether after a restart alpha equals the batch's own estimate. The gradient is then rounding error, which
        AdaGrad and Adam would scale up to full steps, so that no update is done."""
        return False

    # Algorithms 1 and 3

    def materialize(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        training = dict(optimizer=self.optimizer_name, pending=self.npn_joint, **self._settings)
        self.network = self._make(dimension, device, dtype, **training)

    @torch.no_grad()
    def update(self, batch: Batch) -> None:
        if self.npn_joint and self.steps > 0:
            self.network.step()
        self._observe(batch)
        if restarts := self._restarts:
            self._restart(batch)
            if self.npn_reset_optimizer:
                self.network.reset_optimizer()
            if not self.split:
                self.network.broadcast()
        if restarts and self._is_exact_for(batch):
            self.objective_before = None
            for gradient in self.network.gradients.values():
                gradient.zero_()
        elif self.updates > 0:
            self.objective_before = self._train(batch.or_zeros())
        self.steps += 1

    @property
    def _restarts(self) -> bool:
        """Whether the next step begins with a restart."""
        return self.steps == 0 or (self.restart_every > 0 and self.steps % self.restart_every == 0)

    def _train(self, batch: Batch) -> Tensor:
        """Make the updates of a step; return the objective before them, 0-d."""
        set_gradient, make_step = self._updates(batch)
        guarded = self.optimizer_name == "adagrad" and self.updates > 1
        before = [parameter.clone() for parameter in self.network.named.values()] if guarded else []
        for update in range(self.updates):
            alpha = set_gradient()
            if update == 0:
                objective_before = self._objective_of(batch.all_log_batch, alpha)
            if not self.npn_joint:
                make_step()
        if guarded:
            after = self._objective_of(batch.all_log_batch, alpha)
            self._undo_if(after > objective_before + self.npn_max_rise, before)
        return objective_before

    def _objective_of(self, log_batch: Tensor, alpha: Tensor) -> Tensor:
        """The network's objective over both directions, 0-d."""
        return self.objective.value(log_batch, alpha).mean(dim=1).sum()

    def _undo_if(self, undo: Tensor, before: list[Tensor]) -> None:
        """Where `undo`, a 0-d bool, is True: restore the parameters from `before`, and halve AdaGrad's next steps."""
        if undo.device.type == "cpu" and not undo:  # elsewhere a look at it would wait for the device
            return
        for parameter, old in zip(self.network.named.values(), before, strict=True):
            parameter.copy_(torch.where(undo, old, parameter))
            self.network.optimizer.state[parameter]["sum"].mul_(torch.where(undo, HALF_THE_STEP, 1.0))

    def diagnostics(self, log_batch: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        name = f"npn_{self.objective.name.replace('-', '_')}"
        values = {f"{name}_after": self._objective_of(log_batch, alpha)}
        return values if self.objective_before is None else {f"{name}_before": self.objective_before, **values}

    # State

    def _state(self) -> dict[str, Tensor]:
        """This process's state under the names of `full_state`, on its device and without copies."""
        if not hasattr(self, "network"):
            return {}
        numbers = {"steps": torch.tensor(self.steps), "restart_every": torch.tensor(self.restart_every)}
        return numbers | self.network.state()

    def full_state(self) -> dict[str, Tensor]:
        return on_first(self._state())

    def check_state(self, state: dict[str, Tensor], dimension: int) -> None:
        if not state:
            return
        other_optimizers = {key.split(":")[0] for key in state if ":" in key} - {self.optimizer_name, "pending"}
        if other_optimizers:
            raise ValueError(f"npn_opt: {self.optimizer_name!r} where the state is of {other_optimizers.pop()!r}")
        if self.npn_joint != any(key.startswith("pending:") for key in state):
            raise ValueError(f"npn_joint: {self.npn_joint} where the state is of {not self.npn_joint}")

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        if not state:
            return
        self.network.load(state)
        self.steps = int(state["steps"])
        if self._fits_epoch:
            self.restart_every = int(state["restart_every"])
