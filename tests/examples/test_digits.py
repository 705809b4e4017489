import random
import sys

import numpy as np
import pytest
from digits import NUM_DIGITS, WORDS, digit_pairs

sklearn_datasets = pytest.importorskip("sklearn.datasets")


@pytest.fixture(scope="module")
def bunch():
    return sklearn_datasets.load_digits()


@pytest.fixture(scope="module")
def pairs():
    return list(digit_pairs(16))


def words_of(caption):
    return caption.replace(",", "").split()


def test_every_scan_once_with_its_label(pairs, bunch):
    assert len(pairs) == NUM_DIGITS == len(bunch.target)
    assert [label for _, _, label in pairs] == bunch.target.tolist()


def test_caption_names_the_digit_and_no_other(pairs):
    names = {word: digit for digit, word in enumerate(WORDS)} | {str(digit): digit for digit in range(10)}
    for _, caption, label in pairs:
        assert [names[word] for word in words_of(caption) if word in names] == [label]


def test_captions_are_varied(pairs):
    captions = [caption for _, caption, _ in pairs]
    assert len(set(captions)) > 500
    numerals = sum(any(letter.isdigit() for letter in caption) for caption in captions)
    assert 0.4 < numerals / len(captions) < 0.6


def test_bold_has_more_ink_than_regular_and_regular_than_thin(pairs, bunch):
    ink = bunch.images.sum(axis=(1, 2))
    for digit in range(10):
        groups = {"thin": [], "regular": [], "bold": []}
        for i in np.flatnonzero(bunch.target == digit):
            (weight,) = [word for word in words_of(pairs[i][1]) if word in groups]
            groups[weight].append(ink[i])
        assert max(groups["thin"]) < min(groups["regular"])
        assert max(groups["regular"]) < min(groups["bold"])
        for group in groups.values():
            assert 0.25 < len(group) / sum(map(len, groups.values())) < 0.45


def test_lean_follows_the_slant(pairs, bunch):
    # The slope of the least-squares line through the ink, as columns to the right per row upwards.
    slants = []
    for scan in bunch.images:
        y, x = np.nonzero(scan)
        slants.append(-np.polyfit(y, x, 1, w=np.sqrt(scan[y, x]))[0])
    slants = np.array(slants)
    for digit in range(10):
        groups = {"leaning left": [], "upright": [], "leaning right": []}
        for i in np.flatnonzero(bunch.target == digit):
            (lean,) = [lean for lean in groups if lean in pairs[i][1]]
            groups[lean].append(slants[i])
        assert max(groups["leaning left"]) < min(groups["upright"])
        assert max(groups["upright"]) < min(groups["leaning right"])
        assert min(map(len, groups.values())) >= 10


def test_images_show_the_scans_dark_on_white(bunch):
    for i, (image, _, _) in enumerate(digit_pairs(80, range(20))):
        pixels = np.array(image)
        assert pixels.max() == 255 and pixels.min() < 40
        assert (pixels == pixels[..., :1]).all()
        cells = 255 - pixels[..., 0].reshape(10, 8, 10, 8).mean(axis=(1, 3))
        assert np.corrcoef(cells[1:9, 1:9].ravel(), bunch.images[i].ravel())[0, 1] > 0.95
        assert cells[0, 0] < 20


@pytest.mark.parametrize("image_size", [16, 33, 512])
def test_image_size(image_size):
    image, _, _ = next(digit_pairs(image_size))
    assert image.mode == "RGB"
    assert image.size == (image_size, image_size)


def test_same_every_time_whatever_the_global_seeds(pairs):
    random.seed(5), np.random.seed(5)
    state = random.getstate()
    for (image, *rest), (image_again, *rest_again) in zip(pairs, digit_pairs(16), strict=True):
        assert image.tobytes() == image_again.tobytes()
        assert rest == rest_again
    assert random.getstate() == state


def test_rows_in_the_order_wanted(pairs):
    got = list(digit_pairs(16, [1796, 3, 3]))
    assert [caption for _, caption, _ in got] == [pairs[i][1] for i in (1796, 3, 3)]
    assert [image.tobytes() for image, _, _ in got] == [pairs[i][0].tobytes() for i in (1796, 3, 3)]


def test_wrong_arguments_are_told_at_once():
    with pytest.raises(ValueError, match=r"^image_size must be .* got 15$"):
        digit_pairs(15)
    with pytest.raises(ValueError, match=r"^rows must be .* got 1797$"):
        digit_pairs(16, [0, NUM_DIGITS])


def test_missing_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError) as caught:
        digit_pairs()
    assert "pip install open-clip-ext[data]" in str(caught.value)
    assert "\n" not in str(caught.value)
