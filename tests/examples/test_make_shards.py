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
    assert captured.out == ""
    assert captured.err.startswith("make_shards: ") and captured.err.count("\n") == 1
    return captured.err


def test_shapes_are_the_rows_in_order(tmp_path):
    assert write(tmp_path, "--num-samples", 25, "--val-samples", 12, "--seed", 3) == 0
    assert sorted(os.listdir(tmp_path)) == [
        "sizes.json",
        "train-000000.tar",
        "train-000001.tar",
        "train-000002.tar",
        "val-000000.tar",
        "val-000001.tar",
    ]
    for pattern, rows in (("train-*.tar", range(25)), ("val-*.tar", range(25, 37))):
        got = samples(tmp_path, pattern)
        assert [sample["__key__"] for sample in got] == [f"{row:09d}" for row in rows]
        for row, sample in zip(rows, got, strict=True):
            assert {name for name in sample if not name.startswith("__")} == {"png", "txt"}
            assert sample["txt"].decode() == describe_scene(3, row).caption
            image = Image.open(io.BytesIO(sample["png"]))
            assert image.mode == "RGB"
            assert image.tobytes() == describe_scene(3, row).render(16).tobytes()


def test_shifted_are_the_training_shards_only(tmp_path):
    argv = ["--num-samples", 25, "--val-samples", 12, "--seed", 3]
    assert write(tmp_path / "normal", *argv) == 0
    assert write(tmp_path / "shifted", *argv, "--shifted") == 0
    got = samples(tmp_path / "shifted", "train-*.tar")
    assert [sample["__key__"] for sample in got] == [f"{row:09d}" for row in range(25)]
    for row, sample in enumerate(got):
        assert sample["txt"].decode() == shifted_caption(3, row)
        image = Image.open(io.BytesIO(sample["png"]))
        assert image.tobytes() == describe_scene(3, row).render(16, shifted=True).tobytes()
    normal, shifted = contents(tmp_path / "normal"), contents(tmp_path / "shifted")
    assert set(normal) == set(shifted)
    for name in normal:
        assert (normal[name] != shifted[name]) == name.startswith("train")


def test_sizes_are_the_numbers_of_samples(tmp_path):
    write(tmp_path, "--num-samples", 25, "--val-samples", 10)
    sizes = json.loads((tmp_path / "sizes.json").read_text())
    assert sizes == {
        "train-000000.tar": 10,
        "train-000001.tar": 10,
        "train-000002.tar": 5,
        "val-000000.tar": 10,
    }
    for name, size in sizes.items():
        assert len(samples(tmp_path, name)) == size


def test_openclip_reads_the_sizes(tmp_path):
    data = pytest.importorskip("open_clip_train.data")
    write(tmp_path, "--num-samples", 25, "--val-samples", 4)
    assert data.get_dataset_size(f"{tmp_path}/train-{{000000..000002}}.tar") == (25, 3)


def test_printed_values_name_the_shards(tmp_path, capsys):
    folder = tmp_path / "my data"
    write(folder, "--num-samples", 25, "--val-samples", 4)
    words = shlex.split(capsys.readouterr().out)
    for split, count in (("train", 3), ("val", 1)):
        value = words[words.index(f"--{split}-data") + 1]
        expected = [str(folder / f"{split}-{shard:06d}.tar") for shard in range(count)]
        assert list(braceexpand.braceexpand(value)) == expected


def test_jpg(tmp_path):
    write(tmp_path, "--num-samples", 3, "--val-samples", 0, "--image-format", "jpg")
    assert sorted(os.listdir(tmp_path)) == ["sizes.json", "train-000000.tar"]
    for row, sample in enumerate(samples(tmp_path, "*.tar")):
        image = Image.open(io.BytesIO(sample["jpg"]))
        assert image.format == "JPEG" and image.size == (16, 16)
        assert "png" not in sample
        assert sample["txt"].decode() == describe_scene(0, row).caption


