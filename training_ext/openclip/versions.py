"""The version of the installed OpenCLIP, read without importing it."""

import importlib.metadata

from open_clip_ext.errors import InputError


def open_clip_version() -> str:
    """The installed version, such as "2.32.0".

    Raises:
        InputError: open_clip_torch is not installed.
    """
    try:
        return importlib.metadata.version("open_clip_torch")
    except importlib.metadata.PackageNotFoundError:
        raise InputError("open_clip_torch is not installed; pip install 'open_clip_torch[training]'") from None


def release_of(version: str) -> tuple[int, ...]:
    """Major and minor number of a version, for comparisons."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])


def cannot_import(error: ImportError) -> str:
    """The error line if OpenCLIP's training code, a name in it, or a package that it needs is missing."""
    reason = " ".join(str(error).split())
    return (
        f"the training code of open_clip_torch {open_clip_version()} cannot be imported: {reason}; "
        "pip install 'open_clip_torch[training]'"
    )
