"""What the launcher's environment says about the processes, as OpenCLIP reads it."""

import os

from open_clip_train.distributed import is_using_distributed, world_info_from_env

PER_MACHINE = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")  # of torchrun and of Slurm


def world_info() -> tuple[int, int, int]:
    """Local rank, rank and number of processes; 0, 0 and 1 where OpenCLIP starts no process group.

    A launcher of independent runs, such as srun with WORLD_SIZE=1 or mpirun, leaves ranks in the environment, too.
    """
    return world_info_from_env() if is_using_distributed() else (0, 0, 1)


def processes_here() -> int:
    """Number of processes on this machine; 1 if the launcher does not say."""
    found = next((os.environ[name] for name in PER_MACHINE if os.environ.get(name, "").isdecimal()), "1")
    return int(found) if is_using_distributed() else 1
