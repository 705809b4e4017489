"""The version of the installed OpenCLIP, known before any of it is imported."""

import importlib.metadata

from open_clip_ext.errors import InputError


def open_clip_version() -> str:
    """The installed version; InputError if there is none."""
    try:
        return importlib.metadata.version("open_clip_torch")
    except importlib.metadata.PackageNotFoundError:
        raise InputError("open_clip_torch is not installed; pip install 'open_clip_torch[training]'") from None


def release_of(version: str) -> tuple[int, ...]:
    """Its first two numbers."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])


def cannot_import(error: ImportError) -> str:
    """One line for an OpenCLIP whose training code is not there, or lacks a name or a package."""
    reason = " ".join(str(error).split())
    return (
        f"the training code of open_clip_torch {open_clip_version()} cannot be imported: {reason}; "
        "pip install 'open_clip_torch[training]'"
    )
