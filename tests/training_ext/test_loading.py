"""A checkpoint with changed bits is refused, and one with numbers of NumPy's is loaded."""

import random
import sys
import zipfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from conftest import LOSSES, ext_main, run_main

from open_clip_ext.evaluate import main as evaluate
from open_clip_ext.normalizers_report import main as report
from training_ext.openclip.loading import load_mapped, load_plain, load_tokenizer, load_verified, one_line

SHAPES = f"--dataset-type shapes --train-num-samples 48 --workers 0 {LOSSES['queue']}"


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def middle_of(path: Path, record: zipfile.ZipInfo) -> int:
    """Position of a record's middle byte in the archive."""
    content = path.read_bytes()
    names = (content[record.header_offset + at] + 256 * content[record.header_offset + at + 1] for at in (26, 28))
    return record.header_offset + 30 + sum(names) + record.file_size // 2


def test_a_changed_bit_anywhere_is_found_or_changes_nothing(tmp_path):
    path = tmp_path / "x.pt"
    generator = torch.Generator().manual_seed(0)
    saved = {"epoch": 3, "state_dict": {str(n): torch.randn(n, generator=generator) for n in range(1, 40, 3)}}
    torch.save(saved, path)
    whole, refused, draw = path.read_bytes(), 0, random.Random(0)
    for _ in range(300):
        path.write_bytes(whole)
        flip(path, draw.randrange(len(whole)))
        try:
            loaded = load_verified(str(path))
        except Exception:
            refused += 1
            continue
        assert loaded["epoch"] == 3
        assert all(loaded["state_dict"][name].equal(value) for name, value in saved["state_dict"].items())
    assert refused > 100


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint and recovered statistics, each with one changed bit in the largest record, which is named."""
    folder = tmp_path_factory.mktemp("trained")
    initial = folder / "initial.pt"
    assert not run_main(ext_main, f"{SHAPES} --epochs 1 --name a", folder)
    torch.save({"state_dict": torch.load(folder / "a/checkpoints/epoch_1.pt")["state_dict"]}, initial)
    osr = f"--pretrained {initial} --osr-epochs 1 --osr-save {folder}/x.state"
    assert not run_main(ext_main, f"{SHAPES} --epochs 1 --name b {osr}", folder)
    damaged = {}
    for path in (folder / "a/checkpoints/epoch_1.pt", folder / "x.state", initial):
        with zipfile.ZipFile(path) as archive:
            largest = max(archive.infolist(), key=lambda record: record.file_size)
        flip(path, middle_of(path, largest))
        load_mapped(str(path))  # torch does not see it
        damaged[path] = largest.filename
    return damaged


@pytest.mark.parametrize(
    "main, command, number",
    [
        (ext_main, "--epochs 2 --resume {path} --name c", 0),
        (ext_main, "--epochs 1 --pretrained {path} --name d", 2),
        (ext_main, "--epochs 1 --pretrained {path} --osr-load {path} --name e", 1),
        (report, "--checkpoint {path}", 0),
        (evaluate, "", 0),
    ],
)
def test_a_damaged_record_is_named_before_the_start(trained, capsys, main, command, number):
    path, record = list(trained.items())[number]
    folder = list(trained)[1].parent
    before = sorted(folder.rglob("*"))
    if main is evaluate:
        given = f"--checkpoint {path} --zeroshot-data {folder} --out {folder}/x.jsonl --device cpu"
        assert main(given.split()) == 2
    else:
        assert run_main(main, f"{SHAPES} {command.format(path=path)}", folder) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert str(path) in error and f"its record '{record}' is damaged" in error
    assert sorted(folder.rglob("*")) == before


def test_a_damaged_checkpoint_behind_a_url(trained, capsys):
    path, record = next(iter(trained.items()))
    assert run_main(ext_main, f"{SHAPES} --epochs 2 --resume file://{path} --name url", path.parent / "logs") == 2
    assert f"its record '{record}' is damaged" in capsys.readouterr().err


def test_a_file_without_checksums_is_loaded(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.ones(3)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert load_verified(str(tmp_path / "x.pt"))["x"].sum() == 3


@pytest.mark.parametrize("module", ["numpy._core.multiarray", "numpy.core.multiarray"])
def test_numbers_of_numpy_become_pythons(tmp_path, monkeypatch, module):
    numbers = [np.float64(0.1), np.float32(0.5), np.int64(-3), np.bool_(True), np.dtype(">f8").type(0.25)]
    scalar = np.float64().__reduce__()[0]
    monkeypatch.setitem(sys.modules, module, sys.modules[scalar.__module__])  # whichever NumPy is installed
    monkeypatch.setattr(scalar, "__module__", module)
    torch.save({"param_groups": [{"lr": numbers}]}, tmp_path / "x.pt")
    loaded = load_plain(tmp_path / "x.pt")["param_groups"][0]["lr"]
    assert loaded == [0.1, 0.5, -3, True, 0.25]
    assert [type(number) for number in loaded] == [float, float, int, bool, float]


@pytest.mark.parametrize(
    "value, named",
    [
        (np.ones(2), r"it contains numpy\.\S+, which is neither a tensor, a number nor a string$"),
        (np.datetime64("2020"), r"it contains a NumPy scalar of type 'M8', which is not a number$"),
        (np.str_("x"), r"it contains a NumPy scalar of type 'U1', which is not a number$"),
        (Path("x"), r"it contains pathlib\S+, which is neither"),
    ],
)
def test_anything_else_is_named_without_terminal_codes(tmp_path, value, named):
    torch.save({"x": value}, tmp_path / "x.pt")
    with pytest.raises(Exception, match=named) as refused:
        load_plain(tmp_path / "x.pt")
    assert one_line(refused.value) == str(refused.value)


@pytest.mark.parametrize("loss", ["", LOSSES["queue"]])
def test_an_older_checkpoint_with_numbers_of_numpy_starts_and_resumes(run, tmp_path, loss):
    shapes = "--dataset-type shapes --train-num-samples 48 --workers 0"
    saved = run("a", f"{shapes} {loss} --epochs 1").checkpoint(1)
    for group in saved["optimizer"]["param_groups"]:
        group["lr"] = np.float64(group["lr"])
    torch.save(saved, tmp_path / "old.pt")
    assert "Start epoch 0" in run("b", f"{shapes} {loss} --epochs 1 --pretrained {tmp_path}/old.pt").log
    assert run("c", f"{shapes} {loss} --epochs 2 --resume {tmp_path}/old.pt").checkpoint(2)["epoch"] == 2


def test_a_tokenizer_in_the_configuration_of_a_captioning_part(monkeypatch):
    """As of MaMMUT, which has no other text tower; one that must be downloaded is not loaded."""
    config = {"multimodal_cfg": {"hf_tokenizer_name": "a/hub"}}
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: config)
    assert load_tokenizer(Namespace(model="mammut")) is None
