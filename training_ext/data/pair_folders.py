"""Read a folder of images that have their captions beside them, in a .txt of the same name with one a line."""

import os
from dataclasses import dataclass, field

import pandas as pd
from tqdm import tqdm

from training_ext.core.plan import world_info
from training_ext.data.folder_files import CAPTIONS, IMAGES, LeftOut, describe_left_out, find_files
from training_ext.openclip.loading import warn_once

NO_TEXT, NO_PICTURE, NO_CAPTION = "images without .txt", ".txt without image", "images without caption in their .txt"
NOT_UTF8, UNREADABLE_TEXT = ".txt that are not UTF-8", "images whose .txt cannot be read"


@dataclass(frozen=True)
class FolderPairs:
    """The pairs of a folder and the folders in it, without hidden ones.

    Args:
        pairs: path of each image and its captions, by sorted path.
        left_out: what is no pair.
    """

    pairs: list[tuple[str, list[str]]] = field(default_factory=list)
    left_out: LeftOut = field(default_factory=dict)


def find_pairs(folder: str, flag: str | None = None) -> FolderPairs:
    """Read the names in a folder and its captions, but no image. Process 0 warns of a folder of splits.

    Raises:
        InputError: one of the folders cannot be read.
    """
    listed = find_files(folder, flag)
    if listed.are_splits() and len(listed.folders) > 1 and world_info()[1] == 0:
        splits = ", ".join(map(repr, listed.folders))
        warn_once(f"{folder!r} has the folders {splits}, and the pairs of all are read; for one of them give its path")
    folder_pairs = FolderPairs(left_out=listed.left_out)
    stems = [(*os.path.splitext(path), path) for path in listed.files]
    texts = {stem: path for stem, end, path in stems if end.lower() == CAPTIONS}
    images = [(stem, path) for stem, end, path in stems if end.lower() in IMAGES]
    # Silent where it takes a moment.
    for stem, path in tqdm(images, desc="Reading captions", unit="file", delay=2):
        try:
            with open(texts[stem], encoding="utf-8-sig") as file:  # Windows begins a file with a mark
                # Not splitlines, which also cuts at characters such as U+2028.
                captions = [line.strip() for line in file.read().split("\n") if line.strip()]
        except KeyError:
            why = NO_TEXT
        except UnicodeDecodeError:
            why = NOT_UTF8
        except OSError:
            why = UNREADABLE_TEXT
        else:
            if captions:
                folder_pairs.pairs.append((path, captions))
                continue
            why = NO_CAPTION
        folder_pairs.left_out.setdefault(why, []).append(path)
    image_stems = dict(images)
    if lonely := [path for stem, path in texts.items() if stem not in image_stems]:
        folder_pairs.left_out[NO_PICTURE] = lonely
    return folder_pairs


def read_folder(folder: str, image_key: str, caption_key: str) -> pd.DataFrame:
    """The pairs as OpenCLIP reads a csv: a line for each caption. Process 0 warns of files that are no pair."""
    folder_pairs = find_pairs(folder)
    if folder_pairs.left_out and world_info()[1] == 0:
        warn_once(f"Left out of {folder!r}: {describe_left_out(folder_pairs.left_out)}")
    lines = [(path, caption) for path, captions in folder_pairs.pairs for caption in captions]
    return pd.DataFrame(lines, columns=[image_key, caption_key], dtype=object)
