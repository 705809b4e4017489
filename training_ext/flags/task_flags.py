"""Refuse what OpenCLIP 4.x's task loop cannot do with this package, before anything is written."""

import os
from argparse import Namespace
from typing import Any

from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of
from training_ext.core.temperature import trains_logit_scale
from training_ext.openclip.hosts import LEGACY, TASKS, host
from training_ext.openclip.launch import world_info


def divides_model(args: Namespace, world_size: int) -> bool:
    """Whether FSDP shards the model over the processes."""
    return host().loop == TASKS and args.fsdp and world_size > 1


def check_same_loop(path: str, content: dict[str, Any], args: Namespace) -> None:
    """Raise InputError for a checkpoint of another training loop, or with FSDP where this run has none or vice versa.

    Another loop's optimizer has its parameters in another order; under FSDP they are given by name.

    Args:
        content: contents of the file at `path`.
    """
    by_tasks = "global_step" in content
    if by_tasks != (host().loop == TASKS):
        right = "add --legacy-loop"
        if by_tasks:
            right = "leave out --legacy-loop" if args.legacy_loop else "resume it with open_clip_torch 4"
        raise InputError(
            f"{path!r} was written by {'the task loop' if by_tasks else 'the legacy loop'}, whose "
            f"optimizer has another order; {right}, or give it as --pretrained for its weights only",
            "--resume",
        )
    first = content["optimizer"]["param_groups"][0]["params"][0]
    sharded = isinstance(first, str)
    if sharded != divides_model(args, world_info()[2]):
        right = "train with it on several processes" if sharded else "leave it out"
        raise InputError(
            f"{path!r} was written {'with' if sharded else 'without'} --fsdp; {right}, or give the file as "
            "--pretrained for its weights only",
            "--resume",
        )


def check_loop(args: Namespace, resumed: str | None, world_size: int) -> None:
    """Raise InputError for what the chosen training loop cannot do.

    Args:
        resumed: the local checkpoint to resume, or None.
    """
    is_folder = resumed is not None and os.path.isdir(resumed)
    if host().loop == LEGACY:
        if is_folder:
            raise InputError(f"{resumed!r} is a folder of shards, which {host().main} does not read", "--resume")
        return
    divides = divides_model(args, world_size)
    if is_folder and not divides:
        raise InputError(
            f"{resumed!r} is a folder of shards, for --fsdp and several processes; give a file", "--resume"
        )
    if args.uses_ext_loss and args.torchcompile and args.torchcompile_strategy == "step":
        raise InputError(f"'step' with --loss {args.loss}, which has state; give 'model'", "--torchcompile-strategy")
    if args.torchcompile and args.torchcompile_strategy == "step" and (args.accum_freq > 1 or args.precision == "amp"):
        other = f"--accum-freq {args.accum_freq}" if args.accum_freq > 1 else f"--precision {args.precision}"
        raise InputError(f"'step' with {other}; leave one out, or give 'model'", "--torchcompile-strategy")
    if not divides:
        return
    if args.uses_ext_loss and args.precision == "pure_bf16" and trains_logit_scale(args):
        raise InputError(
            "'pure_bf16' with --fsdp and a learned temperature, whose steps are below the spacing of "
            "16-bit numbers; give amp_bf16, or --temperature fixed",
            "--precision",
        )
    for name in ("osr_epochs", "keep_best", "zeroshot_data"):
        value = getattr(args, name)
        if value:
            given = f"{value:g}" if isinstance(value, float) else repr(value)
            raise InputError(f"{given} with --fsdp, which shards the weights; leave one out", flag_of(name))
