"""What a reference model reads, which must be what the model in training reads."""

from typing import Any

import open_clip
from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

from training_ext.openclip.loading import known_config


def inputs_of(model: str, pretrained: str | None) -> dict[str, Any] | None:
    """What a model of OpenCLIP's list reads: image size, normalization, tokens; None for another model."""
    config = known_config(model)
    if config is None:
        return None
    size, text = config["vision_cfg"].get("image_size", 224), config["text_cfg"]
    weights = open_clip.get_pretrained_cfg(model, pretrained) if pretrained else {}  # {} for a file
    return {
        "force_image_size": [size] * 2 if isinstance(size, int) else [*size],
        "image_mean": [*weights.get("mean", OPENAI_DATASET_MEAN)],
        "image_std": [*weights.get("std", OPENAI_DATASET_STD)],
        "force_context_length": text.get("context_length", 77),
        # Not the tokenizer's name: several names are the same one.
        "tokens": (text.get("vocab_size", 49408), text.get("hf_tokenizer_name") is None),
    }


def is_unlike_reference(run: Any) -> bool:
    """Whether the reference model is known to read otherwise than the model in training."""
    model_inputs, its = inputs_of(run.model, run.pretrained), inputs_of(run.distill_model, run.distill_pretrained)
    if model_inputs is None or its is None:
        return False
    overrides = {name: getattr(run, name) for name in model_inputs if getattr(run, name, None) is not None}
    if "force_image_size" in overrides:
        overrides["force_image_size"] = (2 * overrides["force_image_size"])[:2]
    return {**model_inputs, **overrides} != its
