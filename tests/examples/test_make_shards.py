"""Shards of scenes and digits: what is in them, the same bytes every time, and nothing of anybody else's is lost."""

import gc
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import make_shards
import pytest
from digits import NUM_DIGITS, digit_pairs
from PIL import Image

from open_clip_ext.data.scenes import describe_scene, shifted_caption

wds = pytest.importorskip("webdataset")
braceexpand = pytest.importorskip("braceexpand")


def write(out, *extra, source="shapes"):
    small = ["--image-size", "16", "--samples-per-shard", "10"]
    return make_shards.main([source, "--out", str(out), *small, *map(str, extra)])


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def samples(folder, pattern):
    urls = sorted(str(path) for path in folder.glob(pattern))
    return list(wds.WebDataset(urls, shardshuffle=False))


def refused(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        make_shards.main([str(word) for word in argv])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("make_shards: ") and captured.err.count("\n") == 1
    return captured.err


def same_picture(sample, image):
    found = Image.open(io.BytesIO(sample["png"]))
    return found.mode == "RGB" and found.tobytes() == image.tobytes()


def test_shapes_are_the_rows_in_order(tmp_path, capsys):
    from open_clip_train.data import get_dataset_size

    folder = tmp_path / "my data"
    assert write(folder, "--num-samples", 25, "--val-samples", 12, "--seed", 3) == 0
    sizes = {f"train-00000{shard}.tar": size for shard, size in enumerate((10, 10, 5))}
    sizes |= {"val-000000.tar": 10, "val-000001.tar": 2}
    assert json.loads((folder / "sizes.json").read_text()) == sizes
    assert sorted(os.listdir(folder)) == ["sizes.json", *sizes]
    assert get_dataset_size(f"{folder}/train-{{000000..000002}}.tar") == (25, 3)
    words = shlex.split(capsys.readouterr().out)
    for split, rows in (("train", range(25)), ("val", range(25, 37))):
        named = list(braceexpand.braceexpand(words[words.index(f"--{split}-data") + 1]))
        assert named == [str(folder / name) for name in sizes if name.startswith(split)]
        for row, sample in zip(rows, samples(folder, f"{split}-*.tar"), strict=True):
            assert {name for name in sample if not name.startswith("__")} == {"png", "txt"}
            assert sample["__key__"] == f"{row:09d}" and sample["txt"].decode() == describe_scene(3, row).caption
            assert same_picture(sample, describe_scene(3, row).render(16))
    with tarfile.open(folder / "train-000000.tar") as tar:
        headers = {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar.getmembers()}
    assert headers == {(0, 0, 0, "", "", 0o644)}


def test_shifted_are_the_training_shards_only(tmp_path):
    argv = ["--num-samples", 25, "--val-samples", 12, "--seed", 3]
    write(tmp_path / "normal", *argv)
    write(tmp_path / "shifted", *argv, "--shifted")
    for row, sample in enumerate(samples(tmp_path / "shifted", "train-*.tar")):
        assert sample["__key__"] == f"{row:09d}" and sample["txt"].decode() == shifted_caption(3, row)
        assert same_picture(sample, describe_scene(3, row).render(16, shifted=True))
    normal, shifted = contents(tmp_path / "normal"), contents(tmp_path / "shifted")
    assert {name: normal[name] != shifted[name] for name in normal} == {name: name[:5] == "train" for name in shifted}


def test_jpg(tmp_path):
    write(tmp_path, "--num-samples", 3, "--val-samples", 0, "--image-format", "jpg")
    assert sorted(os.listdir(tmp_path)) == ["sizes.json", "train-000000.tar"]
    for sample in samples(tmp_path, "*.tar"):
        image = Image.open(io.BytesIO(sample["jpg"]))
        assert image.format == "JPEG" and image.size == (16, 16) and "png" not in sample


def test_digits_are_split_without_overlap(tmp_path):
    """Validation is the end of a permutation, whatever is trained on."""
    write(tmp_path / "a", "--samples-per-shard", 1000, source="digits")
    train, val = ([int(s["__key__"]) for s in samples(tmp_path / "a", f"{n}-*.tar")] for n in ("train", "val"))
    assert len(val) == 297 and sorted(train + val) == list(range(NUM_DIGITS)) and train != sorted(train)
    found = samples(tmp_path / "a", "val-*.tar")
    for sample, (image, caption, label) in zip(found, digit_pairs(16, val), strict=True):
        assert {name for name in sample if not name.startswith("__")} == {"png", "txt", "cls"}
        assert sample["txt"].decode() == caption and int(sample["cls"]) == label and same_picture(sample, image)
    write(tmp_path / "b", "--num-samples", 20, "--val-samples", 12, source="digits")
    assert [int(sample["__key__"]) for sample in samples(tmp_path / "b", "val-*.tar")] == val[-12:]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["shapes", "digits"])
