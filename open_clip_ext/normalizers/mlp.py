"""A multi-layer perceptron in place of the prototypes (NeuCLIP, Section 5.2, "MLP").

The paper says only that the network is an MLP with random weights at the start. Here

    alpha_1i = logaddexp(log eps, MLP_1(e_1i) - s_ii / tau),    MLP_1(e_1i) ~ log mean_j exp(s_ij / tau)

and the same with image and text swapped. The MLP sees only the anchor's own embedding, so s_ii / tau must be a separate
term of the exponent, which only the identity surrogate allows.

Also fixed here: the network is AmorLIP's (`networks`). A restart draws new weights, since there are no embeddings
to restart from; there is none after the first unless `npn_restart_every` is given. Adam at 1e-3, as AmorLIP's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch, add_eps
from open_clip_ext.errors import InputError
from open_clip_ext.networks import WIDTH, PartitionNetwork, check_width, size
from open_clip_ext.normalizers.npn import NPN
from open_clip_ext.side_model import MOMENTS
from open_clip_ext.surrogates import Identity, Surrogate


class MLP(NPN):
    """A multi-layer perceptron that predicts each sample's log-normalizer; `eps` and `surrogate` are the loss's.

    Raises:
        InputError: the surrogate is not the identity.
    """

    name = "mlp"
    npn_restart_every = 0
    mlp_width: float = WIDTH
    network: PartitionNetwork

    def __init__(self, eps: float = 1e-14, surrogate: Surrogate | None = None, **options: Any):
        super().__init__(**options)
        if surrogate is not None and not isinstance(surrogate, Identity):
            raise InputError(f"{surrogate.name!r} with normalizer 'mlp', which needs 'identity'", "surrogate")
        self.eps = eps

    def memory(self, dimension: int, processes: int) -> dict[str, int]:
        each = 4 * size(dimension, self.mlp_width)
        moments = MOMENTS[self.optimizer_name]
        return {"MLPs": each, "their gradients": each, "their optimizer's state": each * moments}

    def _make(self, dimension: int, device: torch.device, dtype: torch.dtype, **training: Any) -> PartitionNetwork:
        levels = torch.zeros(2, device=device, dtype=dtype)
        return PartitionNetwork(dimension, self.mlp_width, levels, seed=0, **training)

    def _restart(self, batch: Batch) -> None:
        # L + s_ii / tau is the batch's log mean_j exp(s_ij / tau).
        levels = (batch.all_log_batch + batch.all_positives / batch.all_tau).mean(dim=1)
        levels = torch.where(batch.finite, levels, 0.0)
        new = PartitionNetwork(batch.all_image.shape[1], self.mlp_width, levels, seed=self.steps)
        for name, parameter in self.network.named.items():
            parameter.copy_(new.named[name])

    def _updates(self, batch: Batch) -> tuple[Callable[[], Tensor], Callable[[], None]]:
        def set_gradient() -> Tensor:
            log_ratio = self.network(batch.all_image, batch.all_text) - batch.all_positives / batch.all_tau
            alpha = add_eps(log_ratio, self.eps)
            slopes = self.objective.slope(batch.all_log_batch, alpha) * (log_ratio - alpha).exp()
            slopes *= self.objective.weight(batch.all_tau) / batch.size
            self.network.backward(batch.all_image, batch.all_text, slopes, batch.finite)
            return alpha

        return set_gradient, self.network.step

    def forward(self, batch: Batch, updated: Any = None) -> Tensor:
        if self.steps == 0:
            return batch.log_batch
        return add_eps(self.network(batch.image, batch.text) - batch.positives / batch.tau, self.eps)

    def check_state(self, state: dict[str, Tensor], dimension: int) -> None:
        super().check_state(state, dimension)
        check_width(state, "", self.mlp_width)
