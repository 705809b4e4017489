"""Count the samples of local shards from their headers, with a cache that is valid until a file changes."""

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from open_clip_ext.files import whole_file
from training_ext.data.tars import Contents, scan

_SAVE_EVERY = 30.0  # seconds of a scan; a save writes all shards ever scanned
# Below 2 GiB, about 20,000 pairs, one process has finished in the second or two in which others start.
_PARALLEL_ABOVE = 2 * 2**30
_MOST_WORKERS = 16


def usable_cores() -> int:
    """Number of CPU cores that this process may use, which in a container may be fewer than the machine has."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def _stamp(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def scanned_before(paths: dict[str, str]) -> dict[str, Contents]:
    """Contents of the shards, by URL, whose files are as they were when scanned; `paths` are local files by URL."""
    cache = _load_cache() if paths else {}
    entries = {url: cache.get(os.path.abspath(path)) for url, path in paths.items()}
    unchanged = {url: entry for url, entry in entries.items() if entry is not None and entry[:2] == _stamp(paths[url])}
    return {url: Contents(samples, keys) for url, (_, _, samples, keys) in unchanged.items()}


def last_counts(paths: dict[str, str]) -> dict[str, int]:
    """Samples of the shards, by URL, when they were last scanned, whatever their files are now."""
    cache = _load_cache() if paths else {}
    return {url: cache[name][2] for url, path in paths.items() if (name := os.path.abspath(path)) in cache}


def scan_all(paths: dict[str, str]) -> dict[str, Contents]:
    """Contents of shards by URL, from the cache if the file is unchanged, else from its headers.

    Several processes scan many shards: a scan takes 0.6 s of a core for 10,000 pairs, and a network's disk longer.
    `paths` are local files by URL.
    """
    contents_by_url = scanned_before(paths)
    todo = {url: path for url, path in paths.items() if url not in contents_by_url}
    stamps = {url: _stamp(path) for url, path in todo.items()}
    fresh: dict[str, list[int]] = {}
    saved = time.monotonic()
    try:
        for url, contents in tqdm(
            zip(todo, _scan_each([*todo.values()]), strict=True),
            desc="Counting samples", unit="shard", total=len(todo), disable=not todo,
        ):
            contents_by_url[url] = contents
            if contents.damage is None:
                fresh[os.path.abspath(todo[url])] = [*stamps[url], contents.samples, contents.keys]
            if time.monotonic() - saved > _SAVE_EVERY:
                _save_cache(fresh)
                saved = time.monotonic()
    finally:
        if fresh:
            _save_cache(fresh)
    return contents_by_url


def _scan_each(paths: list[str]) -> Iterable[Contents]:
    """The contents of each shard, in order."""
    large = sum(os.path.getsize(path) for path in paths) > _PARALLEL_ABOVE
    workers = min(_MOST_WORKERS, usable_cores(), len(paths)) if large else 0
    # A generator of its own leaves the global one as it is.
    generator = torch.Generator()
    return DataLoader(paths, batch_size=None, num_workers=workers, collate_fn=scan, generator=generator)  # type: ignore[arg-type]


def _cache_file() -> str:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "open_clip_ext", "shard_sizes.json")


def _load_cache() -> dict[str, list[int]]:
    """The cache, [size, modification time (ns), samples, key digest] by absolute path; {} if there is no usable one."""
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
        if isinstance(entry, list) and len(entry) == 4 and all(type(n) is int and n >= 0 for n in entry)
    }


def _save_cache(fresh: dict[str, list[int]]) -> None:
    with suppress(OSError):
        os.makedirs(os.path.dirname(_cache_file()), exist_ok=True)
        with whole_file(_cache_file(), text=True) as file:
            json.dump({**_load_cache(), **fresh}, file)  # read again, since another process may have written it
