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
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus

from open_clip_ext.distributed import copy_from_first, rank
from open_clip_ext.kernels.streaming import are_finite
from open_clip_ext.networks import PartitionNetwork, below
from open_clip_ext.objectives import MAX_LOG_WEIGHT


def l2_log(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 10 per anchor as a function of r = log Z_comb - log lambda, any finite numbers, and its derivative in r.

    Shapes here and below: all that of `ratio`, r.
    """
    return ratio.square() / 2, ratio


def kl(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """f(t) = t log t of Eq. 8 at t = exp(r), r at most `MAX_LOG_WEIGHT`, and its derivative in r."""
    ratio = ratio.clamp(max=MAX_LOG_WEIGHT)
    t = ratio.exp()
    return t * ratio, t * (ratio + 1)


def js(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """f(t) = (t log t - (t + 1) log((t + 1) / 2)) / 2 of Eq. 8 at t = exp(r), and its derivative in r."""
    ratio = ratio.clamp(max=MAX_LOG_WEIGHT)
    t = ratio.exp()
    slope = t * (math.log(2) - softplus(-ratio)) / 2
    return slope + (math.log(2) - softplus(ratio)) / 2, slope


DIVERGENCES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"l2-log": l2_log, "kl": kl, "js": js}
NETWORKS = ("online", "target", "previous")


class Amortization:
    """The networks, their optimizer and their step counters. The first batch allocates the memory.

    Args:
        width: f_d, see `networks`.
        objective: a name in `DIVERGENCES`.
        l2_weight: weight of Eq. 10 when added to another objective.
        updates: T_lambda.
        online_every, target_every: T_online and T_target, in steps.
        ema: alpha, decay of the target network, in [0, 1).
        beta: beta_T.
        beta_epochs: T.
        reinit_every: epochs between new networks; 0: never.
        lr: Adam's learning rate.
    """

    def __init__(
        self, *, width: float, objective: str, l2_weight: float, updates: int, online_every: int, target_every: int,
        ema: float, beta: float, beta_epochs: int, reinit_every: int, lr: float,
    ):
        self.width = width
        self.objective = objective
        self.l2_weight = l2_weight
        self.updates = updates
        self.online_every = online_every
        self.target_every = target_every
        self.ema = ema
        self.beta = beta
        self.beta_epochs = beta_epochs
        self.reinit_every = reinit_every
        self.lr = lr
        self.epoch = 0
        self.step_of_epoch = 0
        self.online: PartitionNetwork | None = None
        self.target: PartitionNetwork | None = None
        self.previous: PartitionNetwork | None = None  # the target at the end of the previous epoch
        self.optimizer: torch.optim.Adam  # made with the online network
        self.objective_before: Tensor | None = None  # value before the latest updates

    def memory(self, dimension: int) -> dict[str, int]:
        """As `Loss.memory`; reached in the second epoch, with the previous network."""
        each = 4 * PartitionNetwork.size(dimension, self.width)
        moments = 2 * each
        return {"MLPs (online, target, previous)": 3 * each, "gradients": each, "their optimizer's state": moments}

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:  # equal after loading a state from within this epoch, or at the start
            self.epoch, self.step_of_epoch = epoch, 0

    @property
    def current_beta(self) -> float:
        """beta_t; 0 in the first epoch, which has no previous network."""
        if self.previous is None:
            return 0.0
        return self.beta / 2 * (1 - math.cos(math.pi * min(self.epoch + 1, self.beta_epochs) / self.beta_epochs))

    @property
    def due(self) -> bool:
        """Whether the next step updates the online network."""
        return self.step_of_epoch % self.online_every == 0

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move networks and optimizer state as `Module.to` moves the loss."""
        if self.online is not None:
            tensors = {key: fn(value) if value.dim() else value for key, value in self._tensors().items()}
            self._restore(tensors, tensors["online:0.up.weight"])

    def log_combined(self, image: Tensor, text: Tensor, log_z: Tensor) -> Tensor:
        """log Z_comb (Eq. 12), (2, b), of anchors (b, d) with log Z, (2, b)."""
        beta = self.current_beta
        if self.previous is None or beta == 0:
            return log_z
        log_previous = self.previous(image, text)
        if beta == 1:
            return log_previous
        return torch.logaddexp(math.log(beta) + log_previous, math.log1p(-beta) + log_z)

    def update(self, image: Tensor, text: Tensor, log_z: Tensor) -> None:
        """Train the online network, at a step that is `due`, on Eq. 8 or 10 summed over both directions.

        Args:
            image, text: embeddings of all processes, (B, d) each.
            log_z: log Z of all anchors, (2, B). If a value is not finite, the gradients are 0.
        """
        if self.step_of_epoch == 0:
            self._begin_epoch(image.shape[1], log_z)
        assert self.online is not None
        log_combined = self.log_combined(image, text, log_z)
        finite = are_finite(log_z)[0]
        # The mean over samples of exp(s <.,.>) in Eq. 8 is Z.
        weight = (log_z - log_combined).exp()
        for update in range(self.updates):
            ratio = log_combined - self.online(image, text)
            values, slopes = DIVERGENCES[self.objective](ratio)
            if self.objective != "l2-log":
                l2_values, l2_slopes = l2_log(ratio)
                values = weight * values + self.l2_weight * l2_values
                slopes = weight * slopes + self.l2_weight * l2_slopes
            if update == 0:
                self.objective_before = values.mean(dim=1).sum()
            gradients = self.online.gradients(image, text, -slopes / ratio.shape[1])
            for parameter, gradient in zip(self.online.named().values(), gradients, strict=True):
                parameter.grad = torch.where(finite, gradient, 0.0)
            self.optimizer.step()

    def step(self) -> None:
        """Update the target network if it is due, and count the step (Algorithm 1, line 8)."""
        if self.step_of_epoch % self.target_every == 0:
            assert self.online is not None and self.target is not None
            online = self.online.named()
            for name, parameter in self.target.named().items():
                parameter.lerp_(online[name], 1 - self.ema)
        self.step_of_epoch += 1

    def _begin_epoch(self, dimension: int, log_z: Tensor) -> None:
        """Make new networks (Algorithm 1, line 4)."""
        if self.target is not None:
            self.previous, self.target = self.target, copy.deepcopy(self.target)
        due = self.reinit_every > 0 and self.epoch % self.reinit_every == 0
        if self.online is None or due:
            levels = log_z.mean(dim=1).nan_to_num(0.0, 0.0, 0.0)
            self.online = PartitionNetwork(dimension, self.width, levels, seed=self.epoch)
            self._new_optimizer(self.online)
            self.target = copy.deepcopy(self.online)
        copy_from_first(self._tensors().values(), log_z.device)

    def _network(self, parameters: dict[str, Tensor], like: Tensor) -> PartitionNetwork:
        dimension = parameters["0.up.weight"].shape[1]
        network = PartitionNetwork(dimension, self.width, like.new_zeros(2), seed=0)
        network.load(parameters)
        return network

    def _new_optimizer(self, online: PartitionNetwork) -> None:
        self.optimizer = torch.optim.Adam(online.named().values(), lr=self.lr)

    # State

    def full_state(self) -> dict[str, Tensor | int]:
        """The step counters; on process 0 also parameters and Adam's moments, as CPU tensors."""
        tensors = self._tensors() if rank() == 0 else {}
        clocks = {"epoch": self.epoch, "step_of_epoch": self.step_of_epoch}
        return {**clocks, **{key: value.detach().cpu().clone() for key, value in tensors.items()}}

    def check_state(self, state: dict[str, Tensor | int | str]) -> None:
        """Raise ValueError if the networks have another width."""
        if isinstance(up := state.get("online:0.up.weight"), Tensor):
            hidden, dimension = up.shape
            if hidden != PartitionNetwork.hidden(dimension, self.width):
                raise ValueError(f"mlp_width: {self.width} where the state's networks are {hidden} wide")

    def load_full_state(self, state: dict[str, Tensor | int | str], like: Tensor) -> None:
        """Load the result of `full_state` on process 0, after `check_state`, to the device and dtype of `like`."""
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        if tensors:
            self._restore(tensors, like)
        else:  # of a loss that has not been trained yet
            self.online = self.target = self.previous = None
        self.objective_before = None
        self.epoch, self.step_of_epoch = int(state["epoch"]), int(state["step_of_epoch"])

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters as `network:name`, Adam's state as `adam:name:key`."""
        tensors: dict[str, Tensor] = {}
        for name in NETWORKS:
            if (network := getattr(self, name)) is not None:
                tensors |= {f"{name}:{key}": value for key, value in network.named().items()}
        if self.online is not None:
            for key, parameter in self.online.named().items():
                tensors |= {f"adam:{key}:{name}": value for name, value in self.optimizer.state[parameter].items()}
        return tensors

    def _restore(self, tensors: dict[str, Tensor], like: Tensor) -> None:
        """Load the result of `_tensors`, with the device and dtype of `like`."""
        for name in NETWORKS:
            parameters = below(tensors, f"{name}:")
            setattr(self, name, self._network(parameters, like) if parameters else None)
        assert self.online is not None
        self._new_optimizer(self.online)
        moments = [below(tensors, f"adam:{key}:") for key in self.online.named()]
        if moments[0]:
            state = {i: {name: value.clone() for name, value in own.items()} for i, own in enumerate(moments)}
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
