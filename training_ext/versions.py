"""Which OpenCLIP is supported, checked before any of it is imported."""

import importlib.metadata

from open_clip_ext.errors import InputError

SUPPORTED = ((3, 3), (4, 0))  # from, below


def open_clip_version() -> str:
    """The installed version; InputError if there is none."""
    try:
        return importlib.metadata.version("open_clip_torch")
    except importlib.metadata.PackageNotFoundError:
        raise InputError("open_clip_torch is not installed; pip install 'open_clip_torch[training]'") from None


def cannot_import(error: ImportError) -> str:
    """One line for an OpenCLIP whose training code is not there, or lacks a name or a package."""
    reason = " ".join(str(error).split())
    return (
        f"the training code of open_clip_torch {open_clip_version()} cannot be imported: {reason}; "
        "pip install 'open_clip_torch[training]'"
    )


def check_version() -> None:
    """Raise InputError unless the installed OpenCLIP lies in the supported range."""
    version = open_clip_version()
    number = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if not SUPPORTED[0] <= number < SUPPORTED[1]:
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise InputError(f"open_clip_torch {version} is installed; open_clip_ext needs >={low},<{high}")
