"""LoRA, arXiv 2106.09685: the flags, what they exclude, and the weights with the additions merged for plain OpenCLIP.

`additions` is imported where there are some.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.errors import InputError
from open_clip_ext.options import AT_LEAST_1, POSITIVE, flag_of, option
from training_ext.core.component import Component
from training_ext.core.hosts import release

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
        from training_ext.components.lora.additions import add, freeze

        if not hasattr(model, "lock_image_tower"):
            raise InputError(f"{self.args.model} is no CLIP of two towers that OpenCLIP can lock", "--lora-rank")
        # FSDP wants one dtype. Else the additions have steps that 16 bits would lose.
        dtype = None if getattr(self.args, "fsdp", False) else torch.float32
        for tower in self._towers():
            parts = freeze(model, tower, self.args)
            if not add(parts, self.lora_maps == "attention", self.lora_rank or 1, self._scale, dtype):
                raise InputError(f"{self.args.model} has no linear maps in its {tower} tower", "--lora-rank")
        if self.args.rank == 0:
            trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            total = sum(parameter.numel() for parameter in model.parameters())
            logging.info(f"LoRA: {trained:,} of {total:,} parameters are trained, additions included")

    def _towers(self) -> tuple[str, ...]:
        return ("image", "text") if self.lora_towers == "both" else (self.lora_towers,)

    @property
    def _scale(self) -> float:
        return self.lora_alpha / (self.lora_rank or 1)

    def export(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        from training_ext.components.lora.additions import added

        merged = {}
        for name, value in weights.items():
            addition = f"{name.removesuffix('original')}0.lora_"
            if f"{addition}up" in weights:
                name = name.replace(".parametrizations.", ".").removesuffix(".original")
                value = added(value, weights[f"{addition}up"], weights[f"{addition}down"], self._scale)
            if ".0.lora_" not in name:
                merged[name] = value
        return merged
