"""A file is complete or absent."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[str]:
    """Gives the temporary name beside `path` to write to, which becomes `path` at the end of the block.

    A kill, a full disk or any exception leaves an older `path` as it was.
    """
    partial = f"{os.fspath(path)}.partial"  # not *.pt, which `--resume latest` would pick
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):  # a full disk must not stay full
            os.remove(partial)
        raise
