"""A fixed integer row for every sample of a webdataset.

Row = the offset of the sample's shard + the sample's position in the tar, where positions count the samples
that OpenCLIP's reader yields for that shard alone, before any filtering or shuffling.
"""

import hashlib
import inspect
import json
import os
import re
import stat
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import IO
from urllib.parse import urlparse

from open_clip_train.data import expand_urls, group_by_keys_nothrow
from tqdm import tqdm
from webdataset.gopen import rewrite_url
from webdataset.tariterators import tar_file_iterator

from open_clip_ext.errors import InputError

ROW_SEPARATOR = "\x1f"
"""Stands between the row and the caption in what `ShardRows` writes."""

_SKIP_META = inspect.signature(tar_file_iterator).parameters["skip_meta"].default
_SAVE_EVERY = 100  # scanned shards


@dataclass(frozen=True)
class Shards:
    """The distinct shards of a data set, in order, each with its number of samples (0 or more)."""

    urls: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.urls) != len(self.sizes) or len(set(self.urls)) != len(self.urls):
            raise ValueError("urls must be distinct and have one size each")

    @cached_property
    def offsets(self) -> dict[str, int]:
        """First row of each shard, by full url."""
        return dict(zip(self.urls, accumulate(self.sizes, initial=0), strict=False))

    @property
    def num_rows(self) -> int:
        """Number of samples in all shards."""
        return sum(self.sizes)

    def size_of(self, url: str) -> int:
        """Number of samples in one shard; KeyError for a url that is not among `urls`."""
        return self._size_by_url[url]

    def num_listed(self, train_data: str) -> int:
        """Number of samples in one pass over `train_data`, where a shard that is listed twice counts twice."""
        return sum(self.size_of(url) for url in expand_urls(train_data)[0])

    @cached_property
    def _size_by_url(self) -> dict[str, int]:
        return dict(zip(self.urls, self.sizes, strict=True))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the number of shards and each shard's url and size, in order.

        Urls count from the longest directory that all share: moving the whole data set keeps the digest.
        """
        return _digest(list(zip(_below_shared_folder(self.urls), self.sizes, strict=True)))


def digest_of_list(train_data: str) -> str:
    """The digest of shards whose sizes nobody needs: of their number and urls alone.

    Raises InputError for a list without shards.
    """
    return _digest(_below_shared_folder(_expand(train_data)))


def _below_shared_folder(urls: Iterable[str]) -> list[str]:
    split = [url.split("/") for url in urls]
    shared = len(os.path.commonprefix([parts[:-1] for parts in split]))
    return ["/".join(parts[shared:]) for parts in split]


def _digest(listing: list) -> str:
    return hashlib.sha256(json.dumps([len(listing), listing]).encode()).hexdigest()


def find_shards(train_data: str, shard_sizes: str | None = None, progress: bool = True) -> Shards:
    """Lists the shards of `train_data` (as OpenCLIP expands it: braces and `::`) with their sizes in samples.

    A size comes from the first of: `shard_sizes`, a JSON file that maps full url or file name to size; the
    `sizes.json` beside a local shard, which maps file name to size; a scan of the local tar, remembered in
    `$XDG_CACHE_HOME/open_clip_ext/shard_sizes.json` until the tar's size or modification time changes. Only
    shards that need a scan are opened. A url listed several times counts once. `progress` shows a bar over
    the scans.

    Raises InputError for a list without shards, a scanned shard that is missing or damaged, a remote shard
    without a size, a bad sizes file, and a data set without samples.
    """
    urls = _expand(train_data)
    local = {url: _local_path(url) for url in urls}
    names = {url: _file_name(url) for url in urls}
    label = f"--shard-sizes {shard_sizes!r}"
    given = _read_sizes(shard_sizes, "--shard-sizes") if shard_sizes is not None else {}
    by_name = Counter(names[url] for url in urls if url not in given)
    beside: dict[str, dict] = {}
    sizes: dict[str, int] = {}
    for url, path in local.items():
        name = names[url]
        if url in given:
            sizes[url] = _checked_size(given, url, label)
            continue
        if name in given:
            if by_name[name] > 1:
                raise InputError(f"{label}: {by_name[name]} shards are named {name!r}: use full urls")
            sizes[url] = _checked_size(given, name, label)
            continue
        if path is None:
            raise InputError(
                f"--train-data: shard {url!r} is not a local file and has no recorded size: list it in "
                f"--shard-sizes FILE, a JSON file of samples by file name or full url, such as "
                f'{{"{name}": 10000}}'
            )
        listing = os.path.join(os.path.dirname(path), "sizes.json")
        if listing not in beside:
            found = os.path.exists(listing)
            beside[listing] = _read_sizes(listing, "--train-data: sizes file") if found else {}
        if name in beside[listing]:
            sizes[url] = _checked_size(beside[listing], name, f"--train-data: sizes file {listing!r}")
    sizes.update(_scan({url: path for url, path in local.items() if path is not None and url not in sizes}, progress))
    shards = Shards(tuple(urls), tuple(sizes[url] for url in urls))
    if shards.num_rows == 0:
        raise InputError(f"--train-data {train_data!r}: no samples in its {len(urls)} shard(s)")
    return shards


def check_local_shards(data: str, flag: str) -> None:
    """Raise InputError, naming `flag`, for the first local shard of `data` that does not exist."""
    for url in _expand(data, flag):
        path = _local_path(url)
        if path is not None and not os.path.exists(path):
            raise InputError(f"{flag}: shard {url!r} cannot be found; give tar files that exist")


def _expand(data: str, flag: str = "--train-data") -> list[str]:
    try:
        urls = expand_urls(data or "")[0]
    except (ValueError, AssertionError) as err:  # unbalanced braces; a ${NAME} without WDS_NAME
        raise InputError(f"{flag} {data!r}: cannot be expanded: {_one_line(err)}") from err
    if not urls or "" in urls:
        raise InputError(f"{flag} {data!r}: names no shard or an empty one; give tar files")
    return list(dict.fromkeys(urls))


def is_local(url: str) -> bool:
    """Whether a shard is a file of this machine."""
    return _local_path(url) is not None


def _local_path(url: str) -> str | None:
    """The file that webdataset's gopen opens for `url`, or None if it does not open a file."""
    url = rewrite_url(url)
    parsed = urlparse(url)
    return {"": url, "file": parsed.path}.get(parsed.scheme)


