"""The network of AmorLIP's Section 3.2 that predicts log Z of an embedding.

"Three-layer MLP" and "intermediate dimension f_d * d" leave its form open. Here, with h = f_d * d:

    x -> Linear(d, h), ReLU, LayerNorm -> Linear(h, d), ReLU, LayerNorm -> + x, ReLU -> Linear(d, 1)

which is also the form that AmorLIP's authors released. The last bias starts at a level that the caller gives, such as
the batch's mean log Z: it would take a thousand steps of Adam at 1e-3 to get there from 0.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from open_clip_ext.options import option

WIDTH = option(
    0.5, "f_d, width of the predicting MLP over the embeddings' dimension",
    valid=lambda value: 0 < value <= 64, expected="in (0, 64]", in_state=True,
)


class PartitionMLP(nn.Module):
    """log Z of embeddings (b, d) as (b,).

    Args:
        dimension: d.
        width: f_d.
    """

    def __init__(self, dimension: int, width: float):
        super().__init__()
        hidden = PartitionNetwork.hidden(dimension, width)
        self.up = nn.Linear(dimension, hidden)
        self.up_norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, dimension)
        self.down_norm = nn.LayerNorm(dimension)
        self.out = nn.Linear(dimension, 1)

    def forward(self, embedding: Tensor) -> Tensor:
        hidden = self.up_norm(self.up(embedding).relu())
        hidden = self.down_norm(self.down(hidden).relu())
        return self.out((hidden + embedding).relu()).squeeze(1)


class PartitionNetwork:
    """One MLP per side. Not an nn.Module, so that the loss's `parameters()` stay free of it.

    Args:
        dimension, width: as in `PartitionMLP`.
        levels: starts of the last biases, (2,), images first; their device and type are the network's.
        seed: of its initialisation, which leaves the global generators alone: every process makes the same network.
    """

    def __init__(self, dimension: int, width: float, levels: Tensor, seed: int):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed CUDA too
            sides = [PartitionMLP(dimension, width) for _ in levels]
        self._sides = nn.ModuleList(sides).to(levels).requires_grad_(False)
        for side, level in zip(sides, levels, strict=True):
            side.out.bias.copy_(level.detach())

    @staticmethod
    def hidden(dimension: int, width: float) -> int:
        """h, the width of the inner layer."""
        return max(1, round(width * dimension))

    @staticmethod
    def size(dimension: int, width: float) -> int:
        """Parameters of both sides."""
        with torch.device("meta"):  # which neither allocates nor draws
            mlp = PartitionMLP(dimension, width)
        return 2 * sum(parameter.numel() for parameter in mlp.parameters())

    def named(self) -> dict[str, Tensor]:
        """The parameters by name, without graph."""
        return dict(self._sides.named_parameters())

    def __call__(self, image: Tensor, text: Tensor, parameters: dict[str, Tensor] | None = None) -> Tensor:
        """log Z of embeddings (b, d) and (b, d), as (2, b).

        Args:
            parameters: in place of its own, by the names of `named`.
        """
        sides = []
        for side, (mlp, embedding) in enumerate(zip(self._sides, (image, text), strict=True)):
            own = {} if parameters is None else below(parameters, f"{side}.")
            sides.append(functional_call(mlp, own, (embedding,)))
        return torch.stack(sides)

    def gradients(self, image: Tensor, text: Tensor, slopes: Tensor) -> Iterable[Tensor]:
        """Gradients of the parameters, in the order of `named`, for the derivatives (2, b) of an objective in log Z."""
        with torch.enable_grad():
            parameters = {name: value.detach().requires_grad_() for name, value in self.named().items()}
            return torch.autograd.grad(self(image, text, parameters), list(parameters.values()), slopes)

    def load(self, parameters: dict[str, Tensor]) -> None:
        """Take over copies of `parameters`, by the names of `named`."""
        for name, parameter in self.named().items():
            parameter.copy_(parameters[name])


def below(parameters: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
