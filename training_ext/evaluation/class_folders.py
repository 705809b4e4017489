"""Read the user's own classes for `--zeroshot-data`: a folder of images for each class, or shards."""

import logging
import os
import re
from collections.abc import Iterator

from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from open_clip_ext.errors import InputError
from training_ext.core.images import COMPARED, warn_of_images
from training_ext.evaluation.folders import CLASSNAMES, FORMATS, Shards, Source


class ClassFolders(Source):
    """A folder of images for each class, as for torchvision's ImageFolder.

    Classes are in alphabetical order of the folders; their names are the lines of classnames.txt beside them, or else
    the folders' names. An image to which several paths lead counts once.
    """

    def __init__(self, flag: str, folder: str):
        super().__init__(flag, folder)
        root, once = os.path.realpath(folder), dict[str, tuple[int, str]]()
        with self.reading(repr(folder)):
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name))
            tops = {root, *(os.path.realpath(os.path.join(folder, name)) for name in names)}
            for label, name in enumerate(names):
                top = os.path.join(folder, name)
                for path, real in images_below(top, tops - {os.path.realpath(top)}):
                    # Of the paths that lead to a file, the one without links tells its class.
                    if real not in once or real == os.path.join(root, os.path.relpath(path, folder)):
                        once[real] = label, path
        self.images = [(path, label) for label, path in sorted(once.values())]
        labels = {label for _, label in self.images}
        empty = [name for label, name in enumerate(names) if label not in labels]
        if not names or empty:
            what = f"no image in {empty[0]!r}" if empty else "neither test/nshards.txt nor folders of images"
            raise self.wrong(f"{folder!r} has {what}; give class folders of images, or shards")
        self.folders = names
        self.classes = self.lines(CLASSNAMES) or [name.replace("_", " ") for name in names]
        if len(self.classes) != len(names):
            raise self.wrong(
                f"{CLASSNAMES} in {folder!r} has {len(self.classes)} names and there are {len(names)} class folders; "
                "give one line for each, in alphabetical order of the folders"
            )
        self.templates = self.prompts()

    def check_headers(self) -> None:
        """Raise InputError if a file does not begin as an image; nothing is decoded."""
        for path, _ in self.images:
            with self.reading(f"the image of {path!r}"), Image.open(path, formats=FORMATS):
                pass

    def warn(self) -> None:
        """Warn of images that look otherwise than to the model, and if classnames.txt may list the classes by the
        numbers in their names, which are in order of text."""
        spread = self.images[:: len(self.images) // COMPARED or 1]
        warn_of_images(((path, path) for path, _ in spread), self.folder, self.flag)
        if not self.lines(CLASSNAMES):
            return
        by_number = sorted(self.folders, key=in_order_of_numbers)
        for line, (name, other) in enumerate(zip(self.folders, by_number, strict=True), 1):
            if name != other:
                logging.warning(
                    f"{self.flag}: line {line} of {CLASSNAMES} in {self.folder!r} is the class in folder {name!r}, not "
                    f"{other!r}, since the order is alphabetical; if that is not meant, pad the numbers with zeros"
                )
                return


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
            elif entry.name.lower().endswith(IMG_EXTENSIONS):
                yield entry.path, os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(real, entry.name)


def is_hidden(name: str) -> bool:
    """Whether it is not the user's: a hidden file or folder, or what macOS adds to an archive."""
    return name.startswith(".") or name == "__MACOSX"


def in_order_of_numbers(name: str) -> list[int | str]:
    """A key to sort names by, as numbers where they have digits."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def open_own_classes(flag: str, folder: str) -> Source:
    """Open the user's own data set for zero-shot classification: class folders, or shards.

    Raises:
        InputError: the folder has neither, or is of another type.
    """
    if not os.path.isdir(folder):
        raise InputError(f"there is no folder {folder!r}", flag)
    is_shards = any(os.path.exists(os.path.join(folder, "test", name)) for name in ("nshards.txt", "0.tar"))
    source = Shards(flag, folder) if is_shards else ClassFolders(flag, folder)
    if source.type != "classification":
        raise source.wrong(f"{folder!r} is of type {source.type}; give a classification with one class per image")
    return source
