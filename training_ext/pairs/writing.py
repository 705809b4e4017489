"""Write pairs as shards that a stopped run need not write again, and keep a report of what is done and left out."""

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps
from tqdm import tqdm

from open_clip_ext.errors import InputError
from open_clip_ext.files import whole_file
from training_ext.core.shard_scan import usable_cores
from training_ext.core.tars import one_line
from training_ext.pairs.shards import SIZES, write_shard
from training_ext.pairs.sources import LeftOut, Pair

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
        made_of: digest of the pairs and the settings.
        shards: samples of each complete shard.
        left_out: by reason, how many and the first of them.
    """

    made_of: str
    shards: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, folder: Path, made_of: str, left_out: LeftOut) -> "Report":
        """The report of an earlier run for the same pairs, or a new one, which is saved.

        Raises:
            InputError: the folder has other shards.
        """
        held = [path.name for name in (REPORT, SIZES, "train-*.tar", "val-*.tar") for path in folder.glob(name)]
        if not held:
            report = cls(made_of)
            report.add(left_out)
            report.save(folder)  # before the first shard, which a kill may leave alone
            return report
        with suppress(OSError, ValueError, TypeError):
            report = cls(**json.loads((folder / REPORT).read_text(encoding="utf-8")))
            if report.made_of == made_of:
                return report
        what = f"{str(folder)!r} has {held[0]}, of other pairs or settings"
        raise InputError(f"{what}; give another folder, or remove this one", "--out")

    def add(self, left_out: LeftOut) -> None:
        for why, names in left_out.items():
            entry = self.left_out.setdefault(why, {"number": 0, "first": []})
            entry["number"] += len(names)
            entry["first"] = [*entry["first"], *names][:NAMED]

    def save(self, folder: Path) -> None:
        with whole_file(folder / REPORT, text=True) as file:
            json.dump(asdict(self), file, indent=1)

    def told(self) -> str:
        """What was left out, a line for each reason."""
        reasons = (f"  {entry['number']} {why}: {', '.join(entry['first'])}" for why, entry in self.left_out.items())
        return "\n".join(["left out:", *(reasons if self.left_out else ["  nothing"])])


def write(folder: Path, jobs: list[Job], report: Report, size: int | None) -> None:
    """Write the shards that the report does not have."""
    total = sum(len(job.pairs) for job in jobs)
    todo = [job for job in jobs if job.file not in report.shards]
    before = total - sum(len(job.pairs) for job in todo)
    with tqdm(total=total, initial=before, desc="Writing shards", unit="image", disable=not todo) as bar:
        for job in todo:
            left_out: LeftOut = {}
            report.shards[job.file] = write_shard(folder / job.file, _samples(job, size, left_out, bar))
            report.add(left_out)
            report.save(folder)


def _samples(job: Job, size: int | None, left_out: LeftOut, bar: tqdm) -> Iterator[dict[str, Any]]:
    """To train on a sample of each image, which has all its captions; to validate one of each caption, as OpenCLIP
    compares pairs."""
    for place, (pair, found) in enumerate(read_images(job.pairs, size, left_out)):
        bar.update()
        if found is None:
            continue
        suffix, data = found
        fields = json.dumps({"captions": pair.captions, "source": pair.name}).encode()
        for number, caption in enumerate(pair.captions[:1] if job.split == "train" else pair.captions):
            key = f"{job.number:06d}{place:06d}" + (f"-{number}" if number else "")
            yield {"__key__": key, suffix: data, "txt": caption.encode(errors="replace"), "json": fields}


def read_images(
    pairs: list[Pair], size: int | None, left_out: LeftOut
) -> Iterator[tuple[Pair, tuple[str, bytes] | None]]:
    """Each pair with suffix and bytes of its image; None for one that cannot be used, which is added to `left_out`."""

    def read(pair: Pair) -> tuple[str, bytes] | Exception:
        try:
            return stored(pair.read(), size)
        except Exception as error:  # image libraries may raise anything
            return error

    with ThreadPoolExecutor(usable_cores()) as pool:  # Pillow decodes without Python's lock
        for start in range(0, len(pairs), AT_ONCE):
            some = pairs[start : start + AT_ONCE]
            for pair, found in zip(some, pool.map(read, some), strict=True):
                if isinstance(found, Exception):
                    why = OTHER_FORMAT if isinstance(found, OtherFormatError) else UNREADABLE
                    left_out.setdefault(why, []).append(f"{pair.name} ({one_line(found)})")
                yield pair, None if isinstance(found, Exception) else found


class OtherFormatError(Exception):
    """OpenCLIP does not look for images of this format in shards."""


def stored(data: bytes, size: int | None) -> tuple[str, bytes]:
    """Suffix and bytes of an image in a shard: as they are, or scaled down to the shorter side `size`.

    A scaled one has its EXIF orientation applied and is on white where it was transparent, since OpenCLIP does neither.

    Raises:
        OtherFormatError: shards cannot hold it as it is.
        Exception: it cannot be decoded.
    """
    with Image.open(io.BytesIO(data)) as opened:
        opened.load()  # one that is cut opens, too
        if size is None:
            if opened.format not in KEPT:
                raise OtherFormatError(opened.format)
            return KEPT[opened.format], data
        image = ImageOps.exif_transpose(opened)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
        scale = size / min(image.size)
        if scale < 1:
            image = image.resize([max(1, round(scale * side)) for side in image.size], Image.Resampling.BICUBIC)
        stream = io.BytesIO()
        if opened.format in LOSSY:
            image.save(stream, "JPEG", quality=95)
            return "jpg", stream.getvalue()
        image.save(stream, "PNG")
        return "png", stream.getvalue()
