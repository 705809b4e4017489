"""`--dry-run`: the flags, schedule and memory of a training, computed from its flags and number of samples."""

import copy
import os
import shlex
import shutil
import textwrap
from argparse import Namespace
from collections.abc import Mapping
from math import ceil
from typing import Any

import open_clip
from open_clip_train import params as open_clip_params

from open_clip_ext import MODEL_CONFIGS, factory
from open_clip_ext.distributed import plain_name
from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of
from open_clip_ext.row_state import bytes_per_row
from training_ext import launch
from training_ext.components.advice import advise, advise_on_captions
from training_ext.core.loss import build_loss
from training_ext.core.plan import global_batch, trains, world_info
from training_ext.core.run import Run
from training_ext.data.epochs import check_steps, samples_per_epoch, steps_per_epoch
from training_ext.data.rows import DataRows, counts_an_epoch, find_rows, kind_of
from training_ext.data.settings import setting_for
from training_ext.flags import preflight, val_data
from training_ext.flags.recipes import Recipe, find
from training_ext.flags.run_recipe import resolved_flags
from training_ext.flags.trial import tried_models
from training_ext.openclip.hosts import starts_from_weights
from training_ext.openclip.loading import known_config, load_checkpoint, without_warnings

MIB = 2**20
TOGETHER = "\0"  # a non-breaking space


def show(args: Namespace) -> None:
    """Print the plan on process 0; of the data only the samples are counted.

    Raises:
        InputError: the training would refuse the flags, or the number of samples is not known.
    """
    if world_info()[1] == 0:
        print("\n".join(lines(args)), flush=True)


def lines(args: Namespace) -> list[str]:
    """Lines of the plan of a training; `args` as `params.parse_args` gives them."""
    processes = world_info()[2]
    flags = resolved_flags(args)
    recipe = None if args.recipe is None else find(args.recipe)
    open_clip.add_model_config(MODEL_CONFIGS)
    args = copy.copy(args)
    preflight.prepare_shapes(args)
    has_data = trains(args)
    if not has_data:
        args.train_data = "DATA.tar"
    run, resumed = launch.build(args), None
    if args.loss is None:
        preflight.check_open_clips_own(run)
    else:
        _, resumed = preflight.check_flags(run)
    samples, num_rows, data, not_found = counted(args, None if recipe is None else recipe.samples, has_data)
    if has_data and args.loss is not None:
        with without_warnings():  # those on captions are below
            preflight.check_rows(run, data, resumed)
    step_rule = steps_per_epoch if args.loss is None else check_steps
    steps = step_rule(args, kind_of(args, args.train_data or ""), samples, processes)
    text = [] if recipe is None else [*about(recipe), ""]
    text += [*shown_flags(args, flags), "", *schedule(args, samples, steps, processes)]
    text += [*([] if recipe is not None or args.loss is None else recommended(args, num_rows, steps)), ""]
    if warnings := advise(args, num_rows, steps) + advise_on_captions(args, None if data is None else data.seen):
        text += ["Warnings", *(_wrapped(sentence, "  ", " " * 4) for sentence in warnings), ""]
    loss = build_loss(args, 1, "cpu") if args.uses_ext_loss else None  # with one row, so that no table is allocated
    if loss is not None:
        loss.limit_to(num_rows)
        preflight.check_batch(loss, args)
    model, reference, *_ = [*tried_models(args), None, None]
    if resumed is not None and model is not None and has_data:
        check_fits(resumed[0], model, run)
    parts = {} if model is None else model_bytes(args, model)
    rows = {} if loss is None else bytes_per_row(loss)
    config = known_config(args.model)
    if loss is not None and config is not None:
        parts |= {f"loss: {name}": size for name, size in loss.memory(config["embed_dim"], processes).items()}
    saved = sum(size for name, size in parts.items() if "gradients" not in name) + sum(rows.values()) * num_rows
    for name, size in rows.items():
        label = "moving averages" if name.startswith("normalizer") else "temperatures"
        parts[f"loss: {label}, {size} bytes a sample"] = size * (ceil(num_rows / processes) + 1)
    if reference is not None:
        parts["reference model"] = bytes_of(reference)
    parts["total"] = sum(parts.values())
    if model is not None:
        step = predicted_step(args, model, processes, num_rows)
        if step is not None:
            parts["at most in a step on a GPU, predicted"] = parts["total"] - parts["gradients"] + step
        parts["a checkpoint"] = saved
    text += ["State of each process"]
    text += [f"  {name:44}{size / MIB:12,.1f} MiB" for name, size in parts.items()]
    text += [f"  not counted: {label}" for label in left_out(args, parts)]
    if not_found := [*not_found, *problems_of_evaluation(args)]:
        text += ["", "Not found, so that a training would end here"]
        text += [_wrapped(sentence, "  ", " " * 4) for sentence in not_found]
    return text


def counted(
    args: Namespace, in_recipe: int | None, has_data: bool
) -> tuple[int, int, DataRows | None, list[str]]:
    """Samples of an epoch, number of rows, and rows of the train data; of data that are not here, the declared number.

    Last comes what is wrong with the train data.
    """
    problems: list[str] = []
    declared = args.train_num_samples or in_recipe
    if has_data:
        try:
            rows = find_rows(args)
        except InputError as error:
            if declared is None:
                raise
            problems.append(str(error))
        else:
            if args.loss is not None:
                preflight.check_shards(args, rows, world_info()[2])
            return samples_per_epoch(args, rows), rows.num_rows, rows, []
    if declared is None:
        raise InputError("is missing; give it, or --train-data, whose samples are counted", "--train-num-samples")
    return declared, declared, None, problems


