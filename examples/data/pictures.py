"""Pictures of things with captions, as shards for OpenCLIP: clip art, and stamps, many of which are photographs.

    apt-get download openclipart-png openclipart-svg tuxpaint-stamps-default
    for file in *.deb; do dpkg-deb -x $file debian; done
    python examples/data/pictures.py --debian debian --out pictures

OUT has the shards of the clip art, OUT/stamps those of the stamps. The same packages, Pillow and seed give the same
bytes; the last line printed is a checksum of keys, captions and pictures.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import io
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from glyphs import checksum, positive, written
from icon_pairs import number_of, reduced
from icons import Icon
from PIL import Image, UnidentifiedImageError
from shard_folder import check_out, write_all
from tqdm import tqdm

CLIP_ART, STAMPS = "usr/share/openclipart", "usr/share/tuxpaint/stamps"
HELD_OUT = {"clip art": 300, "stamps": 150}  # for test, and a third of it for val
SIZE = 128
_THINGS = frozenset(
    "animals buildings containers education electronics food office people plants recreation tools"
    " transportation".split()
)
_SIGNS = frozenset(("aiga-symbols", "alphabets", "cards", "math", "roadsigns"))
_TITLE = re.compile(r"<dc:title[^>]*>([^<]*)</dc:title>")
_SUBJECT = re.compile(r"<dc:subject>(.*?)</dc:subject>", re.DOTALL)
_KEYWORD = re.compile(r"<rdf:li[^>]*>(?!hash)([^<]*)<")
_PUBLIC = re.compile(r"<cc:license [^>]*/PublicDomain\"|<cc:license [^>]*/publicdomain/\"")
_COLLECTION = 6  # pictures with one title, which is then of the collection
_MOST_KEYWORDS = 4
_MIN_CONTRAST = 32


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debian", type=Path, required=True, metavar="DIR", help="where the packages were unpacked")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the shards, created if missing")
    parser.add_argument("--image-size", type=positive, default=SIZE, help=f"pixels (default: {SIZE})")
    parser.add_argument("--seed", type=int, default=0, help="of the split (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace the shards that DIR already holds")
    args = parser.parse_args(argv)
    collections = {"clip art": clip_art(args.debian / CLIP_ART), "stamps": stamps(args.debian / STAMPS)}
    looks: set[bytes] = set()
    words: Counter[str] = Counter()
    every = {}
    with tempfile.TemporaryFile() as spool:
        try:
            folders = {"clip art": check_out(args.out, args.overwrite)}
            folders["stamps"] = check_out(str(folders["clip art"] / "stamps"), args.overwrite)
            for name, captions in collections.items():
                pictures = collect(name, captions, spool, args.image_size, args.seed)
                # A stamp that is clip art, too, would be in training with one and in a gallery of the other.
                pictures = [picture for picture in pictures if picture.look not in looks]
                every[name] = split(pictures, HELD_OUT[name], words)
                looks.update(picture.look for picture in pictures)
        except ValueError as error:
            parser.error(str(error))
        for name, folder in folders.items():
            folder.mkdir(parents=True, exist_ok=True)
            samples = {part: (len(some), written(some, spool)) for part, some in every[name].items()}
            write_all(folder, samples, {}, 10_000, "png")
    for name, parts in every.items():
        print(f"{name}: " + ", ".join(f"{len(some)} {part}" for part, some in parts.items()))
    splits = {f"{name} {part}": some for name, parts in every.items() for part, some in parts.items()}
    print(f"checksum {checksum(splits)}")


def words_of(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


def key_of(place: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", "_".join(place.with_suffix("").parts))


def clip_art(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """The PNG, key and caption of things: their title, or the file's name where many share a title, and keywords."""
    described = []
    for path in sorted((folder / "svg").rglob("*.svg")):
        place, text = path.relative_to(folder / "svg"), path.read_text(encoding="utf-8", errors="replace")
        # A drawing that links to another file shows "Linked image not found".
        is_complete = "<image" not in text
        if place.parts[0] in _THINGS and _SIGNS.isdisjoint(place.parts) and is_complete and _PUBLIC.search(text):
            title, subject = _TITLE.search(text), _SUBJECT.search(text)
            keywords = _KEYWORD.findall(subject[1]) if subject else []
            described.append((place, html.unescape(title[1]).strip() if title else "", keywords))
    titles = Counter(title for _, title, _ in described)
    for place, title, keywords in described:
        is_collection = titles[title] >= _COLLECTION or not title or title.startswith("Clipart by ")
        name = " ".join(words_of(place.stem if is_collection else title))
        plain = dict.fromkeys(" ".join(words_of(keyword)) for keyword in keywords)
        others = [keyword for keyword in plain if keyword and keyword not in name][:_MOST_KEYWORDS]
        yield (folder / "png" / place).with_suffix(".png"), key_of(place), ", ".join([name, *others])


