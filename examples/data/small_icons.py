"""Captioned icons from the wheel of mkdocs-material (9 MB): Material Design, Octicons and Font Awesome in black.

    pip download --no-deps mkdocs-material==9.8.2

Brands are left out, as are images that are blank or duplicates. Hashes of the names decide the splits.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections import Counter
from typing import BinaryIO

from icon_pairs import IconSet, describe_icon, number_of, reduced, render_icon, split_name, svg_document
from icons import CONCEPTS, Icon, Icons, Parts
from tqdm import tqdm

NUM_VAL = NUM_TEST = 1_000

_SIZES = ("12", "16", "24", "32", "48", "96")
_PICTOGRAMMERS = ("Pictogrammers", "https://pictogrammers.com", "Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0")
_GITHUB = ("GitHub", "https://primer.style/octicons", "MIT", "https://opensource.org/license/mit")
_FONTICONS = ("Fonticons", "https://fontawesome.com", "CC-BY-4.0", "https://creativecommons.org/licenses/by/4.0/")
# By folder: key, name, source, and the ends of names that mean a variant, with its title; "" is any other end.
_SETS = {
    "material": ("material", "Material Design", _PICTOGRAMMERS, {}),
    "octicons": ("octicons", "Octicons", _GITHUB, {f"{v}{s}": v for v in ("", "fill-") for s in _SIZES}),
    "fontawesome/regular": ("fa-regular", "Font Awesome", _FONTICONS, {"": ""}),
    "fontawesome/solid": ("fa-solid", "Font Awesome", _FONTICONS, {"": "solid"}),
}
_SVG_FILE = re.compile(rf"material/templates/\.icons/({'|'.join(_SETS)})/([a-z0-9]+(?:-[a-z0-9]+)*)\.svg")
_DOCUMENT = re.compile(r'<svg [^>]*viewBox="([^"]+)"[^>]*>(.*)</svg>\s*', re.DOTALL)


def collect_small_icons(source: str, spool: BinaryIO, image_size: int, seed: int) -> Icons:
    """Render the icons of the wheel at `source` into `spool`, an empty file opened for both.

    Raises:
        ValueError: `source` is not the wheel of mkdocs-material.
        ImportError: resvg-py is not installed.
    """
    try:
        import resvg_py  # noqa: F401
    except ImportError as error:
        raise ImportError("resvg-py is missing: pip install open-clip-ext[data]") from error
    found = Icons()
    try:
        with zipfile.ZipFile(source) as wheel:
            files = [match for name in wheel.namelist() if (match := _SVG_FILE.fullmatch(name))]
            for prefix, title, source_of, _ in _SETS.values():
                found.sets[prefix] = IconSet(prefix, title, *source_of, kind="mono", category="", size=0)
            for match in tqdm(files, desc="rendering", unit=" icons"):
                prefix, _, _, suffixes = _SETS[match[1]]
                png = _render(wheel.read(match[0]).decode(), image_size)
                if png is None:
                    found.left_out["blank or not plain SVG"] += 1
                    continue
                key = f"{prefix}_{match[2]}"
                draw = number_of(seed, f"caption {key}")
                caption = describe_icon(found.sets[prefix], match[2], {}, suffixes, "", draw)
                thing, picture = split_name(match[2], {}, suffixes)[0], hashlib.blake2b(png, digest_size=16).digest()
                place = (spool.tell(), len(png))
                found.icons.append(
                    Icon(key, prefix, thing, caption, number_of(seed, key), picture, *place, reduced(png))
                )
                spool.write(png)
    except (zipfile.BadZipFile, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"argument --wheel: {source!r} cannot be read: {error}") from error
    if not files:
        raise ValueError(f"argument --wheel: must be the wheel of mkdocs-material, got {source!r} without its icons")
    return found


def _render(document: str, image_size: int) -> bytes | None:
    match = _DOCUMENT.fullmatch(re.sub(r"<!--.*?-->", "", document, flags=re.DOTALL))
    if match is None:
        return None
    box = dict(zip(("left", "top", "width", "height"), map(float, match[1].split()), strict=True))
    svg = svg_document({"body": match[2], **box}, {}, image_size)
    return svg and render_icon(svg)


def split_small_icons(found: Icons, num_val: int = NUM_VAL, num_test: int = NUM_TEST) -> Parts:
    """Split icons so that no image occurs twice, and none in a gallery has a near duplicate anywhere.

    The galleries take the first icons, by rank, whose reduced image and whose caption no other icon has; all others are
    for training. `concepts` has the icons of `test` whose name begins with one of `CONCEPTS`, such as "calendar alert";
    the longest counts. All lists are sorted by rank, which is random.
    """
    ranked = sorted(found.icons, key=lambda icon: (icon.rank, icon.key))
    different = list({icon.picture: icon for icon in reversed(ranked)}.values())[::-1]
    found.left_out["the same picture as another"] += len(ranked) - len(different)
    looks, captions = Counter(icon.look for icon in different), Counter(icon.caption for icon in different)
    parts = Parts()
    for icon in different:
        alone = looks[icon.look] == captions[icon.caption] == 1
        if alone and len(parts.test) < num_test:
            parts.test.append(icon)
        elif alone and len(parts.val) < num_val:
            parts.val.append(icon)
        else:
            parts.train.append(icon)
    classes = {name: names[0] for names in CONCEPTS for name in names}
    for icon in parts.test:
        words = icon.name.split()
        heads = (" ".join(words[:length]) for length in range(len(words), 0, -1))
        if concept := next((classes[head] for head in heads if head in classes), None):
            parts.concepts.setdefault(concept, []).append(icon)
    return parts
