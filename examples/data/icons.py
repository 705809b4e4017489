"""Captioned icons from the npm package `@iconify/json`: 380,000 drawings of 240 sets, rendered by resvg.

Every icon becomes a small image on white with a caption from its name, variant, set and category. Monochrome icons are
black, so that their images differ in shape only; coloured sets and emoji keep their colours. Left out are sets whose
licence is unknown or forbids commercial use or changes, hidden and animated icons, SVGs that could read another file,
and images that are blank or duplicates.

Hashes of the names decide the splits, which therefore do not depend on the package's order, the image size or the
number of processes. Icons of held-out sets make the zero-shot sets; of the others, about 1 % are candidates for
validation and 2.5 % for the test split, and the rest is for training.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import multiprocessing
import os
import re
import tarfile
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from icon_pairs import IconSet, describe_icon, number_of, render_icon, split_name, svg_document
from tqdm import tqdm

KINDS = ("mono", "colour", "emoji")
NUM_VAL = 2_000
NUM_TEST = 5_000

LICENCES = frozenset(
    "Apache-2.0 BSD-3-Clause CC0-1.0 CC-BY-3.0 CC-BY-4.0 CC-BY-SA-3.0 CC-BY-SA-4.0 GPL-2.0-only GPL-2.0-or-later"
    " GPL-3.0 GPL-3.0-or-later ISC MIT MPL-2.0 OFL-1.1 Unlicense".split()
)

# What an icon shows: the class's name, then the other names that icon sets use for it.
CONCEPTS = tuple(
    tuple(" ".join(names.split()).split("/"))
    for names in """
    airplane/plane, anchor, left arrow/arrow left, right arrow/arrow right, up arrow/arrow up, down arrow/arrow
    down, bar chart/chart bar/chart, barcode, battery/battery full, bed, bell/notification, bicycle/bike, bluetooth,
    book, bookmark, briefcase, brush/paintbrush/paint brush, bug, building, bus, cake, calculator, calendar, camera,
    car, cat, check/checkmark/check mark/tick, clipboard, clock/time, cloud, code, coffee, compass, credit card,
    crown, cube, database, dog, download, envelope/mail/email, eraser, eye, facebook, file/document, film,
    fingerprint, fire/flame, fish, flag, flask/beaker, flower, folder, ghost, gift, github, glasses,
    globe/earth/world, hammer, headphones/headphone/headset, heart, home/house, hourglass, image/picture/photo,
    infinity, info/information, instagram, key, keyboard, laptop, leaf, light bulb/lightbulb/bulb, linkedin, lock,
    magnet, map, medal, megaphone/bullhorn, menu, microphone/mic, microscope, minus, monitor/desktop, moon, mouse,
    music/music note, newspaper, palette, paperclip/attachment, pause, pen, pencil/edit, phone, pie chart/chart pie,
    pill, pin, play, plug, plus/add, power, printer/print, puzzle, qr code/qrcode, question/help, refresh/reload,
    robot, rocket, rss, ruler, save, scissors/cut, search/magnifying glass, settings/gear/cog, share, shield,
    shopping bag, shopping cart/cart, skull, snowflake, spotify, star, stethoscope, stop, stopwatch, sun, tag,
    target, terminal, thermometer, thumbs up, thumbs down, ticket, train, trash/trash can/bin, tree, trophy, truck,
    tv/television, twitter, umbrella, upload, usb, user/person, users, video, wallet, watch, wifi, wrench, x/close,
    youtube, zoom in, zoom out
    """.split(",")
)
CONCEPT_TEMPLATES = ("{c} icon", "a {c} icon", "an outlined {c} icon", "a filled {c} icon")
MIN_CONCEPT_IMAGES = 10
MAX_CLASS_IMAGES = 50

# Google's emoji are held out. A class is one of them that at least MIN_EMOJI_VENDORS other vendors draw as well.
HELD_OUT_EMOJI = ("noto", "noto-v1")
EMOJI_TEMPLATES = ("{c} emoji", "a {c} emoji")
MIN_EMOJI_VENDORS = 5

# One author's sets resemble each other, so whole authors are held out, except large ones, which training needs.
_HELD_OUT_SHARE = 1 / 8
_HELD_OUT_MOST = 5_000
_VAL_SHARE = 0.01
_TEST_SHARE = 0.025

_MAX_FILE = 1 << 29
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
class Icon(NamedTuple):
    """One icon; its PNG is `length` bytes from `start` on in a spool file; near duplicates have the same `look`."""

    key: str
    set: str
    name: str
    caption: str
    rank: float
    picture: bytes
    start: int
    length: int
    look: bytes = b""


@dataclass
class Icons:
    """All usable icons, in any order, and the number of icons left out by reason."""

    sets: dict[str, IconSet] = field(default_factory=dict)
    icons: list[Icon] = field(default_factory=list)
    left_out: Counter = field(default_factory=Counter)


def read_icon_files(source: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the package's JSON files, from its .tgz file or the folder that it unpacks to.

    Raises:
        ValueError: `source` is neither, or a file is larger than 512 MiB.
    """
    path, found = Path(source), 0
    if path.is_dir():
        for file in sorted((path / "json").glob("[!.]*.json")):
            _check_size(file.name, file.stat().st_size)
            yield file.name, file.read_bytes()
            found += 1
    else:
        try:
            with tarfile.open(path, "r:gz") as tar:
                for member in tar:
                    if member.isreg() and re.fullmatch(r"package/json/[^./][^/]*\.json", member.name):
                        _check_size(member.name, member.size)
                        content = tar.extractfile(member)
                        assert content is not None  # it is a regular file
                        yield member.name, content.read()
                        found += 1
                _check_end(tar.fileobj)
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"argument --iconify: {source!r} is not a whole .tgz file: {error}") from error
        except OSError as error:
            raise ValueError(f"argument --iconify: {source!r} cannot be read: {error}") from error
    if not found:
        raise ValueError(f"argument --iconify: must be the package @iconify/json, got {source!r} without icon sets")


