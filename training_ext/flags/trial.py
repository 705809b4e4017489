"""Try OpenCLIP's own start before anything is written, so that what it refuses costs no files and no wait for data."""

import contextlib
import io
import logging
import os
import warnings
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import open_clip
import torch
from open_clip.pretrained import is_pretrained_cfg
from open_clip_train import params as open_clip_params
from open_clip_train.data import expand_urls
from PIL import Image

from training_ext.core import hosts
from training_ext.core.patching import replaced
from training_ext.core.plan import trains
from training_ext.core.temperature import train_temperature
from training_ext.data.rows import kind_of
from training_ext.openclip.loading import known_config, load_mapped, logged

# What would write, start processes or need a device, by the value without.
WITHOUT: dict[str, Any] = {
    "copy_codebase": False, "fsdp": False, "horovod": False, "name": "trial", "remote_sync": None, "report_to": "",
    "resume": None, "torchcompile": False,
}
WEIGHTS = (".pt", ".pth", ".bin", ".safetensors")  # that OpenCLIP loads by name; others it copies, which needs memory


class Begun(Exception):
    """OpenCLIP has begun its first epoch."""


def try_start(args: Namespace) -> None:
    """Run OpenCLIP's main up to its first step, without memory for the model, data, downloads or files.

    An error counts if there is a given flag without which the start works; any other is left to the run itself, as it
    may be the meta device's.

    Raises:
        InputError: one line with the flag and OpenCLIP's error.
    """
    if needs_download(args.model):
        return
    error = failure(args)
    if error is None:
        return
    from training_ext.openclip.failure_lines import in_words

    defaults = vars(open_clip_params.parse_args(["--model", args.model]))
    # Other flags are for --opt, and fail without it, too.
    for name in sorted(args.given_flags & defaults.keys(), key=lambda name: (name == "opt", name)):
        # timm's optimizers get none of OpenCLIP's defaults.
        unset = {other for other, value in vars(args).items() if value is None} if name == "opt" else set()
        plain = Namespace(**{**vars(args), **{other: defaults[other] for other in {name, *unset} & defaults.keys()}})
        if trains(plain) == trains(args) and failure(plain) is None:
            raise in_words(error, args, name) from error


def needs_download(model: str | None) -> bool:
    """Whether a name of --model or --distill-model is from a hub, or has a text tower that is."""
    return model is not None and (":" in model or "hf_model_name" in (known_config(model) or {}).get("text_cfg", {}))


def tried_models(args: Namespace) -> list[Any]:
    """The model in training as OpenCLIP's main makes it, without memory for its weights, and the reference model if
    there is one; without those that need a download."""
    models: list[tuple[Any, Callable]] = []
    if not needs_download(args.model):
        failure(args, models)
    return [model for model, _ in models]


def failure(args: Namespace, models: list[tuple[Any, Callable]] | None = None) -> Exception | None:
    """What OpenCLIP's main raises before its first step; None if nothing, or if only the meta device is to blame.

    Args:
        models: gets the models, with their transforms of images for training.
    """
    module = hosts.installed().main()
    main, names = module.__name__, vars(module)
    tried = Namespace(**{**vars(args), **{name: value for name, value in WITHOUT.items() if name in args}})
    if needs_download(args.distill_model):
        tried.distill_model = None
    models = [] if models is None else models

    def init_distributed_device(args: Namespace) -> torch.device:
        args.distributed, args.rank, args.local_rank, args.world_size = False, 0, 0, 1
        return torch.device("meta")

    def create_model_and_transforms(name: str, pretrained: str | None = None, **kwargs: Any) -> Any:
        if pretrained and (
            is_pretrained_cfg(name.replace("/", "-"), pretrained)
            or os.path.isfile(pretrained) and not pretrained.endswith(WEIGHTS)
        ):
            pretrained = None
        kwargs |= {"jit": False, "pretrained_image": False}
        built = open_clip.create_model_and_transforms(name, pretrained, **kwargs)
        if not models and args.uses_ext_loss:
            train_temperature(built[0], args)
        models.append(built[:2])
        return built

    def get_data(*_: Any, **__: Any) -> dict[str, Any]:
        if trains(args) and kind_of(args, args.train_data) == "webdataset":
            expand_urls(args.train_data, args.train_data_upsampling_factors)
        loader = SimpleNamespace(num_batches=args.accum_freq, num_samples=args.accum_freq * args.batch_size)
        return {"train" if trains(args) else "val": SimpleNamespace(dataloader=loader)}

    def train_one_epoch(*_: Any, **__: Any) -> None:
        model, transform = models[0]
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("no parameter is left to train")
        with torch.device("cpu"):
            pixels = transform(Image.new("RGB", (64, 64)))
        images = torch.empty(2, *pixels.shape, device="meta", dtype=open_clip.get_input_dtype(args.precision))
        length = model.context_length if hasattr(model, "context_length") else model.text.context_length
        with torch.no_grad():
            model(images, torch.zeros(2, length, dtype=torch.long, device="meta"))
        raise Begun

    def evaluate(*_: Any, **__: Any) -> None:
        raise Begun

    replacements: dict[tuple[str, str], Any] = {
        (main, "parse_args"): lambda _: tried,
        (main, "init_distributed_device"): init_distributed_device,
        (main, "setup_logging"): lambda *_: None,
        (main, "is_master"): lambda *_, **__: False,  # by which OpenCLIP writes no file
        (main, "create_model_and_transforms"): create_model_and_transforms,
        (main, "get_tokenizer"): lambda *_, **__: None,
        (main, "get_data"): get_data,
        (main, "train_one_epoch"): train_one_epoch,
        (main, "evaluate"): evaluate,
        ("open_clip.factory", "torch.load"): lambda path, **_: load_mapped(path),
    }
    if "trace_model" in names:
        replacements[main, "trace_model"] = lambda model, **_: model
    if "create_loss" in names and args.uses_ext_loss:
        replacements[main, "create_loss"] = lambda _: None
    with (
        replaced(replacements), logged(logging.ERROR) as messages, warnings.catch_warnings(), torch.device("meta"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        try:
            module.main(None)
        except Begun:
            return None
        except SystemExit:
            return RuntimeError(messages[-1]) if messages else None
        except Exception as error:
            return None if "meta" in str(error) or isinstance(error, NotImplementedError) else error
    return None
