"""Copy a run's folder by --remote-sync: whole files, although some come and go, and the last ones at an early end."""

import logging
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from typing import Any

import fsspec
from open_clip_train import file_utils

from open_clip_ext.errors import one_line
from open_clip_ext.files import PARTIAL
from training_ext.core.component import Component
from training_ext.core.patching import replaced
from training_ext.core.seam import Seam


class WholeFiles:
    """The complete files below a folder, in place of fsspec's mapping: by their names, and as bytes.

    A file is open while its name is the current one of the iteration, so that it can be read after it was removed.
    """

    def __init__(self, folder: str):
        self._folder = folder

    def __iter__(self) -> Iterator[str]:
        for folder, _, names in os.walk(self._folder):
            for name in sorted(names):
                path = os.path.join(folder, name)
                with suppress(FileNotFoundError), open(path, "rb") as self._file:
                    if not path.endswith(PARTIAL):
                        yield os.path.relpath(path, self._folder).replace(os.sep, "/")

    def __getitem__(self, name: str) -> bytes:
        self._file.seek(0)
        return self._file.read()


class ChangedFiles:
    """The copies that are up to date, in place of fsspec's mapping of the remote folder.

    OpenCLIP leaves out a file whose copy has as many bytes, also if they differ, as those of a new best.pt.

    Args:
        copies: fsspec's mapping.
        files: those to copy, of which one is read at a time.
    """

    def __init__(self, copies: MutableMapping[str, bytes], files: WholeFiles):
        self._copies, self._files = copies, files

    def __contains__(self, name: str) -> bool:
        return name in self._copies and self._copies[name] == self._files[name]

    def __getitem__(self, name: str) -> bytes:
        return self._files[name]

    def __setitem__(self, name: str, content: bytes) -> None:
        self._copies[name] = content


def copy(local: str, remote: str, protocol: str) -> bool:
    """OpenCLIP's `remote_sync`, without files that are half-written; False if it failed, which is logged."""
    mapper, run, files = fsspec.get_mapper, subprocess.run, WholeFiles(local)
    replacements = {
        "fsspec.get_mapper": lambda folder: files if folder == local else ChangedFiles(mapper(folder), files),
        "subprocess.run": lambda command, **kwargs: run([*command, "--exclude", f"*{PARTIAL}"], **kwargs),
    }
    try:
        with replaced({(file_utils.__name__, path): value for path, value in replacements.items()}):
            return file_utils.remote_sync(local, remote, protocol)
    except Exception as error:
        logging.error(f"--remote-sync: {one_line(error)}")
        return False


def keep_copying(seconds: float, *where: str) -> None:
    """Copy every so many seconds for as long as the process that trains is there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training
    training = multiprocessing.parent_process()
    assert training is not None
    while training.is_alive():
        training.join(seconds)
        copy(*where)


class RemoteSync(Component):
    """The process that copies the run's folder, which ends with the run; one that ends early copies once more."""

    name = "remote_sync"
    seams = (
        Seam(
            "open_clip_train.main", "start_sync_process",
            why="its process ends at a file that goes while it is copied, copies half-written ones, keeps a run that "
            "ends early alive, and does not copy the last checkpoint",
            contract="with --remote-sync main calls start_sync_process(seconds, local folder, remote folder, protocol) "
            "on process 0, starts the process that it returns, and ends it after the last epoch; "
            "file_utils.remote_sync uses fsspec.get_mapper and subprocess.run",
            replacement=lambda original, component: component.start,
        ),
    )  # fmt: skip

    _started: tuple[Any, tuple[str, ...]] | None = None

    def wanted(self) -> bool:
        return self.args.remote_sync is not None

    def start(self, seconds: float, *where: str) -> Any:
        """Replaces OpenCLIP's `start_sync_process`; `where` is the local folder, the remote one and the protocol."""
        process = multiprocessing.Process(target=keep_copying, args=(seconds, *where), daemon=True)
        self._started = process, where
        return process

    def end(self, completed: bool) -> None:
        """End the process, and copy what there is, unless OpenCLIP's main has come to its end and did both."""
        if self._started is None or completed:
            return
        process, where = self._started
        if process.is_alive():  # a signal to the whole group has ended it, too
            process.terminate()
        if not copy(*where):
            logging.error(f"--remote-sync: the last state is not in {where[1]!r}")
