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
from safetensors import safe_open

from open_clip_ext.distributed import plain_name
from open_clip_ext.errors import InputError
from training_ext.core.patching import replaced
from training_ext.core.state import CHECKPOINTS, WEIGHTS
from training_ext.openclip.hosts import taken
from training_ext.openclip.loading import load_mapped, load_verified, one_line, without_remote_code, without_warnings

PARAMS = "params.txt"
CPU = Namespace(precision="fp32", device="cpu")
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
        has_logit_bias: whether the weights, or those of the start, have SigLIP's logit_bias; OpenCLIP takes 0 for one
            that a file lacks.
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
        path: the file of the start's weights; its own params.txt, if there is one, must name the same model, since
            models of one shape can differ in their activations.

    Raises:
        InputError: the file does not exist or has no weights.
    """
    model = read_params(os.path.join(experiment_of(path), PARAMS)).get("model", end.model)
    if model != end.model:
        raise InputError(f"{path!r} is of {model!r} and --checkpoint of {end.model!r}", "--interpolate")
    start = find_checkpoint(path, model, flag="--interpolate")
    return [
        replace(
            end, start=path, alpha=alpha, label=f"{end.label}@{alpha:g}",
            has_logit_bias=end.has_logit_bias or start.has_logit_bias,
            digest=f"{alpha!r} of {end.digest}, else {start.digest}",
        )
        for alpha in alphas
    ]


def experiment_of(path: str) -> str:
    """The folder of the training that wrote a checkpoint, which also has its params.txt."""
    folder = os.path.dirname(os.path.abspath(path))
    return os.path.dirname(folder) if os.path.basename(folder) in (CHECKPOINTS, WEIGHTS) else folder


def plain_weights(path: str) -> str:
    """The file with a checkpoint's weights as plain OpenCLIP loads them, which a training with components writes."""
    exported = os.path.join(experiment_of(path), WEIGHTS, os.path.basename(path))
    return exported if os.path.isfile(exported) else path


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
    folder, experiment = os.path.dirname(os.path.abspath(path)), experiment_of(path)
    params = read_params(os.path.join(experiment, PARAMS))
    name = params.get("model") if model is None else model
    if not isinstance(name, str):
        raise InputError(f"there is no {PARAMS} with the model's name beside {path!r}; give the name", "--model")
    is_from_params = name == params.get("model")
    if tag is not None and not is_pretrained_cfg(name.replace("/", "-"), tag):
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none"
        raise InputError(f"{tag!r} is not a tag of {name!r}, which has {tags}", "--pretrained")
    if tag is not None and not (is_from_params and params.get("force_quick_gelu")):
        warn_of_activation(name, tag)
    if tag is None and is_from_params:
        tag = str(params.get("pretrained"))  # may also be a file or empty
    flags = {one: params[one] for one in MODEL_FLAGS if is_from_params and params.get(one) is not None}
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    label = os.path.splitext(os.path.basename(path))[0]
    if params or experiment != folder:  # best.pt is beside params.txt
        label = f"{os.path.basename(experiment)}/{label}"
    has_logit_bias = any(weight.endswith("logit_bias") for weight in names_of_weights(path, flag))
    return Checkpoint(path, label, name, digest.hexdigest(), has_logit_bias, preprocessing_of(name, tag) | flags)


def preprocessing_of(model: str, tag: str | None) -> dict[str, Any]:
    """OpenCLIP's preprocessing flags for the pretrained weights with this tag; {} if there are none."""
    settings = get_pretrained_cfg(model.replace("/", "-"), tag or "") or {}
    names = ("mean", "std", "interpolation", "resize_mode")
    return {f"image_{name}": settings[name] for name in names if settings.get(name) is not None}


