"""Rows per sample in files: every process writes its own part of a table, and any number of processes read them.

    with rows_in_files("run/step_1000.rows"):  # on every process
        state = loss.state_dict()
    if rank == 0:
        torch.save(state, "run/step_1000.pt")

    with rows_in_files("run/step_1000.rows"):
        loss.load_state_dict(torch.load("run/step_1000.pt", weights_only=True))

The folder holds, for each table t and each of the W processes r that wrote it, the rows r, r + W, r + 2W, ... as the
tensor "rows" of table_<t>_part_<r>_of_<W>.safetensors. index.json, with their checksums, comes last: a folder without
it is an unfinished one.
In the state a table is a dictionary that names the save and the number of the table. No process holds more than its own
rows.
"""

import json
import math
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.distributed import all_gather_object, object_of_first, rank, world_size
from open_clip_ext.errors import InputError, MachineError
from open_clip_ext.files import whole_file

INDEX = "index.json"
FORMAT = 1
TENSOR = "rows"
CHUNK_ROWS = 1 << 22  # that a process sends, writes or reads at once: 32 MiB for two columns
CHUNK = 2**20  # bytes of a file, for its checksum
DTYPES = {torch.float32: "F32", torch.float64: "F64"}  # as safetensors calls them


class NotSharedError(InputError):
    """A process does not see the folder; nothing is kept of the save."""


_CURRENT: ContextVar["RowFiles | None"] = ContextVar("rows_in_files", default=None)


def current() -> "RowFiles | None":
    """The `RowFiles` of the enclosing `rows_in_files`, or None."""
    return _CURRENT.get()


@contextmanager
def rows_in_files(folder: str | os.PathLike) -> Iterator["RowFiles"]:
    """Within the block, a loss's state is saved and loaded with its rows per sample in files of `folder`.

    Every process enters it. Saving creates the folder, which must be new and visible to all processes; if processes
    name different folders, process 0's is used. The files are complete at the end of the block.

    Raises:
        InputError: on every process, where the folder exists, or some process cannot write or see it; or a file is
            missing, damaged or of another save.
    """
    files = RowFiles(folder)
    token = _CURRENT.set(files)
    try:
        yield files
        files.finish()
    finally:
        _CURRENT.reset(token)


def check_row_files(folder: str | os.PathLike, state: Mapping[str, Any]) -> None:
    """Raise InputError, one line that names the file, unless all files that a loss's state needs are there and whole.

    Their headers are read, not the rows.
    """
    files = RowFiles(folder)
    for value in state.get("_extra_state", state).values():  # state_dict() has full_state() within
        if isinstance(value, dict):
            files.check(value)


