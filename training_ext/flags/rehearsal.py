"""Try the model and the optimizer of a command line, without memory or data, before anything is written.

OpenCLIP builds its model on the meta device, which computes shapes only, and runs it on a batch of two pairs; the
optimizer takes one step on four numbers. What would fail after the first files are written fails here, in one line.
"""

import logging
import math
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NoReturn

import open_clip
import torch
from open_clip.pretrained import is_pretrained_cfg
from open_clip_train import params as open_clip_params
from PIL import Image
from torch import nn

from open_clip_ext.distributed import plain_name
from open_clip_ext.errors import InputError, did_you_mean
from open_clip_ext.options import flag_of
from training_ext.core.rows import trains
from training_ext.core.temperature import trains_logit_scale
from training_ext.features.recovery.recovered import FORCED
from training_ext.flags.task_flags import check_same_loop
from training_ext.openclip.hosts import SCHEMAS, TASKS, host, taken
from training_ext.openclip.hugging_face import load_tokenizer, local_config, lock_text, text_tower
from training_ext.openclip.loading import load_mapped, one_line
from training_ext.openclip.patching import replaced
from training_ext.openclip.versions import open_clip_version, release_of

# Flags of the model and its transforms; if it fails, each is left out in turn to find the cause.
TRANSFORM = ("image_mean", "image_std", "image_interpolation", "image_resize_mode", "aug_cfg")
TOWERS = (
    "lock_image_unlocked_groups", "lock_image", "lock_text_unlocked_layers", "lock_text", "grad_checkpointing",
)
WEIGHTS = ("pretrained",)
# Flags of the optimizer that only some versions of OpenCLIP have, and their values if they are not given.
OPTIMIZER: dict[str, Any] = {
    "opt_kwargs": {}, "opt_fallback_list": None, "text_layer_decay": None, "image_layer_decay": None,
}


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress logs and warnings, which the run itself will repeat."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def known_config(model: str) -> dict[str, Any] | None:
    """OpenCLIP's configuration of a model by name, also with a slash; None if it is unknown or must be downloaded."""
    return None if ":" in model else open_clip.get_model_config(model.replace("/", "-"))


def model_config(args: Namespace) -> dict[str, Any] | None:
    """The model's configuration, downloaded for a model of the hub; None if that must be left to OpenCLIP.

    Raises:
        InputError: the model is unknown, or its configuration cannot be read or is incomplete.
    """
    given = f"--model: {args.model!r}"
    if args.model.startswith(SCHEMAS):
        if args.model.startswith("hf-hub:") and args.cache_dir is not None:
            return None  # OpenCLIP would download it to another folder
        try:
            config = open_clip.get_model_config(args.model)
            return config if {"vision_cfg", "text_cfg", "embed_dim"} <= set(config) else _no_model(given)
        except (OSError, ValueError) as error:  # requests' errors are OSErrors
            raise InputError(f"{given} has no open_clip_config.json that can be read: {one_line(error)}") from None
    config = known_config(args.model)
    if config is None:
        near = did_you_mean(args.model, open_clip.list_models(), "see open_clip.list_models()")
        raise InputError(f"{given} is not known{near}")
    return config


def _no_model(given: str) -> NoReturn:
    raise InputError(f"{given} is not a model of OpenCLIP's: its open_clip_config.json has no embed_dim or no towers")


def check_model(args: Namespace) -> nn.Module | None:
    """Build the model on the meta device and run it; None if that needs a download or real tensors.

    Raises:
        InputError: the model cannot be built or run, its weights do not fit, or its tokenizer cannot be loaded.
    """
    config = model_config(args)
    if config is not None and config["text_cfg"].get("variable_text") and args.uses_ext_loss:
        raise InputError(f"{args.model!r} takes captions of variable length; --loss {args.loss} does not", "--model")
    if config is None:
        return None
    if args.pretrained_image and "timm_model_name" not in config["vision_cfg"]:
        raise InputError(f"--model {args.model} has no image tower of timm's; leave it out", "--pretrained-image")
    with quiet():
        load_tokenizer(args, config["text_cfg"])
    tower = None
    if config["text_cfg"].get("hf_model_name"):
        if "multimodal_cfg" in config:  # its decoder takes the tokens of the text tower itself
            return None
        with quiet():
            tower = text_tower(args, config["text_cfg"])
    with quiet():
        try:
            model = _rehearse(args, tower)
            return None if tower else model
        except InputError:
            raise
        except NotImplementedError:  # the meta device lacks an operation
            return None
        except Exception as error:
            flag, value = _to_blame(args, tower)
            reason = one_line(error) or repr(error)
            raise InputError(
                f"{flag}:{value} does not go with --model {args.model}: {reason}; give another or leave it out"
            ) from None


