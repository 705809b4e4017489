"""A multi-layer perceptron in place of the prototypes (NeuCLIP, Section 5.2, "MLP").

    alpha_1i = logaddexp(log eps, MLP_1(e_1i) - s_ii / tau),    MLP_1(e_1i) ~ log mean_j exp(s_ij / tau)

and the same with the sides swapped. What the MLP predicts depends on the anchor's own embedding alone, so that the
positive's similarity must leave the exponent in one piece: the identity surrogate only.

Readings fixed here: the network is AmorLIP's (`networks`). A restart draws new weights; since there are no embeddings
to restart from, there is none after the first unless `npn_restart_every` asks for it. Adam at 1e-3, as AmorLIP's.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.errors import InputError
from open_clip_ext.networks import WIDTH, PartitionNetwork
from open_clip_ext.normalizers.base import Batch
from open_clip_ext.normalizers.network import COMMON, MOMENTS, RESTART_EVERY, NetworkNormalizer
from open_clip_ext.pairs import Pairs, add_eps
from open_clip_ext.surrogates import Identity, Surrogate


class MLP(NetworkNormalizer):
    """Args: see `options`; `eps` and `surrogate` are the loss's; `network` goes to NetworkNormalizer.

    Raises:
        InputError: an argument is out of range, or the surrogate is not the identity.
    """

    name = "mlp"
    options = (WIDTH, replace(RESTART_EVERY, default=0), *COMMON)

    def __init__(
        self,
        mlp_width: float = 0.5,
        npn_restart_every: int = 0,
        eps: float = 1e-14,
        surrogate: Surrogate | None = None,
        **network: Any,
    ):
        WIDTH.check(mlp_width)
        if surrogate is not None and not isinstance(surrogate, Identity):
            raise InputError(f"--surrogate: {surrogate.name!r} with --normalizer mlp, which needs 'identity'")
        super().__init__(npn_restart_every=npn_restart_every, **network)
        self.width = mlp_width
        self.eps = eps
        self.network: PartitionNetwork | None = None  # until the first batch

    def memory(self, dimension: int, processes: int) -> dict[str, int]:
        each = 4 * PartitionNetwork.size(dimension, self.width)
        moments = MOMENTS[self.optimizer_name]
        return {"MLPs": each, "their gradients": each, "their optimizer's state": each * moments}

    def _allocate(self, dimension: int, like: Tensor) -> None:
        self.dimension = dimension
        self.network = PartitionNetwork(dimension, self.width, like.new_zeros(2), seed=0)

    def _named(self) -> dict[str, Tensor]:
        return {} if self.network is None else self.network.named()

    def _restart(self, batch: Batch) -> None:
        assert self.network is not None
        # L + s_ii / tau is log mean_j exp(s_ij / tau) over the batch.
        levels = (batch.log_batch + batch.positives / batch.tau).mean(dim=1)
        levels = torch.where(batch.finite, levels, 0.0)
        self.network.load(PartitionNetwork(self.dimension, self.width, levels, seed=self.steps).named())

    def _gradient_setter(self, batch: Batch) -> Callable[[], Tensor]:
        return partial(self._set_gradient, batch)

    def _set_gradient(self, batch: Batch) -> Tensor:
        assert self.network is not None
        log_ratio = self.network(batch.image, batch.text) - batch.positives / batch.tau
        alpha = add_eps(log_ratio, self.eps)
        slopes = self.objective.slopes(batch.log_batch, alpha) * (log_ratio - alpha).exp()
        slopes *= self.objective.factor(batch.tau) / alpha.shape[1]
        gradients = self.network.gradients(batch.image, batch.text, slopes)
        for parameter, gradient in zip(self._named().values(), gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(torch.where(batch.finite, gradient, 0.0))
        return alpha

    def forward(self, pairs: Pairs, positives: Tensor, tau: Tensor, batch: Batch) -> Tensor:
        if self.network is None:
            return batch.log_batch[:, pairs.local]
        self._follow(pairs.all_image)
        return add_eps(self.network(pairs.image, pairs.text) - positives / tau, self.eps)

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        if "0.up.weight" in state:
            hidden, dimension = state["0.up.weight"].shape
            if hidden != PartitionNetwork.hidden(dimension, self.width):
                raise ValueError(f"mlp_width: {self.width} where the state's network is {hidden} wide")
        super().load_full_state(state)
