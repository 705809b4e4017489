"""The small evaluation folder: its forms, and what is in them."""

import csv
import io
import json
import tarfile

import numpy as np
import pytest
from make_shards import main as make_shards
from PIL import Image

from open_clip_ext.data.scenes import COLOURS

ARGUMENTS = "evalset --num-samples 24 --samples-per-shard 10 --image-size 48 --seed 5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evalset") / "data"
    assert not make_shards([*ARGUMENTS.split(), "--out", str(folder)])
    return folder


def samples(folder) -> dict[str, dict[str, bytes]]:
    found: dict[str, dict[str, bytes]] = {}
    for shard in range(int((folder / "test" / "nshards.txt").read_text())):
        with tarfile.open(folder / "test" / f"{shard}.tar") as tar:
            for member in tar:
                key, _, extension = member.name.partition(".")
                found.setdefault(key, {})[extension] = tar.extractfile(member).read()
    return found


def test_the_forms(folder):
    table = json.loads((folder / "tasks.json").read_text())
    assert table["name"] == "evalset" and len(table["tasks"]) == 9
    assert {task["size"] for task in table["tasks"]} == {24, 6}
    for name, members, kind in (
        ("background", {"png", "cls"}, None), ("colour", {"png", "cls", "npy"}, None),
        ("colours", {"png", "npy"}, "multilabel"), ("retrieval", {"png", "txt"}, "retrieval"),
    ):
        place = folder / f"wds_evalset-{name}_test"
        found = samples(place)
        assert len(found) == 24 and all(set(one) == members for one in found.values())
        assert (place / "test" / "nshards.txt").read_text() == "3\n"
        type_file = place / "dataset_type.txt"
        assert (type_file.read_text().strip() if type_file.exists() else None) == kind
    assert len({one["txt"] for one in found.values()}) == 24
    assert all(len(one["txt"].decode().splitlines()) == 2 for one in found.values())


def test_labels_are_what_is_to_be_seen(folder):
    """The objects of a picture are of the class's colour, and of no other's."""
    names = (folder / "wds_evalset-colour_test" / "classnames.txt").read_text().split()
    for sample in samples(folder / "wds_evalset-colour_test").values():
        with Image.open(io.BytesIO(sample["png"])) as picture:
            counts = {colour: count for count, colour in picture.getcolors(1 << 16)}
        seen = {name for name, colour in COLOURS.items() if counts.get(colour, 0) > 20}
        assert seen == {names[int(sample["cls"])]}
    for sample in samples(folder / "wds_evalset-colours_test").values():
        with Image.open(io.BytesIO(sample["png"])) as picture:
            counts = {colour: count for count, colour in picture.getcolors(1 << 16)}
        labels = np.load(io.BytesIO(sample["npy"]), allow_pickle=False)
        seen = {name for name, colour in COLOURS.items() if counts.get(colour, 0) > 10}
        assert seen == {name for name, label in zip(names, labels, strict=True) if label}


def test_associations(folder):
    place = folder / "evalset-association"
    with open(place / "winogavil_dataset.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [len(json.loads(row["candidates"])) for row in rows] == [5, 6, 10, 12, 5, 6]
    for row in rows:
        candidates, associations = json.loads(row["candidates"]), json.loads(row["associations"])
        assert set(associations) < set(candidates) and associations and row["cue"] in COLOURS
        assert all((place / "images" / f"{name}.jpg").exists() for name in candidates)


def test_the_same_arguments_give_the_same_bytes(folder, tmp_path, capsys):
    again = tmp_path / "again"
    assert not make_shards([*ARGUMENTS.split(), "--out", str(again)])
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    assert files == [path.relative_to(again) for path in sorted(again.rglob("*")) if path.is_file()]
    assert all((folder / path).read_bytes() == (again / path).read_bytes() for path in files)
    for arguments, message in ((f"--out {again}", "already holds tasks.json"), ("--out x --val-samples 3", "left out")):
        with pytest.raises(SystemExit) as stopped:
            make_shards(["evalset", *arguments.split()])
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    shapes = tmp_path / "zeroshot-concepts" / "test" / "0.tar"  # what icons writes, its train shards deleted
    shapes.parent.mkdir(parents=True)
    shapes.write_bytes(b"kept")
    with pytest.raises(SystemExit):
        make_shards(["shapes", "--out", str(tmp_path)])
    assert "already holds zeroshot-concepts/test/0.tar" in capsys.readouterr().err and shapes.read_bytes() == b"kept"
    assert not make_shards(f"evalset --num-samples 8 --image-size 16 --out {again} --overwrite".split())
    assert json.loads((again / "tasks.json").read_text())["tasks"][0]["size"] == 8
    assert [path.name for path in (again / "wds_evalset-colour_test" / "test").glob("*.tar")] == ["0.tar"]
