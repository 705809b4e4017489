"""The machine: how many processes were started, as OpenCLIP reads it, and whether folders and devices are there."""

import os
import tempfile
from argparse import Namespace
from pathlib import Path

import torch
from open_clip_train.distributed import is_using_distributed

from open_clip_ext.errors import InputError

PER_MACHINE = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")  # of torchrun and of Slurm


def processes_here() -> int:
    """Number of processes on this machine; 1 if the launcher does not say."""
    process_count = next((os.environ[name] for name in PER_MACHINE if os.environ.get(name, "").isdecimal()), "1")
    return int(process_count) if is_using_distributed() else 1


def check_writable(flag: str, path: str) -> None:
    """Raise InputError unless the folder `path` exists or can be created, and files can be written to it."""
    try:
        folder = Path(path).absolute()
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise NotADirectoryError(None, f"{str(folder)!r} is a file")
        # By trying, since permissions do not tell: root may write where they forbid it.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{path!r} cannot be written to: {reason}; give a writable folder", flag) from None


def check_name(args: Namespace) -> None:
    below = Path(args.name)
    if below.anchor or ".." in below.parts or not below.parts:
        raise InputError(f"{args.name!r} is not a folder inside --logs {args.logs!r}; give one such as run-1", "--name")


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