def _check_end(file: Any) -> None:
    """Read the rest of a tar, since gzip compares its checksum only then; ReadError if it is more than zeros."""
    while block := file.read(1 << 16):
        if block.count(0) < len(block):  # tarfile takes a damaged header for the end
            raise tarfile.ReadError("there are data after the end of the archive")


def _check_size(name: str, size: int) -> None:
    if size > _MAX_FILE:
        raise ValueError(f"argument --iconify: {name} must be at most {_MAX_FILE} bytes, got {size}")


def _text(value: Any) -> str:
    return " ".join(value.split()) if isinstance(value, str) else ""


def _icon_set(data: dict[str, Any]) -> IconSet:
    info = data["info"]
    author, licence, category = info["author"], info["license"], _text(info.get("category"))
    kind = "colour" if info.get("palette") else "mono"
    # The name is needed, too: sets that are no longer listed have no category.
    if category == "Emoji" or "emoji" in info["name"].lower():
        kind = "emoji"
    return IconSet(
        prefix=data["prefix"],
        name=_text(info["name"]),
        author=_text(author["name"]),
        author_url=_text(author.get("url")),
        licence=_text(licence.get("spdx")),
        licence_url=_text(licence.get("url")),
        kind=kind,
        category=category,
        size=len(data["icons"]),
    )


