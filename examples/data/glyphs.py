"""Glyphs: pictures of characters in many fonts with their Unicode names as captions, as shards for OpenCLIP.

    apt-get download fonts-noto-core fonts-noto-extra fonts-freefont-ttf fonts-dejavu-core fonts-dejavu-extra
    for file in fonts-*.deb; do dpkg-deb -x $file fonts; done
    python examples/data/glyphs.py --fonts fonts --out glyphs

Names are compositional ("latin small letter o with circumflex and acute, serif bold"). A character is held out with all
its pictures, so that retrieval asks for unseen combinations of seen words; a training character has several pictures.
With `--characters N` faces are held out instead, and a caption is the name alone, as of all pictures of the character.
The same fonts, Pillow and seed give the same bytes; the last line printed is a checksum of keys, captions and pictures.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import tempfile
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fontTools.ttLib import TTFont, TTLibError
from icon_pairs import number_of, reduced
from icons import Icon
from PIL import Image, ImageDraw, ImageFont
from shard_folder import Sample, check_out, write_all
from tqdm import tqdm

NUM_VAL = NUM_TEST = 1_000
SIZE = 32
# Names that are numbers, or two letters of a syllabary, say nothing of what the picture shows.
_NUMBERED = re.compile(
    r"IDEOGRAPH|HIEROGLYPH|CUNEIFORM|TANGUT|NUSHU|BAMUM|KHITAN|LINEAR [AB]|(HANGUL|YI|VAI) SYLLABLE|VARIATION SELECTOR"
)
_STYLE = re.compile(r"Sans|Serif|Mono|Bold|Italic|Oblique|Condensed")
_EM = 40  # pixels before the reduction to SIZE
_LEAST_INK = 4  # shades


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fonts", nargs="+", required=True, metavar="DIR", help="folders with .ttf and .otf files")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the shards, created if missing")
    parser.add_argument("--num-samples", type=positive, metavar="N", help="training samples (default: all)")
    split_by = parser.add_mutually_exclusive_group()
    split_by.add_argument("--held-out", type=positive, default=NUM_VAL, metavar="N",
                          help=f"characters each for val and test (default: {NUM_VAL})")
    split_by.add_argument("--characters", type=positive, metavar="N",
                          help="only the N with the most pictures, all of them in train, val and test")
    parser.add_argument("--samples-per-shard", type=positive, default=10_000, metavar="K", help="(default: 10000)")
    parser.add_argument("--seed", type=int, default=0, help="of the split (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace the shards that DIR already holds")
    args = parser.parse_args(argv)
    with tempfile.TemporaryFile() as spool:
        try:
            folder = check_out(args.out, args.overwrite)
            glyphs, left_out = collect_glyphs(font_files(args.fonts), spool, args.seed)
            if args.characters:
                splits = split_faces(glyphs, args.characters, args.seed)
            else:
                splits = split_glyphs(glyphs, args.held_out, args.seed)
            if (args.num_samples or 1) > len(splits["train"]):
                raise ValueError(f"argument --num-samples: {args.num_samples} of {len(splits['train'])} glyphs")
        except ValueError as error:
            parser.error(str(error))
        splits["train"] = splits["train"][: args.num_samples]
        folder.mkdir(parents=True, exist_ok=True)
        samples = {split: (len(some), written(some, spool)) for split, some in splits.items()}
        write_all(folder, samples, {}, args.samples_per_shard, "png")
    print("left out: " + ", ".join(f"{count} {reason}" for reason, count in left_out.items()))
    for split, some in splits.items():
        print(f"{split}: {len(some)} pictures of {len({glyph.name for glyph in some})} characters")
    print(f"checksum {checksum(splits)}")


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def font_files(folders: list[str]) -> list[Path]:
    """The plain faces below the folders, one of each name: of Noto's many weights and widths Regular alone."""
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.[to]tf"))
    plain = {path.stem: path for path in files if not path.stem.startswith("Noto") or path.stem.endswith("-Regular")}
    if not plain:
        raise ValueError(f"argument --fonts: no .ttf or .otf file in {' '.join(map(repr, folders))}")
    return [plain[stem] for stem in sorted(plain)]


def name_of(code: int) -> str:
    """The character's Unicode name in lower case; empty where a picture cannot show it: marks, controls, spaces."""
    name = unicodedata.name(chr(code), "")
    numbered = _NUMBERED.search(name) or unicodedata.category(chr(code))[0] in "MCZ"
    return "" if numbered else name.lower()


def collect_glyphs(files: list[Path], spool: BinaryIO, seed: int) -> tuple[list[Icon], Counter]:
    """Draw every named character of the faces into `spool`; return the glyphs, and the numbers left out by reason.

    Two glyphs may be the same picture; `name` is the character.
    """
    glyphs, left_out = [], Counter({"blank": 0})
    for path in tqdm(files, desc="drawing", unit=" faces"):
        try:
            characters = TTFont(path, lazy=True).getBestCmap() or {}
            face = ImageFont.truetype(str(path), _EM, layout_engine=ImageFont.Layout.BASIC)
        except (TTLibError, OSError) as error:
            raise ValueError(f"argument --fonts: {str(path)!r} cannot be read: {error}") from error
        style = " ".join(_STYLE.findall(path.stem)).lower()
        for code, glyph_name in sorted(characters.items()):
            name = name_of(code)
            if not name or glyph_name == ".notdef":
                continue
            png = draw(chr(code), face)
            if png is None:
                left_out["blank"] += 1
                continue
            key = f"{code:05x}_{path.stem}"
            picture = hashlib.blake2b(png, digest_size=16).digest()
            caption = f"{name}, {style}" if style else name
            glyphs.append(
                Icon(key, path.stem, chr(code), caption, number_of(seed, key), picture, spool.tell(), len(png),
                     reduced(png))
            )  # fmt: skip
            spool.write(png)
    return glyphs, left_out


