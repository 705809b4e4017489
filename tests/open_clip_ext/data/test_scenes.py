import hashlib
import math
import pickle
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from PIL import Image

from open_clip_ext.data import Scenes
from open_clip_ext.data.scenes import (
    BACKGROUNDS,
    COLOURS,
    RELATIONS,
    SHAPES,
    SHIFTED_BACKGROUNDS,
    SHIFTED_CAPTION_PERCENT,
    SHIFTED_COLOURS,
    SIZES,
    TEMPLATES,
    describe_scene,
    shifted_caption,
)

ROWS = range(300)


def scene_caption(seed, row):
    return describe_scene(seed, row).caption


def render_scene(seed, row, image_size=64, shifted=False):
    return describe_scene(seed, row).render(image_size, shifted)


def digest(seed, rows, image_size=32):
    total = hashlib.sha256()
    for row in rows:
        total.update(scene_caption(seed, row).encode())
        total.update(shifted_caption(seed, row).encode())
        total.update(render_scene(seed, row, image_size).tobytes())
    return total.hexdigest()


def pixel(image, x, y):
    return image.getpixel((int(x * image.width), int(y * image.height)))


def test_descriptions_never_change():
    text = "\n".join(repr(describe_scene(3, row)) for row in range(1000))
    expected = "80c7cc5e522fe41e5b3928124d155bdf61cfd6cba728c43db6fd8eed34f4b710"
    assert hashlib.sha256(text.encode()).hexdigest() == expected


def digest_of_captions(caption):
    return hashlib.sha256("\n".join(caption(3, row) for row in range(1000)).encode()).hexdigest()


def test_captions_never_change():
    expected = "59bbc62a6dad4853e5e8bcf8e1cf457252dce1dc654373239c5937f853a37161"
    assert digest_of_captions(scene_caption) == expected
    expected = "868ae64e53e747641fef6ff5f1879e9ffbb580dffaf57d81056875e31552e16e"
    assert digest_of_captions(shifted_caption) == expected


def test_global_random_state_is_neither_used_nor_changed():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first = digest(0, range(50))
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    assert digest(0, range(50)) == first


def as_tensor(image):
    return torch.from_numpy(np.array(image))


def as_codes(texts):
    return torch.tensor([[ord(letter) for letter in text.ljust(120)] for text in texts])


def test_loader_workers_make_the_same_scenes():
    scenes = Scenes(12, seed=5, image_size=16, transform=as_tensor, tokenizer=as_codes)
    loader = torch.utils.data.DataLoader(scenes, batch_size=4, num_workers=2)
    images, texts = map(torch.cat, zip(*loader, strict=True))
    assert torch.equal(images, torch.stack([scenes[i][0] for i in range(12)]))
    assert torch.equal(texts, torch.stack([scenes[i][1] for i in range(12)]))


def test_seeds_and_rows_give_different_scenes():
    captions = {scene_caption(seed, row) for seed in range(20) for row in range(20)}
    assert len(captions) > 390


def test_over_100_000_captions():
    drawn = [scene_caption(0, row) for row in range(20_000)]
    # Of N equally likely captions, 20,000 draws repeat about 20,000**2 / 2N: 2,000 where N is 100,000.
    assert len(drawn) - len(set(drawn)) < 1_000


@pytest.mark.parametrize(
    ("name", "words"),
    [("colour", COLOURS), ("shape", SHAPES), ("size", SIZES)],
)
def test_every_attribute_occurs_about_equally_often(name, words):
    scenes = [describe_scene(1, row) for row in range(4000)]
    for side in ("first", "second"):
        drawn = [getattr(getattr(scene, side), name) for scene in scenes]
        for word in words:
            assert 0.75 < drawn.count(word) * len(words) / len(drawn) < 1.25


@pytest.mark.parametrize(
    ("name", "values"),
    [("relation", RELATIONS), ("background", BACKGROUNDS), ("template", range(len(TEMPLATES)))],
)
def test_every_relation_background_and_template_occurs_about_equally_often(name, values):
    drawn = [getattr(describe_scene(1, row), name) for row in range(4000)]
    for value in values:
        assert 0.75 < drawn.count(value) * len(values) / len(drawn) < 1.25


