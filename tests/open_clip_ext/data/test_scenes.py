"""Generated scenes: the same everywhere and for ever, drawn as they are described."""

import hashlib
import pickle
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from open_clip_ext.data import Scenes
from open_clip_ext.data.scenes import (
    BACKGROUNDS,
    COLOURS,
    RELATIONS,
    SHAPES,
    SHIFTED_BACKGROUNDS,
    SHIFTED_CAPTION_PERCENT,
    SHIFTED_COLOURS,
    describe_scene,
    shifted_caption,
)


def caption(seed, row):
    return describe_scene(seed, row).caption


@pytest.mark.parametrize(
    "of, digest",
    [
        (lambda row: repr(describe_scene(3, row)), "80c7cc5e522fe41e5b3928124d155bdf61cfd6cba728c43db6fd8eed34f4b710"),
        (lambda row: caption(3, row), "59bbc62a6dad4853e5e8bcf8e1cf457252dce1dc654373239c5937f853a37161"),
        (lambda row: shifted_caption(3, row), "868ae64e53e747641fef6ff5f1879e9ffbb580dffaf57d81056875e31552e16e"),
    ],
    ids=["descriptions", "captions", "shifted captions"],
)
def test_scenes_never_change_whatever_the_global_generator(of, digest):
    random.seed(1)
    before = random.getstate()
    assert hashlib.sha256("\n".join(map(of, range(1000))).encode()).hexdigest() == digest
    assert random.getstate() == before


def test_a_description_is_a_scene_that_the_caption_tells():
    """Two objects that differ, inside the picture, apart along their relation."""
    steps = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}
    for row in range(1000):
        scene = describe_scene(2, row)
        first, second = scene.first, scene.second
        dx, dy = first.x - second.x, first.y - second.y
        step_x, step_y = steps[scene.relation]
        along, across = dx * step_x + dy * step_y, abs(dx * step_y + dy * step_x)
        assert along > first.radius + second.radius and along > 3 * across
        assert all(t.radius < t.x < 1 - t.radius and t.radius < t.y < 1 - t.radius for t in (first, second))
        assert first.name != second.name
        a, b = (f"a {t.size} {t.colour} {t.shape}" for t in (first, second))
        assert re.search(f"{a} (is )?{RELATIONS[scene.relation]} {b}.* background|background, {a} is", scene.caption)
        assert f" a {scene.background} background" in scene.caption


def test_kinds_of_shifted_captions_have_their_proportions():
    names = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    count, percent, found = 4000, dict(SHIFTED_CAPTION_PERCENT), dict.fromkeys(SHIFTED_CAPTION_PERCENT, 0)
    for row in range(count):
        scene, text = describe_scene(7, row), shifted_caption(7, row)
        named, shown = {name for name in names if name in text}, {scene.first.name, scene.second.name}
        kind = "full" if text == scene.caption else ("object", "pair")[len(named) - 1] if named <= shown else "wrong"
        assert kind != "wrong" or not named & shown
        found[kind] += 1
    assert all(abs(100 * found[kind] / count - percent[kind]) < 2.5 for kind in percent)


@pytest.mark.parametrize("image_size", [32, 64, 224])
@pytest.mark.parametrize("shifted", [False, True])
def test_pixels_have_the_colours_of_the_description(image_size, shifted):
    colours, backgrounds = (SHIFTED_COLOURS, SHIFTED_BACKGROUNDS) if shifted else (COLOURS, BACKGROUNDS)
    for row in range(50):
        scene = describe_scene(4, row)
        image = scene.render(image_size, shifted)
        assert image.mode == "RGB" and image.size == (image_size, image_size)
        background = backgrounds[scene.background]
        assert image.getpixel((0, 0)) == background
        for thing in (scene.first, scene.second):
            colour = background if thing.shape == "ring" else colours[thing.colour]
            assert image.getpixel((int(thing.x * image_size), int(thing.y * image_size))) == colour


def test_objects_fill_their_boxes_and_nothing_else_and_no_two_shapes_look_alike():
    for row in range(60):
        scene = describe_scene(6, row)
        pixels = np.array(scene.render(256))
        outside = np.ones(pixels.shape[:2], dtype=bool)
        for thing in (scene.first, scene.second):
            left, right = (256 * (thing.x + side * thing.radius) for side in (-1.06, 1.06))
            top, bottom = (256 * (thing.y + side * thing.radius) for side in (-1.06, 1.06))
            box = np.s_[int(top) : int(bottom) + 2, int(left) : int(right) + 2]
            outside[box] = False
            own = (pixels[box] == COLOURS[thing.colour]).all(axis=2)
            assert own.sum() > 0.9 * (256 * thing.radius) ** 2 and own.any(axis=1).sum() > 1.6 * 256 * thing.radius
        assert (pixels[outside] == BACKGROUNDS[scene.background]).all()
    drawn = {replace(scene, first=replace(scene.first, shape=shape)).render(64).tobytes() for shape in SHAPES}
    assert len(drawn) == len(SHAPES)


def as_tensor(image):
    return torch.from_numpy(np.array(image))


def as_codes(texts):
    return torch.tensor([[ord(letter) for letter in text.ljust(120)] for text in texts])


@pytest.mark.parametrize("shifted", [False, True])
def test_items_are_the_rows(shifted):
    scenes = Scenes(5, seed=9, image_size=20, first_row=100, shifted=shifted)
    assert len(scenes) == len(list(scenes)) == 5
    for i in (*range(-5, 5), np.int64(2)):
        image, text = scenes[i]
        row = 100 + int(i) % 5
        assert scenes.scene(i) == describe_scene(9, row)
        assert image.tobytes() == describe_scene(9, row).render(20, shifted).tobytes()
        assert text == (shifted_caption if shifted else caption)(9, row)
    for i in (5, -6):
        with pytest.raises(IndexError, match=str(i)):
            scenes[i]
    told = pickle.loads(pickle.dumps(Scenes(3, seed=2, shifted=shifted, transform=as_tensor, tokenizer=as_codes)))[2]
    plain = Scenes(3, seed=2, shifted=shifted)[2]
    assert torch.equal(told[0], as_tensor(plain[0])) and torch.equal(told[1], as_codes([plain[1]])[0])


@pytest.mark.parametrize(
    "wrong, name",
    [
        (lambda: Scenes(0), "num_samples"), (lambda: Scenes(2.5), "num_samples"), (lambda: Scenes(True), "num_samples"),
        (lambda: Scenes(4, first_row=2**63 - 4), "num_samples"), (lambda: Scenes(4, seed=-1), "seed"),
        (lambda: Scenes(4, seed="0"), "seed"), (lambda: Scenes(4, image_size=15), "image_size"),
        (lambda: Scenes(4, image_size=513), "image_size"), (lambda: Scenes(4, first_row=-1), "first_row"),
        (lambda: describe_scene(0, 0).render(513), "image_size"), (lambda: describe_scene(0, 1.5), "row"),
        (lambda: shifted_caption(2**63, 0), "seed"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(wrong, name):
    with pytest.raises(ValueError, match=f"^{name} must be a whole number .*, got "):
        wrong()
    assert shifted_caption(2**63 - 1, 2**63 - 1)  # the largest numbers
