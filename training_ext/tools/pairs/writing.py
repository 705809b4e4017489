"""Write pairs as shards that a stopped run need not write again, and keep a report of what is done and left out."""

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from open_clip_ext.errors import InputError, reason_of
from open_clip_ext.files import whole_file
from training_ext.data.images import as_it_looks, changes
from training_ext.data.shard_scan import usable_cores
from training_ext.tools.pairs.shards import SIZES, write_shard
from training_ext.tools.pairs.sources import LeftOut, Pair

REPORT, NAMED = "report.json", 3
KEPT = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # what OpenCLIP reads from shards
LOSSY = ("JPEG", "MPO", "WEBP", "AVIF")
AT_ONCE = 64  # images in memory
UNREADABLE, OTHER_FORMAT = "images that cannot be read", "images in a format that shards need --size for"


@dataclass(frozen=True)
class Job:
    """A shard to write: its split, its number there, and its pairs."""

    split: str
    number: int
    pairs: list[Pair]

    @property
    def file(self) -> str:
        return f"{self.split}-{self.number:06d}.tar"


@dataclass
class Report:
    """What was written and left out, kept beside the shards as `REPORT`.

    Args:
        made_of: digest of the settings and the pairs, whose images count by their size in bytes.
        shards: samples of each complete shard.
        file_sizes: bytes of each.
        left_out, changed: by reason, how many and the first of them; changed are those in the shards that reach the
            model otherwise than they look.
    """

    made_of: str
    shards: dict[str, int] = field(default_factory=dict)
    file_sizes: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, folder: Path, made_of: str, left_out: LeftOut) -> "Report":
        """The report of an earlier run for the same pairs, or a new one, which is saved.

        Raises:
            InputError: the folder has other shards.
        """
        held = [path.name for name in (REPORT, SIZES, "train-*.tar", "val-*.tar") for path in folder.glob(name)]
        if not held:
            report = cls(made_of)
            report.add(left_out, {})
            report.save(folder)  # before the first shard, which a kill may leave alone
            return report
        with suppress(OSError, ValueError, TypeError):
            report = cls(**json.loads((folder / REPORT).read_text(encoding="utf-8")))
            if report.made_of == made_of:
                return report
        problem = f"{str(folder)!r} has {held[0]}, of other pairs or settings"
        raise InputError(f"{problem}; give another folder, or remove this one", "--out")

    def add(self, left_out: LeftOut, changed: LeftOut) -> None:
        for entries, added in ((self.left_out, left_out), (self.changed, changed)):
            for why, names in added.items():
                entry = entries.setdefault(why, {"number": 0, "first": []})
                entry["number"] += len(names)
                entry["first"] = [*entry["first"], *names][:NAMED]

    def lost(self, folder: Path) -> list[str]:
        """The shards that an earlier run wrote and that are no longer there as they were."""
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.tar")}
        return [name for name in self.shards if name not in sizes or sizes[name] != self.file_sizes.get(name)]

    def save(self, folder: Path) -> None:
        with whole_file(folder / REPORT, text=True) as file:
            json.dump(asdict(self), file, indent=1)

    def told(self) -> str:
        """What was left out and what is changed, a line for each reason."""

        def listed(entries: dict[str, Any]) -> list[str]:
            return [f"  {entry['number']} {why}: {', '.join(entry['first'])}" for why, entry in entries.items()]

        changed = ["stored as they are, but not what OpenCLIP sees (--size mends them):", *listed(self.changed)]
        return "\n".join(["left out:", *(listed(self.left_out) or ["  nothing"]), *(changed if self.changed else [])])


