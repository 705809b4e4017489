"""The supported versions of OpenCLIP: a `Host` for each training loop, with the names that the seams replace.

Nothing of OpenCLIP is imported before its version is checked, so an unsupported one gives a one-line error.
"""

import importlib
import inspect
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of
from training_ext.core.hosts import open_clip_version, release
from training_ext.core.plan import world_info

LEGACY, TASKS = "legacy", "tasks"
"""The two kinds of loop: over model, loss and optimizer, or over a task that has model and loss."""


@dataclass(frozen=True)
class Host:
    """One training loop of OpenCLIP's.

    Args:
        versions: the first supported (major, minor), and the first that is no longer supported.
        loop: LEGACY or TASKS.
        main, train: modules of the command and of its epochs.
        shards: the module that builds the pipeline of shards.
        sample_filter: name in it of the filter of samples.
        builds_filter: whether the filter is a class to be instantiated, not a function.
        zero_shot: the function of the epochs' module that `evaluate` calls whatever the data.
        scale_name: name of 1 / tau in a logged step.
        dict_batches: whether samples and batches are dicts of `image` and `text` instead of pairs.
        refused: prefixes of the flags that the loop or this package ignores.
    """

    versions: tuple[tuple[int, int], tuple[int, int]]
    loop: str = LEGACY
    main: str = "open_clip_train.main"
    train: str = "open_clip_train.train"
    shards: str = "open_clip_train.data"
    sample_filter: str = "filter_no_caption_or_no_image"
    builds_filter: bool = False
    zero_shot: str = "zero_shot_eval"
    scale_name: str = "scale"
    dict_batches: bool = False
    refused: tuple[str, ...] = ()

    @property
    def range(self) -> str:
        """The supported versions in pip's notation, such as '>=2.26,<4.0'."""
        low, high = (".".join(map(str, bound)) for bound in self.versions)
        return f">={low},<{high}"

    @property
    def main_module(self) -> Any:
        return importlib.import_module(self.main)

    @property
    def train_module(self) -> Any:
        return importlib.import_module(self.train)

    def pair(self, batch: Any) -> tuple[Any, Any]:
        """Image(s) and tokens of a sample or a batch of the loop."""
        return (batch["image"], batch["text"]) if self.dict_batches else batch

    def batch(self, image: Any, text: Any) -> Any:
        """The sample or batch of the loop with these image(s) and tokens."""
        return {"image": image, "text": text} if self.dict_batches else (image, text)

    def check_flags(self, args: Namespace) -> None:
        """Raise InputError for the first given flag that would be ignored, unless it has its default value."""
        from open_clip_train import params

        for name in sorted(args.given_flags):
            if name.startswith(self.refused) and getattr(args, name) != getattr(params.parse_args([]), name):
                raise InputError(
                    f"is not followed by open_clip_ext with {self.main} of open_clip_torch "
                    f"{open_clip_version()}; leave it out",
                    flag_of(name),
                )
        if args.dataset_type.endswith("-audio"):
            raise InputError(f"{args.dataset_type} has no images; give webdataset or csv", "--dataset-type")


# They rename the members of shards, which `ShardRows` and `loading.PAIR_MEMBERS` fix.
OTHER_MEMBERS = ("image_key", "text_key")

HOSTS = (
    Host(versions=((2, 26), (4, 0))),
    Host(
        versions=((4, 2), (4, 3)),
        loop=TASKS,
        sample_filter="FilterValidSample",
        builds_filter=True,
        zero_shot="zero_shot_eval_all",
        scale_name="logit_scale",
        dict_batches=True,
        refused=(
            # For data other than images and captions of fixed length
            "audio_", "bucket_", "force_naflex", "length_bucketing", "naflex_", "pretrained_audio", "use_naflex",
            "text_attention_mask",  # for models with a captioning loss
            *OTHER_MEMBERS,
        ),
    ),
)

SCHEMAS = ("local-dir:", "hf-hub:")  # of --model, in which OpenCLIP finds weights beside the config
# The values of flags that some versions lack.
ABSENT = {
    "cache_dir": None, "device": "cuda", "force_context_length": None, "horovod": False, "loss_dist_impl": None,
    "momentum": None, "opt": "adamw", "torchscript": False, "trace": False,
}


@cache
def host() -> Host:
    """The training loop of the installed OpenCLIP.

    Raises:
        InputError: OpenCLIP is missing or not supported.
    """
    supported_host = next((host for host in HOSTS if host.versions[0] <= release() < host.versions[1]), None)
    if supported_host is None:
        ranges = " or ".join(host.range for host in HOSTS)
        raise InputError(f"open_clip_torch {open_clip_version()} is installed; open_clip_ext needs {ranges}")
    return supported_host


def complete(args: Namespace) -> None:
    """Add to `args` the flags that the installed OpenCLIP lacks, and their names as `absent_flags`."""
    args.absent_flags = frozenset(ABSENT.keys() - vars(args).keys())
    for name in args.absent_flags:
        setattr(args, name, ABSENT[name])


def taken(function: Callable, **kwargs: Any) -> dict[str, Any]:
    """The keyword arguments that `function` of the installed OpenCLIP accepts."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in kwargs.items() if name in parameters}


def shards_model(args: Namespace) -> bool:
    """Whether FSDP shards the model over the processes."""
    return host().loop == TASKS and args.fsdp and world_info()[2] > 1


def has_lora(run: Any) -> bool:
    """Whether low-rank additions freeze towers, without a lock of OpenCLIP's."""
    return getattr(run, "lora_rank", None) is not None


def starts_from_weights(args: Namespace) -> bool:
    """Whether the model starts from pretrained weights; those of --resume do not count."""
    if args.model.startswith("local-dir:"):  # perhaps with a configuration alone
        files = Path(args.model.removeprefix("local-dir:")).glob("*")
        return any(file.suffix in (".safetensors", ".bin", ".pth") for file in files)
    return bool(args.pretrained) or args.model.startswith(SCHEMAS)


def logger_is_installed(logger: str) -> bool:
    """Whether OpenCLIP has imported it; a folder wandb/ can be imported, too."""
    module = getattr(host().main_module, logger, None)
    return module is not None and (logger != "wandb" or hasattr(module, "init"))
