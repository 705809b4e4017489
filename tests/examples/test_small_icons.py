"""examples/data/small_icons: the pairs, and that no gallery has a near duplicate elsewhere."""

import json
import zipfile

import pytest
from icon_pairs import reduced
from icons import Icon, Icons
from make_shards import main as make_shards
from small_icons import split_small_icons

from training_ext.data.tars import read_samples

pytest.importorskip("webdataset")
pytest.importorskip("resvg_py")

ICONS = "material/templates/.icons"


def drawing(number: int, note: str = "") -> str:
    """Black squares of a 4 x 4 board; another picture for every number below 65,536."""
    squares = "".join(f"M{bit % 4 * 4} {bit // 4 * 4}h4v4h-4z" for bit in range(16) if number >> bit & 1)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">{note}<path d="{squares}"/></svg>'


@pytest.fixture
def wheel(tmp_path):
    """Forty icons; one of a brand, one that is blank, two that are equal, and two captions that are equal."""
    path = tmp_path / "mkdocs_material.whl"
    with zipfile.ZipFile(path, "w") as file:
        for number in range(1, 37):
            file.writestr(f"{ICONS}/material/thing-{number}.svg", drawing(number * 1729))
        file.writestr(f"{ICONS}/material/sun-outline.svg", drawing(77))
        file.writestr(f"{ICONS}/octicons/bell-fill-24.svg", drawing(78))
        file.writestr(f"{ICONS}/octicons/bell-fill-16.svg", drawing(79))
        file.writestr(f"{ICONS}/fontawesome/solid/house.svg", drawing(80, "<!--! Font Awesome -->"))
        file.writestr(f"{ICONS}/fontawesome/regular/house.svg", drawing(80))
        file.writestr(f"{ICONS}/simple/brand.svg", drawing(81))
        file.writestr(f"{ICONS}/material/nothing.svg", drawing(0))
    return path


def pairs(path) -> dict[str, tuple[bytes, str]]:
    return {sample["__key__"]: (sample["png"], sample["txt"].decode()) for sample in read_samples(str(path))}


def test_pairs_and_splits(wheel, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(split_small_icons, "__defaults__", (4, 6))
    out = tmp_path / "shards"
    assert make_shards(["small-icons", "--wheel", str(wheel), "--out", str(out)]) == 0
    assert "left out: 1 blank or not plain SVG, 1 the same picture as another" in capsys.readouterr().out
    assert list(json.loads((out / "sizes.json").read_text()).values()) == [30, 4, 6]
    train, val, test = (pairs(out / f"{split}-000000.tar") for split in ("train", "val", "test"))
    every = train | val | test
    assert len(every) == 40
    assert "outlined sun icon" in every["material_sun-outline"][1]
    looks, captions = ([value(pair) for pair in every.values()] for value in (lambda p: reduced(p[0]), lambda p: p[1]))
    for picture, caption in (val | test).values():
        assert looks.count(reduced(picture)) == captions.count(caption) == 1


def test_an_icon_shows_the_concept_that_its_name_begins_with():
    names = ("calendar alert", "arrow down bold box", "light bulb on", "sun", "grid sun", "calendars", "house lock",
             "chart pie bold")
    icons = [Icon(name, "set", name, name, 0.0, name.encode(), 0, 0, name.encode()) for name in names]
    concepts = split_small_icons(Icons(icons=icons)).concepts
    assert {concept: [icon.name for icon in shown] for concept, shown in concepts.items()} == {
        "calendar": ["calendar alert"],
        "down arrow": ["arrow down bold box"],
        "light bulb": ["light bulb on"],
        "home": ["house lock"],
        "pie chart": ["chart pie bold"],  # "chart" alone is a bar chart
        "sun": ["sun"],
    }


@pytest.mark.parametrize("content", [b"no wheel", None])
def test_what_is_no_wheel_ends_in_one_line(content, tmp_path, capsys):
    path = tmp_path / "some.whl"
    if content:
        path.write_bytes(content)
    else:
        zipfile.ZipFile(path, "w").close()
    with pytest.raises(SystemExit):
        make_shards(["small-icons", "--wheel", str(path), "--out", str(tmp_path / "out")])
    assert "make_shards: argument --wheel: " in capsys.readouterr().err
