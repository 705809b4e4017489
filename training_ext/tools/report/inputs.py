"""What a report reads: the checkpoint, its model and loss, and the data."""

import hashlib
import json
import math
import os
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from open_clip_ext import factory
from open_clip_ext.errors import InputError
from open_clip_ext.losses import GlobalContrastiveLoss
from open_clip_ext.recovery import digest_of
from training_ext import launch
from training_ext.components.summary import has_report
from training_ext.core.loss import build_loss
from training_ext.core.plan import global_batch, trains
from training_ext.core.state import INSTEAD, entry_of
from training_ext.data import row_folders
from training_ext.data.rows import DataRows, find_rows, kind_of, needs_index
from training_ext.data.shards import Shards, find_shards, local_path, shard_urls
from training_ext.flags.run_recipe import RECIPE
from training_ext.openclip.loading import load_checkpoint
from training_ext.openclip.machine import check_device, check_writable
from training_ext.tools.evaluation import models

BATCH_SIZES = (64, 256, 1024)


@dataclass
class Saved:
    """A checkpoint.

    Args:
        path: its file.
        weights: the model's, by parameter name without the prefixes of wrappers such as DDP.
        entry: what `training_ext.core.state` added, or None.
        epoch: number of completed epochs, or None if the file does not say.
    """

    path: str
    weights: dict[str, Tensor]
    entry: dict[str, Any] | None
    epoch: int | None

    @classmethod
    def read(cls, path: str) -> "Saved":
        """Read a checkpoint; its tensors stay on disk until they are used.

        Raises:
            InputError: the file does not exist, is damaged, or has no CLIP model.
        """
        if not os.path.isfile(path):
            raise InputError(f"{path!r} does not exist", "--checkpoint")
        content = load_checkpoint(path, "--checkpoint")
        if "logit_scale" not in (weights := models.weights_in(content)):
            raise InputError(f"{path!r} has no CLIP model", "--checkpoint")
        return cls(path, weights, entry_of(content), content.get("epoch"))

    @property
    def tau(self) -> float:
        return math.exp(-self.weights["logit_scale"].double().item())

    def load_model(self, args: Namespace) -> tuple[torch.nn.Module, Callable, Callable]:
        """As `evaluation.models.load_model`."""
        flags = {name: getattr(args, name) for name in models.MODEL_FLAGS if getattr(args, name, None) is not None}
        flags = models.preprocessing_of(args.model, args.pretrained or "") | flags
        bias = "logit_bias" in self.weights
        return models.load_model(models.Checkpoint(self.path, self.path, args.model, "", bias, flags), args)

    def load_loss(self, args: Namespace, rows: DataRows) -> GlobalContrastiveLoss | None:
        """The loss with its state, in evaluation mode; None if the loss has no normalizers.

        Raises:
            InputError: the state does not fit the settings.
        """
        if args.loss is None or not factory.find_preset(args.loss).has_parts:
            return None
        # Every process asks for all anchors; a network that is split over processes would answer only for its own.
        args.given_settings["npn_split"] = False
        loss = build_loss(args, rows.num_rows, args.device)
        assert isinstance(loss, GlobalContrastiveLoss) and self.entry is not None
        folder = row_folders.folder_of(self.path, row_folders.rows_folder_of(self.entry), "--checkpoint")
        row_folders.load_state(loss, self.entry["state"], folder, self.path, "--checkpoint")
        loss.set_epoch(math.ceil(args.epochs_before) + (self.epoch or 0))
        return loss.eval()


@dataclass
class Data:
    """The train data.

    Args:
        rows: as the training finds them.
        shards: those of a webdataset, also of a loss that does not need their sizes; else None.
    """

    rows: DataRows
    shards: Shards | None

    @property
    def num_rows(self) -> int:
        return self.rows.num_rows if self.shards is None else self.shards.num_rows

    @classmethod
    def find(cls, options: Namespace, args: Namespace) -> "Data":
        in_shards = kind_of(args, args.train_data) == "webdataset"
        looks = not in_shards or args.train_num_samples is None or needs_index(args)
        args.shard_sizes = options.shard_sizes if looks else None
        args.val_data = None  # of no interest here
        rows = find_rows(args)
        if rows.shards is not None or not in_shards:
            return cls(rows, rows.shards)
        return cls(rows, find_shards(args.train_data, options.shard_sizes, max_bad=args.max_bad_samples))

    def files(self, args: Namespace) -> list[list[int]]:
        """Size and modification time, in ns, of the csv or of each local shard.

        The digest by which a training resumes has neither: there moved images and repaired shards are the same data.
        """
        # Of a csv a plain name is taken as it is; a URL such as file:/data/0.tar names a file, too.
        train_data = args.train_data or ""
        plain = train_data if os.path.exists(train_data) else local_path(train_data)
        paths = [plain] if self.shards is None else map(local_path, self.shards.urls)
        stats = [os.stat(path) for path in paths if path and os.path.exists(path)]
        return [[file.st_size, file.st_mtime_ns] for file in stats]


