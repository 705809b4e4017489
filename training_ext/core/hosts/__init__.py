"""The supported versions of OpenCLIP; `v3` and `v4` have the names that are replaced in each one's loop,
and `v3_events` and `v4_events` those that are replaced for hooks of components.
"""

import importlib
import importlib.metadata
from functools import cache
from types import ModuleType

from open_clip_ext.errors import InputError

HOSTS = {"v3": ((2, 26), (4, 0)), "v4": ((4, 2), (4, 3))}
"""By module: the first supported (major, minor), and the first that is no longer supported."""


def range_of(host: str) -> str:
    """The versions in pip's notation, such as '>=2.26,<4.0'."""
    low, high = (".".join(map(str, bound)) for bound in HOSTS[host])
    return f">={low},<{high}"


@cache  # reading its metadata takes a millisecond, and every line of the log asks
def open_clip_version() -> str:
    """The installed version, such as "2.32.0".

    Raises:
        InputError: open_clip_torch is not installed.
    """
    try:
        return importlib.metadata.version("open_clip_torch")
    except importlib.metadata.PackageNotFoundError:
        raise InputError("open_clip_torch is not installed; pip install 'open_clip_torch[training]'") from None


def cannot_import(error: ImportError) -> str:
    """The error line if OpenCLIP's training code, a name in it, or a package that it needs is missing."""
    reason = " ".join(str(error).split())
    return (
        f"the training code of open_clip_torch {open_clip_version()} cannot be imported: {reason}; "
        "pip install 'open_clip_torch[training]'"
    )


def release() -> tuple[int, ...]:
    """The installed (major, minor)."""
    return tuple(int(part) if part.isdigit() else 0 for part in open_clip_version().split(".")[:2])


def installed() -> ModuleType:
    """The module with the seams of the installed OpenCLIP.

    Raises:
        InputError: as `supported`, or its training code cannot be imported.
    """
    name = supported()
    try:
        host = importlib.import_module(f"{__name__}.{name}")
        host.main()
    except ImportError as error:
        raise InputError(cannot_import(error)) from None
    return host


def supported() -> str:
    """The name of that module; nothing of OpenCLIP is imported.

    Raises:
        InputError: OpenCLIP is missing or not supported.
    """
    for name, (low, high) in HOSTS.items():
        if low <= release() < high:
            return name
    ranges = " or ".join(range_of(host) for host in HOSTS)
    raise InputError(f"open_clip_torch {open_clip_version()} is installed; open_clip_ext needs {ranges}")
