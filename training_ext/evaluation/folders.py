"""Read evaluation data sets from folders.

Nothing in them is executed. A sample that cannot be read is an error: without it the score would be another one.
"""

import csv
import hashlib
import io
import json
import logging
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from open_clip import OPENAI_IMAGENET_TEMPLATES
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from open_clip_ext.errors import InputError
from training_ext.features.first_look import COMPARED, warn_of_images
from training_ext.openclip.loading import one_line

CLASSNAMES, TEMPLATES, TYPE = "classnames.txt", "zeroshot_classification_templates.txt", "dataset_type.txt"
TYPES = ("classification", "multilabel", "retrieval")
SHARD_IMAGES = ("webp", "png", "jpg", "jpeg")
IMAGE_FILES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as ImageFolder's
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF")
WINOGAVIL, WINOGAVIL_IMAGES = "winogavil_dataset.csv", ("winogavil_images", "images")


@dataclass(frozen=True)
class Sample:
    """One image.

    Args:
        place: its file, for error messages.
        image: contents of the image file.
        target: class number, list of captions, or for several labels (C,) of 0 and 1.
        fields: contents of its .npy, or None.
    """

    place: str
    image: bytes
    target: Any
    fields: NDArray | None = None


@dataclass
class Source:
    """A data set: images with their targets.

    Args:
        flag: the flag that names it, for error messages.
        folder: its folder.
        type: one of `TYPES`, or "winogavil".
        classes: names of the classes, for a classification.
        templates: prompts with `{c}` in place of the class name.
    """

    flag: str
    folder: str
    type: str = "classification"
    classes: list[str] = field(default_factory=list)
    templates: list[str] = field(default_factory=list)

    def samples(self, own: Callable[[int], bool]) -> Iterator[tuple[int, Sample]]:
        """Number and sample for all numbers, 0, 1, ..., for which `own(number)` is true."""
        raise NotImplementedError

    def files(self) -> list[str]:
        """Paths of the files that the digest depends on."""
        raise NotImplementedError

    def digest(self) -> str:
        """Digest of the class names and templates and of the files' names, sizes and modification times, 16 hex digits.

        Not of their contents, which may be gigabytes. A size alone says little: tars are padded, so a corrected label
        leaves it as it is.
        """
        found = hashlib.sha256(repr((self.type, self.classes, self.templates)).encode())
        for path in self.files():
            try:
                file = os.stat(path)
            except OSError as error:
                raise self.wrong(f"{path!r} cannot be read: {one_line(error)}") from None
            found.update(f"{os.path.relpath(path, self.folder)} {file.st_size} {file.st_mtime_ns}\n".encode())
        return found.hexdigest()[:16]

    def wrong(self, what: str) -> InputError:
        """An error that names the flag."""
        return InputError(f"{self.flag}: {what}")

    def unreadable(self, place: str, error: Exception) -> InputError:
        """The error for an image that cannot be decoded."""
        unknown = isinstance(error, UnidentifiedImageError)
        reason = f"it is not one of {', '.join(FORMATS)}" if unknown else one_line(error)
        return self.wrong(f"the image of {place!r} cannot be read: {reason}")


