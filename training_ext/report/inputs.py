"""What a report reads: the checkpoint, its model and loss, and the data."""

import math
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import open_clip
import torch
from torch import Tensor

from open_clip_ext import factory
from open_clip_ext.distributed import plain_name
from open_clip_ext.errors import InputError
from open_clip_ext.losses import AmorLIPLoss, GlobalContrastiveLoss
from open_clip_ext.recovery import digest_of
from training_ext.core import checkpoint, row_folders
from training_ext.core.loss import build_loss
from training_ext.core.rows import DataRows, find_rows, kind_of, needs_index, trains
from training_ext.core.shards import Shards, find_shards, is_local, local_path, shard_urls
from training_ext.features.advice import global_batch
from training_ext.features.keys import has_keys
from training_ext.flags.ranges import check_ranges
from training_ext.flags.recipes.resolved import RECIPE
from training_ext.flags.rehearsal import model_config
from training_ext.openclip.hosts import taken
from training_ext.openclip.loading import load_verified, one_line, without_remote_code, without_warnings
from training_ext.openclip.machine import check_device
from training_ext.openclip.patching import replaced

BATCH_SIZES = (64, 256, 1024)


@dataclass
class Saved:
    """A checkpoint.

    Args:
        weights: the model's, by parameter name without the prefixes of wrappers such as DDP.
        entry: what `training_ext.core.checkpoint` added, or None.
        epoch: number of completed epochs, or None if the file does not say.
    """

    weights: dict[str, Tensor]
    entry: dict[str, Any] | None
    epoch: int | None

    @classmethod
    def read(cls, path: str) -> "Saved":
        """Read a checkpoint; its tensors stay on disk until they are used.

        Raises:
            InputError: the file does not exist, is damaged, or has no CLIP model.
        """
        try:
            content = load_verified(path)
        except FileNotFoundError:
            raise InputError(f"{path!r} does not exist", "--checkpoint") from None
        except Exception as error:
            reason = one_line(error)
            raise InputError(f"{path!r} is not a complete checkpoint: {reason}", "--checkpoint") from None
        weights = content.get("state_dict", content) if isinstance(content, dict) else {}
        weights = weights if isinstance(weights, dict) else {}
        weights = {plain_name(name): value for name, value in weights.items() if isinstance(name, str)}
        if "logit_scale" not in weights:
            raise InputError(f"{path!r} has no CLIP model", "--checkpoint")
        return cls(weights, checkpoint.take_entry(content), content.get("epoch"))

    @property
    def is_weights_only(self) -> bool:
        """Whether the file has no state of a training, as the best.pt of --keep-best."""
        return self.entry is None and self.epoch is None

    @property
    def tau(self) -> float:
        return math.exp(-self.weights["logit_scale"].double().item())

    def digest(self) -> str:
        return digest_of(self.weights)


@dataclass
class Job:
    """What process 0 has checked and sends to all.

    Args:
        rows: the rows of the train data.
        shards: the shards of the train data, or None if they are not in shards.
        weights: digest of the checkpoint's weights.
        files: size and modification time of each local file that lists or has the samples.
        sizes: batch sizes of the minibatch estimates.
        out: folder of the report.
    """

    rows: DataRows
    shards: Shards | None
    weights: str
    files: list[list[int]]
    sizes: list[int]
    out: str


