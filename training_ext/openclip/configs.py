"""OpenCLIP's configurations of models by name, and what they need that is on this machine."""

import os
from argparse import Namespace
from typing import Any

import open_clip

from training_ext.openclip.hosts import taken
from training_ext.openclip.loading import without_remote_code
from training_ext.openclip.patching import replaced


def known_config(model: str) -> dict[str, Any] | None:
    """OpenCLIP's configuration of a model by name, also with a slash; None if it is unknown or must be downloaded."""
    return None if ":" in model else open_clip.get_model_config(model.replace("/", "-"))


def load_tokenizer(args: Namespace) -> Any:
    """The model's tokenizer; None if that needs a download."""
    if args.model.startswith("hf-hub:"):
        return None
    config = open_clip.get_model_config(args.model if ":" in args.model else args.model.replace("/", "-"))
    name = config["text_cfg"].get("hf_tokenizer_name")
    if name and not args.model.startswith("local-dir:") and not os.path.exists(name):
        return None
    options = taken(open_clip.get_tokenizer, cache_dir=args.cache_dir, context_length=args.force_context_length)
    with replaced({("open_clip.factory", "HFTokenizer"): without_remote_code(open_clip.factory.HFTokenizer)}):
        return open_clip.get_tokenizer(args.model, **options)