def test_caption_says_what_the_description_says():
    for row in ROWS:
        scene = describe_scene(2, row)
        first, second = (f"a {o.size} {o.colour} {o.shape}" for o in (scene.first, scene.second))
        relation = {
            "left": "to the left of",
            "right": "to the right of",
            "above": "above",
            "below": "below",
        }[scene.relation]
        caption = scene_caption(2, row)
        assert f"{first} {relation} {second}" in caption or f"{first} is {relation} {second}" in caption
        assert f" a {scene.background} background" in caption


def test_relation_matches_the_places():
    steps = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}
    for row in range(3000):
        scene = describe_scene(2, row)
        dx, dy = scene.first.x - scene.second.x, scene.first.y - scene.second.y
        step_x, step_y = steps[scene.relation]
        along, across = dx * step_x + dy * step_y, abs(dx * step_y + dy * step_x)
        assert along > scene.first.radius + scene.second.radius
        assert along > 3 * across


def test_objects_differ_and_lie_inside_the_image():
    for row in range(3000):
        scene = describe_scene(2, row)
        assert (scene.first.shape, scene.first.colour) != (scene.second.shape, scene.second.colour)
        for thing in (scene.first, scene.second):
            assert thing.radius < thing.x < 1 - thing.radius
            assert thing.radius < thing.y < 1 - thing.radius


def test_large_is_larger_than_small():
    radii = {"small": [], "large": []}
    for row in ROWS:
        thing = describe_scene(2, row).first
        radii[thing.size].append(thing.radius)
    assert min(radii["large"]) > 1.5 * max(radii["small"])


@pytest.mark.parametrize(
    ("shifted", "colours", "backgrounds"),
    [(False, COLOURS, BACKGROUNDS), (True, SHIFTED_COLOURS, SHIFTED_BACKGROUNDS)],
)
@pytest.mark.parametrize("image_size", [32, 64, 224])
def test_pixels_have_the_colours_of_the_description(image_size, shifted, colours, backgrounds):
    for row in range(150):
        scene = describe_scene(4, row)
        image = render_scene(4, row, image_size, shifted)
        assert image.tobytes() == scene.render(image_size, shifted=shifted).tobytes()
        for thing in (scene.first, scene.second):
            at_centre = pixel(image, thing.x, thing.y)
            if thing.shape == "ring":
                assert at_centre == backgrounds[scene.background]
                if image_size >= 64:
                    assert pixel(image, thing.x + 0.78 * thing.radius, thing.y) == colours[thing.colour]
            else:
                assert at_centre == colours[thing.colour]
        assert image.getpixel((0, 0)) == backgrounds[scene.background]


def test_drawn_objects_fill_their_boxes_and_nothing_else():
    for row in range(60):
        scene = describe_scene(6, row)
        pixels = np.array(render_scene(6, row, 256))
        outside = np.ones(pixels.shape[:2], dtype=bool)
        for thing in (scene.first, scene.second):
            left, right = (256 * (thing.x + side * thing.radius) for side in (-1.06, 1.06))
            top, bottom = (256 * (thing.y + side * thing.radius) for side in (-1.06, 1.06))
            box = np.s_[int(top) : int(bottom) + 2, int(left) : int(right) + 2]
            outside[box] = False
            own = (pixels[box] == COLOURS[thing.colour]).all(axis=2)
            assert own.sum() > 0.9 * (256 * thing.radius) ** 2
            assert own.any(axis=1).sum() > 1.6 * 256 * thing.radius
        assert (pixels[outside] == BACKGROUNDS[scene.background]).all()


def test_shapes_look_different_from_each_other():
    scene = describe_scene(0, 0)
    drawn = [replace(scene, first=replace(scene.first, shape=shape)).render(64) for shape in SHAPES]
    assert len({image.tobytes() for image in drawn}) == len(SHAPES)


@pytest.mark.parametrize("palettes", [(COLOURS, BACKGROUNDS), (SHIFTED_COLOURS, SHIFTED_BACKGROUNDS)])
def test_colours_are_far_apart(palettes):
    for one, other in combinations([rgb for palette in palettes for rgb in palette.values()], 2):
        assert math.dist(one, other) > 60


