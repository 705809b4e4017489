"""Read the user's own classes for `--zeroshot-data`: a folder of images for each class, or shards."""

import logging
import os
import re

from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, has_file_allowed_extension, make_dataset

from open_clip_ext.errors import InputError
from training_ext.evaluation.folders import CLASSNAMES, FORMATS, Shards, Source


class ClassFolders(Source):
    """A folder of images for each class, as torchvision's ImageFolder reads it, without hidden files.

    Classes are in alphabetical order of the folders; their names are the lines of classnames.txt beside them, or else
    the folders' names.
    """

    def __init__(self, flag: str, folder: str):
        super().__init__(flag, folder)
        with self.reading(repr(folder)):
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name))
            if not names:
                raise self.wrong(f"{folder!r} has neither test/nshards.txt nor folders of images; give one of the two")
            self.images = make_dataset(
                folder, {name: label for label, name in enumerate(names)}, is_valid_file=self._is_image
            )
        self.folders = names
        self.classes = self.lines(CLASSNAMES) or [name.replace("_", " ") for name in names]
        if len(self.classes) != len(names):
            raise self.wrong(
                f"{CLASSNAMES} in {folder!r} has {len(self.classes)} names and there are {len(names)} class folders; "
                "give one line for each, in alphabetical order of the folders"
            )
        self.templates = self.prompts()

    def _is_image(self, path: str) -> bool:
        below = os.path.relpath(path, self.folder).split(os.sep)
        return has_file_allowed_extension(path, IMG_EXTENSIONS) and not any(map(is_hidden, below))

    def check_headers(self) -> None:
        """Raise InputError if a file does not begin as an image; nothing is decoded."""
        for path, _ in self.images:
            with self.reading(f"the image of {path!r}"), Image.open(path, formats=FORMATS):
                pass

    def warn(self) -> None:
        """Also if classnames.txt may list the classes by the numbers in their names, which are in order of text."""
        super().warn()
        by_number = sorted(self.folders, key=in_order_of_numbers)
        if self.lines(CLASSNAMES) and by_number != self.folders:
            line = next(line for line, name in enumerate(self.folders) if name != by_number[line])
            logging.warning(
                f"{self.flag}: line {line + 1} of {CLASSNAMES} in {self.folder!r} is the class in folder "
                f"{self.folders[line]!r}, not {by_number[line]!r}, since the order is alphabetical; if that is not "
                "meant, pad the numbers with zeros"
            )


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
