"""What the installed OpenCLIP lacks, takes and ignores."""

import inspect
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of
from training_ext.core import hosts

# Prefixes of flags of OpenCLIP 4 that it or this package ignores: for data other than images and captions of fixed
# length, for models with a captioning loss, and for other members of shards than `loading.PAIR_MEMBERS`.
IGNORED = (
    "audio_", "bucket_", "force_naflex", "length_bucketing", "naflex_", "pretrained_audio", "use_naflex",
    "text_attention_mask", "image_key", "text_key",
)  # fmt: skip
SCHEMAS = ("local-dir:", "hf-hub:")  # of --model, in which OpenCLIP finds weights beside the config
# The values of flags that some versions lack.
ABSENT = {
    "cache_dir": None, "device": "cuda", "force_context_length": None, "horovod": False, "loss_dist_impl": None,
    "momentum": None, "opt": "adamw", "torchscript": False, "trace": False,
}


def check_flags(args: Namespace) -> None:
    """Raise InputError for the first given flag that would be ignored, unless it has its default value."""
    from open_clip_train import params

    for name in sorted(args.given_flags) if hosts.installed().HAS_TASKS else ():
        if name.startswith(IGNORED) and getattr(args, name) != getattr(params.parse_args([]), name):
            raise InputError(
                f"is not followed by open_clip_ext with open_clip_torch {hosts.open_clip_version()}; leave it out",
                flag_of(name),
            )
    if args.dataset_type.endswith("-audio"):
        raise InputError(f"{args.dataset_type} has no images; give webdataset or csv", "--dataset-type")


def complete(args: Namespace) -> None:
    """Add to `args` the flags that the installed OpenCLIP lacks, and their names as `absent_flags`."""
    args.absent_flags = frozenset(ABSENT.keys() - vars(args).keys())
    for name in args.absent_flags:
        setattr(args, name, ABSENT[name])


def taken(function: Callable, **kwargs: Any) -> dict[str, Any]:
    """The keyword arguments that `function` of the installed OpenCLIP accepts."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in kwargs.items() if name in parameters}


def loggers() -> dict[str, bool]:
    """By the names of --report-to whether the logger's package is installed."""
    main = vars(hosts.installed().main())
    return {name: main[name] is not None for name in ("wandb", "tensorboard", "trackio") if name in main}


def has_lora(run: Any) -> bool:
    """Whether low-rank additions freeze towers, without a lock of OpenCLIP's."""
    return getattr(run, "lora_rank", None) is not None


def starts_from_weights(args: Namespace) -> bool:
    """Whether the model starts from pretrained weights; those of --resume do not count."""
    if args.model.startswith("local-dir:"):  # perhaps with a configuration alone
        files = Path(args.model.removeprefix("local-dir:")).glob("*")
        return any(file.suffix in (".safetensors", ".bin", ".pth") for file in files)
    return bool(args.pretrained) or args.model.startswith(SCHEMAS)
