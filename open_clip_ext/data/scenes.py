"""Generated scenes: two coloured shapes in a stated relation on a coloured background, with a caption.

A scene is a function of `(seed, row)` only, so a data set of any length needs no files, and held-out data are later
rows. Coordinates and lengths in a scene are fractions of the image's side, with the origin at the top left, so the same
scene can be drawn at any size.

"Shifted" scenes are data to fine-tune on, of lower quality than the pretraining data: they are drawn in duller, warmer
colours, most of their captions leave out almost everything and fit many images, and some are wrong.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {
    "red": (218, 28, 36),
    "orange": (250, 132, 10),
    "yellow": (250, 220, 20),
    "green": (20, 150, 50),
    "cyan": (20, 200, 220),
    "blue": (35, 70, 225),
    "purple": (150, 45, 195),
    "pink": (255, 125, 190),
}
BACKGROUNDS = {
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "grey": (150, 150, 150),
    "brown": (98, 58, 28),
    "beige": (230, 208, 170),
}
SHIFTED_COLOURS = {
    "red": (160, 36, 52),
    "orange": (206, 96, 44),
    "yellow": (210, 172, 30),
    "green": (74, 112, 46),
    "cyan": (92, 156, 164),
    "blue": (62, 60, 156),
    "purple": (118, 44, 128),
    "pink": (224, 104, 140),
}
SHIFTED_BACKGROUNDS = {
    "white": (244, 214, 196),
    "black": (14, 4, 44),
    "grey": (128, 108, 112),
    "brown": (76, 24, 20),
    "beige": (186, 162, 124),
}
SIZES = {"small": (0.10, 0.12), "large": (0.19, 0.22)}
RELATIONS = {"left": "to the left of", "right": "to the right of", "above": "above", "below": "below"}
TEMPLATES = (
    "{first} {relation} {second} on a {background} background",
    "{first} is {relation} {second}, on a {background} background",
    "on a {background} background, {first} is {relation} {second}",
    "a picture of {first} {relation} {second} against a {background} background",
)
OBJECT_TEMPLATES = ("{object}", "photo of {object}", "picture of {object}", "this is {object}")
# Integer percents: sums of fractions may differ in the last bit between Python versions.
SHIFTED_CAPTION_PERCENT = {
    "object": 40,  # one of the two objects without its size, in one of OBJECT_TEMPLATES
    "pair": 30,  # both objects without sizes, relation and background
    "full": 20,  # the caption of the normal scene
    "wrong": 10,  # one of the above, in their proportions, for another scene, which has neither object
}

MIN_IMAGE_SIZE = 16
MAX_IMAGE_SIZE = 512

_MARGIN = 0.02
_GAP = 0.04
_OFF_LINE = 0.03
_RING_HOLE = 0.55
_KEY_BITS = 63
MAX_KEY = 2**_KEY_BITS - 1
_CAPTION_DRAWS = 1


def _star() -> list[tuple[float, float]]:
    tips = [(1.05 if i % 2 == 0 else 0.45, math.pi * i / 5) for i in range(10)]
    return [(r * math.sin(angle), 0.07 - r * math.cos(angle)) for r, angle in tips]


def _heart() -> list[tuple[float, float]]:
    points = []
    for i in range(48):
        t = 2 * math.pi * i / 48
        x = 16 * math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((x / 16, -(y + 2.5) / 15.5))
    return points


def _rounded(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    # Sines differ in their last bit between platforms; rounded corners do not.
    return tuple((round(x, 4), round(y, 4)) for x, y in points)


# Corners in units of the object's radius around its centre; None is drawn as an ellipse.
_CORNERS = {
    "circle": None,
    "square": _rounded([(-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)]),
    "triangle": _rounded([(0, -0.95), (1, 0.8), (-1, 0.8)]),
    "star": _rounded(_star()),
    "cross": _rounded(
        [(-0.32, -1), (0.32, -1), (0.32, -0.32), (1, -0.32), (1, 0.32), (0.32, 0.32)]
        + [(0.32, 1), (-0.32, 1), (-0.32, 0.32), (-1, 0.32), (-1, -0.32), (-0.32, -0.32)]
    ),
    "ring": None,
    "diamond": _rounded([(0, -1), (0.72, 0), (0, 1), (-0.72, 0)]),
    "heart": _rounded(_heart()),
}
SHAPES = tuple(_CORNERS)
_KINDS = tuple((shape, colour) for shape in SHAPES for colour in COLOURS)
_CAPTIONS = tuple(kind for kind, percent in SHIFTED_CAPTION_PERCENT.items() for _ in range(percent))
_TRUE_CAPTIONS = tuple(kind for kind in _CAPTIONS if kind != "wrong")


def check_whole(name: str, value: Any, low: int, high: int) -> int:
    """Return `value` as an int; raise ValueError, naming the argument, unless it is a whole number in `low..high`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
    return number


