"""`--dry-run`: the flags, schedule, memory and files of a training, computed from its flags and number of samples."""

import copy
import logging
import shlex
import shutil
import textwrap
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from math import ceil
from pathlib import Path
from typing import Any

import open_clip
import torch

from open_clip_ext import MODEL_CONFIGS
from open_clip_ext.errors import InputError
from open_clip_ext.losses import Loss
from open_clip_ext.metrics_file import FILE
from open_clip_ext.options import flag_of
from open_clip_ext.row_state import bytes_per_row
from training_ext.core import checkpoint
from training_ext.core.loss import build_loss, samples_per_epoch
from training_ext.core.rows import DataRows, find_rows, kind_of, look_at_first, needs_index, trains
from training_ext.core.shards import shard_urls
from training_ext.features.advice import advise, advise_on_captions
from training_ext.flags import data_checks, preflight
from training_ext.flags.recipes.recipe import Recipe, find
from training_ext.flags.recipes.resolved import resolved_flags
from training_ext.openclip.configs import known_config
from training_ext.openclip.launch import world_info

MIB = 2**20
TOGETHER = "\0"  # a non-breaking space


def show(args: Namespace) -> None:
    """Print the plan on process 0; of the data only the samples are counted, and only if nothing else has their number.

    Raises:
        InputError: the training would refuse the flags, or the number of samples is not known.
    """
    _, rank, processes = world_info()
    if rank == 0:
        print("\n".join(lines(args, processes)), flush=True)


def lines(args: Namespace, processes: int) -> list[str]:
    """Lines of the plan of a training on `processes` processes.

    Args:
        args: as `params.parse_args` gives them.
    """
    flags = resolved_flags(args)
    recipe = None if args.recipe is None else find(args.recipe)
    open_clip.add_model_config(MODEL_CONFIGS)
    args = copy.copy(args)
    preflight.prepare_shapes(args)
    has_data = trains(args)
    evaluates = bool(args.val_data or args.imagenet_val or args.imagenet_v2 or getattr(args, "zeroshot_data", None))
    declared = args.train_num_samples or (None if recipe is None else recipe.samples)
    only_evaluates = not has_data and evaluates and declared is None
    if not has_data and not only_evaluates:
        args.train_data = "DATA.tar"
    if args.loss is not None:
        preflight.check_flags(args, processes)
    if only_evaluates:
        model = {name: size for name, size in model_bytes(args).items() if name == "model"}
        state = memory(model, left_out(args, model))
        return [*shown_flags(args, flags), "", "No training", "", *state, "", *files(args, None)]
    kind = kind_of(args, args.train_data or "")
    find_once = cache(partial(find_rows, args))  # a large csv takes long to read
    samples = number_of_samples(args, recipe, kind if has_data else None, find_once)
    step_rule = data_checks.steps_per_epoch if args.loss is None else data_checks.check_steps
    steps = step_rule(args, kind, samples, processes)
    text = [] if recipe is None else [*about(recipe), ""]
    text += [*shown_flags(args, flags), "", *schedule(args, samples, steps, processes), ""]
    num_rows = number_of_rows(args, samples, find_once) if has_data else samples
    warnings = advise(args, num_rows, steps)
    with suppress(InputError):  # the data may be on another machine
        if has_data and kind in ("csv", "webdataset"):
            seen = find_once().seen if kind == "csv" else look_at_first(args, shard_urls(args.train_data))
            warnings += advise_on_captions(args, seen)
    if warnings:
        text += ["Warnings", *(_wrapped(sentence, "  ", " " * 4) for sentence in warnings), ""]
    loss = build_loss(args, 1, "cpu") if args.uses_ext_loss else None  # with one row, so that no table is allocated
    if loss is not None:
        loss.limit_to(num_rows)
        preflight.check_batch(loss, args, processes)
    parts = model_bytes(args)
    rows = {} if loss is None else bytes_per_row(loss)
    parts |= {f"loss: {name}": size for name, size in kept_by(loss, args, processes).items()}
    saved = sum(size for name, size in parts.items() if "gradients" not in name) + sum(rows.values()) * num_rows
    for name, size in rows.items():
        what = "moving averages" if name.startswith("normalizer") else "temperatures"
        parts[f"loss: {what}, {size} bytes a sample"] = size * (ceil(num_rows / processes) + 1)
    if args.distill_model and (reference := model_on_meta(args, args.distill_model)) is not None:
        parts["reference model"] = bytes_of(reference)
    return [*text, *memory(parts, left_out(args, parts)), "", *files(args, saved if "model" in parts else None)]


