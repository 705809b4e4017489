"""Read the user's own classes for `--zeroshot-data`: a folder of images for each class, or shards."""

import logging
import os
import re
from collections.abc import Callable

from PIL import Image

from open_clip_ext.errors import InputError
from training_ext.data.folder_files import IMAGES, describe_left_out, find_files
from training_ext.openclip.loading import warn_once
from training_ext.scoring.folders import CLASSNAMES, FORMATS, Shards, Source

NO_IMAGE = "files that are no image in a class folder"
SHOWN_LETTERS = 60  # of a name


class ClassFolders(Source):
    """A folder of images for each class, without hidden files; the images may be in further folders.

    Classes are in alphabetical order of the folders; their names are the lines of classnames.txt beside them, or else
    the folders' names.

    Attributes:
        folders: names of the class folders.
    """

    def __init__(self, flag: str, folder: str):
        super().__init__(flag, folder)
        listed = find_files(folder, flag)
        names = self.folders = listed.folders
        if not names:
            raise self.wrong(f"{folder!r} has neither test/nshards.txt nor folders of images; give one of the two")
        lines = self.lines(CLASSNAMES)
        if listed.are_splits() and not lines:
            raise self.wrong(
                f"{folder!r} has only {', '.join(map(repr, names))}, which are no names of classes; give one of them, "
                f"or write {CLASSNAMES}"
            )
        self.left_out = listed.left_out
        label_of = {name: label for label, name in enumerate(names)}
        for path in listed.files:
            name, *below = path.removeprefix(folder).lstrip(os.sep).split(os.sep)
            is_image = path.lower().endswith(IMAGES)
            if below and is_image:
                self.images.append((path, label_of[name]))
            elif below or is_image:
                self.left_out.setdefault(NO_IMAGE, []).append(path)
        self.images.sort(key=lambda image: (image[1], os.path.split(image[0])))  # as torchvision's ImageFolder
        if empty := [names[label] for label in sorted({*range(len(names))} - {label for _, label in self.images})]:
            also = f"; left out are {describe_left_out(self.left_out)}" if self.left_out else ""
            raise self.wrong(f"{folder!r} has no images ({', '.join(IMAGES)}) for the classes {', '.join(empty)}{also}")
        self.classes = lines or [name.replace("_", " ") for name in names]
        if len(self.classes) != len(names):
            raise self.wrong(
                f"{CLASSNAMES} in {folder!r} has {len(self.classes)} names and there are {len(names)} class folders; "
                "give one line for each, in alphabetical order of the folders"
            )
        for name in self.classes:
            if name.encode(errors="ignore").decode() != name:
                raise self.wrong(f"the name of the class folder {name!r} is not UTF-8; rename it or write {CLASSNAMES}")
        self.templates = self.prompts()

    def check_headers(self) -> None:
        """Raise InputError if a file does not begin as an image; nothing is decoded."""
        for path, _ in self.images:
            with self.reading(f"the image of {path!r}"), Image.open(path, formats=FORMATS):
                pass

    def warn(self) -> None:
        """Also warn of a classnames.txt that may be in another order.

        Classes are in alphabetical order of their folders, 10 before 2; its lines may be in order of numbers.
        """
        super().warn()
        by_number = sorted(self.folders, key=in_order_of_numbers)
        if self.lines(CLASSNAMES) and by_number != self.folders:
            line = next(line for line, name in enumerate(self.folders) if name != by_number[line])
            logging.warning(
                f"{self.flag}: line {line + 1} of {CLASSNAMES} in {self.folder!r} is the class in folder "
                f"{self.folders[line]!r}, not {by_number[line]!r}, since the order is alphabetical; if that is not "
                "meant, pad the numbers with zeros"
            )


def warn_of_equal_classes(source: Source, tokenizer: Callable) -> None:
    """Warn of classes that the model cannot tell apart: their names are equal, or equal as far as it reads."""
    prompt = min(source.templates, key=len)
    label_of: dict[bytes, int] = {}
    equal = []
    for label, tokens in enumerate(tokenizer([prompt.replace("{c}", name) for name in source.classes])):
        if (earlier := label_of.setdefault(tokens.numpy().tobytes(), label)) != label:
            equal.append((label, earlier))
    if equal:
        one, other = (f"number {label + 1}, {source.classes[label][:SHOWN_LETTERS]!r}" for label in equal[0])
        warn_once(
            f"{source.flag}: {len(equal)} of the {len(source.classes)} classes of {source.folder!r} are named like "
            f"another as far as the model reads, so their images count as errors: first {one}, like {other}; give "
            f"each another name in {CLASSNAMES}"
        )


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
