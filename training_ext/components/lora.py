"""LoRA, arXiv 2106.09685: train low-rank additions to a tower's linear maps, and nothing else of the tower.

An addition is a parametrization of a weight, so it counts wherever the weight is read: by nn.Linear, by OpenCLIP's
attention, which reads a fused `in_proj_weight`, and by torch's fused attention of evaluation. `peft` is not used: it
wraps modules, of which it knows nn.MultiheadAttention, but neither the class that OpenCLIP 4 has in its place nor that
of the pooling of a ResNet, which read their weights without calling a module.
"""

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from open_clip_ext.errors import InputError
from open_clip_ext.options import AT_LEAST_1, POSITIVE, flag_of, option
from training_ext.core.component import Component
from training_ext.core.hosts import release

IN_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
# A `CLIP` has its text tower's parts itself.
TEXT_PARTS = ("token_embedding", "positional_embedding", "cls_emb", "transformer", "ln_final", "text_projection")
# They replace the model's modules, or compile them by their source.
REFUSED = ("torchscript", "use_bnb_linear")


class Lora(Component):
    """W + alpha / rank * up @ down in place of each frozen W, with a random `down` and `up` of zeros at the start."""

    name, switch = "lora", "lora_rank"
    lora_rank: int | None = option(
        None, "train additions of this rank to the linear maps of the towers, and nothing else of these",
        in_state=True, **AT_LEAST_1,
    )  # fmt: skip
    lora_alpha: float = option(
        16.0, "factor of an addition before it is divided by its rank (default: 16)", in_state=True, **POSITIVE
    )
    lora_towers: str = option(
        "both", "towers with additions (default: both); the other one trains as without this",
        choices=("both", "image", "text"), in_state=True,
    )  # fmt: skip
    lora_maps: str = option(
        "all", "maps with additions: all (default) or attention's", choices=("all", "attention"), in_state=True
    )

    def check(self) -> None:
        args = self.args
        for tower in self._towers():
            if getattr(args, f"lock_{tower}"):
                other = "text" if tower == "image" else "image"
                raise InputError(
                    f"would lock the additions, too; leave it out, since {flag_of('lora_rank')} freezes the {tower} "
                    f"tower itself, or give --lora-towers {other}",
                    flag_of(f"lock_{tower}"),
                )
        for name in REFUSED:
            if getattr(args, name, None):
                raise InputError("cannot train additions (--lora-rank); leave it out", flag_of(name))
        if args.grad_checkpointing and release() < (2, 32):
            raise InputError(
                "of OpenCLIP before 2.32 gives the additions of --lora-rank no gradient; leave it out",
                "--grad-checkpointing",
            )

    def wrap_model(self, model: Any) -> None:
        if not hasattr(model, "lock_image_tower"):
            raise InputError(f"{self.args.model} is no CLIP of two towers that OpenCLIP can lock", "--lora-rank")
        # FSDP wants one dtype. Else the additions have steps that 16 bits would lose.
        dtype = None if getattr(self.args, "fsdp", False) else torch.float32
        for tower in self._towers():
            maps = list(self._maps(freeze(model, tower, self.args)))
            if not maps:
                raise InputError(f"{self.args.model} has no linear maps in its {tower} tower", "--lora-rank")
            for module, name in maps:
                addition = Addition(getattr(module, name), self.lora_rank or 1, self._scale, dtype)
                parametrize.register_parametrization(module, name, addition)
        if self.args.rank == 0:
            trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            total = sum(parameter.numel() for parameter in model.parameters())
            logging.info(f"LoRA: {trained:,} of {total:,} parameters are trained, additions included")

    def _towers(self) -> tuple[str, ...]:
        return ("image", "text") if self.lora_towers == "both" else (self.lora_towers,)

    @property
    def _scale(self) -> float:
        return self.lora_alpha / (self.lora_rank or 1)

    def _maps(self, parts: dict[str, nn.Module]) -> Iterator[tuple[nn.Module, str]]:
        """Modules and names of the frozen weights that get an addition."""
        for start, part in parts.items():
            for path, module in part.named_modules(prefix=start):
                if self.lora_maps == "attention" and not ("attn" in path.lower() or "attention" in path.lower()):
                    continue
                for name, weight in list(module.named_parameters(recurse=False)):
                    is_map = isinstance(module, nn.Linear) and name == "weight"
                    if (is_map or name in IN_ATTENTION) and not weight.requires_grad:
                        yield module, name

    def export(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        merged = {}
        for name, value in weights.items():
            addition = f"{name.removesuffix('original')}0.lora_"
            if f"{addition}up" in weights:
                name = name.replace(".parametrizations.", ".").removesuffix(".original")
                value = added(value, weights[f"{addition}up"], weights[f"{addition}down"], self._scale)
            if ".0.lora_" not in name:
                merged[name] = value
        return merged


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