def _to_blame(args: Namespace, tower: dict[str, Any] | None) -> tuple[str, str]:
    """The flag without which the model works, and its value as text."""
    defaults = open_clip_params.parse_args([])
    for name in (*WEIGHTS, *FORCED, *TRANSFORM, *TOWERS, "precision"):
        value = getattr(args, name)
        if name in args.given_flags and value != getattr(defaults, name):
            try:
                _rehearse(Namespace(**{**vars(args), name: getattr(defaults, name)}), tower)
            except Exception:
                continue
            return flag_of(name), "" if value is True else f" {value!r}"
    return "--model", f" {args.model!r}"


def _rehearse(args: Namespace, tower: dict[str, Any] | None) -> nn.Module:
    """Build the model, load its weights, lock its towers and run it.

    Args:
        tower: see `text_tower`; None for a model with a text tower of OpenCLIP's.
    """
    size = args.force_image_size
    own_tower = tower == {}
    local = replaced({("open_clip.hf_model", "AutoConfig.from_pretrained"): local_config})
    with torch.device("meta"), local if own_tower else nullcontext():
        model, for_training, for_evaluation = open_clip.create_model_and_transforms(
            args.model, precision=args.precision, device="meta", output_dict=True,
            **taken(
                open_clip.create_model_and_transforms,
                load_weights=False,
                pretrained_text=False,
                pretrained_hf=False,  # the same in OpenCLIP before 3
                force_image_size=size[0] if size is not None and len(size) == 1 else size,
                **{name: getattr(args, name) for name in (*FORCED, *TRANSFORM) if name != "force_image_size"},
            ),
            **({"text_cfg": tower} if tower else {}),
            **({"init_logit_bias": -10.0} if args.siglip else {}),  # as OpenCLIP's main does
        )
    if args.pretrained and not is_pretrained_cfg(args.model.replace("/", "-"), args.pretrained) and not tower:
        with replaced({("open_clip.factory", "torch.load"): lambda path, **options: load_mapped(path)}):
            _load_weights(model, args)
    if args.lock_image:
        model.lock_image_tower(args.lock_image_unlocked_groups, args.lock_image_freeze_bn_stats)
    if args.lock_text and not tower:  # a stand-in has other layers
        lock_text(model, args)
    if args.grad_checkpointing:
        model.set_grad_checkpointing()
    if args.uses_ext_loss:
        train_temperature(model, trains_logit_scale(args))
        if trains(args) and not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("no parameter is left to train")
    picture = Image.new("RGB", (64, 64))
    for_training(picture)
    pixels = for_evaluation(picture)
    images = pixels.new_empty(2, *pixels.shape, device="meta", dtype=open_clip.get_input_dtype(args.precision))
    context = getattr(model, "context_length", None) or model.text.context_length
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        if own_tower:  # transformers reads the attention mask, which the meta device cannot
            model.encode_image(images)
            return model
        model(images, torch.zeros(2, context, dtype=torch.long, device="meta"))
    return model


def _load_weights(model: nn.Module, args: Namespace) -> None:
    try:
        open_clip.factory.load_checkpoint(model, args.pretrained)
    except (AttributeError, KeyError):  # OpenCLIP looks for a part of the model that only the file has
        if model.logit_bias is None and "logit_bias" in open_clip.factory.load_state_dict(args.pretrained):
            raise InputError(
                f"{args.pretrained!r} has a logit_bias, which --model {args.model} has with SigLIP's "
                "loss (--siglip) only; give that loss, or save the weights without it",
                "--pretrained",
            ) from None
        raise InputError(
            f"{args.pretrained!r} has the weights of another model than --model {args.model}; "
            "give others or leave it out",
            "--pretrained",
        ) from None


def train_temperature(model: nn.Module, trained: bool) -> None:
    """Freeze the model's temperature unless it is trained, and its bias, which this package's losses do not use."""
    if not trained:
        model.logit_scale.requires_grad_(False)
    if getattr(model, "logit_bias", None) is not None:
        model.logit_bias.requires_grad_(False)


