"""Stage I of AmorLIP: networks that learn log Z of every embedding.

AmorLIP, Algorithm 1, with an online network, a target network (its moving average), and the target network from the
end of the previous epoch:

    log Z_comb = log(beta_t * lambda_previous + (1 - beta_t) * Z)                                   Eq. 12
    the online network's output, log lambda, fits log Z_comb by an f-divergence or a square         Eq. 8, 10
    target network <- ema * target + (1 - ema) * online                                            Eq. 11

In plain PyTorch: `equations.amorlip_z_comb`, `equations.amorlip_objective`, `equations.amorlip_lambda`.

Readings fixed here, where the paper is silent:

- Steps of an epoch count from 0, so that its first step updates the new network before the encoders divide by it. The
  last bias of a new network starts at the batch's mean log Z (`networks`), in the target network too, because within an
  epoch the moving average stays close to its start (decay 0.999 every 2 steps).
- beta_t = beta / 2 * (1 - cos(pi t / T)) with t = 1 in the first epoch and T the length of the training.
- KL is Eq. 9 as printed. Its lambda is not normalized, so its optimum with 0.1 times Eq. 10 lies 0.82 above log Z; the
  optima of `l2-log` and `js` are at log Z.
- KL and JS are computed at min(t, exp(12.5)), t = Z_comb / lambda (`objectives.MAX_LOG_WEIGHT`); the slope beyond the
  bound is that at the bound. The paper has no such bound, but a very wrong network output would overflow float32.

One deviation: in Algorithm 1 (line 4) the first epoch mixes Z with the output of the initial network, by beta_1 = 0.002
for 30 epochs. That network is random and says nothing of Z, so that here Z_comb = Z in the first epoch.

Shapes: B pairs of all processes, d = embedding dimension; log Z is (2, B), images first.
"""

import copy
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from open_clip_ext.distributed import on_first
from open_clip_ext.errors import InputError
from open_clip_ext.kernels.streaming import are_not_finite
from open_clip_ext.losses.base import Loss
from open_clip_ext.networks import WIDTH, PartitionNetwork, check_width, size
from open_clip_ext.objectives import MAX_LOG_WEIGHT
from open_clip_ext.options import AT_LEAST_0, AT_LEAST_1, NOT_NEGATIVE, POSITIVE, Derived, option, refuse_unused
from open_clip_ext.side_model import below