class Shards(Source):
    """Shards in the format of DataComp and clip_benchmark: DIR/test/nshards.txt, DIR/test/0.tar, ..."""

    def __init__(self, flag: str, folder: str):
        super().__init__(flag, folder)
        path = os.path.join(folder, "test", "nshards.txt")
        try:
            with open(path, encoding="utf-8") as file:
                number = int(file.read(32))
            if number < 1:
                raise ValueError(f"it has {number}")
        except (OSError, ValueError) as error:
            raise self.wrong(f"{path!r} must have the number of shards, at least 1: {one_line(error)}") from None
        self.shards = []
        for index in range(number):
            self.shards.append(os.path.join(folder, "test", f"{index}.tar"))
            if not os.path.isfile(self.shards[-1]):
                raise self.wrong(f"{self.shards[-1]!r} is missing; nshards.txt says {number} shards")
        kind = lines_of(self, TYPE) or ["classification"]
        self.type = kind[0].lower()
        if self.type not in TYPES:
            raise self.wrong(f"{os.path.join(folder, TYPE)!r} has {kind[0]!r}, which is not one of {', '.join(TYPES)}")
        if self.type != "retrieval":
            self.classes, self.templates = lines_of(self, CLASSNAMES, needed=True), templates_of(self, needed=True)

    def files(self) -> list[str]:
        return self.shards

    def samples(self, own: Callable[[int], bool]) -> Iterator[tuple[int, Sample]]:
        number = 0
        for path in self.shards:
            try:
                with tarfile.open(path, "r:") as tar:
                    for members in grouped(tar):
                        if own(number):
                            yield number, self._sample(tar, members, path)
                        number += 1
                    check_end(tar)
            except (OSError, tarfile.TarError) as error:
                raise self.wrong(f"{path!r} is damaged: {one_line(error)}") from None

    def _sample(self, tar: tarfile.TarFile, members: dict[str, tarfile.TarInfo], path: str) -> Sample:
        first = next(iter(members.values()))
        place = f"{path}: {first.name}"

        def read(extension: str) -> bytes:
            if extension not in members:
                raise self.wrong(f"{place!r} has no .{extension} beside it")
            file = tar.extractfile(members[extension])
            assert file is not None
            return file.read()

        image = read(next((kind for kind in SHARD_IMAGES if kind in members), "jpg"))
        numbers = read_array(self, read("npy"), place) if "npy" in members else None
        if self.type == "retrieval":
            # Not splitlines, which also cuts at characters such as U+2028.
            lines = read("txt").decode("utf-8", "replace").split("\n")
            captions = [line.strip() for line in lines if line.strip()]
            if not captions:
                raise self.wrong(f"{place!r} has no caption")
            return Sample(place, image, captions)
        if self.type == "multilabel":
            if numbers is None or numbers.shape != (len(self.classes),) or not np.isin(numbers, (0, 1)).all():
                raise self.wrong(f"{place!r} needs an .npy of {len(self.classes)} numbers, each 0 or 1")
            return Sample(place, image, numbers)
        text = read("cls")
        label = int(text) if text.strip().isdigit() and len(text) < 20 else -1
        if not 0 <= label < len(self.classes):
            raise self.wrong(f"{place!r} has the class {text[:20]!r}; {CLASSNAMES} has 0 to {len(self.classes) - 1}")
        return Sample(place, image, label, numbers)


class ClassFolders(Source):
    """A folder of images for each class, as for torchvision's ImageFolder.

    Classes are in alphabetical order of the folders; their names are the lines of classnames.txt beside them, or else
    the folders' names. An image to which several paths lead counts once.
    """

    def __init__(self, flag: str, folder: str):
        super().__init__(flag, folder)
        root, once = os.path.realpath(folder), dict[str, tuple[int, str]]()
        try:
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name))
            tops = {root, *(os.path.realpath(os.path.join(folder, name)) for name in names)}
            for label, name in enumerate(names):
                top = os.path.join(folder, name)
                for path, real in images_below(top, tops - {os.path.realpath(top)}):
                    # Of the paths that lead to a file, the one without links tells its class.
                    if real not in once or real == os.path.join(root, os.path.relpath(path, folder)):
                        once[real] = label, path
        except OSError as error:
            raise self.wrong(f"{error.filename!r} cannot be read: {one_line(error)}") from None
        self.images = [(path, label) for label, path in sorted(once.values())]
        labels = {label for _, label in self.images}
        empty = [name for label, name in enumerate(names) if label not in labels]
        if not names or empty:
            what = f"no image in {empty[0]!r}" if empty else "neither test/nshards.txt nor folders of images"
            raise self.wrong(f"{folder!r} has {what}; give class folders of images, or shards")
        self.folders = names
        self.classes = lines_of(self, CLASSNAMES) or [name.replace("_", " ") for name in names]
        if len(self.classes) != len(names):
            raise self.wrong(
                f"{CLASSNAMES} in {folder!r} has {len(self.classes)} names and there are {len(names)} class folders; "
                "give one line for each, in alphabetical order of the folders"
            )
        self.templates = templates_of(self)

    def check_headers(self) -> None:
        """Raise InputError if a file does not begin as an image; nothing is decoded."""
        for path, _ in self.images:
            try:
                with Image.open(path, formats=FORMATS):
                    pass
            except Exception as error:  # decoders raise whatever they like
                raise self.unreadable(path, error) from None

    def files(self) -> list[str]:
        return [path for path, _ in self.images]

    def samples(self, own: Callable[[int], bool]) -> Iterator[tuple[int, Sample]]:
        for number, (path, label) in enumerate(self.images):
            if own(number):
                yield number, Sample(path, read_file(self, path), label)


