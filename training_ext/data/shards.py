"""Give every sample of a webdataset a fixed integer row.

Row = the offset of the sample's shard + the sample's position in the tar, where positions count the samples
that OpenCLIP's reader yields for that shard, before any filtering or shuffling.
"""

import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from urllib.parse import urlparse

from open_clip_train.data import expand_urls
from tqdm import tqdm
from webdataset.gopen import rewrite_url

from open_clip_ext.errors import InputError, reason_of
from training_ext.data.shard_scan import last_counts, scan_all, scanned_before

_CHECKED_SAMPLES = 20_000  # up to which recorded sizes are checked by counting, in a second or two
_NAMED = 3  # shards in a message


@dataclass(frozen=True)
class Shards:
    """The distinct shards of a data set, in order, each with its number of samples (0 or more).

    `keys` maps the URLs of counted shards to their `KeyDigest`.
    """

    urls: tuple[str, ...]
    sizes: tuple[int, ...]
    keys: dict[str, int] = field(default_factory=dict, compare=False)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """First row of each shard, by full url."""
        return dict(zip(self.urls, accumulate(self.sizes, initial=0), strict=False))

    @property
    def num_rows(self) -> int:
        """Number of samples in all shards."""
        return sum(self.sizes)

    @cached_property
    def size_of(self) -> dict[str, int]:
        """Number of samples in each shard, by full url."""
        return dict(zip(self.urls, self.sizes, strict=True))

    def num_listed(self, train_data: str) -> int:
        """Number of samples in one pass over `train_data`, where a shard that is listed twice counts twice."""
        return sum(self.size_of[url] for url in expand_urls(train_data)[0])

    def at(self, urls: Iterable[str]) -> "Shards":
        """The same shards in the same order under other URLs, for example those of another machine."""
        names = dict(zip(self.urls, urls, strict=True))
        keys = {names[url]: digest for url, digest in self.keys.items()}
        return replace(self, urls=tuple(names.values()), keys=keys)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the number of shards and each shard's url and size, in order.

        URLs are relative to the longest folder that all share, so moving the whole data set keeps the digest.
        """
        return _digest(list(zip(_below_shared_folder(self.urls), self.sizes, strict=True)))

    @property
    def counted(self) -> dict[str, int]:
        """The `KeyDigest` of each counted shard, by URL relative to the shared folder."""
        names = zip(self.urls, _below_shared_folder(self.urls), strict=True)
        return {name: self.keys[url] for url, name in names if url in self.keys}


def digest_of_list(train_data: str) -> str:
    """A digest of the number and URLs of shards whose sizes are not needed.

    Raises:
        InputError: the list has no shards.
    """
    return _digest(_below_shared_folder(shard_urls(train_data)))


def _below_shared_folder(urls: Iterable[str]) -> list[str]:
    split = [url.split("/") for url in urls]
    shared = len(os.path.commonprefix([parts[:-1] for parts in split]))
    return ["/".join(parts[shared:]) for parts in split]


def _digest(listing: list) -> str:
    return hashlib.sha256(json.dumps([len(listing), listing]).encode()).hexdigest()


def find_shards(train_data: str, shard_sizes: str | None = None, max_bad: float | None = None) -> Shards:
    """Lists the shards of `train_data` (as OpenCLIP expands it: braces and `::`) with their sizes in samples.

    A size comes from the first of: `shard_sizes`, a JSON file that maps full url or file name to size; the
    `sizes.json` beside a local shard, which maps file name to size; a scan of the local tar, remembered in
    `$XDG_CACHE_HOME/open_clip_ext/shard_sizes.json` until the tar's size or modification time changes. Of local
    shards whose size comes from a file a few are scanned all the same, and all that were scanned before are compared.
    A url listed several times counts once.

    Raises InputError for a list without shards, more shards that are missing or damaged than a share of `max_bad` (none
    by default), a remote shard without a size, a bad sizes file, a recorded size that is wrong, and a data set without
    samples. A missing or damaged shard without a recorded size has that of its last scan, so that a run which has
    survived it can resume, or else the samples before the damage.
    """
    urls = shard_urls(train_data)
    missing = check_missing(urls, max_bad=max_bad)
    local = {url: local_path(url) for url in urls}
    recorded = _recorded_sizes(local, shard_sizes)
    here = {url: path for url, path in local.items() if path is not None and url not in missing}
    checked = _to_check({url: path for url, path in here.items() if url in recorded}, recorded)
    contents_by_url = scan_all({url: path for url, path in here.items() if url not in recorded or url in checked})
    for url, contents in contents_by_url.items():
        size, source = recorded.get(url, (contents.samples, ""))
        if contents.damage is None and contents.samples != size:
            raise InputError(
                f"shard {url!r} holds {contents.samples} samples where {source!r} says {size}; correct it, "
                "or leave the shard out of it to have it counted",
                "--train-data",
            )
    damaged = {url: contents.damage for url, contents in contents_by_url.items() if contents.damage is not None}
    _check_share("--train-data", urls, missing | damaged, max_bad)
    sizes = {url: size for url, (size, _) in recorded.items()}
    sizes = {url: contents.samples for url, contents in contents_by_url.items()} | sizes
    gone = {url: path for url, path in local.items() if path and url in missing | damaged and url not in recorded}
    sizes |= {url: max(size, sizes.get(url, 0)) for url, size in last_counts(gone).items()}
    shards = Shards(
        tuple(urls),
        tuple(sizes.get(url, 0) for url in urls),
        {url: contents.keys for url, contents in contents_by_url.items() if contents.damage is None},
    )
    if shards.num_rows == 0:
        raise InputError(f"{train_data!r} has no samples in its {len(urls)} shard(s)", "--train-data")
    return shards


def estimated_samples(train_data: str) -> int | None:
    """About how many samples local shards have, by their bytes and a count of the largest; None if one is not here."""
    paths = [local_path(url) or "" for url in expand_urls(train_data)[0]]
    if not all(map(os.path.isfile, paths)):
        return None
    sizes = {path: os.path.getsize(path) for path in paths}
    largest = max(paths, key=sizes.__getitem__)
    samples = scan_all({largest: largest})[largest].samples
    return round(samples * sum(sizes[path] for path in paths) / max(1, sizes[largest]))


def _recorded_sizes(local: dict[str, str | None], shard_sizes: str | None) -> dict[str, tuple[int, str]]:
    """Sizes by URL, if a file has them, with the file's path."""
    names = {url: _file_name(url) for url in local}
    sizes_in_file = {} if shard_sizes is None else _read_sizes(shard_sizes, "--shard-sizes")
    by_name = Counter(names[url] for url in local if url not in sizes_in_file)
    beside: dict[str, dict] = {}
    sizes: dict[str, tuple[int, str]] = {}
    for url, path in local.items():
        name = names[url]
        if shard_sizes is not None and (url in sizes_in_file or name in sizes_in_file):
            if url not in sizes_in_file and by_name[name] > 1:
                text = f"{shard_sizes!r}: {by_name[name]} shards are named {name!r}; use full urls"
                raise InputError(text, "--shard-sizes")
            key = url if url in sizes_in_file else name
            sizes[url] = _checked_size(sizes_in_file, key, shard_sizes, "--shard-sizes"), shard_sizes
            continue
        if path is None:
            raise InputError(
                f"shard {url!r} is not a local file and has no recorded size: list it in "
                f"--shard-sizes FILE, a JSON file of samples by file name or full url, such as "
                f'{{"{name}": 10000}}',
                "--train-data",
            )
        listing = os.path.join(os.path.dirname(path), "sizes.json")
        if listing not in beside:
            beside[listing] = _read_sizes(listing, "--train-data") if os.path.exists(listing) else {}
        if name in beside[listing]:
            sizes[url] = _checked_size(beside[listing], name, listing, "--train-data"), listing
    return sizes


