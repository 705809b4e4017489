"""Which OpenCLIP is installed: a `Host` for each of its training loops, with the names that the seams replace.

Nothing of OpenCLIP is imported before the version is known, so that an unsupported one ends in one line.
"""

import importlib
import inspect
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of
from training_ext.versions import open_clip_version, release_of

LEGACY, TASKS = "legacy", "tasks"
"""The two kinds of loop: a function of model, loss and optimizer, and a task that holds model and loss."""


@dataclass(frozen=True)
class Host:
    """One training loop of OpenCLIP's.

    Args:
        versions: the first (major, minor) that has it, and the first that is not supported.
        loop: LEGACY or TASKS.
        main, train: modules of the command and of its epochs.
        shards: the module that assembles the pipeline of shards.
        shards_builder, sample_filter: its names of the function for a data set of shards and of the filter of samples.
        builds_filter: whether the filter is a class, and not the function itself.
        scale_name: under which a logged step has 1 / tau.
        dict_batches: whether samples and batches are dicts of `image` and `text`, and not pairs.
        refused: beginnings of names of flags that the loop or this package does not follow.
    """

    versions: tuple[tuple[int, int], tuple[int, int]]
    loop: str = LEGACY
    main: str = "open_clip_train.main"
    train: str = "open_clip_train.train"
    shards: str = "open_clip_train.data"
    shards_builder: str = "get_wds_dataset"
    sample_filter: str = "filter_no_caption_or_no_image"
    builds_filter: bool = False
    scale_name: str = "scale"
    dict_batches: bool = False
    refused: tuple[str, ...] = ()

    @property
    def range(self) -> str:
        """The supported versions in pip's words, such as '>=2.26,<4.0'."""
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

    def check_flags(self, args: Namespace, defaults: Namespace) -> None:
        """Raise InputError for the first flag with another value than the default that would have no effect."""
        for name in sorted(args.given_flags):
            if name.startswith(self.refused) and getattr(args, name) != getattr(defaults, name):
                raise InputError(
                    f"{flag_of(name)}: is not followed by open_clip_ext with {self.main} of open_clip_torch "
                    f"{open_clip_version()}; leave it out"
                )
        if args.dataset_type.endswith("-audio"):
            raise InputError(f"--dataset-type: {args.dataset_type} has no images; give webdataset or csv")


# Members of shards, which `shards.ShardRows` knows as .txt and `loading.PAIR_MEMBERS`.
OTHER_MEMBERS = ("image_key", "json_text_key", "text_key")

# Of one version, the first is chosen.
HOSTS = (
    Host(versions=((2, 26), (4, 0))),
    Host(
        versions=((4, 2), (4, 3)),
        loop=TASKS,
        sample_filter="FilterValidSample",
        builds_filter=True,
        scale_name="logit_scale",
        dict_batches=True,
        refused=(
            # Of other data than images and captions of fixed length
            "audio_", "bucket_", "force_naflex", "length_bucketing", "naflex_", "pretrained_audio", "use_naflex",
            *OTHER_MEMBERS,
        ),
    ),
    Host(
        versions=((4, 2), (4, 3)),
        main="open_clip_train.legacy_main",
        train="open_clip_train.legacy_train",
        shards="open_clip_train.legacy_data",
        shards_builder="get_wds_dataset_legacy",
        sample_filter="FilterValidSample",
        builds_filter=True,
        scale_name="logit_scale",
        dict_batches=True,
        refused=(
            # Those of the task loop alone
            "audio_", "bucket_", "force_naflex", "fsdp", "image_layer_decay", "length_bucketing", "log_metric",
            "max_image_pixels", "naflex_", "opt_fallback_list", "pretrained_audio", "text_layer_decay", "text_pooler",
            "torchcompile_", "train_loss_ema", "use_naflex", "visual_layer_decay", "wd_exclude",
            *OTHER_MEMBERS,
        ),
    ),
)

# What a flag stands for in versions that do not have it.
ABSENT = {
    "cache_dir": None, "device": "cuda", "force_context_length": None, "horovod": False, "loss_dist_impl": None,
    "momentum": None, "opt": "adamw", "torchscript": False, "trace": False,
}


_chosen: Host | None = None


def installed(legacy: bool = False) -> Host:
    """A loop of the installed OpenCLIP's, looked up anew.

    Args:
        legacy: --legacy-loop.

    Raises:
        InputError: OpenCLIP is not installed, in a version without a supported loop, or with one loop alone.
    """
    version = open_clip_version()
    loops = [host for host in HOSTS if host.versions[0] <= release_of(version) < host.versions[1]]
    if not loops:
        ranges = " or ".join(dict.fromkeys(host.range for host in HOSTS))
        raise InputError(f"open_clip_torch {version} is installed; open_clip_ext needs {ranges}")
    if legacy and len(loops) == 1:
        raise InputError(f"--legacy-loop: open_clip_torch {version} has one training loop; leave it out")
    return loops[legacy]


def choose(legacy: bool) -> None:
    """Make `host` the loop of this command line."""
    global _chosen
    _chosen = installed(legacy)


def host() -> Host:
    """The loop to train with."""
    if _chosen is None:
        choose(legacy=False)
    assert _chosen is not None
    return _chosen


def complete(args: Namespace) -> None:
    """Give `args` the values of the flags that the installed OpenCLIP does not have; their names: `absent_flags`."""
    args.absent_flags = frozenset(ABSENT.keys() - vars(args).keys())
    for name in args.absent_flags:
        setattr(args, name, ABSENT[name])


def taken(function: Callable, **kwargs: Any) -> dict[str, Any]:
    """Those of the keyword arguments that the installed OpenCLIP's function has."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in kwargs.items() if name in parameters}
