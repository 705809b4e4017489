"""Frozen batch norms of timm's image towers keep their activations."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from training_ext.core.component import Component
from training_ext.core.seam import Seam


def freeze(original: Callable, trunk: nn.Module, *chosen: Any) -> nn.Module:
    """OpenCLIP's freezing, which would make a tower whose norms include the activations, as EfficientNet's, linear."""
    from timm.layers import BatchNormAct2d

    norms = [(path, module) for path, module in trunk.named_modules() if isinstance(module, BatchNormAct2d)]
    frozen = original(trunk, *chosen)
    for path, norm in norms:
        if (layer := frozen.get_submodule(path)) is not norm:
            layer.register_forward_hook(lambda _, __, output, norm=norm: norm.act(norm.drop(output)))
    return frozen


class TimmNorms(Component):
    name = "timm_norms"
    seams = (
        Seam(
            "open_clip.timm_model", "freeze_batch_norm_2d",
            why="OpenCLIP replaces a frozen norm of timm's that includes the activation by one without",
            contract="TimmModel.lock freezes the norms of its trunk by freeze_batch_norm_2d(trunk, ...), in place",
            replacement=lambda original, component: partial(freeze, original),
            used_by="open_clip.timm_model:TimmModel.lock",
        ),
    )  # fmt: skip
