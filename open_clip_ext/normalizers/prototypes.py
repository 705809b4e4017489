"""NeuCLIP's normalizer-prediction network (NPN): m prototypes a side that stand for the whole data set.

neuclip.txt Eq. 10 (images as anchors; Eq. 11 is the same with the sides swapped), in the log domain:

    alpha_1i = logaddexp(log eps, logsumexp_j'(l(cos(e_1i, W_1j') - s_ii) / tau) - log m),    l(x) = x in the paper

Algorithm 1, each step: every T_r steps reset W_1 from text and W_2 from image embeddings of the same pairs; T_u
optimiser steps on mean_i exp(L_i - alpha_i) + alpha_i, the part of Eq. 12 that depends on W, with embeddings, L and
tau held fixed; then alpha.

Readings fixed here, where the paper is silent:

- The reset takes the latest m embeddings, kept in a ring buffer: from the batch alone where B >= m (its last m pairs;
  which ones does not matter in a random batch), over several batches where B < m (CC3M: 1024 < 4096). While the ring
  holds only k < m, there are k prototypes and log k, and each batch adds its own: copies of fewer embeddings would
  receive equal gradients and stay copies.
- The optimiser's state is kept across resets, as a reset that only writes the weights does. With the paper's AdaGrad at
  lr 1.0 a prototype's first update still moves every coordinate by 1, against entries of 1 / sqrt(d), and the updates
  after a reset turn it far from where it was put: the resets are less of a restart than they look.
  `npn_initial_accumulator` or a smaller `npn_lr` make the first steps smaller; `npn_reset_optimizer` forgets at resets.
- Eq. 12's factor tau is left out of the network's objective.
- exp(L_i - alpha_i) is bounded by exp(15) in the gradient, see `pairs.MAX_LOG_WEIGHT`.
- Embeddings are unit vectors already, so cos(e, W) = e . W / |W|.
- Every process updates the same network on all B anchors: the gathered embeddings are at hand, so that no gradient of
  m x d numbers travels. At each reset process 0 sends its network, so that processes whose hardware rounds otherwise do
  not drift apart.

Shapes: m = prototypes a side, k <= m of them active, d = embedding dimension, B = global batch.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from open_clip_ext.distributed import rank, world_size
from open_clip_ext.normalizers.base import Batch, Normalizer
from open_clip_ext.normalizers.ring import EmbeddingRing
from open_clip_ext.options import Option, not_negative, positive
from open_clip_ext.pairs import MAX_LOG_WEIGHT, Pairs, add_eps
from open_clip_ext.surrogates import Identity, PowerHinge

OPTIMIZERS = {"adagrad": torch.optim.Adagrad, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


class Prototypes(Normalizer):
    """The NPN with its optimiser, its restarts and its ring buffer.

    Memory is allocated at the first batch, on its device: weights, gradients and ring of 2 * m * d numbers each, and
    the optimiser's state.

    Args: see `options`; `eps` and `surrogate` are the loss's.

    Raises:
        InputError: an argument is out of range; the message names it.
    """

    name = "prototypes"
    differentiable = True
    options = (
        Option(
            "npn_prototypes", int, 4096, "m, prototypes of the normalizer-prediction network on each side",
            valid=lambda value: value >= 1, wanted="at least 1",
        ),
        Option(
            "npn_restart_every", int, 500, "T_r, steps between resets of the prototypes; 0: never after the first",
            valid=not_negative, wanted="at least 0",
        ),
        Option(
            "npn_updates", int, 10, "T_u, updates of the prototypes per step",
            valid=not_negative, wanted="at least 0",
        ),
        Option("npn_opt", str, "adagrad", "optimiser of the prototypes", choices=tuple(OPTIMIZERS)),
        Option(
            "npn_lr", float, 1.0, "learning rate of the prototypes", valid=positive, wanted="a number > 0"
        ),
        Option(
            "npn_wd", float, 0.0, "weight decay of the prototypes", valid=not_negative, wanted="a number >= 0"
        ),
        Option(
            "npn_initial_accumulator", float, 0.0,
            "start of AdaGrad's accumulators; above 0 its first steps are smaller",
            valid=not_negative, wanted="a number >= 0",
        ),
        Option("npn_reset_optimizer", bool, False, "forget the optimiser's state at each reset of the prototypes"),
    )

    def __init__(
        self,
        npn_prototypes: int = 4096,
        npn_restart_every: int = 500,
        npn_updates: int = 10,
        npn_opt: str = "adagrad",
        npn_lr: float = 1.0,
        npn_wd: float = 0.0,
        npn_initial_accumulator: float = 0.0,
        npn_reset_optimizer: bool = False,
        eps: float = 1e-14,
        surrogate: Identity | PowerHinge | None = None,
    ):
        super().__init__()
        given = locals()
        for option in self.options:
            option.check(given[option.name])
        self.capacity = npn_prototypes
        self.restart_every = npn_restart_every
        self.updates = npn_updates
        self.optimizer_name = npn_opt
        self.reset_optimizer = npn_reset_optimizer
        self.eps = eps
        self.surrogate = surrogate or Identity()
        self._optimizer_settings = dict(lr=npn_lr, weight_decay=npn_wd)
        if npn_opt == "adagrad":
            self._optimizer_settings["initial_accumulator_value"] = npn_initial_accumulator
        self.weight: Tensor | None = None  # (2, m, d): [0] meets image anchors, [1] text anchors
        self.ring: EmbeddingRing | None = None  # in the places of their prototypes
        self.optimizer: torch.optim.Optimizer | None = None
        self.steps = 0
        self.objective_before: Tensor | None = None

    def _allocate(self, dimension: int, like: Tensor) -> None:
        self.weight = like.new_zeros(2, self.capacity, dimension)
        self.weight.grad = torch.zeros_like(self.weight)
        self.ring = EmbeddingRing(self.capacity, dimension, like)
        self._new_optimizer()

    @property
    def active(self) -> int:
        """k, the prototypes in use."""
        return self.ring.active

    def _new_optimizer(self) -> None:
        self.optimizer = OPTIMIZERS[self.optimizer_name]([self.weight], **self._optimizer_settings)

    @torch.no_grad()
    def update(self, batch: Batch) -> None:
        self._follow(batch.image)
        self._refresh(batch)
        anchors = torch.stack([batch.image, batch.text])
        for update in range(self.updates):
            gradient, objective = self._gradient(anchors, batch)
            if update == 0:
                self.objective_before = objective
            self.weight.grad[:, : self.active] = torch.where(batch.finite, gradient, 0.0)
            self.optimizer.step()
        self.steps += 1

    def _follow(self, image: Tensor) -> None:
        """Allocate for embeddings like `image`, or go where they went since the last batch."""
        if self.weight is None:
            self._allocate(image.shape[1], image)
        elif self.weight.device != image.device or self.weight.dtype != image.dtype:
            self._restore(self._state(), image)

    def _refresh(self, batch: Batch) -> None:
        """Take the batch into the ring, restart where the step asks for it, add prototypes while there are k < m."""
        held = self.active
        self.ring.push(batch)
        if self.steps == 0 or (self.restart_every > 0 and self.steps % self.restart_every == 0):
            self._restart()
        else:
            self.weight[:, held : self.active] = self.ring.rows[:, held : self.active]

    def _restart(self) -> None:
        self.weight.copy_(self.ring.rows)
        if self.reset_optimizer:
            self._new_optimizer()
        if world_size() > 1:
            for tensor in (self.weight, *self.optimizer.state[self.weight].values()):
                if tensor.device == self.weight.device:
                    dist.broadcast(tensor, 0)

    def _gradient(self, anchors: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gradient (2, k, d) and value (0-d) of the sum over sides of mean_i exp(L_i - alpha_i) + alpha_i."""
        norm, prototypes = self._normalised()
        gaps = torch.bmm(anchors, prototypes.mT).sub_(batch.positives[:, None])
        slope = self.surrogate.slope(gaps)
        tau = batch.tau[:, :, None] if batch.tau.dim() else batch.tau
        exponents = self.surrogate.value(gaps) / tau
        log_sum = exponents.logsumexp(dim=2)
        log_mean = log_sum - math.log(self.active)
        alpha = add_eps(log_mean, self.eps)
        ratio = (batch.log_batch - alpha).clamp_(max=MAX_LOG_WEIGHT).exp_()
        objective = (ratio + alpha).mean(dim=1).sum()
        share = exponents.sub_(log_sum[:, :, None]).exp_()
        share.mul_(((1 - ratio) * (log_mean - alpha).exp())[:, :, None] / (tau * anchors.shape[1])).mul_(slope)
        gradient = torch.bmm(share.mT, anchors)
        radial = (gradient * prototypes).sum(dim=2, keepdim=True)
        return gradient.sub_(radial * prototypes).div_(norm), objective

    def _normalised(self) -> tuple[Tensor, Tensor]:
        weight = self.weight[:, : self.active]
        norm = weight.norm(dim=2, keepdim=True)
        norm = norm + (norm == 0)
        return norm, weight / norm

    def forward(self, pairs: Pairs, positives: Tensor, tau: Tensor, batch: Batch) -> Tensor:
        if self.weight is None:
            return batch.log_batch[:, pairs.local]
        self._follow(pairs.all_image)
        _, prototypes = self._normalised()
        cosines = torch.stack([pairs.image @ prototypes[0].T, pairs.text @ prototypes[1].T])
        tau = tau[:, :, None] if tau.dim() else tau
        exponents = self.surrogate.value(cosines - positives[:, None]) / tau
        log_mean = exponents.logsumexp(dim=2) - math.log(self.active)
        return add_eps(log_mean, self.eps)

    def diagnostics(self, log_batch: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        after = ((log_batch - alpha).clamp(max=MAX_LOG_WEIGHT).exp() + alpha).mean(dim=1).sum()
        shown = {"npn_objective_after": after, "prototypes": torch.tensor(float(self.active))}
        if self.objective_before is not None:
            shown = {"npn_objective_before": self.objective_before, **shown}
        return shown

    def full_state(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._state().items()} if rank() == 0 else {}

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        if "weight" not in state:
            return
        if state["weight"].shape[1] != self.capacity:
            raise ValueError(f"npn_prototypes: {self.capacity} where the state has {state['weight'].shape[1]}")
        others = {key.split(".")[0] for key in state if "." in key} - {self.optimizer_name}
        if others:
            raise ValueError(f"npn_opt: {self.optimizer_name!r} where the state is of {others.pop()!r}")
        self._restore(state, state["weight"])

    def _state(self) -> dict[str, Tensor]:
        if self.weight is None:
            return {}
        state = {"steps": torch.tensor(self.steps), "weight": self.weight, **self.ring.state()}
        for name, value in self.optimizer.state[self.weight].items():
            state[f"{self.optimizer_name}.{name}"] = value
        return {name: value.detach().clone() for name, value in state.items()}

    def _restore(self, state: dict[str, Tensor], like: Tensor) -> None:
        """Take over `state` with the device and type of `like`; the caller's tensors stay its own."""
        self._allocate(state["weight"].shape[2], like)
        self.weight.copy_(state["weight"])
        self.ring.restore(state)
        self.steps = int(state["steps"])
        saved = {key.split(".")[1]: value.clone() for key, value in state.items() if "." in key}
        if saved:
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": {0: saved}})