def test_digits_are_split_without_overlap(tmp_path):
    write(tmp_path / "a", "--samples-per-shard", 1000, source="digits")
    train, val = samples(tmp_path / "a", "train-*.tar"), samples(tmp_path / "a", "val-*.tar")
    assert len(val) == 297
    assert sorted(int(sample["__key__"]) for sample in train + val) == list(range(NUM_DIGITS))
    assert [int(sample["__key__"]) for sample in train] != sorted(int(sample["__key__"]) for sample in train)
    keys = [int(sample["__key__"]) for sample in val]
    for sample, (image, caption, label) in zip(val, digit_pairs(16, keys), strict=True):
        assert {name for name in sample if not name.startswith("__")} == {"png", "txt", "cls"}
        assert sample["txt"].decode() == caption
        assert int(sample["cls"]) == label
        assert Image.open(io.BytesIO(sample["png"])).tobytes() == image.tobytes()


def test_digits_validation_is_the_end_of_the_permutation(tmp_path):
    def keys(name, *extra, split="val"):
        write(tmp_path / name, "--num-samples", 20, *extra, source="digits")
        return [sample["__key__"] for sample in samples(tmp_path / name, f"{split}-*.tar")]

    longer, shorter = keys("a", "--val-samples", 30), keys("b", "--val-samples", 12)
    assert longer[-12:] == shorter
    assert keys("c", "--val-samples", 12, "--seed", 1) != shorter
    assert len(keys("d", "--val-samples", 0, split="train")) == 20