def stamps(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """The PNG, key and caption of the stamps that have both: the first line of the text beside the picture."""
    for path in sorted(folder.rglob("*.png")):
        place = path.relative_to(folder)
        text = path.with_suffix(".txt")
        if _SIGNS.isdisjoint(place.parts) and text.exists():
            yield path, key_of(place), text.read_text(encoding="utf-8").split("\n")[0].strip()


def collect(
    name: str, captions: Iterator[tuple[Path, str, str]], spool: BinaryIO, size: int, seed: int
) -> list[Icon]:
    """Draw the pictures into `spool`; of equal ones the first by rank, without blank ones and those without words.

    Raises:
        ValueError: there is none, or one cannot be read.
    """
    pictures = []
    for path, key, caption in tqdm(captions, desc=name, unit=" pictures"):
        try:
            png = draw(path, size)
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise ValueError(f"argument --debian: {str(path)!r} cannot be read: {error}") from error
        if png is None or not words_of(caption):
            continue
        digest = hashlib.blake2b(png, digest_size=16).digest()
        pictures.append(
            Icon(key, name, key, caption, number_of(seed, key), digest, spool.tell(), len(png), reduced(png))
        )
        spool.write(png)
    if not pictures:
        raise ValueError(f"argument --debian: there is no {name} where the packages were unpacked; see --help")
    pictures.sort(key=lambda picture: (picture.rank, picture.key))
    return list({picture.picture: picture for picture in reversed(pictures)}.values())[::-1]


def draw(path: Path, size: int) -> bytes | None:
    """The picture on a white square as an RGB PNG file; None if it is blank."""
    with Image.open(path) as file:
        image = file.convert("RGBA")
    side = max(image.size)
    square = Image.new("RGBA", (side, side), "white")
    square.alpha_composite(image, ((side - image.width) // 2, (side - image.height) // 2))
    image = square.convert("RGB").resize((size, size), Image.Resampling.LANCZOS)
    if np.ptp(np.asarray(image), axis=(0, 1)).max() < _MIN_CONTRAST:
        return None
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def split(pictures: list[Icon], held_out: int, words: Counter[str]) -> dict[str, list[Icon]]:
    """Split so that a gallery's picture has a caption and a look, as by `reduced`, that no other picture has, and only
    words of training captions.

    Args:
        pictures: different ones, sorted by rank, which is random.
        held_out: pictures for test; val has a third as many.
        words: training captions by word, of earlier collections, to which those of this one are added.

    Raises:
        ValueError: too few pictures can be held out.
    """
    looks, captions = (Counter(values) for values in zip(*((one.look, one.caption) for one in pictures), strict=True))
    for one in pictures:
        words.update(set(words_of(one.caption)))
    chosen = []
    for one in pictures:
        own = set(words_of(one.caption))
        alone = looks[one.look] == captions[one.caption] == 1
        if alone and len(chosen) < held_out + held_out // 3 and all(words[word] > 1 for word in own):
            chosen.append(one)
            words.subtract(own)
    if len(chosen) < held_out + held_out // 3:
        raise ValueError(f"argument --debian: only {len(chosen)} of {len(pictures)} pictures of a set can be held out")
    gone = {one.key for one in chosen}
    return {
        "train": [one for one in pictures if one.key not in gone], "val": chosen[held_out:], "test": chosen[:held_out],
    }  # fmt: skip


if __name__ == "__main__":
    main()
