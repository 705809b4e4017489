"""Read evaluation data sets from folders.

Nothing in them is executed. A sample that cannot be read is an error: without it the score would be another one.
Text files may begin with a byte order mark, which Windows writes.
"""

import csv
import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray
from open_clip import OPENAI_IMAGENET_TEMPLATES
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from open_clip_ext.errors import InputError, reason_of
from training_ext.data.first_look import images_of_shards
from training_ext.data.folder_files import LeftOut, describe_left_out
from training_ext.data.images import spread, warn_of_images
from training_ext.data.tars import stored_samples

CLASSNAMES, TEMPLATES, TYPE = "classnames.txt", "zeroshot_classification_templates.txt", "dataset_type.txt"
CLASSIFICATION = "classification"  # the type of a folder that does not say
TYPES = (CLASSIFICATION, "multilabel", "retrieval")
SHARD_IMAGES = ("webp", "png", "jpg", "jpeg")
FORMATS = ["JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF"]
if find_spec("PIL.AvifImagePlugin"):  # not in older versions of Pillow
    FORMATS.append("AVIF")
WINOGAVIL, WINOGAVIL_IMAGES = "winogavil_dataset.csv", ("winogavil_images", "images")


def type_of(folder: str) -> str:
    """What the files of a task's folder say that it is: one of `TYPES`, "winogavil", or the unknown that they name."""
    if os.path.exists(os.path.join(folder, WINOGAVIL)):
        return "winogavil"
    path = os.path.join(folder, TYPE)
    if not os.path.exists(path):
        return CLASSIFICATION
    with open(path, encoding="utf-8-sig") as file:
        return next((line.strip().lower() for line in file if line.strip()), CLASSIFICATION)


@dataclass(frozen=True)
class Sample:
    """One image.

    Args:
        place: its file, for error messages.
        image: contents of the image file.
        target: class number, list of captions, or for several labels (C,) of 0 and 1.
        fields: contents of its .npy, (columns,) int64, or None; in `PairShards` the digest of the image.
    """

    place: str
    image: bytes
    target: Any
    fields: NDArray | None = None


class Source:
    """A data set: images with their targets.

    Args:
        flag: the flag that names it, for error messages.
        folder: its folder.

    Attributes:
        type: one of `TYPES`, or "winogavil".
        classes: names of the classes, for a classification.
        templates: prompts with `{c}` in place of the class name.
        images: path and target of each image that is a file of its own.
        left_out: files and links beside them that are none, by reason.
    """

    def __init__(self, flag: str, folder: str):
        self.flag = flag
        self.folder = folder
        self.type = "classification"
        self.classes: list[str] = []
        self.templates: list[str] = []
        self.images: list[tuple[str, Any]] = []
        self.left_out: LeftOut = {}

    def samples(self, includes: Callable[[int], bool]) -> Iterator[tuple[int, Sample]]:
        """Number and sample for all numbers, 0, 1, ..., for which `includes(number)` is true."""
        for number, (path, target) in enumerate(self.images):
            if includes(number):
                with self.reading(repr(path)), open(path, "rb") as file:
                    image = file.read()
                yield number, Sample(path, image, target)

    def files(self) -> list[str]:
        """Paths of the files that the digest depends on."""
        return [path for path, _ in self.images]

    def digest(self) -> str:
        """Digest of the class names and templates and of the files' names, sizes and modification times, 16 hex digits.

        Not of their contents, which may be gigabytes. A size alone says little: tars are padded, so a corrected label
        leaves it as it is.
        """
        sha256 = hashlib.sha256(repr((self.type, self.classes, self.templates)).encode())
        for path in self.files():
            with self.reading(repr(path)):
                file = os.stat(path)
            line = f"{os.path.relpath(path, self.folder)} {file.st_size} {file.st_mtime_ns}\n"
            sha256.update(line.encode(errors="surrogateescape"))
        return sha256.hexdigest()[:16]

    def warn(self) -> None:
        """Warn of images that look otherwise than to the model, and of contents that may not be what is meant."""
        warn_of_images(((path, path) for path, _ in spread(self.images)), self.flag)
        if self.left_out:
            logging.warning(f"{self.flag}: left out of {self.folder!r}: {describe_left_out(self.left_out)}")

    def wrong(self, message: str) -> InputError:
        """An error that names the flag."""
        return InputError(message, self.flag)

    @contextmanager
    def reading(self, subject: str, problem: str = "cannot be read") -> Iterator[None]:
        """Raise InputError that names `subject` for any error in the block, since decoders raise whatever they like."""
        try:
            yield
        except InputError:
            raise
        except UnidentifiedImageError:
            raise self.wrong(f"{subject} {problem}: it is not one of {', '.join(FORMATS)}") from None
        except Exception as error:
            name = repr(error.filename) if isinstance(error, OSError) and error.filename else subject
            raise self.wrong(f"{name} {problem}: {reason_of(error)}") from None

    def lines(self, name: str, needed: bool = False) -> list[str]:
        """The lines of a file of the folder; none where there is no such file, unless it is `needed`."""
        path, lines = os.path.join(self.folder, name), [""]
        if os.path.exists(path):
            with self.reading(repr(path)), open(path, encoding="utf-8-sig") as file:
                # Not splitlines, which also cuts at characters such as U+2028.
                lines = [line.strip() for line in file.read().rstrip().split("\n")]
        if lines == [""] and needed:
            raise self.wrong(f"{path!r} is missing or empty")
        if lines != [""] and "" in lines and name == CLASSNAMES:
            raise self.wrong(f"{path!r} has no name in line {lines.index('') + 1}")
        return [line for line in lines if line]

    def prompts(self, needed: bool = False) -> list[str]:
        """Templates of the data set; OpenCLIP's 80 for ImageNet if it has none and `needed` is False."""
        lines = self.lines(TEMPLATES, needed)
        for line in lines:
            if "{c}" not in line:
                raise self.wrong(f"{TEMPLATES} in {self.folder!r}: {line!r} has no {{c}} for the class")
        return lines or [template("{c}") for template in OPENAI_IMAGENET_TEMPLATES]