def l2_log(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Half the squared error (AmorLIP, Eq. 10) as a function of r = log Z_comb - log lambda, and its slope in r.

    Here and in `js` and `kl`, where t = exp(r) = Z_comb / lambda, results have the shape of `ratio`, which is r.
    """
    return ratio.square() / 2, ratio


def kl(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """KL's f(t) = t log t (AmorLIP, Eq. 8) as a function of r = log t <= `MAX_LOG_WEIGHT`, and its slope in r."""
    ratio = ratio.clamp(max=MAX_LOG_WEIGHT)
    t = ratio.exp()
    return t * ratio, t * (ratio + 1)


def js(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Jensen-Shannon's f(t) (AmorLIP, Eq. 8) as a function of r = log t <= `MAX_LOG_WEIGHT`, and its slope in r.

    f(t) = (t log t - (t + 1) log((t + 1) / 2)) / 2.
    """
    ratio = ratio.clamp(max=MAX_LOG_WEIGHT)
    t = ratio.exp()
    slope = t * (math.log(2) - softplus(-ratio)) / 2
    return slope + (math.log(2) - softplus(ratio)) / 2, slope


DIVERGENCES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"l2-log": l2_log, "kl": kl, "js": js}
NETWORKS = ("online", "target", "previous")


class Amortization(Loss):
    """Stage I of AmorLIP: trains the networks that predict log Z of an embedding.

    It holds the online, the target and the previous network, the online one's optimizer, and the number of the step
    within the epoch. The first step allocates the networks.
    """

    mlp_width: float = WIDTH
    amor_objective: str = option("l2-log", "what the network minimizes", choices=tuple(DIVERGENCES))
    amor_l2_weight: float = option(0.1, "weight of l2-log when added to another objective", **NOT_NEGATIVE)
    amor_updates: int = option(3, "T_lambda, consecutive updates of the network", **AT_LEAST_1)
    amor_online_every: int = option(8, "T_online, steps between updates of the network", **AT_LEAST_1)
    amor_target_every: int = option(2, "T_target, steps between updates of the target network", **AT_LEAST_1)
    amor_ema: float = option(
        0.999, "alpha, EMA decay of the target network",
        valid=lambda value: 0 <= value < 1, expected="in [0, 1)",
    )
    amor_beta: float = option(
        0.8, "beta_T, final weight of the last epoch's network in Z_comb",
        valid=lambda value: 0 <= value <= 1, expected="in [0, 1]",
    )
    amor_beta_epochs: int = option(
        Derived("all epochs", lambda epochs: epochs), "epochs of beta's cosine", **AT_LEAST_1
    )
    amor_reinit_every: int = option(1, "epochs between new networks; 0: never", **AT_LEAST_0)
    amor_lr: float = option(1e-3, "Adam's learning rate of the network", **POSITIVE)
    follows_epochs = True

    def __init__(self, accum_freq: int = 1, validate: bool = False, **options: Any):
        super().__init__(accum_freq, validate, **options)
        if self.amor_beta_epochs is None:
            raise InputError("the cosine of beta needs its length, or the number of epochs", "amor_beta_epochs")
        self.epoch_of_steps = self.step_of_epoch = 0
        self.online: PartitionNetwork | None = None
        self.target: PartitionNetwork | None = None
        self.previous: PartitionNetwork | None = None  # the target at the end of the previous epoch
        self.objective_before: Tensor | None = None  # value before the latest updates

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, explicit: Collection[str]) -> None:
        if settings["amor_objective"] == "l2-log":
            refuse_unused(explicit, ["amor_l2_weight"], "with amor_objective 'l2-log'")

    def memory(self, dimension: int, processes: int) -> dict[str, int]:
        """Bytes by purpose from the second epoch on, when there is a previous network, too."""
        each = 4 * size(dimension, self.mlp_width)
        moments = 2 * each
        return {"MLPs (online, target, previous)": 3 * each, "gradients": each, "their optimizer's state": moments}

    def begin_step(self) -> None:
        """Count steps anew in a new epoch. `set_epoch` does not, since a state of an earlier epoch, or from within this
        one, may be loaded after it."""
        if self.epoch != self.epoch_of_steps:
            self.epoch_of_steps, self.step_of_epoch = self.epoch, 0

    @property
    def current_epoch(self) -> int:
        """The epoch; before `set_epoch`, that of a state that was loaded."""
        return self.epoch_of_steps if self.epoch < 0 else self.epoch

    @property
    def current_beta(self) -> float:
        """beta_t of Eq. 12; 0 in the first epoch, which has no previous network."""
        if self.previous is None:
            return 0.0
        t = min(self.current_epoch + 1, self.amor_beta_epochs)
        return self.amor_beta / 2 * (1 - math.cos(math.pi * t / self.amor_beta_epochs))

    @property
    def due(self) -> bool:
        """Whether the next step updates the online network."""
        return self.step_of_epoch % self.amor_online_every == 0

    def log_combined(self, image: Tensor, text: Tensor, log_z: Tensor) -> Tensor:
        """log Z_comb (Eq. 12), (2, b), of anchors (b, d) with log Z, (2, b)."""
        beta = self.current_beta
        if self.previous is None or beta == 0:
            return log_z
        log_previous = self.previous(image, text)
        if beta == 1:
            return log_previous
        return torch.logaddexp(math.log(beta) + log_previous, math.log1p(-beta) + log_z)

    def train_online(self, image: Tensor, text: Tensor, log_z: Tensor) -> None:
        """Train the online network, at a step that is `due`, on Eq. 8 or 10 summed over both directions.

        Args:
            image, text: embeddings of all processes, (B, d) each.
            log_z: log Z of all anchors, (2, B). If a value is not finite, the gradients are 0.
        """
        if self.step_of_epoch == 0:
            self._begin_epoch(log_z)
        assert self.online is not None
        log_combined = self.log_combined(image, text, log_z)
        finite = ~are_not_finite(log_z)[0]
        # The mean over samples of exp(s <.,.>) in Eq. 8 is Z.
        weight = (log_z - log_combined).exp()
        for update in range(self.amor_updates):
            ratio = log_combined - self.online(image, text)
            values, slopes = DIVERGENCES[self.amor_objective](ratio)
            if self.amor_objective != "l2-log":
                l2_values, l2_slopes = l2_log(ratio)
                values = weight * values + self.amor_l2_weight * l2_values
                slopes = weight * slopes + self.amor_l2_weight * l2_slopes
            if update == 0:
                self.objective_before = values.mean(dim=1).sum()
            self.online.backward(image, text, -slopes / ratio.shape[1], finite)
            self.online.step()

    def end_step(self) -> None:
        """Update the target network if it is due, and count the step (Algorithm 1, line 8)."""
        if self.step_of_epoch % self.amor_target_every == 0:
            assert self.online is not None and self.target is not None
            for name, parameter in self.target.named.items():
                parameter.lerp_(self.online.named[name], 1 - self.amor_ema)
        self.step_of_epoch += 1

    def _begin_epoch(self, log_z: Tensor) -> None:
        """Make new networks (Algorithm 1, line 4)."""
        if self.target is not None:
            self.previous = copy.deepcopy(self.target)
        due = self.amor_reinit_every > 0 and self.epoch_of_steps % self.amor_reinit_every == 0
        if self.online is None or due:
            levels = log_z.mean(dim=1).nan_to_num(0.0, 0.0, 0.0)
            self.online = self._network("online", levels)
            self.target = self._network("target", levels)
        for network in self._networks().values():
            network.broadcast()

    def _network(self, name: str, levels: Tensor) -> PartitionNetwork:
        # fused=None: as torch chooses, which rounds otherwise than its fused Adam.
        training = dict(optimizer="adam", lr=self.amor_lr, fused=None) if name == "online" else {}
        return PartitionNetwork(self.dimension, self.mlp_width, levels, seed=self.epoch_of_steps, **training)

    def _networks(self) -> dict[str, PartitionNetwork]:
        return {name: network for name in NETWORKS if (network := getattr(self, name)) is not None}

    def diagnostics(self) -> dict[str, Tensor]:
        return {} if self.objective_before is None else {"amor_objective": self.objective_before}

    def diagnostics_state(self) -> dict[str, Tensor | int]:
        return {name: value.cpu() for name, value in Amortization.diagnostics(self).items()}

    def load_diagnostics_state(self, state: dict[str, Tensor | int]) -> None:
        before = state.get("amor_objective")
        self.objective_before = before if isinstance(before, Tensor) else None

    def full_state(self) -> dict[str, Any]:
        """Parameters are named `network:name`, Adam's moments `adam:name:key`."""
        tensors: dict[str, Tensor] = {}
        for name, network in self._networks().items():
            tensors |= {key if key.startswith("adam:") else f"{name}:{key}": v for key, v in network.state().items()}
        clocks = {"epoch": self.epoch_of_steps, "step_of_epoch": self.step_of_epoch}
        return {**super().full_state(), **clocks, **on_first(tensors)}

    def check_state(self, state: dict[str, Any], dimension: int = 0) -> None:
        super().check_state(state, dimension)
        check_width(state, "online:", self.mlp_width)

    def load_full_state(self, state: dict[str, Any]) -> None:
        super().load_full_state(state)
        self.epoch_of_steps, self.step_of_epoch = int(state["epoch"]), int(state["step_of_epoch"])
        self.objective_before = None
        for name in NETWORKS:
            network, tensors = None, below(state, f"{name}:")
            if tensors:
                network = self._network(name, self._like.new_zeros(2))
                network.load(state | tensors)
            setattr(self, name, network)