def test_same_arguments_same_bytes(tmp_path, monkeypatch, source):
    argv = ["--num-samples", 23, "--val-samples", 5]
    command = [sys.executable, make_shards.__file__, source, "--out", tmp_path / "a"]
    command += ["--image-size", "16", "--samples-per-shard", "10", *argv]
    done = subprocess.run([str(word) for word in command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    monkeypatch.setattr(time, "time", lambda: 1e9)
    write(tmp_path / "b", *argv, source=source)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    write(tmp_path / "c", *argv, "--seed", 1, source=source)
    for name in ("train-000000.tar", "val-000000.tar"):
        assert contents(tmp_path / "a")[name] != contents(tmp_path / "c")[name]


@pytest.mark.parametrize("name", ["other.tar", "sizes.json"])
def test_a_folder_with_shards_is_refused(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(b"mine")
    message = refused(capsys, ["shapes", "--out", tmp_path, "--num-samples", 2])
    assert str(tmp_path) in message and name in message and "--overwrite" in message
    assert contents(tmp_path) == {name: b"mine"}


def test_overwrite_replaces_own_files_only_and_the_sizes_first(tmp_path, monkeypatch, capsys):
    write(tmp_path, "--num-samples", 35, "--val-samples", 5)
    for name in ("other.tar", "notes.txt"):
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "train-000009.tar.partial").write_bytes(b"cut off")
    gone, unlink = [], Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **more: (gone.append(path.name), unlink(path, **more)))
    write(tmp_path, "--num-samples", 12, "--val-samples", 0, "--overwrite")
    assert gone[0] == "sizes.json"
    own = ["sizes.json", "train-000000.tar", "train-000001.tar"]
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "other.tar", *own]
    assert (tmp_path / "other.tar").read_bytes() == (tmp_path / "notes.txt").read_bytes() == b"mine"
    sizes = {"train-000000.tar": 5, "other.tar": 80}
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    capsys.readouterr()
    message = refused(capsys, ["shapes", "--out", tmp_path, "--num-samples", 2, "--overwrite"])
    assert "--out" in message and "counts other.tar, too" in message
    assert json.loads((tmp_path / "sizes.json").read_text()) == sizes


@pytest.mark.parametrize("error, code", [(OSError(28, "No space left on device"), 1), (RuntimeError(), None)])
def test_no_file_is_left_half_written(tmp_path, monkeypatch, capsys, error, code):
    encode, calls, ignored = make_shards._encode, [], []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)

    def failing(image, image_format):
        calls.append(sorted(os.listdir(tmp_path)))
        if len(calls) == 15:
            raise error
        return encode(image, image_format)

    monkeypatch.setattr(make_shards, "_encode", failing)
    if code is None:
        with pytest.raises(RuntimeError):
            write(tmp_path, "--num-samples", 30, "--val-samples", 5, "--overwrite")
    else:
        assert write(tmp_path, "--num-samples", 30, "--val-samples", 5, "--overwrite") == code
        last = capsys.readouterr().err.splitlines()[-1]
        assert "No space left on device" in last and str(tmp_path) in last
    assert os.listdir(tmp_path) == ["train-000000.tar"] and len(samples(tmp_path, "*.tar")) == 10
    being_written = [name for name in calls[-1] if name != "train-000000.tar"]
    assert len(being_written) == 1 and not being_written[0].endswith((".tar", ".json"))
    error.__traceback__ = None  # it holds the tar
    gc.collect()  # a tar that was not closed would now fail to end its file
    assert not ignored


@pytest.mark.parametrize(
    "argv, named",
    [
        ("shapes --num-samples 0", "--num-samples"), ("shapes --val-samples -1", "--val-samples"),
        ("shapes --num-samples 2000000 --samples-per-shard 1", "--samples-per-shard"), ("shapes --seed -5", "--seed"),
        ("shapes --image-size 8", "16 to 512"), ("shapes --image-format gif", "png"), ("letters", "letters"),
        ("digits --val-samples 1797", "--val-samples"), ("digits --num-samples 1501", "at most 1500"),
        ("digits --shifted", "--shifted"), ("shapes --number 5", "--number"), ("shapes --iconify x.tgz", "--iconify"),
        ("digits --kinds mono", "--kinds"), ("shapes --jobs 2", "--jobs"),
    ],
)  # fmt: skip
def test_wrong_arguments_write_nothing(tmp_path, capsys, argv, named):
    assert named in refused(capsys, [*argv.split(), "--out", tmp_path / "new"])
    assert os.listdir(tmp_path) == []


def test_folders_that_cannot_be_or_that_openclip_would_misread(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("{a,b}", "a::b", "", "run:1", "a\\b"):
        message = refused(capsys, ["shapes", "--out", name])
        assert "--out" in message and repr(name) in message
    (tmp_path / "file").write_bytes(b"mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        message = refused(capsys, ["shapes", "--out", out])
        assert "--out" in message and str(out) in message
    for source in ("shapes", "digits", "icons", "evalset"):
        assert "File name too long" in refused(capsys, [source, "--out", tmp_path / ("long" * 75)])
    assert "--out" in refused(capsys, ["shapes"])
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "pip install open-clip-ext[data]" in refused(capsys, ["digits", "--out", tmp_path / "new"])
    assert contents(tmp_path) == {"file": b"mine"}
