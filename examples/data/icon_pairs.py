"""An icon's pair: its picture, rendered by resvg, and its caption from its name, variant, set and category."""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

_MIN_CONTRAST = 32
_SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{size}" height="{size}"'
    ' viewBox="{left} {top} {width} {height}">{body}</svg>'
)
# No images, text, styles or scripts, which can refer to other files, and no animations, which often start blank.
_ELEMENTS = frozenset(
    "g path circle ellipse line polygon polyline rect defs symbol use clipPath mask marker pattern linearGradient"
    " radialGradient stop filter feBlend feColorMatrix feComposite feDropShadow feFlood feGaussianBlur feMerge"
    " feMergeNode feMorphology feOffset".split()
)
_ELSEWHERE = re.compile(r"""&|href\s*=(?!\s*["']#)|url\((?!\s*["']?#)""")

_ADJECTIVES = {
    "baseline": "filled",
    "bold": "bold",
    "broken": "broken",
    "duo": "duotone",
    "duotone": "duotone",
    "fill": "filled",
    "filled": "filled",
    "flat": "flat",
    "light": "light",
    "line": "line",
    "linear": "line",
    "outline": "outlined",
    "outlined": "outlined",
    "round": "rounded",
    "rounded": "rounded",
    "sharp": "sharp",
    "solid": "solid",
    "thin": "thin",
    "twotone": "two-tone",
}
# At the end of any name these mean the variant; "light" or "line" may belong to the object's name.
_UNDECLARED = frozenset("duotone fill filled outline outlined rounded sharp solid twotone".split())
_POINTERS = frozenset("angle arrow caret chevron triangle".split())
_DIRECTIONS = frozenset("up down left right".split())


@dataclass
class IconSet:
    """A set's name and origin, and which of `KINDS` it is."""

    prefix: str
    name: str
    author: str
    author_url: str
    licence: str
    licence_url: str
    kind: str
    category: str
    size: int
    held_out: bool = False


def number_of(seed: int, name: str) -> float:
    """A number in [0, 1) that depends only on `seed` and `name`."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _variant(title: str) -> list[str]:
    words = re.split(r"[^a-z0-9]+", re.sub("two.tone", "twotone", title.lower()))
    return [_ADJECTIVES[word] for word in words if word in _ADJECTIVES]


def split_name(name: str, prefixes: dict[str, str], suffixes: dict[str, str]) -> tuple[str, list[str]]:
    """What an icon shows, in words, and the adjectives of its variant.

    `prefixes` and `suffixes` map those that the set declares to their titles. "star-24-filled" in a set with the suffix
    "24-filled", titled "24 Filled", gives ("star", ["filled"]).
    """
    for affixes, begins in ((prefixes, True), (suffixes, False)):
        for affix in sorted(filter(None, affixes), key=len, reverse=True):
            if begins and name.startswith(f"{affix}-"):
                return _thing(name[len(affix) + 1 :].split("-")), _variant(affixes[affix])
            if not begins and name.endswith(f"-{affix}"):
                return _thing(name[: -len(affix) - 1].split("-")), _variant(affixes[affix])
    if "" in suffixes:
        return _thing(name.split("-")), _variant(suffixes[""])
    words = name.split("-")
    variant: list[str] = []
    while len(words) > 1 and words[-1] in _UNDECLARED:
        variant.insert(0, _ADJECTIVES[words.pop()])
    return _thing(words), variant


def _thing(words: list[str]) -> str:
    if len(words) == 2 and words[0] in _POINTERS and words[1] in _DIRECTIONS:
        words = words[::-1]
    return " ".join(words)


def describe_icon(icon_set: IconSet, name: str, prefixes: dict, suffixes: dict, category: str, draw: float) -> str:
    """The caption of an icon; `draw`, in [0, 1), selects its form; `category` may be empty."""
    thing, variant = split_name(name, prefixes, suffixes)
    noun = "emoji" if icon_set.kind == "emoji" else "logo" if icon_set.category == "Logos" else "icon"
    noun = "flag" if "flag" in icon_set.name.lower() else noun
    phrase = " ".join([*dict.fromkeys(variant), thing] + [noun] * (noun not in thing.split()))
    article = "an" if phrase[0] in "aeiou" else "a"
    set_name = re.sub(r"\s*\(.*?\)|\b((free|color) )*icons?\b", "", icon_set.name, flags=re.IGNORECASE).strip()
    set_name = set_name or icon_set.name
    forms = [phrase, f"{article} {phrase}", f"{phrase}, {set_name}", f"{article} {phrase} from {set_name}"]
    if category:
        category = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", category).lower()
        forms += [f"{phrase}, {category}", f"{phrase}, {category}, {set_name}"]
    return forms[int(draw * len(forms))]


def svg_document(icon: dict[str, Any], data: dict[str, Any], image_size: int) -> str | None:
    """The icon as an SVG document; None if it is animated or could read another file."""
    body = icon["body"]
    if not set(re.findall(r"<(?!/)([^\s/>]*)", body)) <= _ELEMENTS or _ELSEWHERE.search(body):
        return None
    box = {key: float(icon.get(key, data.get(key, default))) for key, default in _BOX.items()}
    return _SVG.format(size=image_size, body=body, **box)


_BOX = {"left": 0, "top": 0, "width": 16, "height": 16}


def render_icon(svg: str) -> bytes | None:
    """Render an SVG document on white as an RGB PNG file; None if the image is blank or the SVG invalid."""
    import resvg_py

    try:
        png = resvg_py.svg_to_bytes(svg, background="#ffffff", skip_system_fonts=True)
    except ValueError:
        return None
    image = Image.open(io.BytesIO(png)).convert("RGB")
    if np.ptp(np.asarray(image), axis=(0, 1)).max() < _MIN_CONTRAST:
        return None
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def reduced(png: bytes) -> bytes:
    """An image as 8 x 8 pixels in 8 shades of each colour: equal for near duplicates."""
    image = Image.open(io.BytesIO(png)).convert("RGB").resize((8, 8), Image.Resampling.BOX)
    return image.point(lambda value: value // 32).tobytes()
