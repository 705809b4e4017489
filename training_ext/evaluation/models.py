"""Load the model of a checkpoint: of this package's training or any of OpenCLIP's."""

import ast
import hashlib
import json
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import open_clip
import torch
from open_clip.pretrained import get_pretrained_cfg, is_pretrained_cfg
from safetensors import SafetensorError, safe_open

from open_clip_ext.distributed import plain_name
from open_clip_ext.errors import InputError
from training_ext.openclip.hosts import taken
from training_ext.openclip.loading import load_mapped, load_verified, one_line, without_remote_code, without_warnings
from training_ext.openclip.patching import replaced

PARAMS = "params.txt"
# The training's flags that the model and its transform depend on.
MODEL_FLAGS = (
    "force_quick_gelu", "force_custom_text", "force_image_size", "force_context_length", "image_mean", "image_std",
    "image_interpolation", "image_resize_mode",
)


@dataclass(frozen=True)
class Checkpoint:
    """A file of weights, and what is needed to build its model.

    Args:
        path: the file.
        label: short name for tables, such as `NAME/epoch_3`.
        model: OpenCLIP's name of the model.
        digest: SHA-256 (hex) of the file.
        has_logit_bias: whether the weights have SigLIP's logit_bias.
        flags: the training's values of `MODEL_FLAGS`, and the preprocessing of the pretrained weights it started from.
        start: the file of weights to interpolate with, or None.
        alpha: share of `path` in every weight, in [0, 1]; the rest is `start`'s.
    """

    path: str
    label: str
    model: str
    digest: str
    has_logit_bias: bool
    flags: dict[str, Any] = field(default_factory=dict)
    start: str | None = None
    alpha: float = 1.0


def interpolated(end: Checkpoint, path: str, alphas: Sequence[float]) -> list[Checkpoint]:
    """The weights alpha * end + (1 - alpha) * start for each alpha: WiSE-FT, arXiv 2109.01903.

    Args:
        path: the file of the start's weights; its own params.txt, if there is one, must name the same model.

    Raises:
        InputError: the file does not exist or has no weights, or is another model's.
    """
    model = read_params(os.path.join(experiment_of(path), PARAMS)).get("model", end.model)
    if model != end.model:
        raise InputError(
            f"{path!r} is of {model!r} and --checkpoint of {end.model!r}; give one model's", "--interpolate"
        )
    start = find_checkpoint(path, model, flag="--interpolate")
    return [
        replace(
            end, start=path, alpha=alpha, label=f"{end.label}@{alpha:g}",
            digest=f"{alpha!r} of {end.digest}, else {start.digest}",
        )
        for alpha in alphas
    ]


def experiment_of(path: str) -> str:
    """The folder of the training that wrote a checkpoint, which also has its params.txt."""
    folder = os.path.dirname(os.path.abspath(path))
    return os.path.dirname(folder) if os.path.basename(folder) == "checkpoints" else folder


def find_checkpoint(
    path: str, model: str | None, tag: str | None = None, flag: str = "--checkpoint"
) -> Checkpoint:
    """Describe a checkpoint without loading its weights.

    Args:
        model: OpenCLIP's name of the model; None: from params.txt beside the checkpoint.
        tag: OpenCLIP's tag of the pretrained weights whose preprocessing is used; None: from params.txt, or else the
            model's own preprocessing.
        flag: names the path in messages.

    Raises:
        InputError: the file does not exist or has no weights, the model's name is not known, or the tag is not one of
            the model's.
    """
    if not os.path.isfile(path):
        raise InputError(f"{path!r} is not a file", flag)
    folder, name = os.path.split(os.path.abspath(path))
    experiment = experiment_of(path)
    inside = experiment != folder
    params = read_params(os.path.join(experiment, PARAMS))
    if model is None and not isinstance(params.get("model"), str):
        raise InputError(f"there is no {PARAMS} with the model's name beside {path!r}; give the name", "--model")
    own = model is None or model == params.get("model")
    name_of_model = str(model or params["model"])
    if tag is not None and not is_pretrained_cfg(name_of_model.replace("/", "-"), tag):
        known = ", ".join(open_clip.list_pretrained_tags_by_model(name_of_model)) or "none"
        raise InputError(f"{tag!r} is not a tag of {name_of_model!r}, which has {known}", "--pretrained")
    if tag is not None and not (own and params.get("force_quick_gelu")):
        warn_of_activation(name_of_model, tag)
    if tag is None and own:
        tag = str(params.get("pretrained"))  # may also be a file or empty
    preprocessing = {} if tag is None else preprocessing_of(name_of_model, tag)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    label = os.path.splitext(name)[0]
    return Checkpoint(
        path,
        f"{os.path.basename(experiment)}/{label}" if inside or params else label,  # best.pt is beside params.txt
        name_of_model,
        digest.hexdigest(),
        any(name.endswith("logit_bias") for name in names_of_weights(path, flag)),
        preprocessing | {name: params[name] for name in MODEL_FLAGS if own and params.get(name) is not None},
    )


