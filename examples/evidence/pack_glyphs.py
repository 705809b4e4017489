"""Pack the pairs of examples/data/glyphs.py into one small file for gpu.py, which moves it to the GPU as it is.

    python examples/evidence/pack_glyphs.py --fonts fonts --out glyphs.xz

Pictures are grey, captions OpenCLIP's tokens. Beside `train`, `val` and `test`, `zeroshot` has the other pictures of
the test gallery's characters, and for each character its name in `TEMPLATES`.
"""

import argparse
import io
import lzma
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
import open_clip
from grid import HERE
from PIL import Image

sys.path.append(str(HERE.parent / "data"))
from glyphs import NUM_TEST, checksum, collect_glyphs, font_files, name_of, split_glyphs
from icons import Icon

TEMPLATES = ("{}", "{}, sans", "{}, serif")
CONTEXT = 24  # of ViT-icons-tiny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fonts", nargs="+", required=True, metavar="DIR", help="folders with .ttf and .otf files")
    parser.add_argument("--out", type=Path, required=True, help="the file")
    args = parser.parse_args()
    tokenizer = open_clip.SimpleTokenizer(context_length=CONTEXT)
    arrays = {}
    with tempfile.TemporaryFile() as spool:
        try:
            glyphs, _ = collect_glyphs(font_files(args.fonts), spool, seed=0)
            splits = split_glyphs(glyphs, NUM_TEST, seed=0)
        except ValueError as error:
            parser.error(str(error))
        sha256 = checksum(splits)
        # Neighbours in a font look alike, and so take less room; the order of the training is drawn anew.
        splits["train"].sort(key=lambda glyph: (glyph.set, glyph.name))
        gallery = {glyph.name: number for number, glyph in enumerate(splits["test"])}
        seen = {glyph.picture for glyph in splits["test"]}
        others = {glyph.picture: glyph for glyph in glyphs if glyph.name in gallery and glyph.picture not in seen}
        for split, some in splits.items():
            arrays[f"{split}_images"] = pictures(some, spool)
            arrays[f"{split}_tokens"] = tokens(tokenizer, [glyph.caption for glyph in some])
        arrays["zeroshot_images"] = pictures(list(others.values()), spool)
    arrays["zeroshot_labels"] = np.array([gallery[glyph.name] for glyph in others.values()])
    names = [template.format(name_of(ord(name))) for name in gallery for template in TEMPLATES]
    arrays["zeroshot_tokens"] = tokens(tokenizer, names).reshape(len(gallery), len(TEMPLATES), CONTEXT)
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    packed = lzma.compress(stream.getvalue(), preset=6)
    args.out.write_bytes(packed)
    print(", ".join(f"{name} {len(array)}" for name, array in arrays.items()))
    print(f"{len(packed)} bytes; checksum of the pairs {sha256}")


def pictures(glyphs: list[Icon], spool: BinaryIO) -> np.ndarray:
    """Grey shades, (n, 32, 32) uint8."""
    shades = []
    for glyph in glyphs:
        spool.seek(glyph.start)
        shades.append(np.asarray(Image.open(io.BytesIO(spool.read(glyph.length))).convert("L")))
    return np.stack(shades)


def tokens(tokenizer: open_clip.SimpleTokenizer, captions: list[str]) -> np.ndarray:
    return tokenizer(captions).numpy().astype(np.uint16)


if __name__ == "__main__":
    main()
