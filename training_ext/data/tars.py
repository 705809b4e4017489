"""Read the samples of tar files, grouped as OpenCLIP groups them, and detect damaged archives.

webdataset reads with tarfile, which takes a damaged or zeroed header, and a cut between two members, for the end of the
archive, so that the rest of a shard is lost silently.
"""

import hashlib
import inspect
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from open_clip_train.data import group_by_keys_nothrow
from webdataset.gopen import gopen
from webdataset.tariterators import tar_file_iterator

from open_clip_ext.errors import reason_of
from training_ext.openclip.loading import PAIR_MEMBERS, suffixes_of

_SKIP_META = inspect.signature(tar_file_iterator).parameters["skip_meta"].default
_BLOCK = 1 << 16


class _StrictHeader(tarfile.TarInfo):
    """Raises ReadError for a damaged or missing header, which tarfile would silently take for the archive's end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_StrictHeader":
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as err:
            if buf and not buf.strip(b"\0"):  # the archive's real end
                raise
            raise tarfile.ReadError(str(err) if buf else "it has no end mark, as if it were cut") from err


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members that webdataset's tar_file_iterator yields; raises ReadError at damage."""
    for member in tar:
        # Otherwise tarfile keeps every header in memory.
        tar.members = []  # type: ignore[attr-defined]  # undocumented
        # The pattern covers webdataset's meta_prefix and meta_suffix, too.
        if member.isreg() and not re.match(_SKIP_META, member.name):
            yield member
    file: Any = tar.fileobj
    while block := file.read(_BLOCK):
        if block.count(0) < len(block):  # after the real end there are only zeros
            raise tarfile.ReadError("there are data after the end of the archive, as if a header were zeroed")


class KeyDigest:
    """A digest of the keys of samples, in order: an integer of 56 bits."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=7)

    def add(self, key: object) -> None:
        # The payload of a member named "a.__key__" is the key, which the headers do not show.
        name = key if isinstance(key, str) else ""
        self._hash.update(name.encode(errors="surrogateescape") + b"\0")

    def value(self) -> int:
        return int.from_bytes(self._hash.digest(), "big")


def read_samples(url: str) -> Iterator[dict]:
    """Yield the samples of one shard, dicts of bytes by suffix, exactly as OpenCLIP's reader does.

    An error of opening or reading, of any type, is raised after the samples before it.
    """
    errors: list[Exception] = []
    yield from samples_before(url, errors)
    for error in errors:
        raise error


def samples_before(url: str, errors: list[Exception]) -> Iterator[dict]:
    """As `read_samples`, but an error is added to `errors`, before the sample is yielded in which it may lie."""
    return group_by_keys_nothrow(
        _files(lambda: tarfile.open(fileobj=gopen(url), mode="r|*", tarinfo=_StrictHeader), _payload, url, errors)
    )


def _files(opened: Callable[[], tarfile.TarFile], data: Callable, url: str, errors: list[Exception]) -> Iterator[dict]:
    """The members of a tar as webdataset's reader yields them, with `data(tar, member)` in place of the payload."""
    # The last sample is yielded when this ends, so an error must wait.
    try:
        with opened() as tar:
            for member in _members(tar):
                yield {"fname": member.name, "data": data(tar, member), "__url__": url}
    except Exception as error:  # file systems, commands and archives may raise anything
        errors.append(error)


def _payload(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file: Any = tar.extractfile(member)
    return file.read()


def stored_samples(path: str) -> Iterator[tuple[Callable[[Any], bytes], dict]]:
    """Yield the samples of a local tar, dicts by suffix, each with the function that reads one of its values.

    A compressed tar is read as a stream, as webdataset does; of another only the members that are asked for.

    Raises:
        Exception: the tar is damaged.
    """
    try:
        opened = tarfile.open(path, "r:", tarinfo=_StrictHeader)
    except tarfile.ReadError:  # also of one that is damaged, which the stream tells
        for sample in read_samples(path):
            yield bytes, sample
        return
    with opened as tar:
        members = ({"fname": member.name, "data": member, "__url__": path} for member in _members(tar))
        for sample in group_by_keys_nothrow(members):
            yield partial(_part_of_file, path), sample


def _part_of_file(path: str, member: tarfile.TarInfo) -> bytes:
    with open(path, "rb") as file:
        file.seek(member.offset_data)
        return file.read(member.size)


@dataclass(frozen=True)
class Contents:
    """Result of a scan of a tar's headers.

    Args:
        samples: number of samples; in a damaged tar those before the damage.
        keys: `KeyDigest` of the samples.
        damage: what is wrong, or None.
    """

    samples: int
    keys: int
    damage: str | None = None


def scan(path: str) -> Contents:
    """Scan the headers of a local tar, without its payloads."""
    samples, keys = 0, KeyDigest()
    errors: list[Exception] = []
    # A payload's length is falsy where the payload is, which matters for a "__bad__" member.
    for sample in group_by_keys_nothrow(_files(lambda: _open_file(path), lambda _, member: member.size, "", errors)):
        samples += 1
        keys.add(sample["__key__"])
    return Contents(samples, keys.value(), reason_of(errors[0]) if errors else None)


def _open_file(path: str) -> tarfile.TarFile:
    try:
        return tarfile.open(path, "r:", tarinfo=_StrictHeader)
    except tarfile.ReadError:
        # Compressed. Read as a stream, like webdataset, since that mode stops after the first of several gzip members.
        return tarfile.open(path, "r|*", tarinfo=_StrictHeader)


def fields_of(sample: dict) -> dict[str, Any]:
    """The fields of the .json of a sample of bytes by suffix.

    Raises:
        ValueError: there are none; the message says what there is instead.
    """
    if "json" not in sample:
        raise ValueError(f"no .json but {suffixes_of(sample)}")
    try:
        fields = json.loads(sample["json"])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a .json that cannot be read: {reason_of(error)}") from None
    if not isinstance(fields, dict):
        raise ValueError("a .json that is no object with fields")
    return fields


def decode_pairs(decode: Callable) -> Callable:
    """webdataset's `decode`, restricted to the members that OpenCLIP reads; all others stay bytes.

    webdataset itself decodes every member by its suffix, and unpickles `.pyd`, `.pickle` and `.pth`, compressed or not.
    """
    return partial(decode, only=PAIR_MEMBERS)