def _to_check(paths: dict[str, str], recorded: dict[str, tuple[int, str]]) -> set[str]:
    """Shards to scan as a check of their recorded size: the first, the last, and others within the budget."""
    urls, samples = list(paths), 0
    chosen: list[str] = []
    for url in dict.fromkeys([*urls[:1], *urls[-1:], *urls]):
        if len(chosen) >= 2 and samples + recorded[url][0] > _CHECKED_SAMPLES:
            break
        chosen.append(url)
        samples += recorded[url][0]
    return {*chosen, *scanned_before(paths)}


def check_missing(urls: list[str], flag: str = "--train-data", max_bad: float | None = None) -> dict[str, str]:
    """The local shards that cannot be read, with the reason.

    Raises:
        InputError: they are more than a fraction of `max_bad`, or all.
    """
    # Silent where it takes a moment; on a network's disk 100,000 take minutes.
    looked_at = tqdm(urls, desc="Looking for shards", unit="shard", delay=2)
    missing = {url: reason for url in looked_at if (reason := _why_missing(url)) is not None}
    _check_share(flag, urls, missing, max_bad)
    return missing


def _why_missing(url: str) -> str | None:
    path = local_path(url)
    if path is None:
        return None
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        return reason_of(error) + ("; * is not expanded, {000..009} is" if "*" in path else "")
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    return None if os.access(path, os.R_OK) else "no permission to read it"