def _file_name(url: str) -> str:
    path = _local_path(url)
    if path is not None:
        return os.path.basename(path)
    tars = re.findall(r"""[^\s/'"=?&]+\.(?:tar\.gz|tar|tgz)(?![\w.-])""", url)
    return tars[-1] if tars else os.path.basename(url)


def _one_line(err: BaseException) -> str:
    text = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
    return " ".join(text.split()) or type(err).__name__


def _read_sizes(path: str, label: str) -> dict:
    try:
        with open(path, encoding="utf-8") as file:
            sizes = json.load(file)
    except OSError as err:
        raise InputError(f"{label} {path!r}: cannot be read: {_one_line(err)}") from err
    except (ValueError, RecursionError) as err:
        raise InputError(f"{label} {path!r}: not valid JSON: {_one_line(err)}") from err
    if not isinstance(sizes, dict):
        raise InputError(f'{label} {path!r}: must be a JSON object such as {{"00000.tar": 10000}}')
    return sizes


def _checked_size(sizes: dict, key: str, label: str) -> int:
    size = sizes[key]
    if type(size) is not int or size < 0:
        raise InputError(f"{label}: size of {key!r} must be an integer of 0 or more, not {json.dumps(size)}")
    return size


class _StrictHeader(tarfile.TarInfo):
    """Raises ReadError for a damaged header, where tarfile would quietly take it for the archive's end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_StrictHeader":
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as err:
            if not buf.strip(b"\0"):  # a true end: zeros, or the end of the file
                raise
            raise tarfile.ReadError(str(err)) from err


def _open_tar(file: IO[bytes]) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=file, mode="r:", tarinfo=_StrictHeader)
    except tarfile.ReadError:
        # Compressed. As a stream, like webdataset: that mode stops after the first of several gzip members.
        file.seek(0)
        return tarfile.open(fileobj=file, mode="r|*", tarinfo=_StrictHeader)


def _entries(tar: tarfile.TarFile) -> Iterator[dict]:
    """What webdataset's tar_file_iterator yields, with each payload's length in place of the payload."""
    for member in tar:
        # Else tarfile keeps every header in memory.
        tar.members = []  # type: ignore[attr-defined]  # undocumented
        if not member.isreg():
            continue
        if re.match(_SKIP_META, member.name):  # covers its meta_prefix and meta_suffix too
            continue
        # The length is as true or false as the payload, which decides on a sample with a "__bad__" member.
        yield {"fname": member.name, "data": member.size, "__url__": ""}


def _count_samples(path: str) -> int:
    """Number of samples in a local tar, from its headers alone; InputError if it is damaged."""
    try:
        with open(path, "rb") as file, _open_tar(file) as tar:
            return sum(1 for _ in group_by_keys_nothrow(_entries(tar)))
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as err:
        raise InputError(
            f"--train-data: shard {path!r} is not a readable tar file: {_one_line(err)}; restore or leave out"
        ) from err


def _scan(paths: dict[str, str], progress: bool) -> dict[str, int]:
    """Sizes by url, from the cache where the file is unchanged since, else from a scan."""
    sizes, todo = {}, {}
    cache = _load_cache() if paths else {}
    for url, path in paths.items():
        try:
            status = os.stat(path)
        except OSError as err:
            raise InputError(f"--train-data: shard {url!r} cannot be found: {_one_line(err)}") from err
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"--train-data: shard {url!r} is not a regular file; give a tar file")
        key, stamp = os.path.abspath(path), [status.st_size, status.st_mtime_ns]
        if key in cache and cache[key][:2] == stamp:
            sizes[url] = cache[key][2]
        else:
            todo[url] = path, key, stamp
    fresh: dict[str, list[int]] = {}
    try:
        for url, (path, key, stamp) in tqdm(
            todo.items(), desc="Counting samples", unit="shard", disable=not (progress and todo)
        ):
            sizes[url] = _count_samples(path)
            fresh[key] = [*stamp, sizes[url]]
            if len(fresh) % _SAVE_EVERY == 0:
                _save_cache(fresh)
    finally:
        if fresh:
            _save_cache(fresh)
    return sizes


def _cache_file() -> str:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "open_clip_ext", "shard_sizes.json")


def _load_cache() -> dict[str, list[int]]:
    """Bytes, modification time (ns) and samples by absolute path; empty if there is no usable cache."""
    try:
        with open(_cache_file(), encoding="utf-8") as file:
            cache = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(cache, dict):
        return {}
    return {
        key: entry
        for key, entry in cache.items()
        if isinstance(entry, list) and len(entry) == 3 and all(type(n) is int and n >= 0 for n in entry)
    }


def _save_cache(fresh: dict[str, list[int]]) -> None:
    path = _cache_file()
    temporary = None
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        cache = {**_load_cache(), **fresh}  # read again: another process may have saved since
        with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(path), delete=False) as file:
            temporary = file.name
            json.dump(cache, file)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None and os.path.exists(temporary):
            os.remove(temporary)


class ShardRows:
    """Pipeline stage that reads tars as OpenCLIP does and writes each sample's row into its caption.

    It takes the place of OpenCLIP's `tarfile_to_samples_nothrow`, which `tarfile_to_samples` must be. Samples
    without "txt", which OpenCLIP drops later, keep their place in the count but stay as they are. `split_row`
    reads a row back. Iterating raises InputError at a shard that is not among `shards` and at a sample beyond
    its shard's size.
    """

    def __init__(self, shards: Shards, tarfile_to_samples: Callable[..., Iterable[dict]]):
        self.shards = shards
        self.tarfile_to_samples = tarfile_to_samples

    def __call__(
        self, src: Iterable[dict], handler: Callable[[Exception], bool] | None = None
    ) -> Iterator[dict]:
        """Yields the samples of `src`, dicts with a "url"; `handler`, if any, replaces the reader's own."""
        options = {} if handler is None else {"handler": handler}
        for source in src:
            url = source["url"]
            if url not in self.shards.offsets:
                known = len(self.shards.urls)
                raise InputError(f"--train-data: shard {url!r} is not one of the {known} that have rows")
            offset, size = self.shards.offsets[url], self.shards.size_of(url)
            for position, sample in enumerate(self.tarfile_to_samples([source], **options)):
                if position >= size:
                    raise InputError(
                        f"--train-data: shard {url!r} holds more samples than its recorded size of {size}: "
                        "correct --shard-sizes or the sizes.json beside it; without either it is counted"
                    )
                if "txt" in sample:
                    sample["txt"] = f"{offset + position}{ROW_SEPARATOR}".encode() + sample["txt"]
                yield sample


def split_row(text: str) -> tuple[int, str]:
    """Row and caption from the text that `ShardRows` wrote; ValueError if there is no row in it."""
    row, separator, caption = text.partition(ROW_SEPARATOR)
    if not separator:
        raise ValueError(f"no row before the caption {text!r}")
    return int(row), caption