def batch_sizes(options: Namespace, args: Namespace, num_rows: int) -> list[int]:
    """Batch sizes of the minibatch estimates; InputError if a given one does not fit `num_rows`."""
    if options.batch_sizes is None:
        return [size for size in sorted({*BATCH_SIZES, global_batch(args)}) if 2 <= size <= num_rows]
    for size in options.batch_sizes:
        if not 2 <= size <= num_rows:
            raise InputError(f"{size} is out of range; it must be from 2 to the {num_rows} rows", "--batch-sizes")
    return list(options.batch_sizes)


def check(options: Namespace, args: Namespace) -> Data:
    """Check the command line against the checkpoint and the data, on process 0.

    Raises:
        InputError: one line that names the flag, its value and what would be right.
    """
    saved = Saved.read(options.checkpoint)
    check_device(args)
    check_writable("--out", options.out)
    if not trains(args):
        raise InputError("is missing, and the report needs it; repeat the flags of the training", "--train-data")
    if args.uses_ext_loss and not has_report(args):
        raise InputError(
            f"the normalizers of this training with {args.loss!r} are not sums over all pairs, as with amorlip, "
            "--reference-gap, --same-key, --same-caption and --positives; give a checkpoint of another",
            "--checkpoint",
        )
    if args.batch_size < 1:
        raise InputError(f"{args.batch_size} is out of range; it must be at least 1", "--batch-size")
    data = Data.find(options, args)
    if saved.entry is None and saved.epoch is None and args.uses_ext_loss:  # as the best.pt of --keep-best
        raise InputError(
            f"{saved.path!r} has weights only, without the state of --loss {args.loss}; give a file of checkpoints/",
            "--checkpoint",
        )
    run = launch.build(args)
    run.data.rows = data.rows
    try:
        run.state.check_entry(saved.path, saved.entry)
    except InputError as error:
        flag = "--checkpoint" if error.argument == "--resume" else error.argument
        raise InputError(error.text.replace(INSTEAD, "repeat the flags of its training"), flag) from None
    if saved.entry is not None:
        row_folders.check(saved.path, row_folders.rows_folder_of(saved.entry), saved.entry["state"], "--checkpoint")
    batch_sizes(options, args, data.num_rows)
    return data


def embeddings_digest(args: Namespace, data: Data, saved: Saved, transform: Any) -> str:
    """Digest of all that the embeddings depend on, 16 hex digits; not of the images of a csv."""
    several = ("captions_field", "several_captions", "json_text_key_probs")  # among which the seed draws
    captions = (*several, "json_text_key", "csv_img_key", "csv_caption_key")
    key = {
        "weights": digest_of(saved.weights),
        "data": data.rows.digest if data.shards is None else data.shards.digest,
        "files": data.files(args),
        "flags": {name: getattr(args, name, None) for name in ("model", "precision", *models.MODEL_FLAGS, *captions)},
        "seed": args.seed if any(getattr(args, name, None) for name in several) else None,
        # In words: before OpenCLIP 3.3 it contains a function, with its address.
        "transform": re.sub(r" at 0x[0-9a-f]+", "", str(transform)),
    }
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def training_flags(path: str, command_line: list[str]) -> list[str]:
    """`--recipe` with the recipe.yaml of the run that wrote a checkpoint, then `command_line`, which overrides it.

    With --model, --loss or --recipe among `command_line`, or without a recipe.yaml, `command_line` alone.
    """
    flags = {word.partition("=")[0] for word in command_line}
    recipe = os.path.join(models.experiment_of(path), RECIPE)
    if flags & {"--model", "--loss", "--recipe"} or not os.path.exists(recipe):
        return command_line
    return ["--recipe", recipe, *command_line]


def check_data_of_recipe(args: Namespace, command_line: list[str]) -> None:
    """Raise InputError for remote train data from a recipe.yaml that the user did not name: a shell opens URLs."""
    if args.recipe in command_line or args.recipe is None or "train_data" not in args.recipe_flags:
        return
    urls = shard_urls(args.train_data) if kind_of(args, args.train_data) == "webdataset" else [args.train_data]
    if None in map(local_path, [*args.train_data.split("::"), *urls]):
        raise InputError(f"{args.train_data!r} in {args.recipe!r} is not local; give it as a flag", "--train-data")