class Shards(Source):
    """Shards in the format of DataComp and clip_benchmark: DIR/test/nshards.txt, DIR/test/0.tar, ..."""

    def __init__(self, flag: str, folder: str):
        super().__init__(flag, folder)
        path = os.path.join(folder, "test", "nshards.txt")
        requirement = "must have the number of shards, at least 1"
        with self.reading(repr(path), requirement), open(path, encoding="utf-8-sig") as file:
            number = int(file.read(32))
            if number < 1:
                raise ValueError(f"it has {number}")
        self.shards = []
        for index in range(number):
            self.shards.append(os.path.join(folder, "test", f"{index}.tar"))
            if not os.path.isfile(self.shards[-1]):
                raise self.wrong(f"{self.shards[-1]!r} is missing; nshards.txt says {number} shards")
        with self.reading(repr(os.path.join(folder, TYPE))):
            self.type = type_of(folder)
        if self.type not in TYPES:
            path = os.path.join(folder, TYPE)
            raise self.wrong(f"{path!r} has {self.type!r}, which is not one of {', '.join(TYPES)}")
        if self.type != "retrieval":
            self.classes, self.templates = self.lines(CLASSNAMES, needed=True), self.prompts(needed=True)

    def files(self) -> list[str]:
        return self.shards

    def warn(self) -> None:
        warn_of_images(images_of_shards(self.shards), self.flag)

    def samples(self, includes: Callable[[int], bool]) -> Iterator[tuple[int, Sample]]:
        number = 0
        for path in self.shards:
            with self.reading(repr(path), "is damaged"):
                for read, members in stored_samples(path):
                    if includes(number):
                        yield number, self._sample(read, members, path)
                    number += 1

    def _sample(self, read_member: Callable[[Any], bytes], members: dict[str, Any], path: str) -> Sample:
        image_suffix, *_ = (suffix for suffix in members if not suffix.startswith("__"))
        sample_name = f"{path}: {members['__key__']}.{image_suffix}"

        def read(suffix: str) -> bytes:
            if suffix not in members:
                raise self.wrong(f"{sample_name!r} has no .{suffix} beside it")
            return read_member(members[suffix])

        image = read(next((kind for kind in SHARD_IMAGES if kind in members), "jpg"))
        if self.type == "retrieval":
            lines = read("txt").decode("utf-8", "replace").split("\n")
            captions = [line.strip() for line in lines if line.strip()]
            if not captions:
                raise self.wrong(f"{sample_name!r} has no caption")
            return Sample(sample_name, image, captions)
        fields = self._integers(read("npy"), sample_name) if "npy" in members else None
        if self.type == "multilabel":
            if fields is None or fields.shape != (len(self.classes),) or not np.isin(fields, (0, 1)).all():
                raise self.wrong(f"{sample_name!r} needs an .npy of {len(self.classes)} numbers, each 0 or 1")
            return Sample(sample_name, image, fields)
        text = read("cls")
        label = int(text) if text.strip().isdigit() and len(text) < 20 else -1
        if not 0 <= label < len(self.classes):
            classes = f"{CLASSNAMES} has 0 to {len(self.classes) - 1}"
            raise self.wrong(f"{sample_name!r} has the class {text[:20]!r}; {classes}")
        return Sample(sample_name, image, label, fields)

    def _integers(self, content: bytes, sample_name: str) -> NDArray:
        with self.reading(f"the .npy of {sample_name!r}"):
            # Not load, which also opens archives.
            numbers = np.atleast_1d(np.lib.format.read_array(io.BytesIO(content), allow_pickle=False))
            if numbers.dtype.kind not in "biuf":
                raise TypeError(f"it has {numbers.dtype}, no numbers")
        if numbers.ndim != 1 or not (np.isfinite(numbers) & (numbers == np.rint(numbers))).all():
            raise self.wrong(f"{sample_name!r}: a .npy has something other than one row of whole numbers")
        return numbers.astype(np.int64)