def number_of_samples(
    args: Namespace, recipe: Recipe | None, kind: str | None, find: Callable[[], DataRows]
) -> int:
    """Number of pairs in an epoch: counted, unless --train-num-samples decides; the recipe's if there are no data here.

    Args:
        kind: of the train data; None without.
        find: finds their rows.
    """
    declared = args.train_num_samples or (None if recipe is None else recipe.samples)
    if args.train_num_samples is not None and kind != "csv":  # in a csv OpenCLIP trains on all lines
        return args.train_num_samples
    if kind is None:
        if declared is None:
            raise InputError("is missing; give it, or --train-data, whose samples are counted", "--train-num-samples")
        return declared
    try:
        data_checks.check_size_known(args)
        return samples_per_epoch(args, find())
    except InputError:
        if declared is None:
            raise
        return declared


def number_of_rows(args: Namespace, samples: int, find: Callable[[], DataRows]) -> int:
    """n of a loss with state per sample, which --train-num-samples does not change; else, and where the data cannot be
    counted here, `samples`."""
    if not needs_index(args):
        return samples
    try:
        return find().num_rows
    except InputError:
        return samples


def about(recipe: Recipe) -> list[str]:
    items = [("source", recipe.source), ("data", recipe.data), ("published", recipe.score)]
    items += [("note", note) for note in recipe.notes]
    return [f"Recipe {recipe.name}", *(_item(name, text) for name, text in items if text)]


def shown_flags(args: Namespace, flags: Mapping[str, Any]) -> list[str]:
    """The flags, grouped by the origin of their values; flags that are not listed are at OpenCLIP's defaults."""
    given = args.given_flags - args.recipe_flags
    groups: dict[str, list[str]] = {"given": [], "recipe": [], "default": []}
    for name, value in {**flags, "batch_size": args.batch_size}.items():
        origin = "given" if name in given else "recipe" if name in args.recipe_flags else "default"
        several = isinstance(value, (list, dict))
        words = [f"{key}={item}" for key, item in value.items()] if isinstance(value, dict) else value
        words = [shlex.quote(str(word).replace("\t", "\\t")) for word in (words if several else [value])]
        groups[origin].append(flag_of(name) if value is True else TOGETHER.join([flag_of(name), *words]))
    return ["Flags", *(_item(origin, " ".join(words)) for origin, words in groups.items() if words)]


def schedule(args: Namespace, samples: int, steps: int, processes: int) -> list[str]:
    batch = args.batch_size * processes * args.accum_freq
    factors = f"{processes} process(es) x {args.batch_size} x --accum-freq {args.accum_freq}"
    total = steps * args.epochs
    warmup = "" if args.skip_scheduler else f", {min(args.warmup, total):,} of them warm-up"
    passes = f"{args.epochs}" + (f", after {args.epochs_before:g} of recovery" if args.epochs_before else "")
    return [
        "Training",
        _item("global batch", f"{batch:,} = {factors}"),
        _item("samples", f"{samples:,} per epoch"),
        _item("steps", f"{steps:,} per epoch, {total:,} in total{warmup}"),
        _item("epochs", passes),
        _item("total", f"{total * batch:,} samples"),
    ]


def model_on_meta(args: Namespace, name: str) -> Any:
    """The model without memory for its weights; None for one that is not in OpenCLIP's list."""
    known = known_config(name)
    if known is None or "hf_model_name" in known["text_cfg"]:
        return None
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the warning that no weights were loaded
    try:
        with torch.device("meta"):
            return open_clip.create_model(name, precision=args.precision, device="meta")
    finally:
        logging.disable(before)


