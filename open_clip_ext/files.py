"""Write files atomically: a file is complete or absent."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PARTIAL = ".partial"  # end of a temporary name; not .pt, which `--resume latest` would pick


@contextmanager
def whole_file(path: str | os.PathLike, text: bool = False) -> Iterator[IO]:
    """Open a new file beside `path`, for bytes or for UTF-8 text, that becomes `path` at the end of the block.

    A kill, a full disk or any exception leaves an older `path` as it was. A link at the temporary name is replaced, not
    followed.
    """
    partial = f"{os.fspath(path)}{PARTIAL}"
    with suppress(FileNotFoundError):  # left by an earlier run that was killed
        os.remove(partial)
    file = open(partial, "x", encoding="utf-8") if text else open(partial, "xb")
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):  # frees a full disk
            os.remove(partial)
        raise


@contextmanager
def locked_folder(path: str | os.PathLike) -> Iterator[None]:
    """Let one process at a time into the block, of those that give a file of the same folder."""
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


def is_full(error: BaseException | None) -> bool:
    """Whether the disk was full; torch's writer raises a RuntimeError from the OSError."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        error = error.__cause__ or error.__context__
    return False
