"""Refuse a checkpoint from which the run cannot go on."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from open_clip_ext.errors import InputError
from open_clip_ext.options import default_value
from training_ext.core.state import FORMAT, INSTEAD, PARTS, READABLE, state_options


def check_loss(path: str, entry: dict[str, Any] | None, args: Namespace) -> None:
    """Raise InputError unless our entry of a checkpoint is of this run's loss."""
    own = "OpenCLIP's own loss"
    given = f"--loss {args.loss}" if args.uses_ext_loss else own
    if entry is None or not entry.get("state"):
        if args.uses_ext_loss:
            raise InputError(f"{path!r} was trained with {own}, not with {given}; {INSTEAD}", "--resume")
        return
    if entry["format"] not in READABLE:
        age = "a newer" if entry["format"] > FORMAT else "an older"
        wrong = f"{path!r} was written by {age} open_clip_ext (format {entry['format']})"
        raise InputError(f"{wrong}; {INSTEAD}", "--resume")
    saved = entry.get("parts", {})
    if entry["loss"] != args.loss or any(saved.get(name) != getattr(args, name) for name in PARTS):
        given += words(vars(args)) if args.uses_ext_loss else ""
        text = f"{path!r} was trained with --loss {entry['loss']}{words(saved)}, not with {given}; {INSTEAD}"
        raise InputError(text, "--resume")
    for option in state_options(args):
        # A file from before an option existed was trained with its default.
        value, before = getattr(args, option.name), saved.get(option.name, default_value(option.default))
        if value != before:
            own = option.flag
            right = f"give {before}" if not isinstance(before, bool) else f"give {own}" if before else "leave it out"
            raise InputError(f"{value}, but {path!r} has {before}; {right}", own)
    if (surrogate := entry["state"].get("surrogate", args.surrogate)) != args.surrogate:
        raise InputError(f"{args.surrogate}, but the table of {path!r} is of {surrogate}; give it", "--surrogate")


def words(parts: Mapping[str, Any]) -> str:
    return "".join(f" --{name} {parts[name]}" for name in PARTS if parts.get(name) is not None)


def check_optimizer(path: str, loaded: dict[str, Any], has_tasks: bool, by_name: bool) -> None:
    """Raise InputError unless the optimizer of a checkpoint has this loop's order of parameters.

    Args:
        has_tasks: whether the loop is that of tasks.
        by_name: whether FSDP gives the parameters by their names.
    """
    from_tasks = "global_step" in loaded
    if from_tasks != has_tasks:
        raise InputError(
            f"{path!r} was written with open_clip_torch {4 if from_tasks else 3}, whose optimizer has another order; "
            "resume it with that, or give it as --pretrained for its weights only",
            "--resume",
        )
    groups = loaded.get("optimizer", {}).get("param_groups", [])
    sharded = any(isinstance(name, str) for group in groups for name in group["params"])
    if sharded != by_name:
        right = "train with it on several processes" if sharded else "leave it out"
        raise InputError(
            f"{path!r} was written {'with' if sharded else 'without'} --fsdp; {right}, or give the file as "
            "--pretrained for its weights only",
            "--resume",
        )
