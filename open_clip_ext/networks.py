"""The network of AmorLIP's Section 3.2 that predicts log Z of an embedding.

The paper's three-layer MLP, whose intermediate layers have the dimension f_d * d (Section 4), leaves details open.
Here, with h = f_d * d:

    x -> Linear(d, h), ReLU, LayerNorm -> Linear(h, d), ReLU, LayerNorm -> + x, ReLU -> Linear(d, 1)

which is also what AmorLIP's authors released. The caller initializes the last bias, for example to the batch's mean
log Z: from 0, Adam at 1e-3 would need a thousand steps to get there.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from open_clip_ext.options import option
from open_clip_ext.side_model import SideModel, below

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
        hidden = hidden_width(dimension, width)
        self.up = nn.Linear(dimension, hidden)
        self.up_norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, dimension)
        self.down_norm = nn.LayerNorm(dimension)
        self.out = nn.Linear(dimension, 1)

    def forward(self, embedding: Tensor) -> Tensor:
        hidden = self.up_norm(self.up(embedding).relu())
        hidden = self.down_norm(self.down(hidden).relu())
        return self.out((hidden + embedding).relu()).squeeze(1)


class PartitionNetwork(SideModel):
    """One MLP for images and one for texts.

    Args:
        dimension, width: as in `PartitionMLP`.
        levels: initial values of the last biases, (2,), images first; the network takes their device and dtype.
        seed: of the initialization, the same on every process; the global generators are left alone.
        training: further arguments of `SideModel`.
    """

    def __init__(self, dimension: int, width: float, levels: Tensor, seed: int, **training: Any):
        # On the CPU, whatever torch.set_default_device says: a GPU's generator is not seeded here.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed CUDA too
            sides = nn.ModuleList(PartitionMLP(dimension, width) for _ in levels)
        named = {name: parameter.detach() for name, parameter in sides.to(levels).named_parameters()}
        for side, level in enumerate(levels):
            named[f"{side}.out.bias"].copy_(level.detach())
        super().__init__(named, **training)
        self._size = dimension, width

    def forward(self, image: Tensor, text: Tensor, named: dict[str, Tensor] | None = None) -> Tensor:
        """log Z, (2, b), of image and text embeddings, (b, d) each; `named`, if given, are the parameters to use."""
        mlp, named = without_values(*self._size), self.named if named is None else named
        sides = [functional_call(mlp, below(named, f"{side}."), (e,)) for side, e in enumerate((image, text))]
        return torch.stack(sides)

    def backward(self, image: Tensor, text: Tensor, slopes: Tensor, finite: Tensor) -> None:
        """Set `gradients` from an objective's derivatives in log Z, (2, b); to 0 if `finite`, 0-d bool, is False."""
        with torch.enable_grad():
            named = {name: value.detach().requires_grad_() for name, value in self.named.items()}
            gradients = torch.autograd.grad(self(image, text, named), list(named.values()), slopes)
        self.gradients = {
            name: torch.where(finite, gradient, 0.0) for name, gradient in zip(named, gradients, strict=True)
        }


def hidden_width(dimension: int, width: float) -> int:
    """h, the width of the hidden layer."""
    return max(1, round(width * dimension))


@cache
def without_values(dimension: int, width: float) -> PartitionMLP:
    """The MLP on the meta device, for its names and shapes: takes no memory and draws no random numbers."""
    with torch.device("meta"):
        return PartitionMLP(dimension, width)


def size(dimension: int, width: float) -> int:
    """Number of parameters of both MLPs, for images and for texts."""
    return 2 * sum(parameter.numel() for parameter in without_values(dimension, width).parameters())


def check_width(state: dict[str, Any], prefix: str, width: float) -> None:
    """Raise ValueError if the state has a network of another f_d under `prefix`."""
    if isinstance(up := state.get(f"{prefix}0.up.weight"), Tensor):
        hidden, dimension = up.shape
        if hidden != hidden_width(dimension, width):
            raise ValueError(f"mlp_width: {width} where the state's network is {hidden} wide")
