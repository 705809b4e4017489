"""`Plan`: a run as its command line describes it: processes, sizes, folder, and when it saves."""

import os
from argparse import Namespace
from dataclasses import dataclass

from open_clip_train.distributed import is_using_distributed, world_info_from_env

from open_clip_ext.errors import InputError
from training_ext.core import hosts

LAUNCHERS = (  # variables in which OpenCLIP finds rank and number of processes
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "PMI_SIZE", "PMI_RANK",
    "MPI_LOCALRANKID", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
)


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


def trains(args: Namespace) -> bool:
    """Whether OpenCLIP trains, by its own rule; otherwise it only evaluates."""
    return bool(args.train_data) or args.dataset_type == "synthetic"


def global_batch(args: Namespace) -> int:
    """Samples of one optimizer step, over all processes and accumulated batches."""
    return args.batch_size * args.accum_freq * world_info()[2]


@dataclass(frozen=True)
class Plan:
    """One run of the command; OpenCLIP's main completes `args` before the model is built."""

    args: Namespace

    @property
    def trains(self) -> bool:
        return trains(self.args)

    @property
    def keeps_files(self) -> bool:
        """Whether the run may write anything."""
        return bool(self.args.logs) and self.args.logs.lower() != "none"

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which logs and writes."""
        return getattr(self.args, "rank", world_info()[1]) == 0

    @property
    def folder(self) -> str | None:
        """The run's folder, once it has a name; None without files."""
        args = self.args
        return os.path.join(args.logs, args.name) if self.keeps_files and args.name is not None else None

    def file(self, name: str) -> str | None:
        """Path of a file in the run's folder on the process that writes it, else None."""
        return os.path.join(self.args.logs, self.args.name, name) if self.args.save_logs else None

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step, over all processes."""
        return global_batch(self.args)

    @property
    def shards_model(self) -> bool:
        """Whether FSDP shards the model, so that every process takes part in a checkpoint."""
        return hosts.installed().HAS_TASKS and self.args.fsdp and world_info()[2] > 1

    def steps(self, batches: int) -> int:
        """Optimizer steps of this many batches of a process; OpenCLIP leaves out the batches of an incomplete one."""
        return batches // self.args.accum_freq

    def saves_after(self, epochs: int) -> bool:
        """Whether OpenCLIP writes a checkpoint once this many epochs are done."""
        return self.keeps_files and (self._is_numbered(epochs) or self.args.save_most_recent)

    def checkpoint_after(self, epochs: int) -> str:
        """Path of that checkpoint."""
        latest = hosts.installed().main().LATEST_CHECKPOINT_NAME
        return os.path.join(self.args.checkpoint_path, f"epoch_{epochs}.pt" if self._is_numbered(epochs) else latest)

    def _is_numbered(self, epochs: int) -> bool:
        """Whether the checkpoint's name has the epoch."""
        every = self.args.save_frequency
        return epochs == self.args.epochs or (every > 0 and epochs % every == 0)
