"""`--resume latest` takes the checkpoint with the most training, and a run that fails leaves it."""

import os
import pkgutil
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import LOSSES, ext_main, run_main
from open_clip_train.main import get_latest_checkpoint

from open_clip_ext.files import temporary_name
from training_ext.core.state import KEY
from training_ext.data.checkpoint_files import BEFORE_RENAME, latest_checkpoint, most_trained

FLAGS = f"{LOSSES['fastclip-v3']} --workers 0"


def test_without_save_most_recent_its_older_file_is_not_the_latest(run, datasets):
    common = f"{datasets['shapes']} {FLAGS}"
    run("x", f"{common} --epochs 1 --save-most-recent")
    run("x", f"{common} --epochs 2 --resume latest")
    folder = run("x", f"{common} --epochs 3 --resume latest").path / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"epoch_1.pt", "epoch_2.pt", "epoch_3.pt", "epoch_latest.pt"}
    assert latest_checkpoint(get_latest_checkpoint, str(folder), remote=False) == str(folder / "epoch_3.pt")
    # What a kill leaves between OpenCLIP's save and its renaming: whole, torn.
    shutil.copy(folder / "epoch_1.pt", folder / BEFORE_RENAME)
    assert latest_checkpoint(get_latest_checkpoint, str(folder), remote=False) == str(folder / "epoch_3.pt")
    for name in ("epoch_2.pt", "epoch_3.pt"):
        (folder / name).unlink()
    (folder / BEFORE_RENAME).write_bytes(b"torn")
    found = latest_checkpoint(get_latest_checkpoint, str(folder), remote=False)
    assert found == str(folder / "epoch_latest.pt")  # of epoch 1, too


@pytest.mark.parametrize("flag", ["", "--save-most-recent"])
def test_save_most_recent_resumes_from_the_checkpoint_with_the_most_training(run, datasets, flag):
    """Its own is behind if the flag was not given before, or if a kill came between the two files of an epoch."""
    common = f"{datasets['shapes']} {FLAGS}"
    saved = run("x", f"{common} --epochs 2 {flag}").path / "checkpoints"
    if flag:
        shutil.copy(saved / "epoch_1.pt", saved / "epoch_latest.pt")
    resumed = run("x", f"{common} --epochs 3 --save-most-recent --resume latest")
    assert [epoch for epoch, _ in resumed.logged()] == [epoch for epoch in range(3) for _ in range(6)]
    assert "epoch_latest.pt' (epoch 2)" in resumed.log and resumed.log.count("=> resuming checkpoint") == 1
    names = {"epoch_1.pt", "epoch_2.pt", "epoch_3.pt", "epoch_latest.pt"}
    assert {path.name for path in saved.iterdir()} == names
    assert torch.load(saved / "epoch_latest.pt", weights_only=True)["epoch"] == 3


@pytest.mark.parametrize("name, flag", [("epoch_1.pt", ""), ("epoch_latest.pt", "--save-most-recent")])
def test_a_run_whose_only_checkpoint_is_torn_does_not_begin_anew(refused, datasets, tmp_path, name, flag):
    folder = tmp_path / "logs" / "x" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(b"torn")
    common = f"{datasets['shapes']} {FLAGS} --epochs 1 --logs {tmp_path / 'logs'} --name x {flag}"
    assert f"--resume: {str(folder / name)!r} is not a complete checkpoint" in refused(f"{common} --resume latest")


def test_half_written_files_of_a_remote_folder_are_not_the_latest(monkeypatch):
    names = ["epoch_1.pt", "epoch_2.pt", os.path.basename(temporary_name("epoch_2.pt"))]
    lines = "".join(f"2026-01-01 00:00:00       1000 {name}\n" for name in names)
    listed = SimpleNamespace(returncode=0, stdout=lines.encode())
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: listed)
    found = latest_checkpoint(get_latest_checkpoint, "s3://x/checkpoints", remote=True)
    assert found == "s3://x/checkpoints/epoch_2.pt"