def warn_of_activation(model: str, tag: str) -> None:
    """Warn if the weights with this tag were trained with another activation than the model has, as OpenCLIP does."""
    weights = get_pretrained_cfg(model.replace("/", "-"), tag) or {}
    quick_gelu, theirs = (bool(one.get("quick_gelu")) for one in (open_clip.get_model_config(model) or {}, weights))
    if quick_gelu != theirs:
        names = ("GELU", "QuickGELU")
        other = f"{model}-quickgelu" if theirs else model.removesuffix("-quickgelu")
        logging.warning(
            f"--model: {model!r} has {names[quick_gelu]} and the weights {tag!r} were trained with {names[theirs]}; "
            f"unless yours were fine-tuned with {names[quick_gelu]}, give --model {other}"
        )


def read_params(path: str) -> dict[str, Any]:
    """Parse OpenCLIP's params.txt, lines of `name: value`; {} if it cannot be read."""
    params: dict[str, Any] = {}
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, ValueError):
        return params
    for line in lines:
        name, _, text = line.partition(": ")
        try:
            value = ast.literal_eval(text)
            json.dumps(value)  # what no flag can be, such as a set, stays text
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = text
        params[name] = value
    return params


def names_of_weights(path: str, flag: str) -> list[str]:
    """Names of the weights in a file, without prefixes of wrappers.

    Raises:
        InputError: the file is damaged or has no weights, or is a script.
    """
    try:
        if path.endswith(".safetensors"):
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        content = load_verified(path)
    except Exception as error:  # a damaged archive may raise anything
        reason = f"is not a complete checkpoint: {one_line(error)}"
        if "TorchScript" in reason:
            reason = "is a TorchScript archive, which would execute what it contains; give a file of its state_dict"
        raise InputError(f"{path!r} {reason}", flag) from None
    if not (weights := weights_in(content)):
        raise InputError(f"{path!r} has no weights of a model", flag)
    return list(weights)


def weights_in(content: Any) -> dict[str, torch.Tensor]:
    """The weights in the content of a file, by name without prefixes of wrappers; {} if there are none."""
    weights = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        return {}
    return {plain_name(str(name)): value for name, value in weights.items()}


def load_model(checkpoint: Checkpoint, args: Namespace = CPU) -> tuple[torch.nn.Module, Callable, Callable]:
    """The model in evaluation mode, the transform for evaluation, and the tokenizer.

    Args:
        args: precision and device are used.

    Raises:
        InputError: OpenCLIP does not know the model, or the weights belong to another.
    """
    flag, path, model_flags = "--model", checkpoint.path, dict(checkpoint.flags)
    seams = {
        ("open_clip.factory", "HFTokenizer"): without_remote_code(open_clip.factory.HFTokenizer),
        ("open_clip.factory", "torch.load"): lambda path, **options: load_mapped(path),
    }
    size = model_flags.get("force_image_size")
    if isinstance(size, tuple | list) and len(size) == 1:
        model_flags["force_image_size"] = size[0]
    if checkpoint.has_logit_bias:
        model_flags["init_logit_bias"] = 0.0
    create = open_clip.create_model_and_transforms
    try:
        with replaced(seams), without_warnings():  # about settings of the training
            model, _, transform = create(
                checkpoint.model, precision=args.precision, device=args.device, output_dict=True,
                **taken(create, load_weights=False, pretrained_text=False), **model_flags,
            )
            open_clip.load_checkpoint(model, plain_weights(path))
            if checkpoint.start is not None:
                end = {name: value.clone() for name, value in model.state_dict().items()}
                flag, path = "--interpolate", checkpoint.start
                open_clip.load_checkpoint(model, plain_weights(path))
                model.load_state_dict(interpolate(model.state_dict(), end, checkpoint.alpha))
            length = checkpoint.flags.get("force_context_length")
            tokenizer = open_clip.get_tokenizer(checkpoint.model, context_length=length)
    except InputError:
        raise
    except Exception as error:  # a wrong model name may raise anything
        reason = str(error).strip().splitlines()[-1].strip()[:200] if str(error).strip() else repr(error)
        if open_clip.get_model_config(checkpoint.model) is None and ":" not in checkpoint.model:
            reason = "OpenCLIP does not know it"
        raise InputError(f"{checkpoint.model!r} with the weights of {path!r}: {reason}", flag) from None
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
