"""Check what a command line needs of the machine: folders and devices; writes nothing."""

import os
import tempfile
from argparse import Namespace
from pathlib import Path

import torch
from open_clip_train.distributed import is_using_distributed

from open_clip_ext.errors import InputError
from training_ext.openclip.launch import processes_here
from training_ext.openclip.loading import one_line


def check_writable(flag: str, path: str) -> None:
    """Raise InputError unless the folder `path` exists or can be created, and files can be written to it."""
    try:
        whole = folder = Path(path).absolute()
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise NotADirectoryError(None, f"{str(folder)!r} is a file")
        most = os.pathconf(folder, "PC_NAME_MAX")
        if any(len(os.fsencode(part)) > most for part in whole.parts):
            raise OSError(None, f"a name has at most {most} bytes")
        # By trying, since permissions do not tell: root may write where they forbid it.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise InputError(f"{path!r} cannot be written to: {reason}; give a writable folder", flag) from None


def check_device(args: Namespace) -> None:
    """Raise InputError for a missing device that was given; OpenCLIP would train on the CPU, and so it does by default.

    Also for several processes on one GPU, with which NCCL waits forever.
    """
    kind = args.device.partition(":")[0]
    try:
        torch.empty(0, device=args.device)
        if kind == "meta":
            raise ValueError("it computes nothing")
    except Exception as error:
        if "device" not in args.given_flags:
            return
        there = f"cuda:0 to cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "cpu"
        reason = str(error).splitlines()[0][:120]
        raise InputError(f"{args.device!r} is not on this machine, which has {there}: {reason}", "--device") from None
    processes, gpus = processes_here(), torch.cuda.device_count()
    if kind == "cuda" and is_using_distributed() and not args.no_set_device_rank and processes > gpus:
        raise InputError(
            f"{args.device!r} for {processes} processes on this machine, which has {gpus} GPUs; start one process per "
            "GPU",
            "--device",
        )
