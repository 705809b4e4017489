"""Write files atomically, and let one run at a time use a folder: a file is complete or absent."""

import errno
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PARTIAL = ".partial"  # end of a temporary name; not .pt, which `--resume latest` would pick
LOCK = ".lock"  # of a folder in use; what it contains names the process
_held: set[int] = set()  # file descriptors


class InUseError(Exception):
    """Another process uses the folder; the message names it."""


def is_only_user(folder: str | os.PathLike) -> bool:
    """Whether this process holds the folder's lock (`only_user`)."""
    try:
        lock = os.stat(os.path.join(folder, LOCK))
    except OSError:
        return False
    return any(os.path.samestat(os.fstat(file), lock) for file in _held)


def _close_held() -> None:
    """Close the locks that a forked process inherits: it would keep the folder of a killed run locked."""
    for file in _held:
        os.close(file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_held)


@contextmanager
def only_user(folder: str | os.PathLike) -> Iterator[None]:
    """Create `folder` and hold its lock within the block, so that one process at a time uses it.

    The kernel holds the lock, so a killed process leaves none behind; on a file system without locks every process
    enters. At the end the folders that this created are removed if they are empty.

    Raises:
        InUseError: another process holds the lock.
        OSError: the folder cannot be created or written to.
    """
    folder = os.path.abspath(folder)
    folders = [folder]
    while not os.path.exists(folders[-1]):
        folders.append(os.path.dirname(folders[-1]))
    path = os.path.join(folder, LOCK)
    file = _locked(path)
    _held.add(file)
    try:
        yield
    finally:
        with suppress(OSError):
            os.remove(path)  # first, since whoever locks it next must find it gone
        _held.discard(file)
        os.close(file)
        with suppress(OSError):
            for parent in folders[:-1]:
                os.rmdir(parent)


def _locked(path: str) -> int:
    """Create the lock file `path`, lock it and return its file descriptor."""
    while True:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            _lock_of_kernel(file)
            if os.path.samestat(os.fstat(file), os.stat(path)):  # else its process has just removed it
                os.ftruncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return file
        except BlockingIOError:
            holder = os.pread(file, 200, 0).decode(errors="replace") or "another process"
            os.close(file)
            raise InUseError(holder) from None
        except FileNotFoundError:
            pass
        os.close(file)


def _lock_of_kernel(file: int) -> None:
    """Lock an open file, if the file system has locks; raises BlockingIOError if another process holds it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


@contextmanager
def whole_file(path: str | os.PathLike, text: bool = False) -> Iterator[IO]:
    """Open a temporary file beside `path`, binary or UTF-8 text, and rename it to `path` at the end of the block.

    After a kill, a full disk or any exception an older `path` is unchanged. Processes that write at the same time have
    separate temporary files, and the last rename wins. A killed process leaves its own.
    """
    path = os.fspath(path)
    partial = temporary_name(path)
    file = open(partial, "x", encoding="utf-8") if text else open(partial, "xb")
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):  # frees a full disk
            os.remove(partial)
        if isinstance(error.__context__, KeyboardInterrupt):  # torch's writer raises a RuntimeError in its place
            raise KeyboardInterrupt from None
        raise


def temporary_name(path: str) -> str:
    """New temporary name beside `path`.

    It begins with a dot, so that a half-written copy of it in a remote folder is not the last in the order of names.
    """
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{secrets.token_hex(4)}{PARTIAL}")


@contextmanager
def locked_folder(path: str | os.PathLike) -> Iterator[None]:
    """Lock the folder of the file `path` within the block, so that one process at a time writes files there."""
    if fcntl is None:
        yield
        return
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def os_error(error: BaseException | None) -> OSError | None:
    """The OSError behind an error, itself or its cause: torch's writer raises a RuntimeError instead."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def is_full(error: BaseException) -> bool:
    """Whether an error says that the disk is full or a quota is used up."""
    return getattr(os_error(error), "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