def write(folder: Path, jobs: list[Job], report: Report, size: int | None) -> None:
    """Write the shards that the report does not have, and those of it that are lost."""
    total = sum(len(job.pairs) for job in jobs)
    if lost := report.lost(folder):
        print(f"missing or changed since they were written, so written again: {', '.join(lost)}")
    todo = [job for job in jobs if job.file not in report.shards or job.file in lost]
    before = total - sum(len(job.pairs) for job in todo)
    with tqdm(total=total, initial=before, desc="Writing shards", unit="image", disable=not todo) as bar:
        for job in todo:
            left_out: LeftOut = {}
            changed: LeftOut = {}
            samples = write_shard(folder / job.file, _samples(job, size, left_out, changed, bar))
            if job.file not in report.shards:  # else they are counted
                report.add(left_out, changed)
            report.shards[job.file] = samples
            report.file_sizes[job.file] = (folder / job.file).stat().st_size
            report.save(folder)


def _samples(
    job: Job, size: int | None, left_out: LeftOut, changed: LeftOut, bar: tqdm
) -> Iterator[dict[str, Any]]:
    """To train on a sample of each image, which has all its captions; to validate one of each caption, as OpenCLIP
    compares pairs."""
    for index, (pair, image) in enumerate(read_images(job.pairs, size, left_out)):
        bar.update()
        if image is None:
            continue
        for change in image.changes:
            changed.setdefault(change, []).append(pair.name)
        fields = json.dumps({"captions": pair.captions, "source": pair.name}).encode()
        for number, caption in enumerate(pair.captions[:1] if job.split == "train" else pair.captions):
            key = f"{job.number:06d}{index:06d}" + (f"-{number}" if number else "")
            yield {"__key__": key, image.suffix: image.data, "txt": caption.encode(errors="replace"), "json": fields}


@dataclass(frozen=True)
class StoredImage:
    """The file of an image in a shard, and what OpenCLIP changes in it."""

    suffix: str
    data: bytes
    changes: tuple[str, ...] = ()


def read_images(
    pairs: list[Pair], size: int | None, left_out: LeftOut
) -> Iterator[tuple[Pair, StoredImage | None]]:
    """Each pair with its image in a shard; None for one that cannot be used, which is added to `left_out`."""

    def read(pair: Pair) -> StoredImage | Exception:
        try:
            return stored(pair.read(), size)
        except Exception as error:  # image libraries may raise anything
            return error

    with ThreadPoolExecutor(usable_cores()) as pool:  # Pillow decodes without Python's lock
        for start in range(0, len(pairs), AT_ONCE):
            some = pairs[start : start + AT_ONCE]
            for pair, image in zip(some, pool.map(read, some), strict=True):
                if isinstance(image, Exception):
                    why = OTHER_FORMAT if isinstance(image, OtherFormatError) else UNREADABLE
                    left_out.setdefault(why, []).append(f"{pair.name} ({reason_of(image)})")
                yield pair, None if isinstance(image, Exception) else image


class OtherFormatError(Exception):
    """OpenCLIP does not look for images of this format in shards."""


def stored(data: bytes, size: int | None) -> StoredImage:
    """Bytes of an image file as a shard gets them.

    Without `size` the file is kept. With it the image is turned as its EXIF entry says, converted to RGB, and scaled
    down until its shorter side has `size` pixels.

    Raises:
        OtherFormatError: shards cannot hold it as it is.
        Exception: it cannot be decoded.
    """
    with Image.open(io.BytesIO(data)) as opened:
        opened.load()  # one that is cut opens, too
        if size is None:
            if opened.format not in KEPT:
                raise OtherFormatError(opened.format)
            return StoredImage(KEPT[opened.format], data, tuple(changes(opened)))
        image = as_it_looks(opened)
        scale = size / min(image.size)
        if scale < 1:
            image = image.resize([max(1, round(scale * side)) for side in image.size], Image.Resampling.BICUBIC)
        stream = io.BytesIO()
        if opened.format in LOSSY:
            image.save(stream, "JPEG", quality=95)
            return StoredImage("jpg", stream.getvalue())
        image.save(stream, "PNG")
        return StoredImage("png", stream.getvalue())