def preprocessing_of(model: str, tag: str) -> dict[str, Any]:
    """OpenCLIP's preprocessing flags for the pretrained weights with this tag; {} if there are none."""
    settings = get_pretrained_cfg(model.replace("/", "-"), tag) or {}
    names = ("mean", "std", "interpolation", "resize_mode")
    return {f"image_{name}": settings[name] for name in names if settings.get(name) is not None}


def warn_of_activation(model: str, tag: str) -> None:
    """Warn if the weights with this tag were trained with another activation than the model has, as OpenCLIP does."""
    weights = get_pretrained_cfg(model.replace("/", "-"), tag) or {}
    own, theirs = (bool(one.get("quick_gelu")) for one in (open_clip.get_model_config(model) or {}, weights))
    if own != theirs:
        names = ("GELU", "QuickGELU")
        other = f"{model}-quickgelu" if theirs else model.removesuffix("-quickgelu")
        logging.warning(
            f"--model: {model!r} has {names[own]} and the weights {tag!r} were trained with {names[theirs]}; unless "
            f"yours were fine-tuned with {names[own]}, give --model {other}"
        )


def read_params(path: str) -> dict[str, Any]:
    """Parse OpenCLIP's params.txt, lines of `name: value`; {} if it cannot be read."""
    found: dict[str, Any] = {}
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, ValueError):
        return found
    for line in lines:
        name, _, text = line.partition(": ")
        try:
            value = ast.literal_eval(text)
            json.dumps(value)  # what no flag can be, such as a set, stays text
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = text
        found[name] = value
    return found


def names_of_weights(path: str, flag: str) -> list[str]:
    try:
        if path.endswith(".safetensors"):
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        content = load_verified(path)
    except (SafetensorError, Exception) as error:  # a damaged archive may raise anything
        reason = f"is not a complete checkpoint: {one_line(error)}"
        if "TorchScript" in reason:
            reason = "is a TorchScript archive, which would execute what it contains; give a file of its state_dict"
        raise InputError(f"{path!r} {reason}", flag) from None
    weights = content.get("state_dict", content) if isinstance(content, dict) else None
    if not (
        isinstance(weights, dict)
        and weights
        and all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in weights.items())
    ):
        raise InputError(f"{path!r} has no weights of a model", flag)
    return [plain_name(name) for name in weights]


def load_model(checkpoint: Checkpoint, args: Namespace) -> tuple[torch.nn.Module, Callable, Callable]:
    """The model in evaluation mode, the transform for evaluation, and the tokenizer.

    Args:
        args: precision and device are used.

    Raises:
        InputError: OpenCLIP does not know the model, or the weights belong to another.
    """
    given = f"--model: {checkpoint.model!r} with the weights of {checkpoint.path!r}"
    seams = {
        ("open_clip.factory", "HFTokenizer"): without_remote_code(open_clip.factory.HFTokenizer),
        ("open_clip.factory", "torch.load"): lambda path, **options: load_mapped(path),
    }
    size = checkpoint.flags.get("force_image_size")
    flags = {
        **checkpoint.flags,
        **({"force_image_size": size[0]} if isinstance(size, (tuple, list)) and len(size) == 1 else {}),
        **({"init_logit_bias": 0.0} if checkpoint.has_logit_bias else {}),
    }
    try:
        with replaced(seams), without_warnings():  # about settings of the training
            model, _, transform = open_clip.create_model_and_transforms(
                checkpoint.model, precision=args.precision, device=args.device, output_dict=True,
                **taken(open_clip.create_model_and_transforms, load_weights=False, pretrained_text=False), **flags,
            )
            open_clip.load_checkpoint(model, checkpoint.path)
            if checkpoint.start is not None:
                end = {name: value.clone() for name, value in model.state_dict().items()}
                given = f"--interpolate: {checkpoint.model!r} with the weights of {checkpoint.start!r}"
                open_clip.load_checkpoint(model, checkpoint.start)
                model.load_state_dict(interpolate(model.state_dict(), end, checkpoint.alpha))
            length = checkpoint.flags.get("force_context_length")
            tokenizer = open_clip.get_tokenizer(checkpoint.model, context_length=length)
    except InputError:
        raise
    except Exception as error:  # a wrong model name may raise anything
        reason = str(error).strip().splitlines()[-1].strip()[:200] if str(error).strip() else repr(error)
        if open_clip.get_model_config(checkpoint.model) is None and ":" not in checkpoint.model:
            reason = "OpenCLIP does not know it"
        raise InputError(f"{given}: {reason}") from None
    return model.eval(), transform, tokenizer


def interpolate(start: dict[str, torch.Tensor], end: dict[str, torch.Tensor], alpha: float) -> dict[str, torch.Tensor]:
    """alpha * end + (1 - alpha) * start, computed in float32 or float64; integers, such as counts of steps, are the
    end's."""
    mixed = {}
    for name, value in start.items():
        precision = torch.promote_types(value.dtype, torch.float32)
        other = end[name].to(precision)
        mixed[name] = torch.lerp(value.to(precision), other, alpha) if value.is_floating_point() else end[name]
    return mixed