@pytest.mark.parametrize(
    ("palette", "shifted"), [(COLOURS, SHIFTED_COLOURS), (BACKGROUNDS, SHIFTED_BACKGROUNDS)]
)
def test_every_shifted_colour_is_another_of_the_same_name(palette, shifted):
    assert list(shifted) == list(palette)
    for name, rgb in shifted.items():
        assert all(0 <= value <= 255 for value in rgb)
        assert math.dist(rgb, palette[name]) > 40


NAMES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)


def test_names_are_of_the_objects_of_the_caption():
    for row in ROWS:
        scene = describe_scene(2, row)
        named = [name for name in NAMES if name in scene.caption]
        first, second = scene.first.name, scene.second.name
        assert first != second and sorted((first, second)) == sorted(named)
        assert scene.caption.index(first) < scene.caption.index(second)


def kind_of(seed, row):
    """The kind of a shifted caption, told from its words and its scene."""
    scene, caption = describe_scene(seed, row), shifted_caption(seed, row)
    shown = [scene.first.name, scene.second.name]
    named = [name for name in NAMES if name in caption]
    if "background" in caption:
        kind, right = "full", caption == scene.caption
    elif re.fullmatch(r"an? \w+ \w+ and an? \w+ \w+", caption):
        kind, right = "pair", named == sorted(shown, key=NAMES.index)
    else:
        assert re.fullmatch(r"(photo of |picture of |this is )?an? \w+ \w+", caption)
        kind, right = "object", len(named) == 1 and named[0] in shown
    if not right:
        assert named and not set(named) & set(shown)
    return kind, right


def test_kinds_of_shifted_captions_have_their_proportions():
    assert sum(SHIFTED_CAPTION_PERCENT.values()) == 100
    count, percent = 6000, dict(SHIFTED_CAPTION_PERCENT)
    drawn = Counter(kind_of(7, row) for row in range(count))
    wrong = percent.pop("wrong")
    for kind, share in percent.items():
        assert abs(100 * drawn[kind, True] / count - share) < 2.5
        # The wrong ones come in the same forms, in proportion.
        assert abs(100 * drawn[kind, False] / count - wrong * share / (100 - wrong)) < 1.5
    assert sum(drawn[kind, False] for kind in percent) / count == pytest.approx(wrong / 100, abs=0.015)


def test_the_kind_does_not_depend_on_the_scene():
    rows = {}
    for row in range(6000):
        scene = describe_scene(7, row)
        rows.setdefault(("shape", scene.first.shape), []).append(row)
        rows.setdefault(("background", scene.background), []).append(row)
    for some in rows.values():
        full = sum(kind_of(7, row) == ("full", True) for row in some)
        assert abs(100 * full / len(some) - SHIFTED_CAPTION_PERCENT["full"]) < 6


def test_short_captions_name_either_object_in_every_form():
    sides, starts = Counter(), Counter()
    for row in range(2000):
        if kind_of(1, row) == ("object", True):
            caption = shifted_caption(1, row)
            sides[caption.endswith(describe_scene(1, row).first.name)] += 1
            starts[caption.split()[0].replace("an", "a")] += 1
            assert (" an " in f" {caption}") == ("orange" in caption)
    total = sum(sides.values())
    assert 0.4 < sides[True] / total < 0.6
    assert set(starts) == {"a", "photo", "picture", "this"}
    assert all(0.18 < number / total < 0.32 for number in starts.values())


def test_shifted_captions_often_fit_many_images():
    normal, shifted = (len({f(0, row) for row in range(4000)}) for f in (scene_caption, shifted_caption))
    assert normal > 3900 and shifted < 2600


def test_rows_and_seeds_give_different_shifted_captions():
    assert len({shifted_caption(0, row) for row in range(40)}) > 30
    assert len({shifted_caption(seed, 0) for seed in range(40)}) > 30


@pytest.mark.parametrize("image_size", [16, 17, 50, 64, 65, 224, 512])
def test_image_size(image_size):
    image = render_scene(0, 1, image_size)
    assert image.mode == "RGB"
    assert image.size == (image_size, image_size)
    assert len(image.getcolors(maxcolors=512**2)) >= 3


def test_a_scene_looks_the_same_at_any_size():
    for row in range(20):
        small = np.array(render_scene(0, row, 64), dtype=float)
        large = np.array(render_scene(0, row, 256).resize((64, 64), Image.Resampling.BOX), dtype=float)
        assert abs(small - large).mean() < 3


