"""What OpenCLIP 4.x's loop of tasks cannot carry, refused in one line before anything is written."""

import os
from argparse import Namespace

from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of
from training_ext.hosts import LEGACY, host


def check_loop(args: Namespace, resumed: str | None, world_size: int) -> None:
    """Raise InputError for what the loop to train with does not do.

    Args:
        resumed: the local checkpoint to resume, or None.
    """
    is_folder = resumed is not None and os.path.isdir(resumed)
    if host().loop == LEGACY:
        if is_folder:
            raise InputError(f"--resume: {resumed!r} is a folder of shards, which {host().main} does not read")
        return
    divides = args.fsdp and world_size > 1
    if is_folder and not divides:
        raise InputError(f"--resume: {resumed!r} is a folder of shards, for --fsdp and several processes; give a file")
    if args.uses_ext_loss and args.torchcompile and args.torchcompile_strategy == "step":
        raise InputError(f"--torchcompile-strategy: 'step' with --loss {args.loss}, whose state moves; give 'model'")
    if not divides:
        return
    for name in ("osr_epochs", "keep_best", "zeroshot_data"):
        value = getattr(args, name)
        if value:
            given = f"{value:g}" if isinstance(value, float) else repr(value)
            raise InputError(f"{flag_of(name)}: {given} with --fsdp, which divides the weights; leave one out")
