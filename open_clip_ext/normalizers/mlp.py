"""A multi-layer perceptron in place of the prototypes (NeuCLIP, Section 5.2, "MLP").

The paper says only that the network is an MLP with random weights at the start. Here

    alpha_1i = logaddexp(log eps, MLP_1(e_1i) - s_ii / tau),    MLP_1(e_1i) ~ log mean_j exp(s_ij / tau)

and the same with image and text swapped. The MLP sees only the anchor's own embedding, so s_ii / tau must be a separate
term of the exponent, which only the identity surrogate allows.

Also fixed here: the network is AmorLIP's (`networks`). A restart draws new weights, since there are no embeddings
to restart from; there is none after the first unless `npn_restart_every` is given. Adam at 1e-3, as AmorLIP's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch, add_eps
from open_clip_ext.errors import InputError
from open_clip_ext.networks import WIDTH, PartitionNetwork
from open_clip_ext.normalizers.trained import MOMENTS, NetworkNormalizer
from open_clip_ext.surrogates import Identity, Surrogate


class MLP(NetworkNormalizer):
    """A multi-layer perceptron that predicts each sample's log-normalizer.

    Args: `eps` and `surrogate` are the loss's; for the options see the bodies of this class and NetworkNormalizer.

    Raises:
        InputError: an argument is out of range, or the surrogate is not the identity.
    """

    name = "mlp"
    npn_restart_every = 0
    mlp_width: float = WIDTH

    def __init__(self, eps: float = 1e-14, surrogate: Surrogate | None = None, **options: Any):
        super().__init__(**options)
        if surrogate is not None and not isinstance(surrogate, Identity):
            raise InputError(f"{surrogate.name!r} with normalizer 'mlp', which needs 'identity'", "surrogate")
        self.width = self.mlp_width
        self.eps = eps
        self.network: PartitionNetwork

    def memory(self, dimension: int, processes: int) -> dict[str, int]:
        each = 4 * PartitionNetwork.size(dimension, self.width)
        moments = MOMENTS[self.optimizer_name]
        return {"MLPs": each, "their gradients": each, "their optimizer's state": each * moments}

    def _make(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        levels = torch.zeros(2, device=device, dtype=dtype)
        self.network = PartitionNetwork(dimension, self.width, levels, seed=0)

    def _named(self) -> dict[str, Tensor]:
        return self.network.named()

    def _restart(self, batch: Batch) -> None:
        # L + s_ii / tau is the batch's log mean_j exp(s_ij / tau).
        levels = (batch.all_log_batch + batch.all_positives / batch.all_tau).mean(dim=1)
        levels = torch.where(batch.finite, levels, 0.0)
        self.network.load(PartitionNetwork(self.dimension, self.width, levels, seed=self.steps).named())

    def _gradient_setter(self, batch: Batch) -> Callable[[], Tensor]:
        return partial(self._set_gradient, batch)

    def _set_gradient(self, batch: Batch) -> Tensor:
        log_ratio = self.network(batch.all_image, batch.all_text) - batch.all_positives / batch.all_tau
        alpha = add_eps(log_ratio, self.eps)
        slopes = self.objective.slope(batch.all_log_batch, alpha) * (log_ratio - alpha).exp()
        slopes *= self.objective.weight(batch.all_tau) / batch.size
        gradients = self.network.gradients(batch.all_image, batch.all_text, slopes)
        for parameter, gradient in zip(self._named().values(), gradients, strict=True):
            parameter.grad = torch.where(batch.finite, gradient, 0.0)  # a deep copy of a parameter has none
        return alpha

    def forward(self, batch: Batch, updated: Any = None) -> Tensor:
        if self.steps == 0:
            return batch.log_batch
        return add_eps(self.network(batch.image, batch.text) - batch.positives / batch.tau, self.eps)

    def check_state(self, state: dict[str, Tensor], dimension: int) -> None:
        super().check_state(state, dimension)
        if "0.up.weight" in state:
            hidden = len(state["0.up.weight"])
            if hidden != PartitionNetwork.hidden(dimension, self.width):
                raise ValueError(f"mlp_width: {self.width} where the state's network is {hidden} wide")
