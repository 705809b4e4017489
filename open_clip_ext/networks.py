"""The network of AmorLIP's Section 3.2 that predicts log Z of an embedding.

The paper's three-layer MLP, whose intermediate layers have the dimension f_d * d (Section 4), leaves details open.
Here, with h = f_d * d:

    x -> Linear(d, h), ReLU, LayerNorm -> Linear(h, d), ReLU, LayerNorm -> + x, ReLU -> Linear(d, 1)

which is also what AmorLIP's authors released. The caller initializes the last bias, for example to the batch's mean
log Z: from 0, Adam at 1e-3 would need a thousand steps to get there.
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
    """Predicts log Z, (b,), of embeddings (b, d).

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
    """One MLP for images and one for texts. Not an nn.Module, so that the loss's `parameters()` do not contain it.

    Args:
        dimension, width: as in `PartitionMLP`.
        levels: initial values of the last biases, (2,), images first; the network takes their device and dtype.
        seed: of the initialization, the same on every process; the global generators are left alone.
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
        """h, the width of the hidden layer."""
        return max(1, round(width * dimension))

    @staticmethod
    def size(dimension: int, width: float) -> int:
        """Number of parameters of both MLPs."""
        with torch.device("meta"):  # no memory, no random numbers
            mlp = PartitionMLP(dimension, width)
        return 2 * sum(parameter.numel() for parameter in mlp.parameters())

    def named(self) -> dict[str, Tensor]:
        """The parameters by name; none requires a gradient."""
        return dict(self._sides.named_parameters())

    def __call__(self, image: Tensor, text: Tensor, parameters: dict[str, Tensor] | None = None) -> Tensor:
        """log Z, (2, b), of image and text embeddings, (b, d) each.

        Args:
            parameters: used in place of its own, by the names of `named`.
        """
        sides = []
        for side, (mlp, embedding) in enumerate(zip(self._sides, (image, text), strict=True)):
            own = {} if parameters is None else below(parameters, f"{side}.")
            sides.append(functional_call(mlp, own, (embedding,)))
        return torch.stack(sides)

    def gradients(self, image: Tensor, text: Tensor, slopes: Tensor) -> Iterable[Tensor]:
        """Gradients in the parameters, in the order of `named`, given an objective's derivatives in log Z, (2, b)."""
        with torch.enable_grad():
            parameters = {name: value.detach().requires_grad_() for name, value in self.named().items()}
            return torch.autograd.grad(self(image, text, parameters), list(parameters.values()), slopes)

    def load(self, parameters: dict[str, Tensor]) -> None:
        """Copy the values of `parameters`, by the names of `named`."""
        for name, parameter in self.named().items():
            parameter.copy_(parameters[name])


def below(parameters: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries whose names start with `prefix`, under the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