def check_optimizer(args: Namespace, model: nn.Module | None) -> torch.optim.Optimizer:
    """The optimizer of the command line on four numbers, after one step.

    Args:
        model: the model on the meta device, for which the task loop's optimizer is built, too; None if unknown.

    Raises:
        InputError: the name is unknown, or the optimizer does not work with the other flags.
    """
    if args.opt.lower().startswith("timm/"):
        _check_timm(args)
    try:
        return _try_optimizer(args, model)
    except InputError:
        raise
    except Exception as error:  # timm's optimizers may raise anything
        flag, value, advice = _optimizer_flag_to_blame(args, model)
        reason = one_line(error) or repr(error)
        raise InputError(f"{value} does not work with the other flags: {reason}{advice}", flag) from None


def _try_optimizer(args: Namespace, model: nn.Module | None) -> torch.optim.Optimizer:
    """Build the optimizer and make a step; arguments as in `check_optimizer`."""
    numbers = nn.Linear(2, 2, bias=False)
    with quiet():
        if host().loop == TASKS:
            if model is not None:
                with suppress(NotImplementedError):  # the meta device lacks an operation
                    _task_optimizer(args, model)
            without_layers = {"text_layer_decay": None, "image_layer_decay": None}
            optimizer = _task_optimizer(Namespace(**{**vars(args), **without_layers}), numbers)
        elif args.opt.lower() == "adamw":
            settings: dict[str, Any] = {"lr": args.lr, "betas": (args.beta1, args.beta2), "eps": args.eps}
            settings |= {"weight_decay": args.wd, **_more_settings(args)}
            optimizer = torch.optim.AdamW(numbers.parameters(), **settings)
        else:
            optimizer = _timm_optimizer(args, numbers)
        numbers(torch.ones(2)).sum().backward()
        optimizer.step()
    if args.uses_ext_loss and not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        raise InputError(
            f"{args.opt!r} cannot save the state of --loss {args.loss}, as timm's Lookahead has no hooks; "
            "leave out lookahead_",
            "--opt",
        )
    return optimizer


def _optimizer_flag_to_blame(args: Namespace, model: nn.Module | None) -> tuple[str, str, str]:
    """The flag without which the optimizer works, its value as text, and what to do."""
    for name, absent in OPTIMIZER.items():
        value = getattr(args, name, absent)
        if value and value != absent:
            try:
                _try_optimizer(Namespace(**{**vars(args), name: absent}), model)
            except Exception:
                continue
            words = [f"{key}={word}" for key, word in value.items()] if isinstance(value, dict) else value
            shown = " ".join(map(str, words)) if isinstance(words, list) else str(words)
            return flag_of(name), shown, "; give another or leave it out"
    return "--opt", repr(args.opt), ""


def _more_settings(args: Namespace) -> dict[str, Any]:
    """The settings of --opt-kwargs, which only some versions of OpenCLIP have."""
    return getattr(args, "opt_kwargs", None) or {}


