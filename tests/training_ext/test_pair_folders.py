"""A folder of images with a .txt of the same name: what its pairs are, and that it trains as the csv of them does."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import LOSSES
from open_clip import get_tokenizer
from test_captions import of_epochs

from open_clip_ext.data import Scenes
from training_ext.data.folder_files import describe_left_out
from training_ext.data.pair_folders import NO_CAPTION, NO_PICTURE, NO_TEXT, NOT_UTF8, UNREADABLE_TEXT, find_pairs
from training_ext.data.sample_keys import keys_of_captions

COMMON = f"{LOSSES['fastclip-v3']} --epochs 2 --workers 1"


@pytest.fixture
def folder(tmp_path) -> Path:
    """24 pairs in two folders, some with two captions, and surplus files."""
    folder = tmp_path / "pairs"
    (folder / "b" / ".hidden").mkdir(parents=True)
    for row, (image, caption) in enumerate(Scenes(24, image_size=48)):
        path = folder / ("b" if row % 2 else "") / f"{row:02d}.v1"
        image.save(f"{path}.JPG" if row == 3 else f"{path}.png", "PNG")
        Path(f"{path}.txt").write_text(caption + ("\n\nsecond\n" if row % 6 == 0 else ""))
    return folder


def add_surplus(folder: Path) -> None:
    image = next(folder.glob("*.png"))
    for name in ("alone.png", "empty.png", "latin.png", ".00.v1.png", "b/.hidden/x.png"):
        shutil.copy(image, folder / name)
    (folder / "empty.txt").write_text(" \n\n")
    (folder / "latin.txt").write_bytes("Café".encode("latin-1"))
    (folder / "README.txt").write_text("These are pictures.")
    (folder / "list.json").write_text("{}")


def test_the_pairs_of_a_folder(folder):
    first, left_out = find_pairs(str(folder))
    assert not left_out and len(first) == 24
    assert first == sorted(first) and first[0][1] == [Scenes(1)[0][1], "second"]
    (folder / "b/01.v1.txt").write_text("\ufeffmarked", encoding="utf-8")
    add_surplus(folder)
    (folder / "lost.png").write_bytes(b"")
    (folder / "lost.txt").symlink_to(folder / "unmounted.txt")
    pairs, left_out = find_pairs(str(folder))
    assert [path for path, _ in pairs] == [path for path, _ in first]
    assert dict(pairs)[f"{folder}/b/01.v1.png"] == ["marked"]
    assert left_out == {
        NO_TEXT: [f"{folder}/alone.png"], NO_CAPTION: [f"{folder}/empty.png"], NOT_UTF8: [f"{folder}/latin.png"],
        UNREADABLE_TEXT: [f"{folder}/lost.png"], NO_PICTURE: [f"{folder}/README.txt"],
    }
    assert f"1 {NO_TEXT} ('{folder}/alone.png'), 1 " in describe_left_out(left_out)


def test_it_trains_as_a_csv_and_resumes_to_the_last_bit(run, folder, tmp_path):
    table = pd.DataFrame(
        [(path, caption) for path, captions in find_pairs(str(folder))[0] for caption in captions],
        columns=["filepath", "title"],
    )
    table.to_csv(tmp_path / "pairs.csv", sep="\t", index=False)
    add_surplus(folder)
    (folder / "b/05.v1.png").write_bytes(b"no image")
    shutil.copytree(folder, tmp_path / "val", ignore=lambda place, names: ["05.v1.png"])
    more = f"{COMMON} --val-data {tmp_path}/val"
    whole = run("whole", f"--train-data {folder} --dataset-type folder {more}")
    assert f"Left out of '{folder}'" in whole.log and "05.v1.png': cannot identify image file" in whole.log
    csv = run("csv", f"--train-data {tmp_path}/pairs.csv {more}")
    resumed = run("resumed", f"--train-data {folder} {more} --resume {whole.path}/checkpoints/epoch_1.pt")
    assert f"Left out of '{folder}'" in resumed.log  # also in the second run of a process
    for other in (csv, resumed):
        states = [experiment.checkpoint(2)["state_dict"] for experiment in (whole, other)]
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_captions_of_one_text_are_drawn(run, told, folder):
    pairs, _ = find_pairs(str(folder))
    flat = [caption for _, captions in pairs for caption in captions]
    keys = keys_of_captions(get_tokenizer("ViT-test")(flat)).tolist()
    names = dict(zip(keys, flat, strict=True))
    run("x", f"--train-data {folder} {COMMON} --several-captions --same-caption --batch-size 4 --epochs 4")
    epochs = of_epochs(told, names, 24)
    assert all(caption in pairs[row][1] for epoch in epochs for row, caption in epoch.items())
    assert {epoch[0] for epoch in epochs} == set(pairs[0][1])


def test_wrong_folders(refused, folder, tmp_path, datasets):
    for flags in ("", "--dataset-type folder "):
        (tmp_path / "empty").mkdir(exist_ok=True)
        line = refused(f"{flags}--train-data {tmp_path}/empty --loss clip --epochs 1")
        assert line.startswith("--train-data: ") and "no image with a caption" in line
    line = refused(f"--dataset-type folder {datasets['csv']} --loss clip --epochs 1")
    assert line.startswith("--dataset-type: 'folder'")
    line = refused(f"--dataset-type folder --train-data {tmp_path}/none --loss clip --epochs 1")
    assert line.startswith("--train-data: ") and "does not exist" in line
    for path in folder.rglob("*.[pJ]*"):
        path.write_bytes(b"")
    line = refused(f"--train-data {folder} --loss clip --epochs 1")
    assert "none of the first" in line and f"pair 1 of '{folder}'" in line