def _check_share(flag: str, urls: list[str], bad: dict[str, str], max_bad: float | None) -> None:
    if len(bad) / len(urls) <= (max_bad or 0) and len(bad) < len(urls):
        return
    named = ", ".join(f"{url!r} ({reason})" for url, reason in list(bad.items())[:_NAMED])
    more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    remedy = "restore them or leave them out"
    if flag == "--train-data" and len(bad) < len(urls):
        # Rounded up, so that it suffices.
        remedy += f", or give --max-bad-samples {-(-1000 * len(bad) // len(urls)) / 1000:g} to train without them"
    raise InputError(f"{len(bad)} of {len(urls)} shards cannot be read: {named}{more}; {remedy}", flag)


def shard_urls(data: str, flag: str = "--train-data") -> list[str]:
    """The distinct shards of `data`; InputError if there are none."""
    try:
        urls = expand_urls(data or "")[0]
    except (ValueError, AssertionError) as err:  # unbalanced braces; a ${NAME} without WDS_NAME
        raise InputError(f"{data!r} cannot be expanded: {reason_of(err)}", flag) from err
    if not urls or "" in urls:
        raise InputError(f"{data!r} names no shard or an empty one; give tar files", flag)
    return list(dict.fromkeys(urls))


def local_path(url: str) -> str | None:
    """The file that webdataset's gopen opens for `url`, or None if it does not open a file."""
    url = rewrite_url(url)
    parsed = urlparse(url)
    return {"": url, "file": parsed.path}.get(parsed.scheme)


def _file_name(url: str) -> str:
    path = local_path(url)
    if path is not None:
        return os.path.basename(path)
    tars = re.findall(r"""[^\s/'"=?&]+\.(?:tar\.gz|tar|tgz)(?![\w.-])""", url)
    return tars[-1] if tars else os.path.basename(url)


def _read_sizes(path: str, flag: str) -> dict:
    try:
        with open(path, encoding="utf-8-sig") as file:
            sizes = json.load(file)
    except OSError as err:
        raise InputError(f"{path!r} cannot be read: {reason_of(err)}", flag) from err
    except (ValueError, RecursionError) as err:
        raise InputError(f"{path!r} is not valid JSON: {reason_of(err)}", flag) from err
    if not isinstance(sizes, dict):
        raise InputError(f'{path!r} must be a JSON object such as {{"00000.tar": 10000}}', flag)
    return sizes


def _checked_size(sizes: dict, key: str, path: str, flag: str) -> int:
    size = sizes[key]
    if type(size) is not int or size < 0:
        raise InputError(f"{path!r}: the size of {key!r} must be an integer of 0 or more, not {json.dumps(size)}", flag)
    return size