def bytes_of(model: Any) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def model_bytes(args: Namespace) -> dict[str, int]:
    """Bytes of the weights, gradients and moments; {} for a model that is not in OpenCLIP's list."""
    if ":" not in args.model and known_config(args.model) is None:
        raise InputError(f"{args.model!r} is unknown to this open_clip_torch", "--model")
    model = model_on_meta(args, args.model)
    if model is None:
        return {}
    if args.lock_image:
        model.lock_image_tower(args.lock_image_unlocked_groups, args.lock_image_freeze_bn_stats)
    if args.lock_text:
        model.lock_text_tower(args.lock_text_unlocked_layers, args.lock_text_freeze_layer_norm)
    weights = bytes_of(model)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    moments = {"AdamW's moments": 2 * trained} if args.opt == "adamw" else {}
    return {"model": weights, "gradients": trained, **moments}


def kept_by(loss: Loss | None, args: Namespace, processes: int) -> dict[str, int]:
    """Bytes that each process keeps for the loss, by part, except the rows per sample."""
    config = known_config(args.model)
    return {} if loss is None or config is None else loss.memory(config["embed_dim"], processes)


def left_out(args: Namespace, parts: Mapping[str, int]) -> list[str]:
    """What `parts` does not count, in words."""
    unknown = [] if "model" in parts else ["the model, which is not in OpenCLIP's list, and what the loss keeps"]
    if args.distill_model and "reference model" not in parts:
        unknown.append("the reference model, which is not in OpenCLIP's list")
    if trains(args) and args.opt != "adamw":
        unknown.append(f"the state of --opt {args.opt}")
    if getattr(args, "fsdp", False):
        unknown.append("that --fsdp shards model, gradients and moments over the processes")
    return unknown


def memory(parts: Mapping[str, int], unknown: list[str]) -> list[str]:
    lines = [f"  {name:44}{size / MIB:12,.1f} MiB" for name, size in (*parts.items(), ("total", sum(parts.values())))]
    return ["State of each process, without activations", *lines, *(f"  not counted: {what}" for what in unknown)]


def files(args: Namespace, saved: int | None) -> list[str]:
    """Lines on the files that the training would write.

    Args:
        saved: size of a checkpoint in bytes, if known.
    """
    folder = Path(args.logs) / (args.name or f"DATE-model_{args.model.replace('/', '-')}-...")
    results = folder / "checkpoints" / "results.jsonl"
    size = "" if saved is None else f", about {saved / MIB:,.1f} MiB each"
    if not checkpoint.keeps_files(args):
        return ["Files", "  no checkpoints and metrics, with --logs none"]
    often = "the last epoch"
    if not args.delete_previous_checkpoint and 0 < args.save_frequency < args.epochs:
        often = "each epoch" if args.save_frequency == 1 else f"every {args.save_frequency} epochs and the last"
    latest = "; epoch_latest.pt of each epoch" if args.save_most_recent else ""
    text = [
        _item("log", str(folder / "out.log")),
        _item("flags", f"{folder / 'recipe.yaml'} for --recipe, and params.txt"),
        *(
            [_item("checkpoints", f"{folder / 'checkpoints' / 'epoch_K.pt'} of {often}{size}{latest}")]
            if trains(args) else []
        ),
        _item("numbers", " and ".join([str(folder / FILE)] * (args.loss is not None) + [str(results)])),
    ]
    if getattr(args, "keep_best", None):
        text.append(_item("best weights", str(folder / "best.pt")))
    if "tensorboard" in args.report_to:
        text.append(_item("tensorboard", str(folder / "tensorboard")))
    return ["Files", *text]


def _item(name: str, text: str) -> str:
    return _wrapped(text, f"  {name:14}", " " * 16)


def _wrapped(text: str, first: str, rest: str) -> str:
    """Wrap the text to the terminal, indented by `first` and then `rest`; flags stay with their values."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    wrapper = textwrap.TextWrapper(width, first, rest, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text).replace(TOGETHER, " ")