def draw(character: str, face: ImageFont.FreeTypeFont) -> bytes | None:
    """The character in black, in the middle of a white square, as an RGB PNG file; None if nothing is seen."""
    left, top, right, bottom = face.getbbox(character)
    width, height = right - left, bottom - top
    if min(width, height) < 2:
        return None
    side = int(max(width, height, _EM)) + 8
    image = Image.new("L", (side, side), 255)
    corner = (side - width) / 2 - left, (side - height) / 2 - top
    ImageDraw.Draw(image).text(corner, character, font=face, fill=0)
    image = image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    if len(set(image.tobytes())) <= _LEAST_INK:
        return None
    stream = io.BytesIO()
    image.convert("RGB").save(stream, "PNG")
    return stream.getvalue()


def split_glyphs(glyphs: list[Icon], held_out: int, seed: int) -> dict[str, list[Icon]]:
    """Split by character: a gallery has one picture of each of its characters, and training none of them.

    Every word of a gallery's names is in the name of a training character. A character that in any face looks like
    another (latin and greek capital a), reduced as by `reduced`, is in no gallery. Of equal pictures training has the
    first by rank. All lists are sorted by rank, which is random.
    """
    ranked, alike = by_rank(glyphs), alike_characters(glyphs)
    first = {glyph.name: glyph for glyph in reversed(ranked)}
    words = {name: set(name_of(ord(name)).split()) for name in first}
    left = Counter(word for some in words.values() for word in some)  # characters not held out
    chosen: list[str] = []
    for name in sorted(first.keys() - alike, key=lambda name: number_of(seed, f"character {ord(name):05x}")):
        if len(chosen) < 2 * held_out and all(left[word] > 1 for word in words[name]):
            chosen.append(name)
            left.subtract(words[name])
    if len(chosen) < 2 * held_out:
        raise ValueError(f"argument --held-out: twice {held_out} of {len(chosen)} characters that can be held out")
    test, val = (
        sorted((first[name] for name in names), key=lambda glyph: glyph.rank)
        for names in (chosen[:held_out], chosen[held_out:])
    )
    gone = set(chosen)
    different = {glyph.picture: glyph for glyph in reversed(ranked) if glyph.name not in gone}
    return {"train": list(different.values())[::-1], "val": val, "test": test}


def split_faces(glyphs: list[Icon], characters: int, seed: int) -> dict[str, list[Icon]]:
    """Split by face: each gallery has one picture of each character, and training the others; captions are the names.

    A character's pictures differ, reduced as by `reduced`, and it looks like no other in any face. The characters are
    those with the most pictures. All lists are sorted by rank.
    """
    alike = alike_characters(glyphs)
    pictures: dict[str, dict[bytes, Icon]] = defaultdict(dict)
    for glyph in by_rank(glyphs):
        if glyph.name not in alike:
            pictures[glyph.name].setdefault(glyph.look, glyph._replace(caption=name_of(ord(glyph.name))))
    several = [name for name, some in pictures.items() if len(some) > 2]
    if characters > len(several):
        raise ValueError(f"argument --characters: {characters} of {len(several)} with at least 3 pictures")
    several.sort(key=lambda name: (-len(pictures[name]), number_of(seed, f"character {ord(name):05x}")))
    splits: dict[str, list[Icon]] = {"train": [], "val": [], "test": []}
    for name in several[:characters]:
        val, test, *train = pictures[name].values()
        for split, some in (("train", train), ("val", [val]), ("test", [test])):
            splits[split] += some
    return {split: by_rank(some) for split, some in splits.items()}


def by_rank(glyphs: list[Icon]) -> list[Icon]:
    return sorted(glyphs, key=lambda glyph: (glyph.rank, glyph.key))


def alike_characters(glyphs: list[Icon]) -> set[str]:
    """The characters that in any face look like another, reduced as by `reduced`."""
    looks: dict[bytes, set[str]] = defaultdict(set)
    for glyph in glyphs:
        looks[glyph.look].add(glyph.name)
    return {name for names in looks.values() if len(names) > 1 for name in names}


def written(glyphs: list[Icon], spool: BinaryIO) -> Iterator[Sample]:
    for glyph in glyphs:
        spool.seek(glyph.start)
        yield glyph.key, spool.read(glyph.length), glyph.caption, None


def checksum(splits: dict[str, list[Icon]]) -> str:
    """SHA-256 of every split's keys, captions and pictures, in order."""
    digest = hashlib.sha256()
    for split, glyphs in splits.items():
        for glyph in glyphs:
            digest.update(f"{split} {glyph.key} {glyph.caption} {glyph.picture.hex()}\n".encode())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
