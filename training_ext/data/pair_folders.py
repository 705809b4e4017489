"""Read a folder of images that have their captions beside them, in a .txt of the same name with one a line."""

import os

import pandas as pd
from tqdm import tqdm

from training_ext.core.plan import world_info
from training_ext.data.folder_files import CAPTIONS, IMAGES, LeftOut, describe_left_out, find_files
from training_ext.openclip.loading import warn_once

NO_TEXT, NO_PICTURE, NO_CAPTION = "images without .txt", ".txt without image", "images without caption in their .txt"
NOT_UTF8, UNREADABLE_TEXT = ".txt that are not UTF-8", "images whose .txt cannot be read"


def find_pairs(folder: str, flag: str | None = None) -> tuple[list[tuple[str, list[str]]], LeftOut]:
    """The pairs of a folder and the folders in it, without hidden ones; process 0 warns of a folder of splits.

    The names and the captions are read, but no image.

    Returns:
        Path of each image and its captions, by sorted path; and what is no pair.

    Raises:
        InputError: one of the folders cannot be read.
    """
    listed = find_files(folder, flag)
    if listed.are_splits() and len(listed.folders) > 1 and world_info()[1] == 0:
        splits = ", ".join(map(repr, listed.folders))
        warn_once(f"{folder!r} has the folders {splits}, and the pairs of all are read; for one of them give its path")
    pairs, left_out = [], listed.left_out
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
                pairs.append((path, captions))
                continue
            why = NO_CAPTION
        left_out.setdefault(why, []).append(path)
    image_stems = dict(images)
    if lonely := [path for stem, path in texts.items() if stem not in image_stems]:
        left_out[NO_PICTURE] = lonely
    return pairs, left_out


def read_folder(folder: str, image_key: str, caption_key: str) -> pd.DataFrame:
    """The pairs as OpenCLIP reads a csv: a line for each caption. Process 0 warns of files that are no pair."""
    pairs, left_out = find_pairs(folder)
    if left_out and world_info()[1] == 0:
        warn_once(f"Left out of {folder!r}: {describe_left_out(left_out)}")
    lines = [(path, caption) for path, captions in pairs for caption in captions]
    return pd.DataFrame(lines, columns=[image_key, caption_key], dtype=object)
