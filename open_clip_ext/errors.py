"""Exceptions that end a command, and helpers that word their messages."""

import difflib
import errno
import os
import re
import signal
from collections.abc import Collection
from pathlib import Path

from open_clip_ext.files import is_full, os_error

# In torch's messages; the files of the second kind are in /dev/shm.
ENDED_WORKER = re.compile(
    r"DataLoader worker \(pid(\(s\))? [\d, ]+\) (is killed by signal: [\w ]+|exited unexpectedly)"
    r"|</torch_\S+>: (No space left on device|Cannot allocate memory)"
)
# In torch's, of the memory that loader workers share; in Python's, of the same and of semaphores.
NO_SHARED_MEMORY = re.compile(
    r"unable to open shared memory object.*: (.+)|^\[Errno \d+\] (.+): '/dev/shm\b|^\[Errno 30\] ([^:]+)$"
)
# In torch's messages, of the host and of a GPU.
OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory|(CUDA )?out of memory", re.IGNORECASE)

# In messages of gloo and of the store; then of NCCL, of the process that it fails in and of one that waits in vain.
LOST_ANOTHER = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "socket closed",
    "connection was likely closed", "remote process", "closed by remote peer", "nccl communicator was aborted",
    "caught collective operation timeout",
)  # fmt: skip
# After these a run saves its state and ends; Windows lacks some.
STOPS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*m")


class InputError(ValueError):
    """Bad input from the user: one line that names the argument, the value and what would be right.

    A command prints the line with the argument as a flag and exits with `code`.

    Args:
        text: the value and what would be right.
        argument: name of the argument in Python, or the flag; the message starts with it.
    """

    code = 2

    def __init__(self, text: str, argument: str | None = None):
        super().__init__(text if argument is None else f"{argument}: {text}")
        self.text = text
        self.argument = argument


def one_line(error: Exception) -> str:
    """An exception's message on one line, of at most 200 characters."""
    return " ".join(TERMINAL_CODE.sub("", str(error)).split())[:200]


def reason_of(error: BaseException) -> str:
    """As `one_line`, without the number and the path of an OSError and Pillow's name of an image in memory."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = re.sub(r" ?<_io\.BytesIO object at \w+>", "", text)
    return " ".join(text.split())[:200] or type(error).__name__


def last_line(error: Exception) -> str:
    """Message of an error; if a loader worker raised it, the last line of the traceback that is its text."""
    line = str(error).strip().splitlines()[-1]
    return line.removeprefix(f"{type(error).__module__}.{type(error).__name__}: ")


class MachineError(InputError):
    """No input was bad, but the machine failed in a training that had made a step: a full disk or memory, a loader's
    worker that was killed. A command exits with code 75, EX_TEMPFAIL of sysexits.h: to try again may help."""

    code = 75


class Stopped(Exception):
    """A signal stopped the run, and its state is saved; the message is one line that says how to resume it.

    The command prints the line and exits with `code`, which shells and schedulers read as ended by the signal: 143
    after SIGTERM, 130 after Ctrl-C, 129 after SIGHUP, 138 after SIGUSR1.

    Args:
        after: number of the signal.
        where: the epoch and step at which it stopped, and how to resume.
    """

    def __init__(self, after: int, where: str):
        super().__init__(f"stopped by {signal.Signals(after).name} {where}")
        self.code = 128 + after


def fault_of_machine(error: BaseException, folder: str | os.PathLike | None = None) -> str | None:
    """Describe a system error in one line, cause and remedy; None for other errors.

    System errors are a full disk or memory, a killed loader worker, a pipe that nobody reads, and processes that cannot
    find one another.

    Args:
        folder: every OSError of a file in this folder is a system error, too.
    """
    if isinstance(error, RuntimeError) and (ended := ENDED_WORKER.search(str(error))):
        return (
            f"{ended[0]}; where nobody ended it, the memory or the shared memory (/dev/shm) is too small: lower "
            "--workers, or give the container more (--shm-size)"
        )
    if no_shared_memory := NO_SHARED_MEMORY.search(str(error)):
        reason = next(filter(None, no_shared_memory.groups()))
        remedy = "mount it writable or, before OpenCLIP 4, read a csv or images with --workers 0"
        return f"/dev/shm cannot be written: {reason}; {remedy}"
    is_of_torch = OUT_OF_MEMORY.search(str(error)) if isinstance(error, RuntimeError) else None
    if is_of_torch or isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        text = str(error)[is_of_torch.start() :] if is_of_torch else str(error)
        reason = ". ".join(text.replace("\n", " ").split(". ")[:2])
        return f"{reason or 'out of memory'}; lower --batch-size or --workers"
    if isinstance(error, ValueError) and "environment variable MASTER_" in str(error):
        variable = next((name for name in ("SLURM_NTASKS", "WORLD_SIZE") if name in os.environ), "WORLD_SIZE")
        return (
            f"{variable}: {os.environ.get(variable)} processes, but no MASTER_ADDR and MASTER_PORT to find one another"
            f"; set them, use torchrun, or unset {variable}"
        )
    if isinstance(error, BrokenPipeError):
        return "whoever read this output, or another pipe of the process, has ended"
    system = os_error(error) if is_full(error) else error
    if not isinstance(system, OSError):
        return None
    name = system.filename
    subject = f"{os.fspath(name)!r} cannot be written: " if isinstance(name, str | os.PathLike) else ""
    if is_full(system):
        return f"{subject}the disk or the quota is full; make room"
    is_below = folder is not None and subject and Path(os.path.abspath(name)).is_relative_to(os.path.abspath(folder))
    return f"{subject}{system.strerror}" if is_below else None


def lost_another_process(error: RuntimeError) -> bool:
    """Whether a collective failed because another process has ended."""
    import torch.distributed as dist

    text = str(error).lower()
    return dist.is_available() and dist.is_initialized() and any(sign in text for sign in LOST_ANOTHER)


def did_you_mean(name: object, valid_names: Collection[str], otherwise: str = "") -> str:
    """End of the message about an unknown name: suggests the closest valid one, or `otherwise` if none is close."""
    near = difflib.get_close_matches(str(name), valid_names, n=1)
    end = f"did you mean {near[0]!r}?" if near else otherwise
    return f"; {end}" if end else ""


def not_one_of(value: object, valid_values: Collection[str]) -> str:
    """Message about a value that must be one of `valid_values`."""
    return f"{value!r} is not one of {', '.join(valid_values)}{did_you_mean(value, valid_values)}"
