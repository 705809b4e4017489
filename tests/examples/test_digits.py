"""The scanned digits: always the same captions, and images that show the scans."""

import hashlib
import random
import sys

import numpy as np
import pytest
from digits import NUM_DIGITS, digit_pairs

sklearn_datasets = pytest.importorskip("sklearn.datasets")


@pytest.fixture(scope="module")
def pairs():
    return list(digit_pairs(16))


def test_captions_never_change_and_labels_are_the_scans(pairs):
    random.seed(5)
    state = random.getstate()
    assert [label for *_, label in digit_pairs(16)] == sklearn_datasets.load_digits().target.tolist()
    assert random.getstate() == state and len(pairs) == NUM_DIGITS
    digest = hashlib.sha256("\n".join(caption for _, caption, _ in pairs).encode()).hexdigest()
    assert digest == "a1ba370451b106987270646e87ed6bf2c665fc44852ea2702d7e66915400632e"
    assert pairs[0][1:] == ("a handwritten 0 with thin strokes, leaning right", 0)


def test_images_show_the_scans_dark_on_white():
    scans = sklearn_datasets.load_digits().images
    for i, (image, _, _) in enumerate(digit_pairs(80, range(20))):
        pixels = np.array(image)
        assert image.mode == "RGB" and image.size == (80, 80)
        assert pixels.max() == 255 and pixels.min() < 40 and (pixels == pixels[..., :1]).all()
        cells = 255 - pixels[..., 0].reshape(10, 8, 10, 8).mean(axis=(1, 3))
        assert np.corrcoef(cells[1:9, 1:9].ravel(), scans[i].ravel())[0, 1] > 0.95
        assert cells[0, 0] < 20


def test_rows_in_the_order_wanted(pairs):
    found = list(digit_pairs(16, [1796, 3, 3]))
    for (image, *rest), row in zip(found, (1796, 3, 3), strict=True):
        assert rest == list(pairs[row][1:]) and image.tobytes() == pairs[row][0].tobytes()


def test_wrong_arguments_are_told_at_once(monkeypatch):
    with pytest.raises(ValueError, match=r"^image_size must be .* got 15$"):
        digit_pairs(15)
    with pytest.raises(ValueError, match=r"^rows must be .* got 1797$"):
        digit_pairs(16, [0, NUM_DIGITS])
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install open-clip-ext\[data\]"):
        digit_pairs()