def test_a_run_removes_what_a_kill_left_half_written(run, datasets):
    common = f"{datasets['shapes']} {FLAGS}"
    folder = run("x", f"{common} --epochs 1").path / "checkpoints"
    (folder / "epoch_9.pt.partial").write_bytes(b"half")
    Path(temporary_name(str(folder / "epoch_9"))).touch()
    (folder / "epoch_latest.partial").mkdir()
    Path(temporary_name(str(folder / "tmp.pt"))).touch()
    of_another_command = Path(temporary_name(str(folder / "between.pt")))
    of_another_command.touch()
    run("x", f"{common} --epochs 2 --resume latest")
    assert {path.name for path in folder.iterdir()} == {"epoch_1.pt", "epoch_2.pt", of_another_command.name}


def test_steps_of_a_recovery_are_none_of_the_training(tmp_path):
    """A run with --save-most-recent is stopped within it; the next, without the flag, trains."""
    for name, components in (
        ("epoch_latest.pt", {"exact_resume": {"position": {"batches": 9}}, "recovery": {"epochs": 2, "done": 1}}),
        ("epoch_0_step_5.pt", {"exact_resume": {"position": {"batches": 5}}, "recovery": {"epochs": 2}}),
    ):
        torch.save({"epoch": 0, "optimizer": {}, KEY: {"components": components}}, tmp_path / name)
    assert most_trained(str(tmp_path)) == str(tmp_path / "epoch_0_step_5.pt")


@pytest.mark.parametrize(
    "loss, extra, name",
    [
        ("fastclip-v3", "", "epoch_0_step_6.pt"),
        ("clip", "--save-most-recent --save-frequency 0", "epoch_latest.pt"),
    ],
)
def test_an_evaluation_that_fails_loses_no_epoch(datasets, tmp_path, ends, loss, extra, name):
    lines = Path(datasets["csv"].split()[1]).read_text().splitlines()
    image, *rest = lines[5].split("\t")
    whole = Path(image).read_bytes()
    (tmp_path / "torn.png").write_bytes(whole[: len(whole) // 2])  # whose header is read before the start
    lines[5] = "\t".join([str(tmp_path / "torn.png"), *rest])
    (tmp_path / "val.csv").write_text("\n".join(lines) + "\n")
    common = f"{datasets['csv']} {LOSSES[loss]} --workers 0 --epochs 2 --name x {extra}"
    assert "--val-data: line 6 of" in ends(f"{common} --val-data {tmp_path}/val.csv")
    folder = tmp_path / "logs/x/checkpoints"
    assert [path.name for path in folder.iterdir()] == [name]
    assert not run_main(ext_main, f"{common} --resume latest", tmp_path / "logs")
    assert torch.load(sorted(folder.glob("epoch_[2l]*.pt"))[0], weights_only=True)["epoch"] == 2
    log = (tmp_path / "logs/x/out.log").read_text()
    assert "resuming checkpoint" in log and log.count("Epoch 0 6/6") == 1


def test_what_a_resumed_run_does_once_or_twice(run, datasets, monkeypatch):
    """Once before anything is written, without which it could not be refused, and once to train."""
    common, calls = f"{datasets['shapes']} {FLAGS}", Counter()
    run("x", f"{common} --epochs 1")

    def counted(name: str):
        def call(*args, **kwargs):
            calls[name.rpartition(".")[2]] += 1
            return original(*args, **kwargs)

        original = pkgutil.resolve_name(name)
        monkeypatch.setattr(name, call)

    for name in ("torch.load", "training_ext.core.loss.create_loss", "argparse.ArgumentParser.parse_known_args"):
        counted(name)
    run("x", f"{common} --epochs 2 --resume latest")
    assert calls == {"load": 2, "create_loss": 2, "parse_known_args": 2}
