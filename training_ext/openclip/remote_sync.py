"""`RemoteSync`: --remote-sync of a run that ends early."""

import logging
from collections.abc import Callable
from typing import Any

from open_clip_train.file_utils import remote_sync


class RemoteSync:
    """OpenCLIP's process that copies the run's folder, which ends with the run, after a last copy."""

    def __init__(self) -> None:
        self._started: tuple[Any, tuple[str, ...]] | None = None

    def start(self, original: Callable, seconds: float, *where: str) -> Any:
        """Replaces OpenCLIP's `start_sync_process`; `where` is the local folder, the remote one and the protocol."""
        process = original(seconds, *where)
        process.daemon = True
        self._started = process, where
        return process

    def end(self, completed: bool) -> None:
        """End the process, and copy what there is, unless OpenCLIP's main has come to its end and did both."""
        if self._started is None or completed:
            return
        process, where = self._started
        if process.is_alive():  # a signal to the whole group has ended it, too
            process.terminate()
        if not remote_sync(*where):
            logging.error(f"--remote-sync: the last state is not in {where[1]!r}")
