"""The page of samples with the largest and smallest temperatures."""

import base64
import io
import re
from html import unescape

import pytest
import torch
from conftest import LOSSES
from PIL import Image

from open_clip_ext.data import Scenes
from training_ext.features import temperature_sheet
from training_ext.features.temperature_sheet import FILE, SHOWN, THUMBNAIL

PICTURE = r"(<img src='data:image/png;base64,([^']+)' alt=''>)?"
FIGURE = re.compile(rf"<figure>{PICTURE}<figcaption><b>(\S+)</b> row (\d+)<br>(.*?)<")


@pytest.mark.parametrize("data", ["shapes", "shards"])
def test_the_page_shows_the_right_samples(run, datasets, data):
    experiment = run("x", f"{datasets[data]} {LOSSES['isogclr']} --epochs 2 --workers 0 --lr 1e-3")
    page = (experiment.path / FILE).read_text()
    assert FILE in experiment.log
    taus = experiment.checkpoint(2)["optimizer"]["open_clip_ext"]["state"]["temperature.tau"]
    size = THUMBNAIL if data == "shapes" else 48  # scenes are drawn, and files have their own size
    scenes = Scenes(48, image_size=size)
    sections = page.split("<h2>")[1:]
    assert [section.split("<")[0] for section in sections] == [
        "The largest of images", "The smallest of images", "The largest of texts", "The smallest of texts",
    ]
    for number, section in enumerate(sections):
        figures = FIGURE.findall(section)
        assert len(figures) == SHOWN
        own = taus[:, number // 2]
        values = own.sort(descending=number % 2 == 0).values[:SHOWN]
        for (_, picture, tau, row, caption), value in zip(figures, values, strict=True):
            image, text = scenes[int(row)]
            assert float(tau) == pytest.approx(value.item(), rel=1e-3) == pytest.approx(own[int(row)].item(), rel=1e-3)
            assert unescape(caption) == text
            shown = Image.open(io.BytesIO(base64.b64decode(picture)))
            assert shown.size == (size, size) and shown.convert("RGB").tobytes() == image.tobytes()


def test_only_at_the_end_and_for_individual_temperatures(run, datasets):
    experiment = run("x", f"{datasets['shapes']} {LOSSES['sogclr']} --epochs 1 --workers 0 --lr 1e-3")
    assert not (experiment.path / FILE).exists()


def test_captions_are_text_and_pictures_may_fail(tmp_path, run, datasets, monkeypatch):
    """Synthetic data have none to show; and whatever goes wrong, the training has its checkpoint."""
    experiment = run("a", f"{datasets['synthetic']} {LOSSES['isogclr']} --epochs 1 --workers 0 --lr 1e-3")
    page = (experiment.path / FILE).read_text()
    assert page.count("(cannot be shown)") == 4 * SHOWN and "<img" not in page

    def fails(*args):
        raise OSError("no space <left>")

    monkeypatch.setattr(temperature_sheet, "write_sheet", fails)
    experiment = run("b", f"{datasets['shapes']} {LOSSES['isogclr']} --epochs 1 --workers 0 --lr 1e-3")
    assert "The page of temperatures was not written: OSError('no space <left>')" in experiment.log
    assert torch.is_tensor(experiment.checkpoint(1)["state_dict"]["logit_scale"])