def _task_optimizer(args: Namespace, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the task loop, from the flags as its main passes them on."""
    from open_clip_train.optim import OptimizerCfg, create_optimizer

    config = OptimizerCfg(
        opt=args.opt,
        lr=args.lr,
        weight_decay=args.wd,
        beta1=args.beta1,
        beta2=args.beta2,
        eps=args.eps,
        momentum=args.momentum,
        opt_kwargs=_more_settings(args),
        text_layer_decay=args.text_layer_decay,
        image_layer_decay=args.image_layer_decay,
        pooler_in_head=args.text_pooler_in_head,
        wd_exclude_patterns=args.wd_exclude_patterns,
        fallback_list=args.opt_fallback_list,
    )
    return create_optimizer(module, config)


def _check_timm(args: Namespace) -> None:
    """Raise InputError if timm has no optimizer of this name, or if it gets one beta only."""
    from timm.optim import list_optimizers

    known = list_optimizers()
    if args.opt.lower().split("timm/")[-1].removeprefix("lookahead_") not in known:
        near = did_you_mean(args.opt, [f"timm/{other}" for other in known], "see timm.optim.list_optimizers()")
        raise InputError(f"{args.opt!r} is not one of timm's{near}", "--opt")
    if (args.beta1 is None) != (args.beta2 is None):
        one, other = ("beta1", "beta2") if args.beta2 is None else ("beta2", "beta1")
        raise InputError(f"--{one}: {getattr(args, one)} with --opt {args.opt} needs --{other}, too; give both or none")


def _timm_optimizer(args: Namespace, numbers: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a legacy loop."""
    from timm.optim import create_optimizer_v2

    name = args.opt.lower().split("timm/")[-1]
    more: dict[str, Any] = {} if args.beta1 is None else {"betas": (args.beta1, args.beta2)}
    if args.momentum is not None:
        more["momentum"] = args.momentum
    if args.eps is not None or release_of(open_clip_version()) < (4, 0):  # since then None is left out
        more["eps"] = args.eps
    more |= _more_settings(args)
    try:
        return create_optimizer_v2(numbers, name, lr=args.lr, weight_decay=args.wd, **more)
    except TypeError:
        if more.get("eps", 0) is not None:
            raise
        raise InputError(f"--opt {args.opt} needs one from OpenCLIP; give for example 1e-8", "--eps") from None


def check_resumed(path: str, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, args: Namespace) -> None:
    """Raise InputError unless OpenCLIP can load the checkpoint into this model and this optimizer.

    Args:
        path: a local file that `checkpoint.read_entry` could read.
        model: the model on the meta device, or None if unknown.
        optimizer: one of the same kind as the run's, or None if the run only evaluates.
    """
    content = load_mapped(path)
    if not isinstance(content, dict):
        raise InputError(f"{path!r} contains a {type(content).__name__}; give a checkpoint of OpenCLIP's", "--resume")
    if "epoch" not in content:
        _check_weights(path, content, model, args)  # weights only, which OpenCLIP accepts, too
        return
    epoch = content["epoch"]
    if type(epoch) is not int or epoch < 0:
        raise InputError(f"{path!r} has the epoch {epoch!r}; give a checkpoint of OpenCLIP's", "--resume")
    _check_weights(path, content.get("state_dict"), model, args)
    if optimizer is None:
        return
    if epoch >= args.epochs and args.resume != "latest":  # a requeued job may find that it is already done
        raise InputError(f"{args.epochs}, but --resume {path!r} has completed {epoch}; give more", "--epochs")
    _check_moments(path, content.get("optimizer"), model, optimizer, args)
    _check_temperature(path, content["state_dict"], args)
    check_same_loop(path, content, args)


def _check_weights(path: str, weights: Any, model: nn.Module | None, args: Namespace) -> None:
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise InputError(f"{path!r} has no weights; give a checkpoint of OpenCLIP's", "--resume")
    if model is None:
        return
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    saved = {plain_name(name): tuple(value.shape) for name, value in weights.items()}
    for name in (*own, *saved):
        if args.torchscript and name.endswith("attn_mask"):  # a constant, which a scripted model saves
            continue
        if own.get(name) != saved.get(name):
            if name == "logit_bias" and (name in own) != (name in saved):
                was, right = ("was", "give --loss siglip") if name in saved else ("was not", "leave --loss siglip out")
                raise InputError(
                    f"{path!r} {was} trained with SigLIP's loss, which adds a logit_bias to a model; {right}",
                    "--resume",
                )
            raise InputError(
                f"{path!r} is of another model than --model {args.model}: {name} is "
                f"{saved.get(name, 'not there')}, and should be {own.get(name, 'not there')}",
                "--resume",
            )


def _check_temperature(path: str, weights: dict[str, torch.Tensor], args: Namespace) -> None:
    """Raise InputError if a training checkpoint has another fixed temperature than the command line."""
    saved = next((value for name, value in weights.items() if plain_name(name) == "logit_scale"), None)
    if saved is None or not args.uses_ext_loss or args.tau_init is None or trains_logit_scale(args):
        return
    given = torch.full_like(saved, -math.log(args.tau_init))
    if (saved.double() - given.double()).abs().item() > 1e-5:
        tau = math.exp(-saved.item())
        raise InputError(f"{args.tau_init:g}, but {path!r} has {tau:g}; give {tau:g}", "--tau-init")


def _check_moments(
    path: str, saved: Any, model: nn.Module | None, optimizer: torch.optim.Optimizer, args: Namespace
) -> None:
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    if not groups:
        raise InputError(
            f"{path!r} has no optimizer state; give it as --pretrained to use its weights only", "--resume"
        )
    # A group's name is a label of the task loop's; files of the other loop are for `check_same_loop`.
    missing = set(optimizer.param_groups[0]) - set(groups[0]) - {"group_name"}
    if missing:
        raise InputError(
            f"{path!r} was trained with another optimizer than {args.opt!r}, one without "
            f"{', '.join(sorted(missing))}; give that one",
            "--opt",
        )
    own = None if model is None else sum(parameter.requires_grad for parameter in model.parameters())
    count = sum(len(group["params"]) for group in groups)
    if own is not None and count != own:
        raise InputError(
            f"{path!r} trained {count} of the model's tensors, and this command line trains {own}; "
            "lock the same towers, and learn the temperature in both or in neither",
            "--resume",
        )