class RowFiles:
    """The files of one save; made by `rows_in_files`.

    Attributes:
        folder: where they are, the same on every process once something is written.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = os.path.abspath(folder)
        self._save = ""
        self._tables: list[list[int]] = []  # rows and columns of each, while writing
        self._checksums: list[int] = []  # of this process's part of each
        self._problem: InputError | None = None
        self._made = False

    def _path(self, table: int, part: int, parts: int) -> str:
        return os.path.join(self.folder, f"table_{table}_part_{part}_of_{parts}.safetensors")

    # Writing, by every process

    def write(self, rows: Tensor, num_rows: int) -> dict[str, Any] | None:
        """Write this process's rows (local n, c) of a table of `num_rows`.

        Returns:
            The dictionary that stands for the table in the state; None on all processes but 0. An error raises in
            `finish`, on every process.
        """
        if not self._tables:
            self._begin()
        table = len(self._tables)
        self._tables.append([num_rows, rows.shape[1]])
        if self._problem is None:
            path = self._path(table, rank(), world_size())
            try:
                self._checksums.append(self._write_part(path, rows))
            except OSError as error:
                self._problem = _unwritten(path, error)
        return {"rows_in_files": self._save, "table": table} if rank() == 0 else None

    def _begin(self) -> None:
        if rank() == 0:
            self._save = secrets.token_hex(8)
            try:
                os.mkdir(self.folder)
                self._made = True
            except OSError as error:
                self._problem = InputError(f"{self.folder!r} cannot be made: {error.strerror}; give a new folder")
        self.folder, self._save, self._problem = object_of_first((self.folder, self._save, self._problem))
        if self._problem is None and not os.path.isdir(self.folder):
            problem = f"process {rank()} does not see {self.folder!r}; give a folder that all processes share"
            self._problem = NotSharedError(problem)

    def _write_part(self, path: str, rows: Tensor) -> int:
        """Write a file as safetensors lays it out, and return its checksum. In pieces: save_file would hold the rows
        once more in host memory."""
        tensor = {
            "dtype": DTYPES[rows.dtype],
            "shape": list(rows.shape),
            "data_offsets": [0, rows.numel() * rows.element_size()],
        }
        header = json.dumps({"__metadata__": {"save": self._save}, TENSOR: tensor}).encode()
        header += b" " * (-len(header) % 8)
        header = len(header).to_bytes(8, "little") + header
        checksum = zlib.crc32(header)
        with whole_file(path) as file:
            file.write(header)
            for chunk in rows.split(CHUNK_ROWS):
                piece = chunk.cpu().contiguous().numpy().data
                file.write(piece)
                checksum = zlib.crc32(piece, checksum)
        return checksum

    def finish(self) -> None:
        """Write the index, once every process has written its parts."""
        if not self._tables:
            return
        problems, checksums = zip(*all_gather_object((self._problem, self._checksums)), strict=True)
        problem = next(filter(None, problems), None)
        if rank() == 0 and problem is None:
            path = os.path.join(self.folder, INDEX)
            index = {"format": FORMAT, "save": self._save, "processes": world_size(), "tables": self._tables}
            index["crc32"] = list(zip(*checksums, strict=True))  # of each table's parts
            try:
                with whole_file(path, text=True) as file:
                    json.dump(index, file)
            except OSError as error:
                problem = _unwritten(path, error)
        if problem is not None and self._made:
            shutil.rmtree(self.folder, ignore_errors=True)  # a full disk must not stay full
        if (problem := object_of_first(problem)) is not None:
            raise problem

    # Reading, by any process

    def read(self, saved: Mapping[str, Any], rows: Tensor, num_rows: int) -> None:
        """Fill `rows` (local n, c) with this process's rows of a table of `num_rows`.

        Args:
            saved: the result of `write`, on which `check` did not raise.

        Raises:
            InputError: a file is missing, damaged or of another save.
        """
        parts, shape, checksums = self._find(saved)
        process, processes = rank(), world_size()
        for part in range(process, parts, processes):
            path = self._path(saved["table"], part, parts)
            with self._open(saved, part, parts, shape):
                if checksums is not None and _checksum(path) != checksums[part]:
                    raise InputError(f"{path!r} is damaged: its bytes have changed since it was written")
        both = math.lcm(parts, processes)
        for part in range(parts):
            # The rows of this part and of this process are every `both`-th from the first on.
            first_row = next((row for row in range(part, both, parts) if row % processes == process), None)
            if first_row is None:
                continue
            target = rows[first_row // processes :: both // processes]
            offset, stride = first_row // parts, both // parts
            with self._open(saved, part, parts, shape) as tensor:
                count = max(1, CHUNK_ROWS // stride)
                for start in range(0, len(target), count):
                    piece = target[start : start + count]
                    begin = offset + start * stride
                    piece.copy_(tensor[begin : begin + (len(piece) - 1) * stride + 1][::stride])

    def check(self, saved: Mapping[str, Any]) -> tuple[int, int]:
        """The shape of a table; raises InputError unless all its files are there and whole."""
        parts, shape, _ = self._find(saved)
        for part in range(parts):
            with self._open(saved, part, parts, shape):
                pass
        return shape

    def _find(self, saved: Mapping[str, Any]) -> tuple[int, tuple[int, int], list[int] | None]:
        """Number of processes that wrote the table, its shape, and the parts' checksums, None in older saves."""
        path = os.path.join(self.folder, INDEX)
        try:
            with open(path, encoding="utf-8") as file:
                index = json.load(file)
            version, save, parts = index["format"], index["save"], int(index["processes"])
            rows, columns = map(int, index["tables"][saved["table"]])
            checksums = index["crc32"][saved["table"]] if "crc32" in index else None
            if checksums is not None and len(checksums) != parts:
                raise ValueError(f"{len(checksums)} checksums of {parts} files")
        except FileNotFoundError:
            raise InputError(f"{path!r} is missing, the index of the rows per sample of the state") from None
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise InputError(f"{path!r} is damaged: {error!r}") from None
        if version != FORMAT:
            raise InputError(f"{path!r} was written by another open_clip_ext (format {version})")
        if save != saved["rows_in_files"]:
            raise InputError(f"{path!r} is of another save than the state; give the folder that was written with it")
        return parts, (rows, columns), checksums

    @contextmanager
    def _open(self, saved: Mapping[str, Any], part: int, parts: int, shape: tuple[int, int]) -> Iterator[Any]:
        """Open a part; its rows stay on disk until they are used."""
        from safetensors import SafetensorError, safe_open  # the library itself needs torch alone

        path = self._path(saved["table"], part, parts)
        try:
            with safe_open(path, "pt") as file:
                tensor = file.get_slice(TENSOR)
                if (file.metadata() or {}).get("save") != saved["rows_in_files"]:
                    raise InputError(f"{path!r} is of another save than the state")
                if tensor.get_shape() != [len(range(part, shape[0], parts)), shape[1]]:
                    raise InputError(f"{path!r} is damaged: it has rows and columns {tensor.get_shape()}")
                yield tensor
        except FileNotFoundError:
            raise InputError(f"{path!r} is missing: a part of the rows per sample") from None
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path!r} is damaged: {' '.join(str(error).split())}") from None


def _unwritten(path: str, error: OSError) -> MachineError:
    return MachineError(f"{path!r} cannot be written: {error.strerror or error}; what was saved before stands")


def _checksum(path: str) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while piece := file.read(CHUNK):
            checksum = zlib.crc32(piece, checksum)
    return checksum
