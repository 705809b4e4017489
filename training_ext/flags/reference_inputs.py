"""Refuse a reference model that reads images or captions otherwise than the trained model, whose tensors it gets."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import open_clip
from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

from open_clip_ext.errors import InputError
from training_ext.flags.rehearsal import known_config

TEXT = {"context_length": 77, "vocab_size": 49408}  # with OpenCLIP's defaults
IMAGE = {"mean": OPENAI_DATASET_MEAN, "std": OPENAI_DATASET_STD}


def check_reference_inputs(args: Namespace) -> None:
    """Compare image size, normalization and tokenizer of `--model` and `--distill-model`, as far as both are OpenCLIP's
    own models.

    Raises:
        InputError: they differ.
    """
    ours, theirs = known_config(args.model), known_config(args.distill_model)
    if ours is None or theirs is None:
        return

    def compare(what: str, own: Any, its: Any, instead: str) -> None:
        if own != its:
            raise InputError(
                f"{args.distill_model!r} has {what} {its}, the training {own}; {instead}", "--distill-model"
            )

    size = _pair(args.force_image_size or _image_size(ours))
    compare("an image size of", size, _pair(_image_size(theirs)), "use models of one size")
    for name, default in TEXT.items():
        own, its = (config["text_cfg"].get(name, default) for config in (ours, theirs))
        if name == "context_length":
            own = getattr(args, "force_context_length", None) or own
        compare(f"the {name}", own, its, "use models with one tokenizer")
    # Not by name: tokenizers of several names are the same.
    names = [config["text_cfg"].get("hf_tokenizer_name") for config in (ours, theirs)]
    own, its = ("Hugging Face" if name else "OpenCLIP" for name in names)
    compare("a tokenizer of", own, its, "use models with one tokenizer")
    for name, numbers in IMAGE.items():
        flag = f"image_{name}"
        own = getattr(args, flag) or _pretrained(args.model, args.pretrained).get(name, numbers)
        its = _pretrained(args.distill_model, args.distill_pretrained).get(name, numbers)
        add = f"add --image-{name} {' '.join(map(str, its))}"
        compare(f"images normalized by the {name}", tuple(own), tuple(its), add)


def _image_size(config: dict[str, Any]) -> int | Sequence[int]:
    return config["vision_cfg"].get("image_size", 224)


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    numbers = [size] if isinstance(size, int) else [*size]
    return numbers[0], numbers[-1]


def _pretrained(model: str, tag: str | None) -> dict[str, Any]:
    """What OpenCLIP knows of pretrained weights; {} for a file."""
    return open_clip.get_pretrained_cfg(model, tag) if tag else {}
