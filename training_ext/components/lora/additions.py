"""Additions of low rank to the weights of a frozen tower.

An addition is a parametrization of a weight, so it counts wherever the weight is read: by nn.Linear, by OpenCLIP's
attention, which reads a fused `in_proj_weight`, and by torch's fused attention of evaluation. `peft` is not used: it
wraps modules, of which it knows nn.MultiheadAttention, but neither the class that OpenCLIP 4 has in its place nor that
of the pooling of a ResNet, which read their weights without calling a module.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

IN_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
# A `CLIP` has its text tower's parts itself.
TEXT_PARTS = ("token_embedding", "positional_embedding", "cls_emb", "transformer", "ln_final", "text_projection")


class Addition(nn.Module):
    """Adds a map of low rank to a weight.

    Args:
        weight: (rows, columns).
        dtype: of the addition's parameters; None: the weight's.
    """

    def __init__(self, weight: Tensor, rank: int, scale: float, dtype: torch.dtype | None):
        super().__init__()
        rows, columns = weight.shape
        self.scale = scale
        self.lora_down = nn.Parameter(weight.new_empty(rank, columns, dtype=dtype))
        self.lora_up = nn.Parameter(weight.new_zeros(rows, rank, dtype=dtype))
        nn.init.kaiming_uniform_(self.lora_down, a=math.sqrt(5))  # that of nn.Linear

    def forward(self, weight: Tensor) -> Tensor:
        return added(weight, self.lora_up, self.lora_down, self.scale)


def added(weight: Tensor, up: Tensor, down: Tensor, scale: float) -> Tensor:
    """weight + scale * up @ down, in the weight's dtype also under autocast, since OpenCLIP's towers look at it."""
    with torch.autocast(weight.device.type, enabled=False):
        return torch.addmm(weight, up.to(weight.dtype), down.to(weight.dtype), alpha=scale)


def freeze(model: Any, tower: str, args: Any) -> dict[str, nn.Module]:
    """Freeze a tower but for the groups or layers that flags of OpenCLIP unlock; return its modules by path."""
    if tower == "image":
        parts, unlocked = {"visual": model.visual}, args.lock_image_unlocked_groups
    else:
        names = ["text"] if hasattr(model, "text") else TEXT_PARTS
        parts = {name: part for name in names if (part := getattr(model, name, None)) is not None}
        unlocked = args.lock_text_unlocked_layers
    if not unlocked:  # OpenCLIP 3 would leave out a projection after a tower of timm or Hugging Face
        for part in parts.values():
            part.requires_grad_(False)
    if tower == "image":
        model.lock_image_tower(unlocked_groups=unlocked, freeze_bn_stats=True)
    elif unlocked:
        model.lock_text_tower(unlocked_layers=unlocked, freeze_layer_norm=True)
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def add(parts: dict[str, nn.Module], only_attention: bool, rank: int, scale: float, dtype: torch.dtype | None) -> int:
    """Give an addition to each frozen weight of a linear map in these modules, by path; returns how many there are.

    Args:
        only_attention: leave out the maps outside attention.
        rank, scale, dtype: see `Addition`.
    """
    maps = list(_maps(parts, only_attention))
    for module, name in maps:
        addition = Addition(getattr(module, name), rank, scale, dtype)
        parametrize.register_parametrization(module, name, addition)
    return len(maps)


def _maps(parts: dict[str, nn.Module], only_attention: bool) -> Iterator[tuple[nn.Module, str]]:
    for start, part in parts.items():
        for path, module in part.named_modules(prefix=start):
            if only_attention and not ("attn" in path.lower() or "attention" in path.lower()):
                continue
            for name, weight in list(module.named_parameters(recurse=False)):
                is_map = isinstance(module, nn.Linear) and name == "weight"
                if (is_map or name in IN_ATTENTION) and not weight.requires_grad:
                    yield module, name
