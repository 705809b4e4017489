"""What every reader of folders does alike: training and validation, make_shards, pairs and classes to evaluate on."""

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LOSSES
from PIL import Image

from open_clip_ext import InputError
from open_clip_ext.make_shards import main as make_shards
from training_ext.data.csv_rows import read_csv
from training_ext.data.folder_files import LEADS_NOWHERE, REPEATED, find_files
from training_ext.data.rows import find_rows
from training_ext.openclip.loading import warn_once
from training_ext.scoring.class_folders import NO_IMAGE, ClassFolders, open_own_classes
from training_ext.scoring.folders import FORMATS, Images
from training_ext.scoring.pairs import open_pairs
from training_ext.tools.pairs.sources import find_sources


def flags(folder: Path) -> Namespace:
    return Namespace(
        train_data=str(folder), val_data=str(folder), dataset_type="auto", csv_img_key="filepath", csv_separator="\t",
        csv_caption_key="title", same_key=None, several_captions=False, shard_sizes=None, loss="queue", seed=0,
    )  # fmt: skip


def trained(folder: Path) -> list[str]:
    return read_csv(flags(folder), str(folder))["filepath"].tolist()


def packed(folder: Path) -> list[str]:
    return [pair.path for pair in find_sources([str(folder)], flags(folder), "--train-data", {})]


def scored(folder: Path) -> list[str]:
    return [path for path, _ in open_pairs(flags(folder)).images]


def classified(folder: Path) -> list[str]:
    return [path for path, _ in open_own_classes("--zeroshot-data", str(folder)).images]


@pytest.fixture(params=[trained, packed, scored, classified])
def images(request) -> Callable[[Path], list[str]]:
    """images(folder) -> the images that one of the readers finds, by path."""
    return lambda folder: sorted(request.param(folder))


@pytest.fixture
def folder(tmp_path) -> Path:
    """8 images with captions in two folders."""
    for row in range(8):
        path = tmp_path / "data" / ("red" if row % 2 else "blue/deeper") / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (30 * row, 0, 90)).save(path)
        path.with_suffix(".txt").write_text(f"shade {row}")
    return tmp_path / "data"


def test_links_are_followed_once(images, folder, tmp_path):
    without = images(folder)
    (tmp_path / "elsewhere").mkdir()
    (folder / "red/7.png").rename(tmp_path / "elsewhere/7.png")
    (folder / "red/7.txt").rename(tmp_path / "elsewhere/7.txt")
    for link, target in {
        "red/more": tmp_path / "elsewhere", "red/up": folder, "blue/up": folder, "blue/a": folder / "blue/deeper",
        "blue/x": folder / "blue/y", "blue/y": folder / "blue/x", "part2": tmp_path / "unmounted",
    }.items():  # fmt: skip
        (folder / link).symlink_to(target)
    assert images(folder) == sorted([*without[:-1], f"{folder}/red/more/7.png"])
    assert find_files(str(folder)).left_out == {
        LEADS_NOWHERE: [f"{folder}/blue/x", f"{folder}/blue/y", f"{folder}/part2"],
        REPEATED: [f"{folder}/blue/a", f"{folder}/blue/up", f"{folder}/red/up"],
    }


@pytest.mark.parametrize("unreadable", [".", "red", "blue/deeper"])
def test_a_folder_that_cannot_be_read_is_not_left_out(images, folder, monkeypatch, unreadable):
    scandir = os.scandir

    def denied(path: str):
        if Path(path) == folder / unreadable:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)  # a mode does not stop root
    with pytest.raises(InputError, match=f"the folder '{folder / unreadable}' cannot be read: Permission denied"):
        images(folder)


def test_formats(images, folder):
    for suffix in ("gif", "ppm", "TIFF", "avif"):
        (folder / f"red/{suffix}.{suffix}").touch()
        (folder / f"red/{suffix}.txt").write_text("red")
    assert len(images(folder)) == 12


def test_class_folders_decode_them_and_tell_what_is_left_out(folder, caplog):
    kinds = [kind for kind in ("GIF", "AVIF") if kind in FORMATS]  # older versions of Pillow have no AVIF
    for kind in kinds:
        Image.new("RGB", (8, 8), "red").save(folder / f"red/x.{kind}")
    (folder / "beside.png").touch()
    (folder / "README.md").write_text("about")
    source = open_own_classes("--zeroshot-data", str(folder))
    assert isinstance(source, ClassFolders)
    assert len(list(Images(source, lambda image: image.mode, 0, 1))) == 8 + len(kinds)
    source.warn()
    assert caplog.messages == [
        f"--zeroshot-data: left out of '{folder}': 9 {NO_IMAGE} ('{folder}/beside.png')"
    ]


def test_names_that_are_not_utf_8(folder, refused, capsys):
    os.rename(folder / "red/7.png", os.fsencode(folder) + b"/red/\xe9.png")
    os.rename(folder / "red/7.txt", os.fsencode(folder) + b"/red/\xe9.txt")
    assert find_rows(flags(folder)).num_rows == len(packed(folder)) == 8
    for source in (open_pairs(flags(folder)), open_own_classes("--zeroshot-data", str(folder))):
        assert len(source.digest()) == 16
    os.rename(folder / "red", os.fsencode(folder) + b"/r\xe9d")
    assert len(open_pairs(flags(folder)).images) == 8
    with pytest.raises(InputError, match=r"the class folder 'r\\udce9d' is not UTF-8"):
        open_own_classes("--zeroshot-data", str(folder))
    line = "'/r\\udce9d' in the command line is not UTF-8"
    assert line in refused(f"{LOSSES['clip']} --train-data /r\udce9d")
    assert make_shards(["/r\udce9d"]) == 2 and line in capsys.readouterr().err


def test_folders_of_splits(folder, caplog):
    warn_once.cache_clear()
    (folder / "red").rename(folder / "train")
    assert len(trained(folder)) == 8 and not caplog.messages
    (folder / "blue").rename(folder / "Test")
    assert len(packed(folder)) == 8 and "has the folders 'Test', 'train', and the pairs of all are" in caplog.text
    with pytest.raises(InputError, match="has only 'Test', 'train', which are no names of classes"):
        classified(folder)
    (folder / "classnames.txt").write_text("a test\na train\n")
    assert len(classified(folder)) == 8