def check(options: Namespace, args: Namespace, saved: Saved) -> Job:
    """Check the command line against the checkpoint and the data.

    Raises:
        InputError: one line that names the flag, its value and what would be right.
    """
    check_device(args)
    model_config(args)
    if not trains(args):
        raise InputError("is missing, and the report needs it; repeat the flags of the training", "--train-data")
    if args.horovod:
        raise InputError("the report runs under torch.distributed only; use torchrun", "--horovod")
    if args.loss is not None and issubclass(factory.find_preset(args.loss).loss or object, AmorLIPLoss):
        raise InputError(
            f"the networks of {args.loss!r} predict a partition function that depends on the batch size, so "
            "there is no exact value over all data; give a checkpoint of another loss",
            "--loss",
        )
    if args.uses_ext_loss and getattr(args, "reference_gap", None):
        raise InputError(
            f"the normalizers of {args.loss!r} also depend on the reference model, and the report has the "
            "checkpoint's embeddings only; give a checkpoint of another loss",
            "--loss",
        )
    if args.uses_ext_loss and has_keys(args):
        flag = "--same-key" if args.same_key is not None else "--same-caption"
        raise InputError(
            "the normalizers of this training leave out pairs of equal keys, and the report sums over all; "
            "give a checkpoint of a training without it",
            flag,
        )
    check_ranges(args)
    rows, shards = find_all_rows(options, args)
    if saved.is_weights_only and args.uses_ext_loss:
        raise InputError(
            f"{options.checkpoint!r} has weights only, without the state of --loss {args.loss}; give a "
            "file of checkpoints/",
            "--checkpoint",
        )
    instead = "repeat the flags of its training"
    checkpoint.check_entry(saved.entry, options.checkpoint, args, rows, flag="--checkpoint", instead=instead)
    if saved.entry is not None:
        row_folders.check(options.checkpoint, saved.entry.get("rows"), saved.entry["state"], "--checkpoint")
    num_rows = rows.num_rows if shards is None else shards.num_rows
    if num_rows < 2:
        raise InputError(f"{num_rows} row has no negatives; at least 2 are needed", "--train-data")
    sizes = batch_sizes(options.batch_sizes, num_rows, global_batch(args))
    if options.gradient_batches > 0 and not sizes:
        raise InputError(f"is empty, but --gradient-batches {options.gradient_batches} needs a size", "--batch-sizes")
    out = options.out or default_folder(options.checkpoint)
    if os.path.exists(out) and not os.path.isdir(out):
        raise InputError(f"{out!r} is a file; give a folder", "--out")
    return Job(rows, shards, saved.digest(), files_of(args, shards), sizes, out)


def files_of(args: Namespace, shards: Shards | None) -> list[list[int]]:
    """Size and modification time, in ns, of the csv or of each local shard.

    The digest by which a training resumes has neither: there moved images and repaired shards are the same data. Here
    other images under the same names must not get the embeddings of the old ones.
    """
    # Of a csv a plain name is taken as it is; a URL such as file:/data/0.tar names a file, too.
    given = args.train_data or ""
    plain = given if os.path.exists(given) else local_path(given)
    paths = [plain] if shards is None else [local_path(url) for url in shards.urls]
    found = [os.stat(path) for path in paths if path and os.path.exists(path)]
    return [[file.st_size, file.st_mtime_ns] for file in found]


def batch_sizes(given: str | None, num_rows: int, trained_with: int) -> list[int]:
    """The batch sizes of `--batch-sizes`, ascending; None: the default ones and the training's, 2 to `num_rows`."""
    if given is None:
        return [size for size in sorted({*BATCH_SIZES, trained_with}) if 2 <= size <= num_rows]
    try:
        sizes = sorted({int(part) for part in given.split(",")}) if given.strip() else []
    except ValueError:
        raise InputError(f"{given!r} is not a list of integers such as 64,256", "--batch-sizes") from None
    for size in sizes:
        if not 2 <= size <= num_rows:
            raise InputError(f"{size} is out of range; it must be from 2 to the {num_rows} rows", "--batch-sizes")
    return sizes


def experiment_of(path: str) -> str:
    """The folder of the run that wrote a checkpoint."""
    folder = os.path.dirname(os.path.abspath(path))
    return os.path.dirname(folder) if os.path.basename(folder) == "checkpoints" else folder


def default_folder(path: str) -> str:
    """For example EXPERIMENT/normalizers/epoch_3 for EXPERIMENT/checkpoints/epoch_3.pt."""
    return os.path.join(experiment_of(path), "normalizers", os.path.splitext(os.path.basename(path))[0])


def training_flags(path: str, given: list[str]) -> list[str]:
    """`--recipe` with the recipe.yaml of the run that wrote a checkpoint, then the flags `given`, which override it.

    With --model, --loss or --recipe among `given`, or without a recipe.yaml, `given` alone.
    """
    flags = {word.partition("=")[0] for word in given}
    recipe = os.path.join(experiment_of(path), RECIPE)
    if flags & {"--model", "--loss", "--recipe"} or not os.path.exists(recipe):
        return given
    return ["--recipe", recipe, *given]


