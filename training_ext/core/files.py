"""Write a checkpoint: complete, or not at all."""

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

from open_clip_ext.errors import FULL
from open_clip_ext.files import is_full, os_error, whole_file


def atomic_save(save: Callable, content: Any, path: Any) -> None:
    """`torch.save` that writes a complete file or none: after a kill an older file at `path` is intact.

    Raises:
        OSError: it cannot be written; names `path` and the reason.
    """
    try:
        with whole_file(path) as file:
            save(content, file)
    except (OSError, RuntimeError) as error:
        cause = os_error(error)
        if cause is None:
            raise
        reason = cause.strerror or str(cause)
        if is_full(cause):
            needed, free = _size(content) / 2**20, shutil.disk_usage(os.path.dirname(path) or ".").free / 2**20
            reason = f"it needs {needed:.1f} MiB, and {FULL} ({free:.1f} MiB free)"
        raise OSError(cause.errno, reason, os.fspath(path)) from None


def _size(content: Any) -> int:
    """Bytes of the tensors in a checkpoint."""
    if isinstance(content, torch.Tensor):
        return content.numel() * content.element_size()
    values = content.values() if isinstance(content, dict) else content if isinstance(content, (list, tuple)) else ()
    return sum(map(_size, values))