def test_the_command_writes_the_same_bytes(tmp_path):
    argv = ["--num-samples", 23, "--val-samples", 5]
    write(tmp_path / "a", *argv)
    command = [sys.executable, make_shards.__file__, "shapes", "--out", tmp_path / "b"]
    command += ["--image-size", "16", "--samples-per-shard", "10", *argv]
    result = subprocess.run([str(word) for word in command], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("source", ["shapes", "digits"])
def test_same_arguments_same_bytes(tmp_path, monkeypatch, source):
    argv = ["--num-samples", 23, "--val-samples", 5]
    write(tmp_path / "a", *argv, source=source)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    write(tmp_path / "b", *argv, source=source)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    write(tmp_path / "c", *argv, "--seed", 1, source=source)
    for name in ("train-000000.tar", "val-000000.tar"):
        assert contents(tmp_path / "a")[name] != contents(tmp_path / "c")[name]


def test_headers_hold_no_time_and_no_owner(tmp_path):
    write(tmp_path, "--num-samples", 3, "--val-samples", 0)
    with tarfile.open(tmp_path / "train-000000.tar") as tar:
        headers = {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar.getmembers()}
    assert headers == {(0, 0, 0, "", "", 0o644)}


@pytest.mark.parametrize("name", ["other.tar", "sizes.json"])
def test_a_folder_with_shards_is_refused(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(b"mine")
    message = refused(capsys, ["shapes", "--out", tmp_path, "--num-samples", 2])
    assert str(tmp_path) in message and name in message and "--overwrite" in message
    assert contents(tmp_path) == {name: b"mine"}


def test_overwrite_replaces_own_files_only(tmp_path):
    write(tmp_path, "--num-samples", 35, "--val-samples", 5)
    (tmp_path / "other.tar").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    (tmp_path / "train-000009.tar.partial").write_bytes(b"cut off")
    write(tmp_path, "--num-samples", 12, "--val-samples", 0, "--overwrite")
    assert sorted(os.listdir(tmp_path)) == [
        "notes.txt",
        "other.tar",
        "sizes.json",
        "train-000000.tar",
        "train-000001.tar",
    ]
    assert (tmp_path / "other.tar").read_bytes() == (tmp_path / "notes.txt").read_bytes() == b"mine"
    sizes = json.loads((tmp_path / "sizes.json").read_text())
    assert sizes == {"train-000000.tar": 10, "train-000001.tar": 2}


@pytest.mark.parametrize(
    ("error", "code"), [(OSError(28, "No space left on device"), 1), (RuntimeError(), None)]
)
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
    assert os.listdir(tmp_path) == ["train-000000.tar"]
    assert len(samples(tmp_path, "*.tar")) == 10
    being_written = [name for name in calls[-1] if name != "train-000000.tar"]
    assert len(being_written) == 1 and not being_written[0].endswith((".tar", ".json"))
    error.__traceback__ = None  # it holds the tar
    gc.collect()  # a tar that was not closed would now fail to end its file
    assert not ignored


def test_sizes_of_other_shards_are_not_lost(tmp_path, capsys):
    (tmp_path / "00000.tar").write_bytes(b"mine")
    sizes = '{"train-000000.tar": 5, "00000.tar": 80}'
    (tmp_path / "sizes.json").write_text(sizes)
    message = refused(capsys, ["shapes", "--out", tmp_path, "--num-samples", 2, "--overwrite"])
    assert "--out" in message and "counts 00000.tar, too" in message
    assert contents(tmp_path) == {"00000.tar": b"mine", "sizes.json": sizes.encode()}


def test_overwrite_takes_the_sizes_away_first(tmp_path, monkeypatch):
    write(tmp_path, "--num-samples", 12, "--val-samples", 5)
    gone, unlink = [], Path.unlink

    def noting(path, *args, **kwargs):
        gone.append(path.name)
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(Path, "unlink", noting)
    write(tmp_path, "--num-samples", 12, "--val-samples", 0, "--overwrite")
    assert gone[0] == "sizes.json"
    assert sorted(gone[1:]) == ["train-000000.tar", "train-000001.tar", "val-000000.tar"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["shapes", "--num-samples", "0"], ["--num-samples", "'0'"]),
        (["shapes", "--num-samples", "many"], ["--num-samples", "'many'"]),
        (["shapes", "--val-samples", "-1"], ["--val-samples", "'-1'"]),
        (["shapes", "--samples-per-shard", "0"], ["--samples-per-shard", "'0'"]),
        (["shapes", "--num-samples", "2000000", "--samples-per-shard", "1"], ["-per-shard", "got 1"]),
        (["shapes", "--seed", "-5"], ["--seed", "'-5'"]),
        (["shapes", "--image-size", "8"], ["--image-size", "'8'", "16 to 512"]),
        (["shapes", "--image-format", "gif"], ["--image-format", "'gif'", "png", "jpg"]),
        (["letters"], ["'letters'", "shapes", "digits"]),
        (["digits", "--val-samples", "1797"], ["--val-samples", "got 1797"]),
        (["digits", "--num-samples", "1501"], ["--num-samples", "got 1501", "1500"]),
        (["digits", "--num-samples", "1", "--val-samples", "5000"], ["--val-samples", "got 5000"]),
        (["digits", "--shifted"], ["--shifted", "shapes", "got digits"]),
        (["shapes", "--shifted=yes"], ["--shifted", "'yes'"]),
        (["shapes", "--number", "5"], ["--number"]),
    ],
)
def test_wrong_arguments_write_nothing(tmp_path, capsys, argv, named):
    message = refused(capsys, [*argv, "--out", tmp_path / "new"])
    for words in named:
        assert words in message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["{a,b}", "a::b", "", "run:1", "a\\b"])
def test_folder_names_that_openclip_would_misread(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, ["shapes", "--out", name])
    assert "--out" in message and repr(name) in message
    assert os.listdir(tmp_path) == []


def test_out_that_cannot_be_a_folder(tmp_path, capsys):
    (tmp_path / "file").write_bytes(b"mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        message = refused(capsys, ["shapes", "--out", out])
        assert "--out" in message and str(out) in message
    for source in ("shapes", "digits", "icons", "evalset"):
        message = refused(capsys, [source, "--out", tmp_path / ("long" * 75)])
        assert "--out" in message and "longlong" in message and "File name too long" in message
    assert contents(tmp_path) == {"file": b"mine"}


def test_missing_out(capsys):
    assert "--out" in refused(capsys, ["shapes"])


def test_missing_scikit_learn_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "pip install open-clip-ext[data]" in refused(capsys, ["digits", "--out", tmp_path / "new"])
    assert os.listdir(tmp_path) == []