def end_with_parent() -> None:
    """Let this worker end when its parent does: a parent that is killed cannot shut down its pool."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def collect_icons(
    source: str, spool: BinaryIO, image_size: int, seed: int, kinds: Iterable[str], jobs: int
) -> Icons:
    """Render the icons of the package at `source` into `spool`, an empty file opened for both, on `jobs` processes.

    Raises:
        ValueError: `source` is not the package @iconify/json.
        ImportError: resvg-py is not installed.
        ChildProcessError: a process was killed.
    """
    try:
        import resvg_py  # noqa: F401
    except ImportError as error:
        raise ImportError("resvg-py is missing: pip install open-clip-ext[data]") from error
    if jobs == 1:
        return _collect(source, spool, image_size, seed, kinds, map)
    try:
        with ProcessPoolExecutor(jobs, initializer=end_with_parent) as pool:
            return _collect(source, spool, image_size, seed, kinds, lambda *args: pool.map(*args, chunksize=64))
    except BrokenProcessPool:
        raise ChildProcessError(
            f"one of the {jobs} rendering processes was killed, perhaps for lack of memory; give fewer --jobs"
        ) from None


def _collect(
    source: str, spool: BinaryIO, image_size: int, seed: int, kinds: Iterable[str], each: Callable
) -> Icons:
    found = Icons()
    with tqdm(desc="rendering", unit=" icons") as bar:
        for file_name, text in read_icon_files(source):
            try:
                data = json.loads(text)
                icon_set = _icon_set(data)
                if icon_set.licence not in LICENCES:
                    found.left_out["licence"] += icon_set.size
                    continue
                # Sets of every kind, so that the held-out sets do not depend on `kinds`.
                found.sets[icon_set.prefix] = icon_set
                if icon_set.kind not in kinds:
                    continue
                described = list(_described(data, icon_set, image_size, seed, found.left_out))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(
                    f"argument --iconify: {file_name} in {source!r} is damaged or not an icon set: {error!r}"
                ) from error
            for (icon, _), png in zip(described, each(render_icon, [svg for _, svg in described]), strict=True):
                bar.update()
                if png is None:
                    found.left_out["blank"] += 1
                    continue
                picture = hashlib.blake2b(png, digest_size=16).digest()
                found.icons.append(icon._replace(picture=picture, start=spool.tell(), length=len(png)))
                spool.write(png)
    _hold_out(found.sets.values(), seed)
    return found


def _described(
    data: dict[str, Any], icon_set: IconSet, image_size: int, seed: int, left_out: Counter
) -> Iterator[tuple[Icon, str]]:
    prefix, prefixes, suffixes = data["prefix"], data.get("prefixes", {}), data.get("suffixes", {})
    categories = {name: category for category, names in data.get("categories", {}).items() for name in names}
    for name, icon in data["icons"].items():
        if icon.get("hidden"):
            continue
        if not _NAME.fullmatch(name) or not _NAME.fullmatch(prefix):
            raise ValueError(f"an icon is named {prefix!r}:{name!r}")
        svg = svg_document(icon, data, image_size)
        if svg is None:
            left_out["animated or not plain SVG"] += 1
            continue
        key = f"{prefix}_{name}"
        caption = describe_icon(
            icon_set, name, prefixes, suffixes, categories.get(name, ""), number_of(seed, f"caption {key}")
        )
        thing = re.sub(r"( \d+| alt)+$", "", split_name(name, prefixes, suffixes)[0])
        yield Icon(key, prefix, thing, caption, number_of(seed, key), b"", 0, 0), svg


def _hold_out(sets: Iterable[IconSet], seed: int) -> None:
    by_author = defaultdict(list)
    for icon_set in sets:
        by_author[icon_set.author].append(icon_set)
        icon_set.held_out = icon_set.prefix in HELD_OUT_EMOJI
    for author, own in by_author.items():
        general = any(s.kind == "mono" and re.match("UI|Material|Archive", s.category) for s in own)
        if general and sum(s.size for s in own) <= _HELD_OUT_MOST and number_of(seed, author) < _HELD_OUT_SHARE:
            for icon_set in own:
                icon_set.held_out = True


@dataclass
class Parts:
    """The icons of each split; `concepts` and `emoji` map a class name to its icons from held-out sets."""

    train: list[Icon] = field(default_factory=list)
    val: list[Icon] = field(default_factory=list)
    test: list[Icon] = field(default_factory=list)
    concepts: dict[str, list[Icon]] = field(default_factory=dict)
    emoji: dict[str, list[Icon]] = field(default_factory=dict)


def split_icons(found: Icons, num_val: int = NUM_VAL, num_test: int = NUM_TEST) -> Parts:
    """Split icons so that no image occurs twice; of icons with the same image the first by rank is kept.

    Captions are unique within `val` and within `test`, which have at most `num_val` and `num_test` icons. All lists are
    sorted by rank, which is random.
    """
    parts, pictures = Parts(), set()
    captions: dict[str, set[str]] = {"val": set(), "test": set()}
    classes: dict[str, list[Icon]] = {names[0]: [] for names in CONCEPTS}
    concepts = {name: names[0] for names in CONCEPTS for name in names}
    vendors, emoji = defaultdict(set), defaultdict(list)
    for icon in found.icons:
        icon_set = found.sets[icon.set]
        if icon_set.kind == "emoji" and not icon_set.held_out:
            vendors[icon.name].add(icon_set.author)
    for icon in sorted(found.icons, key=lambda icon: (not found.sets[icon.set].held_out, icon.rank, icon.key)):
        if icon.picture in pictures:
            found.left_out["the same picture as another"] += 1
            continue
        pictures.add(icon.picture)
        icon_set = found.sets[icon.set]
        if icon_set.held_out:
            if icon.set in HELD_OUT_EMOJI and len(vendors[icon.name]) >= MIN_EMOJI_VENDORS:
                emoji[icon.name].append(icon)
            elif icon_set.kind == "mono" and icon.name in concepts:
                classes[concepts[icon.name]].append(icon)
        elif icon.rank >= _VAL_SHARE + _TEST_SHARE:
            parts.train.append(icon)
        else:
            name, most = ("val", num_val) if icon.rank < _VAL_SHARE else ("test", num_test)
            if len(captions[name]) < most and icon.caption not in captions[name]:
                captions[name].add(icon.caption)
                getattr(parts, name).append(icon)
    parts.concepts = {name: i[:MAX_CLASS_IMAGES] for name, i in classes.items() if len(i) >= MIN_CONCEPT_IMAGES}
    parts.emoji = dict(sorted(emoji.items()))
    return parts


def licence_table(found: Icons, used: Iterable[Icon]) -> str:
    """Tab-separated lines, one per set with used icons: its author, source and licence."""
    counts = Counter(icon.set for icon in used)
    lines = ["set\tname\tauthor\tauthor_url\tlicence\tlicence_url\ticons\n"]
    for prefix in sorted(counts):
        s = found.sets[prefix]
        columns = (prefix, s.name, s.author, s.author_url, s.licence, s.licence_url, str(counts[prefix]))
        lines.append("\t".join(columns) + "\n")
    return "".join(lines)
