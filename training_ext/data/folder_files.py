"""Find the files of a folder of data and of the folders in it, for every reader of folders."""

import os
from collections import deque
from dataclasses import dataclass, field

from open_clip_ext.errors import InputError

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".avif", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff")
CAPTIONS = ".txt"
SYSTEMS = ("__MACOSX", "lost+found")  # made by macOS in archives, and by file systems
SPLITS = {"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"}
REPEATED, LEADS_NOWHERE = "links to folders that are read under another path", "links that lead nowhere"

LeftOut = dict[str, list[str]]
"""Names of what is left out, by reason."""


@dataclass(frozen=True)
class FolderFiles:
    """What is in a folder and in the folders below it, but for hidden names.

    Args:
        folders: names of the folders that are directly in it, in order.
        files: paths, in order; a link that leads nowhere counts if it is named as an image or its captions.
        left_out: links that are not followed, in order.
    """

    folders: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    left_out: LeftOut = field(default_factory=dict)

    def are_splits(self) -> bool:
        """Whether its folders are named as parts of a data set, such as train and test."""
        return bool(self.folders) and {name.lower() for name in self.folders} <= SPLITS


def find_files(folder: str, flag: str | None = None) -> FolderFiles:
    """Find the files; of several paths to a folder that links make, one is read, if possible the one without a link.

    Raises:
        InputError: a folder cannot be read.
    """
    listing = FolderFiles()
    read: set[str] = set()  # real paths
    todo = deque([folder])
    while todo:
        path = todo.popleft()
        if (real := os.path.realpath(path)) in read:
            listing.left_out.setdefault(REPEATED, []).append(path)
            continue
        read.add(real)
        for entry in entries(path, flag):
            if entry.name.startswith(".") or entry.name in SYSTEMS:
                continue
            kind = _kind(entry)
            if kind == "folder":
                # Links wait until all folders without a link are read.
                (todo.append if entry.is_symlink() else todo.appendleft)(entry.path)
                if path is folder:
                    listing.folders.append(entry.name)
            elif kind == "file" or entry.name.lower().endswith((*IMAGES, CAPTIONS)):
                listing.files.append(entry.path)
            elif entry.is_symlink():
                listing.left_out.setdefault(LEADS_NOWHERE, []).append(entry.path)
    for paths in (listing.files, *listing.left_out.values()):
        paths.sort()
    return listing


def entries(folder: str, flag: str | None = None) -> list[os.DirEntry]:
    """What is directly in a folder, by name.

    Raises:
        InputError: it cannot be read.
    """
    try:
        with os.scandir(folder) as iterator:
            return sorted(iterator, key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(
            f"the folder {folder!r} cannot be read: {error.strerror}; make it readable, or take it out", flag
        ) from None


def _kind(entry: os.DirEntry) -> str:
    """ "folder", "file", or "" of a pipe and of a link that leads nowhere."""
    try:
        return "folder" if entry.is_dir() else "file" if entry.is_file() else ""
    except OSError:  # links that lead to one another
        return ""


def describe_left_out(left_out: LeftOut) -> str:
    """How many are left out for each reason, with an example; "" if none is."""
    return ", ".join(f"{len(names)} {why} ({names[0]!r})" for why, names in left_out.items())