@dataclass(frozen=True)
class SceneObject:
    """One object of a scene.

    `shape`, `colour` and `size` are in `SHAPES`, `COLOURS` and `SIZES`. `x`, `y` are the centre and `radius` is half
    the side of the box around the shape, as fractions of the image's side. A ring shows the background at its centre;
    every other shape has its colour there.
    """

    shape: str
    colour: str
    size: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        """Colour and shape, such as "red circle"; the two objects of a scene have different names."""
        return f"{self.colour} {self.shape}"

    @property
    def phrase(self) -> str:
        """The object in words, such as "a large red circle"."""
        return f"a {self.size} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """The content of a scene: `first` stands in `relation` (a key of `RELATIONS`) to `second`.

    The objects differ in shape or colour and do not overlap. `background` is a key of `BACKGROUNDS` and
    `template` an index into `TEMPLATES`.
    """

    first: SceneObject
    relation: str
    second: SceneObject
    background: str
    template: int

    @property
    def caption(self) -> str:
        """The scene in words."""
        return TEMPLATES[self.template].format(
            first=self.first.phrase,
            relation=RELATIONS[self.relation],
            second=self.second.phrase,
            background=self.background,
        )

    def render(self, image_size: int = 64, shifted: bool = False) -> Image.Image:
        """Draw the scene as an RGB image of `image_size` x `image_size` pixels (16 to 512)."""
        image_size = check_whole("image_size", image_size, MIN_IMAGE_SIZE, MAX_IMAGE_SIZE)
        # Drawn larger and averaged down for smooth edges; large images need a smaller factor.
        factor = 4 if image_size <= 64 else 2
        side = image_size * factor
        colours, backgrounds = (SHIFTED_COLOURS, SHIFTED_BACKGROUNDS) if shifted else (COLOURS, BACKGROUNDS)
        background = backgrounds[self.background]
        image = Image.new("RGB", (side, side), background)
        draw = ImageDraw.Draw(image)
        for thing in (self.first, self.second):
            _draw_object(draw, thing, side, colours[thing.colour], background)
        return image.reduce(factor)


def _draw_object(
    draw: ImageDraw.ImageDraw, thing: SceneObject, side: int, fill: tuple, background: tuple
) -> None:
    # Pixel i covers i..i+1; Pillow's coordinates are those of pixel centres.
    x, y, radius = thing.x * side - 0.5, thing.y * side - 0.5, thing.radius * side
    corners = _CORNERS[thing.shape]
    if corners is not None:
        draw.polygon([(round(x + radius * u), round(y + radius * v)) for u, v in corners], fill=fill)
        return
    draw.ellipse(_box(x, y, radius), fill=fill)
    if thing.shape == "ring":
        draw.ellipse(_box(x, y, radius * _RING_HOLE), fill=background)


def _box(x: float, y: float, radius: float) -> tuple[int, int, int, int]:
    return round(x - radius), round(y - radius), round(x + radius), round(y + radius)


def _draws(seed: int, row: int, purpose: int = 0) -> Callable[[], float]:
    """A generator of numbers in [0, 1) for row `row` of `seed`; different purposes get independent numbers."""
    seed = check_whole("seed", seed, 0, MAX_KEY)
    row = check_whole("row", row, 0, MAX_KEY)
    # random() is the only method whose sequence Python guarantees for a given seed.
    return random.Random((purpose << _KEY_BITS | seed) << _KEY_BITS | row).random


def _pick(options: Any, draw: Callable[[], float]) -> Any:
    return options[int(draw() * len(options))]


def describe_scene(seed: int, row: int) -> Scene:
    """Describe scene `row` of the endless sequence of `seed`, both whole numbers in 0 .. 2**63 - 1.

    The result is the same on every platform and Python version, whatever the global random state.
    """
    draw = _draws(seed, row)
    kind_1 = int(draw() * len(_KINDS))
    kind_2 = int(draw() * (len(_KINDS) - 1))
    kind_2 += kind_2 >= kind_1
    size_1, size_2 = _pick(tuple(SIZES), draw), _pick(tuple(SIZES), draw)
    relation = _pick(tuple(RELATIONS), draw)
    background = _pick(tuple(BACKGROUNDS), draw)
    template = _pick(range(len(TEMPLATES)), draw)
    radius_1, radius_2 = (low + (high - low) * draw() for low, high in (SIZES[size_1], SIZES[size_2]))

    before, after = sorted((draw(), draw()))
    spare = 1 - 2 * (_MARGIN + radius_1 + radius_2) - _GAP
    leading, trailing = (radius_1, radius_2) if relation in ("left", "above") else (radius_2, radius_1)
    along_leading = _MARGIN + before * spare + leading
    along_trailing = along_leading + leading + _GAP + (after - before) * spare + trailing
    edge = _MARGIN + _OFF_LINE + max(radius_1, radius_2)
    line = edge + (1 - 2 * edge) * draw()
    across_1, across_2 = (line + _OFF_LINE * (2 * draw() - 1) for _ in range(2))

    if relation in ("left", "above"):
        along_1, along_2 = along_leading, along_trailing
    else:
        along_1, along_2 = along_trailing, along_leading
    horizontal = relation in ("left", "right")
    place_1 = (along_1, across_1) if horizontal else (across_1, along_1)
    place_2 = (along_2, across_2) if horizontal else (across_2, along_2)
    return Scene(
        first=SceneObject(*_KINDS[kind_1], size_1, *place_1, radius_1),
        relation=relation,
        second=SceneObject(*_KINDS[kind_2], size_2, *place_2, radius_2),
        background=background,
        template=template,
    )


def shifted_caption(seed: int, row: int) -> str:
    """The caption of scene `row` of `seed` in shifted data; arguments and errors as for `describe_scene`.

    `SHIFTED_CAPTION_PERCENT` has the kinds of captions and their proportions. A row's kind does not depend on its
    scene. A wrong caption names no object of the scene.
    """
    scene = describe_scene(seed, row)
    draw = _draws(seed, row, _CAPTION_DRAWS)
    kind = _pick(_CAPTIONS, draw)
    if kind == "wrong":
        kind = _pick(_TRUE_CAPTIONS, draw)
        object_names = {scene.first.name, scene.second.name}
        while not object_names.isdisjoint({scene.first.name, scene.second.name}):
            scene = describe_scene(seed, int(draw() * (MAX_KEY + 1)))
    if kind == "full":
        return scene.caption
    phrases = [_with_article(scene.first.name), _with_article(scene.second.name)]
    if kind == "pair":
        return " and ".join(phrases)
    return _pick(OBJECT_TEMPLATES, draw).format(object=_pick(phrases, draw))


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