def test_same_caption_different_image():
    seen = {}
    for row in range(20_000):
        scene = describe_scene(0, row)
        if scene.caption in seen:
            assert scene.render(64).tobytes() != seen[scene.caption].render(64).tobytes()
            return
        seen[scene.caption] = scene
    pytest.fail("no caption came twice")


def test_items_are_the_rows():
    scenes = Scenes(5, seed=9, image_size=20, first_row=100)
    assert len(scenes) == 5
    items = list(scenes)
    assert len(items) == 5
    for i, (image, caption) in enumerate(items):
        assert caption == scene_caption(9, 100 + i)
        assert image.tobytes() == render_scene(9, 100 + i, 20).tobytes()
    assert scenes[-1][1] == items[-1][1]
    assert scenes[np.int64(2)][1] == items[2][1]
    for i in (5, -6):
        with pytest.raises(IndexError, match=str(i)):
            scenes[i]


def test_shifted_items_are_the_shifted_rows():
    normal, shifted = (Scenes(40, seed=9, image_size=20, first_row=100, shifted=s) for s in (False, True))
    for i in range(-40, 40):
        row = 100 + i % 40
        image, caption = shifted[i]
        assert caption == shifted_caption(9, row)
        assert image.tobytes() == render_scene(9, row, 20, shifted=True).tobytes()
        assert image.tobytes() != normal[i][0].tobytes()
        assert normal[i][1] == scene_caption(9, row)
        assert shifted.scene(i) == normal.scene(i) == describe_scene(9, row)
    for i in (40, -41):
        with pytest.raises(IndexError, match=str(i)):
            shifted.scene(i)
    again = pickle.loads(pickle.dumps(shifted))
    assert again[3][1] == shifted[3][1] and again[3][0].tobytes() == shifted[3][0].tobytes()


def test_later_rows_are_held_out():
    everything, later = Scenes(8), Scenes(4, first_row=4)
    assert [later[i][1] for i in range(4)] == [everything[i][1] for i in range(4, 8)]


def test_transform_and_tokenizer():
    def shout(texts):
        return [text.upper() for text in texts]

    scenes = Scenes(2, transform=lambda image: image.size, tokenizer=shout)
    assert scenes[1] == ((64, 64), scene_caption(0, 1).upper())


def test_scenes_can_be_pickled():
    scenes = pickle.loads(pickle.dumps(Scenes(3, seed=2, transform=as_tensor, tokenizer=as_codes)))
    assert torch.equal(scenes[2][0], as_tensor(render_scene(2, 2)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_samples", 0),
        ("num_samples", 2.5),
        ("num_samples", True),
        ("num_samples", 2**63),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", "0"),
        ("image_size", 15),
        ("image_size", 513),
        ("image_size", None),
        ("first_row", -1),
        ("first_row", 2**63),
    ],
)
def test_wrong_arguments(name, value):
    with pytest.raises(ValueError) as caught:
        Scenes(**{"num_samples": 4, name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} must be ") and message.endswith(f"got {value!r}")
    assert "\n" not in message


def test_wrong_arguments_of_functions():
    with pytest.raises(ValueError, match="image_size .*got 8"):
        render_scene(0, 0, 8)
    with pytest.raises(ValueError, match="row .*got -1"):
        scene_caption(0, -1)
    with pytest.raises(ValueError, match="row .*got 1.5"):
        shifted_caption(0, 1.5)
    with pytest.raises(ValueError, match="seed .*got -1"):
        shifted_caption(-1, 0)
    with pytest.raises(ValueError, match="image_size .*got 513"):
        describe_scene(0, 0).render(513, shifted=True)
    with pytest.raises(ValueError, match="seed .*got 0.5"):
        render_scene(0.5, 0)


def test_numpy_numbers_and_the_largest_numbers():
    assert scene_caption(np.int64(5), np.int64(6)) == scene_caption(5, 6)
    assert shifted_caption(np.int64(5), np.int64(6)) == shifted_caption(5, 6)
    assert shifted_caption(2**63 - 1, 2**63 - 1)
    assert scene_caption(2**63 - 1, 2**63 - 1) != scene_caption(2**63 - 1, 2**63 - 2)