def problems_of_evaluation(args: Namespace) -> list[str]:
    """What a training would say of the data to evaluate on."""
    problems = []
    for check in (val_data.check_imagenet, val_data.check):
        try:
            check(args)
        except InputError as error:
            problems.append(str(error))
    return problems


def about(recipe: Recipe) -> list[str]:
    items = [("source", recipe.source), ("data", recipe.data), ("published", recipe.score)]
    items += [("note", note) for note in recipe.notes]
    return [f"Recipe {recipe.name}", *(_item(name, text) for name, text in items if text)]


def shown_flags(args: Namespace, flags: Mapping[str, Any]) -> list[str]:
    """The flags by the origin of their values, without those at a default that no other flag changes."""
    from_command_line = args.given_flags - args.recipe_flags
    defaults = vars(open_clip_params.parse_args([]))
    defaults |= {option.name: option.default for option in factory.all_options()}
    groups: dict[str, list[str]] = {"given": [], "recipe": [], "set for you": []}
    for name, value in {**flags, "batch_size": args.batch_size}.items():
        origin = "given" if name in from_command_line else "recipe" if name in args.recipe_flags else "set for you"
        if origin == "set for you" and (name in factory.PARTS or value == (defaults.get(name) or type(value)())):
            continue
        several = isinstance(value, (list, dict))
        words = [f"{key}={item}" for key, item in value.items()] if isinstance(value, dict) else value
        words = [shlex.quote(str(word).replace("\t", "\\t")) for word in (words if several else [value])]
        groups[origin].append(flag_of(name) if value is True else TOGETHER.join([flag_of(name), *words]))
    return ["Flags", *(_item(origin, " ".join(words)) for origin, words in groups.items() if words)]


def schedule(args: Namespace, samples: int, steps: int, processes: int) -> list[str]:
    batch = global_batch(args)
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


def recommended(args: Namespace, pairs: int, steps: int) -> list[str]:
    """What docs/settings.md has for so many pairs, to compare."""
    row = setting_for(pairs, starts_from_weights(args))
    number = f"{pairs:,} pairs{' per epoch' if counts_an_epoch(args) else ''}"
    text = f"for {number} {row.command(pairs, args.epochs * steps)}, a global batch of at most "
    return [_item("settings.md", f"{text}{row.largest_batch(pairs):,}" + (f"; {row.note}" if row.note else ""))]


def bytes_of(model: Any) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def check_fits(path: str, model: Any, run: Run) -> None:
    """Raise InputError for a checkpoint of a model of other shapes, or of another number of trained parameters.

    Not for other names, which a scripted model has, or where a component changes the model.
    """
    if os.path.isdir(path) or any(component.answers("wrap_model") for component in run.components):
        return
    content = load_checkpoint(path)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, saved in content["state_dict"].items():
        if (shape := shapes.get(plain_name(name), saved.shape)) != saved.shape:
            text = f"{path!r} has {plain_name(name)} of {tuple(saved.shape)}, not of {tuple(shape)}; give its --model"
            raise InputError(text, "--resume")
    in_optimizer = sum(len(group["params"]) for group in content.get("optimizer", {}).get("param_groups", []))
    if in_optimizer != (trained := sum(parameter.requires_grad for parameter in model.parameters())):
        text = f"{path!r} has {in_optimizer} trained parameters, not {trained}; give --lock-image and the like as then"
        raise InputError(text, "--resume")


def predicted_step(args: Namespace, model: Any, processes: int, num_rows: int) -> int | None:
    """What `step_memory.step_bytes` says, or None for a model that does not run on tensors without values."""
    loss = None
    if args.uses_ext_loss:
        on_gpu = copy.copy(args)
        on_gpu.given_settings = {name: value for name, value in args.given_settings.items() if name != "rows_on"}
        loss = build_loss(on_gpu, num_rows, "meta")
    try:
        from training_ext.tools import step_memory  # which needs private parts of torch

        return step_memory.step_bytes(model, args, processes, loss)
    except (AttributeError, ImportError, KeyError, NotImplementedError, RuntimeError, TypeError):
        return None


def model_bytes(args: Namespace, model: Any) -> dict[str, int]:
    """Bytes of the weights, gradients and moments."""
    weights = bytes_of(model)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    moments = {"AdamW's moments": 2 * trained} if args.opt == "adamw" else {}
    return {"model": weights, "gradients": trained, **moments}


def left_out(args: Namespace, parts: Mapping[str, int]) -> list[str]:
    """What `parts` does not count, in words."""
    unknown = [] if "model" in parts else ["the model, which is not in OpenCLIP's list, and what the loss keeps"]
    if "model" in parts and not any("predicted" in name for name in parts):
        unknown.append("the activations, which are not known for this model")
    if args.distill_model and "reference model" not in parts:
        unknown.append("the reference model, which is not in OpenCLIP's list")
    if args.opt != "adamw":
        unknown.append(f"the state of --opt {args.opt}")
    if getattr(args, "fsdp", False):
        unknown.append("that --fsdp shards model, gradients and moments over the processes")
    return unknown


def _item(name: str, text: str) -> str:
    return _wrapped(text, f"  {name:14}", " " * 16)


def _wrapped(text: str, first_indent: str, indent: str) -> str:
    """Wrap the text to the terminal, indented by `first_indent` and then `indent`; flags stay with their values."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    wrapper = textwrap.TextWrapper(width, first_indent, indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text).replace(TOGETHER, " ")
