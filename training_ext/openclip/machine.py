"""The machine: how many processes were started, as OpenCLIP reads it, and whether folders and devices are there."""

import os
import shutil
import tempfile
from argparse import Namespace
from pathlib import Path

import torch
from open_clip_train.distributed import is_using_distributed, world_info_from_env

from open_clip_ext.errors import InputError

LAUNCHERS = (  # variables in which OpenCLIP finds rank and number of processes
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "PMI_SIZE", "PMI_RANK",
    "MPI_LOCALRANKID", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
)
PER_MACHINE = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")  # of torchrun and of Slurm


def world_info() -> tuple[int, int, int]:
    """Local rank, rank and number of processes; 0, 0 and 1 where OpenCLIP starts no process group.

    A launcher of independent runs, such as srun with WORLD_SIZE=1 or mpirun, leaves ranks in the environment, too.

    Raises:
        InputError: a variable of the launcher's is not a number, or the rank is not one of the processes'.
    """
    try:
        local_rank, rank, processes = world_info_from_env() if is_using_distributed() else (0, 0, 1)
    except ValueError:
        named = {name: os.environ[name] for name in LAUNCHERS if not os.environ.get(name, "0").isdecimal()}
        shown = ", ".join(f"{name}={value!r}" for name, value in named.items())
        raise InputError(f"{shown} in the environment must be a whole number, as a launcher sets it") from None
    if not 0 <= rank < processes:
        raise InputError(f"process {rank} of {processes}, by the environment; ranks are from 0 to {processes - 1}")
    return local_rank, rank, processes


def global_batch(args: Namespace) -> int:
    """Samples of one optimizer step, over all processes and accumulated batches."""
    return args.batch_size * args.accum_freq * world_info()[2]


def processes_here() -> int:
    """Number of processes on this machine; 1 if the launcher does not say."""
    found = next((os.environ[name] for name in PER_MACHINE if os.environ.get(name, "").isdecimal()), "1")
    return int(found) if is_using_distributed() else 1


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


def check_room(flag: str, path: str, size: int) -> None:
    """Raise InputError unless the disk of the new file `path`, or of the closest folder above, has `size` bytes."""
    above = next(folder for folder in Path(path).absolute().parents if folder.exists())
    if (free := shutil.disk_usage(above).free) < size:
        raise InputError(f"{path!r} needs {size / 1e6:,.0f} MB, and its disk has {free / 1e6:,.0f}; make room", flag)


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
