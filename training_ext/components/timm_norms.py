"""Frozen batch norms of timm's image towers keep their activations."""

from typing import Any

from torch import Tensor, nn

from training_ext.core.component import Component
from training_ext.core.seam import Seam


def keep_activations(original: Any, component: Any) -> Any:
    """OpenCLIP's freezing, which would make a tower whose norms include the activations, as EfficientNet's, linear."""
    from timm.layers import BatchNormAct2d

    def freeze(trunk: nn.Module, *chosen: Any) -> nn.Module:
        norms = [(path, module) for path, module in trunk.named_modules() if isinstance(module, BatchNormAct2d)]
        frozen = original(trunk, *chosen)
        for path, norm in norms:
            if (layer := frozen.get_submodule(path)) is not norm:
                layer.register_forward_hook(activation(norm))
        return frozen

    return freeze


def activation(norm: Any) -> Any:
    def activated(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return norm.act(norm.drop(output))

    return activated


class TimmNorms(Component):
    name = "timm_norms"
    seams = (
        Seam(
            "open_clip.timm_model", "freeze_batch_norm_2d",
            why="OpenCLIP replaces a frozen norm of timm's that includes the activation by one without",
            contract="TimmModel.lock freezes the norms of its trunk by freeze_batch_norm_2d(trunk, ...), in place",
            replacement=keep_activations,
            used_by="open_clip.timm_model:TimmModel.lock",
        ),
    )  # fmt: skip