class Candidates(Source):
    """WinoGAViL's folder: winogavil_dataset.csv, and the candidates' images as images/NAME.jpg.

    Attributes:
        instances: cue, image numbers of the n candidates, and (n,) bool: which of them are associations.
    """

    def __init__(self, flag: str, folder: str):
        super().__init__(flag, folder, "winogavil")
        self.instances: list[tuple[str, list[int], NDArray]] = []
        number_of: dict[str, int] = {}
        path = os.path.join(folder, WINOGAVIL)
        try:
            with open(path, encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    candidates, associations = (json.loads(row[name]) for name in ("candidates", "associations"))
                    numbers = [number_of.setdefault(str(name), len(number_of)) for name in candidates]
                    truth = np.isin(candidates, associations)
                    if not row["cue"] or truth.sum() != len(set(associations)) or not associations:
                        raise ValueError(f"cue {row['cue']!r} has no association, or one that is no candidate")
                    self.instances.append((row["cue"], numbers, truth))
        except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
            raise self.wrong(f"{path!r} cannot be read as cue, candidates, associations: {one_line(error)}") from None
        images = next((name for name in WINOGAVIL_IMAGES if os.path.isdir(os.path.join(folder, name))), "images")
        self.images = [os.path.join(folder, images, f"{name}.jpg") for name in number_of]
        missing = next((image for image in self.images if not os.path.isfile(image)), None)
        if missing is not None or not self.instances:
            raise self.wrong(f"{path!r} " + (f"needs {missing!r}" if missing else "has no instance"))

    def files(self) -> list[str]:
        return [os.path.join(self.folder, WINOGAVIL), *self.images]

    def samples(self, own: Callable[[int], bool]) -> Iterator[tuple[int, Sample]]:
        for number, path in enumerate(self.images):
            if own(number):
                yield number, Sample(path, read_file(self, path), 0)


class Images(IterableDataset):
    """The decoded samples of one process, divided among the loader's workers.

    Args:
        source: the data set.
        transform: from an RGB image to a tensor.
        rank, world_size: the process reads every world_size-th sample, starting at rank.
    """

    def __init__(self, source: Source, transform: Callable[[Image.Image], Tensor], rank: int, world_size: int):
        super().__init__()
        self.source = source
        self.transform = transform
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[tuple[int, Tensor, Any, NDArray | None]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        first, step = self.rank * workers + worker, self.world_size * workers
        for number, sample in self.source.samples(lambda number: number % step == first):
            try:
                with Image.open(io.BytesIO(sample.image), formats=FORMATS) as image:
                    tensor = self.transform(image.convert("RGB"))
            except Exception as error:  # decoders raise whatever they like
                raise self.source.unreadable(sample.place, error) from None
            yield number, tensor, sample.target, sample.fields


def open_own_classes(flag: str, folder: str) -> Source:
    """Open the user's own data set for zero-shot classification: class folders, or shards.

    Raises:
        InputError: the folder has neither, or is of another type.
    """
    if not os.path.isdir(folder):
        raise InputError(f"there is no folder {folder!r}", flag)
    source: Source
    if any(os.path.exists(os.path.join(folder, "test", name)) for name in ("nshards.txt", "0.tar")):
        source = Shards(flag, folder)
    else:
        source = ClassFolders(flag, folder)
    if source.type != "classification":
        raise source.wrong(f"{folder!r} is of type {source.type}; give a classification with one class per image")
    return source


def lines_of(source: Source, name: str, needed: bool = False) -> list[str]:
    path = os.path.join(source.folder, name)
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file.read().rstrip().split("\n")]
    except FileNotFoundError:
        lines = []
    except (OSError, ValueError) as error:
        raise source.wrong(f"{path!r} cannot be read: {one_line(error)}") from None
    lines = [] if lines == [""] else lines
    if needed and not lines:
        raise source.wrong(f"{path!r} is missing or empty")
    if name == CLASSNAMES and "" in lines:
        raise source.wrong(f"{path!r} has no name in line {lines.index('') + 1}")
    return lines


def templates_of(source: Source, needed: bool = False) -> list[str]:
    """Templates of the data set; OpenCLIP's 80 for ImageNet if it has none and `needed` is False."""
    lines = [line for line in lines_of(source, TEMPLATES, needed) if line]
    for line in lines:
        if "{c}" not in line:
            raise source.wrong(f"{TEMPLATES} in {source.folder!r}: {line!r} has no {{c}} for the class")
    return lines or [template("{c}") for template in OPENAI_IMAGENET_TEMPLATES]


def grouped(tar: tarfile.TarFile) -> Iterator[dict[str, tarfile.TarInfo]]:
    """The members of each sample by extension: consecutive files whose names are equal up to the first dot."""
    key: tuple[str, str] | None = None
    members: dict[str, tarfile.TarInfo] = {}
    for member in tar:
        folder, _, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        if not member.isfile() or not stem or not extension:
            continue
        if (folder, stem) != key:
            if members:
                yield members
            key, members = (folder, stem), {}
        members[extension.lower()] = member
    if members:
        yield members


def check_end(tar: tarfile.TarFile) -> None:
    """Raise ReadError for a truncated archive, which tarfile accepts if it is cut at or in a header."""
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("it has no end mark")


def read_array(source: Source, content: bytes, place: str) -> NDArray:
    try:
        # Not load, which also opens archives.
        numbers = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
        if numbers.dtype.kind not in "biuf":
            raise TypeError(f"it has {numbers.dtype}, no numbers")
        return numbers
    except Exception as error:  # of a damaged header NumPy raises what its parser and the memory do
        raise source.wrong(f"the .npy of {place!r} cannot be read: {one_line(error)}") from None


def read_file(source: Source, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise source.wrong(f"{path!r} cannot be read: {one_line(error)}") from None


def images_below(folder: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    """Path and real path of each image file below a folder, without hidden ones; OSError for an unreadable folder.

    Args:
        seen: real paths of folders that are not read again when a link leads to them.
    """
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if is_hidden(entry.name):
                continue
            if entry.is_dir():
                yield from images_below(entry.path, seen)
            elif entry.name.lower().endswith(IMAGE_FILES):
                yield entry.path, os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(real, entry.name)


def is_hidden(name: str) -> bool:
    """Whether it is not the user's: a hidden file or folder, or what macOS adds to an archive."""
    return name.startswith(".") or name == "__MACOSX"


def warn_of_contents(source: Source) -> None:
    """Warn of class folders whose images look otherwise than to the model, or whose classnames.txt may list them by the
    numbers in their names, which are in order of text."""
    if not isinstance(source, ClassFolders):
        return
    spread = source.images[:: len(source.images) // COMPARED or 1]
    warn_of_images(((path, path) for path, _ in spread), source.folder, source.flag)
    if not lines_of(source, CLASSNAMES):
        return
    by_number = sorted(source.folders, key=in_order_of_numbers)
    for line, (name, other) in enumerate(zip(source.folders, by_number, strict=True), 1):
        if name != other:
            logging.warning(
                f"{source.flag}: line {line} of {CLASSNAMES} in {source.folder!r} is the class in folder {name!r}, not "
                f"{other!r}, since the order is alphabetical; if that is not meant, pad the numbers with zeros"
            )
            return


def in_order_of_numbers(name: str) -> list[Any]:
    """A key to sort names by, as numbers where they have digits."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
