"""Write a checkpoint: complete, or not at all."""

import os
from collections.abc import Callable
from typing import Any

from open_clip_ext.files import os_error, whole_file


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
        raise OSError(cause.errno, cause.strerror or str(cause), os.fspath(path)) from None