class Candidates(Source):
    """WinoGAViL's folder: winogavil_dataset.csv, and the candidates' images as images/NAME.jpg.

    Attributes:
        instances: cue, image numbers of the n candidates, and (n,) bool: which of them are associations.
    """

    def __init__(self, flag: str, folder: str):
        super().__init__(flag, folder)
        self.type = "winogavil"
        self.instances: list[tuple[str, list[int], NDArray]] = []
        number_of: dict[str, int] = {}
        self.table = os.path.join(folder, WINOGAVIL)
        wrong_table = "cannot be read as cue, candidates, associations"
        with self.reading(repr(self.table), wrong_table), open(self.table, encoding="utf-8-sig", newline="") as file:
            for row in csv.DictReader(file):
                candidates, associations = (json.loads(row[name]) for name in ("candidates", "associations"))
                numbers = [number_of.setdefault(str(name), len(number_of)) for name in candidates]
                truth = np.isin(candidates, associations)
                if not row["cue"] or truth.sum() != len(set(associations)) or not associations:
                    raise ValueError(f"cue {row['cue']!r} has no association, or one that is no candidate")
                self.instances.append((row["cue"], numbers, truth))
        images = next((name for name in WINOGAVIL_IMAGES if os.path.isdir(os.path.join(folder, name))), "images")
        self.images = [(os.path.join(folder, images, f"{name}.jpg"), None) for name in number_of]
        missing = next((path for path, _ in self.images if not os.path.isfile(path)), None)
        if missing is not None or not self.instances:
            raise self.wrong(f"{self.table!r} " + (f"needs {missing!r}" if missing else "has no instance"))

    def files(self) -> list[str]:
        return [self.table, *super().files()]


@dataclass(eq=False)
class Images(IterableDataset):
    """The decoded samples of one process, divided among the loader's workers.

    Args:
        source: the data set.
        transform: from an RGB image to a tensor.
        rank, world_size: the process reads every world_size-th sample, starting at rank.
    """

    source: Source
    transform: Callable[[Image.Image], Tensor]
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[tuple[int, Tensor, Any, NDArray | None]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        offset, step = self.rank * workers + worker, self.world_size * workers
        for number, sample in self.source.samples(lambda number: number % step == offset):
            place, file = f"the image of {sample.place!r}", io.BytesIO(sample.image)
            with self.source.reading(place), Image.open(file, formats=FORMATS) as image:
                tensor = self.transform(image.convert("RGB"))
            yield number, tensor, sample.target, sample.fields