def check_data_of_recipe(args: Namespace, given: list[str]) -> None:
    """Raise InputError for remote train data from a recipe.yaml that the user did not name: a shell opens URLs."""
    if args.recipe in given or args.recipe is None or "train_data" not in args.recipe_flags:
        return
    urls = shard_urls(args.train_data) if kind_of(args, args.train_data) == "webdataset" else [args.train_data]
    if not all(map(is_local, [*args.train_data.split("::"), *urls])):
        raise InputError(f"{args.train_data!r} in {args.recipe!r} is not local; give it as a flag", "--train-data")


def find_all_rows(options: Namespace, args: Namespace) -> tuple[DataRows, Shards | None]:
    """The rows as the training finds them, and the shards, even if the training's loss does not read their sizes."""
    if kind_of(args, args.train_data) != "webdataset":
        args.shard_sizes = options.shard_sizes
        return find_rows(args), None
    looks = args.train_num_samples is None or needs_index(args)
    args.shard_sizes = options.shard_sizes if looks else None
    rows = find_rows(args)
    return rows, rows.shards or find_shards(args.train_data, options.shard_sizes, max_bad=args.max_bad_samples)


def build_model(args: Namespace, saved: Saved, path: str) -> tuple[torch.nn.Module, tuple, Callable]:
    """The checkpoint's model in evaluation mode, the transforms for training and evaluation, and the tokenizer.

    Raises:
        InputError: the weights belong to another model.
    """
    size = args.force_image_size
    hub_tokenizer = without_remote_code(open_clip.factory.HFTokenizer)
    # Without the warning of random weights, which are replaced below.
    with replaced({("open_clip.factory", "HFTokenizer"): hub_tokenizer}), without_warnings():
        tokenizer = open_clip.get_tokenizer(
            args.model,
            context_length=args.force_context_length,
            **taken(open_clip.get_tokenizer, cache_dir=args.cache_dir),
        )
        model, *transforms = open_clip.create_model_and_transforms(
            args.model,
            args.pretrained or None,
            precision=args.precision,
            device=args.device,
            force_quick_gelu=args.force_quick_gelu,
            force_custom_text=args.force_custom_text,
            force_patch_dropout=args.force_patch_dropout,
            force_image_size=size[0] if isinstance(size, (tuple, list)) and len(size) == 1 else size,
            image_mean=args.image_mean,
            image_std=args.image_std,
            image_interpolation=args.image_interpolation,
            image_resize_mode=args.image_resize_mode,
            aug_cfg=args.aug_cfg,
            output_dict=True,
            **taken(
                open_clip.create_model_and_transforms,
                load_weights=False,
                cache_dir=args.cache_dir,
                force_context_length=args.force_context_length,
            ),
            **({"init_logit_bias": 0.0} if "logit_bias" in saved.weights else {}),
        )
    try:
        model.load_state_dict(saved.weights)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()[:200]
        raise InputError(f"{path!r} is of another model than {args.model!r}: {reason}", "--model") from None
    return model.eval(), tuple(transforms), tokenizer


def load_loss(args: Namespace, saved: Saved, rows: DataRows, path: str) -> GlobalContrastiveLoss | None:
    """The checkpoint's loss with its state, in evaluation mode; None if the loss has no normalizers.

    Args:
        path: file of the checkpoint.

    Raises:
        InputError: the state does not fit the settings.
    """
    if args.loss is None or not factory.find_preset(args.loss).has_parts:
        return None
    # Every process asks for all anchors; a network that is split over processes would answer only for its own.
    args.given_settings.pop("npn_split", None)
    loss = build_loss(args, rows.num_rows, args.device)
    assert isinstance(loss, GlobalContrastiveLoss) and saved.entry is not None
    folder = row_folders.folder_of(path, saved.entry.get("rows"), "--checkpoint")
    row_folders.load_state(loss, saved.entry["state"], folder, f"--checkpoint: {path!r}")
    loss.set_epoch(math.ceil(args.osr_epochs) + (saved.epoch or 0))  # for gamma of the next step
    return loss.eval()
