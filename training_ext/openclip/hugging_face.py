"""Models with a text tower or a tokenizer of Hugging Face: what is wrong with them ends in one line.

A text tower is rehearsed from its configuration if that is on this machine; otherwise a small one stands in for it, and
`built` catches what fails when OpenCLIP downloads and builds the tower. A tokenizer that needs no download is loaded
before anything is written.
"""

import io
import os
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.hf_configs import arch_dict

from open_clip_ext.errors import InputError
from open_clip_ext.files import is_full
from training_ext.openclip.hosts import SCHEMAS, taken
from training_ext.openclip.loading import one_line, without_remote_code
from training_ext.openclip.patching import replaced

# Stands in for a text tower that is not on this machine.
STAND_IN = {"width": 64, "heads": 1, "layers": 1}
# Text towers with one learned embedding per position, and the position of a caption's first token.
FIRST_POSITION = {"bert": 0, "roberta": 2, "xlm-roberta": 2}


def load_tokenizer(args: Namespace, config: dict[str, Any]) -> Any:
    """The model's tokenizer; None if that needs a download.

    Args:
        config: the configuration of the text tower in OpenCLIP's.

    Raises:
        InputError: it cannot be loaded.
    """
    name = config.get("hf_tokenizer_name")
    if name and not args.model.startswith("local-dir:") and _can_be_downloaded(name):
        return None
    options = taken(open_clip.get_tokenizer, cache_dir=args.cache_dir, context_length=args.force_context_length)
    with replaced({("open_clip.factory", "HFTokenizer"): without_remote_code(open_clip.factory.HFTokenizer)}):
        return open_clip.get_tokenizer(args.model, **options)


def text_tower(args: Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """Check the model's text tower of Hugging Face, and return the configuration of what stands in for it.

    Args:
        config: the configuration of the text tower in OpenCLIP's.

    Returns:
        An empty dict if the tower's own configuration is on this machine.

    Raises:
        InputError: the tower cannot be loaded, or OpenCLIP does not know its kind, or it has too few positions.
    """
    name = config["hf_model_name"]
    given = f"--model: {args.model!r} has the text tower {name!r} (hf_model_name), "
    if open_clip.hf_model.transformers is None:
        raise InputError(f"{given}which needs transformers; pip install transformers")
    context = args.force_context_length or config.get("context_length", open_clip.factory.DEFAULT_CONTEXT_LENGTH)
    try:
        own = local_config(name)
    except Exception as error:  # transformers may raise anything
        if _can_be_downloaded(name):
            return {**STAND_IN, "context_length": context}
        reason = one_line(error).rstrip(".") or repr(error)
        raise InputError(f"{given}which cannot be loaded: {reason}; give a folder or a model of the hub") from None
    if own.model_type not in arch_dict:
        raise InputError(f"{given}of the type {own.model_type!r}; OpenCLIP knows the types {', '.join(arch_dict)}")
    # Other weights take the place of the tower's own.
    if os.path.isdir(name) and not args.pretrained and not args.model.startswith(SCHEMAS) and not any(
        path.suffix in (".safetensors", ".bin") for path in Path(name).iterdir()
    ):
        raise InputError(f"{given}a folder without weights; put its model.safetensors there, or give --pretrained")
    if own.model_type in FIRST_POSITION:
        most = own.max_position_embeddings - FIRST_POSITION[own.model_type]
        if context > most:
            raise InputError(
                f"{context} tokens, but {name!r} has {most} positions; give fewer", "--force-context-length"
            )
    return {}


def local_config(name: str, **options: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, **{**options, "local_files_only": True, "trust_remote_code": False})


def _can_be_downloaded(name: str) -> bool:
    """Whether only a download can tell if there is a model of this name."""
    from huggingface_hub import constants
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if os.path.exists(name) or constants.HF_HUB_OFFLINE:
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def lock_text(model: Any, args: Namespace) -> None:
    try:
        with redirect_stdout(io.StringIO()):  # OpenCLIP prints how many layers it unlocks
            model.lock_text_tower(args.lock_text_unlocked_layers, args.lock_text_freeze_layer_norm)
    except KeyError:  # OpenCLIP knows the layers of only some towers of Hugging Face
        raise InputError(
            f"{args.lock_text_unlocked_layers} with --model {args.model}, whose text "
            "tower OpenCLIP can lock only as a whole; leave it out",
            "--lock-text-unlocked-layers",
        ) from None


def built(args: Namespace, build: Callable[[], Any], frozen: bool = False) -> Any:
    """Let OpenCLIP build a model and its transforms, and name the flag if a text tower of Hugging Face fails.

    Args:
        build: returns the model and its transforms.
        frozen: whether the model is that of --distill-model.

    Raises:
        InputError: the tower, or the weights of a model with one, cannot be loaded, or the tower cannot be locked;
            OpenCLIP has written its first files by then.
    """
    try:
        model, *transforms = build()
    except (InputError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        name, weights = (args.distill_model, args.distill_pretrained) if frozen else (args.model, args.pretrained)
        if is_full(error) or not _has_hugging_face_tower(name):
            raise
        flag, given = "--distill-model" if frozen else "--model", f" with the weights {weights!r}" if weights else ""
        # These two name only what is missing.
        reason = "" if isinstance(error, AttributeError | KeyError) else one_line(error).rstrip(".")
        raise InputError(
            f"{name!r} cannot be built{given}: {reason or repr(error)}; "
            "give weights of this model, and a text tower (hf_model_name) that can be loaded",
            flag,
        ) from error
    if args.lock_text and not frozen and isinstance(getattr(model, "text", None), open_clip.hf_model.HFTextEncoder):
        lock_text(model, args)  # OpenCLIP will lock it again; the rehearsal has not seen a tower that was downloaded
    return model, *transforms


def _has_hugging_face_tower(model: str) -> bool:
    try:
        config = open_clip.get_model_config(model if model.startswith(SCHEMAS) else model.replace("/", "-"))
        return bool(config["text_cfg"].get("hf_model_name"))
    except Exception:  # a configuration that cannot be read is an error of another kind
        return False
