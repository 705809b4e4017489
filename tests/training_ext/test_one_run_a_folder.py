"""A run in a folder that another run uses is refused, before it reads or writes anything there."""

import os
from datetime import datetime
from pathlib import Path

import pytest
from conftest import LOSSES, ext_main, run_main

from open_clip_ext.files import only_user

SHAPES = "--dataset-type shapes --train-num-samples 48 --workers 0 --epochs 1"
QUEUE = f"{SHAPES} {LOSSES['queue']}"
@pytest.mark.parametrize("arguments", [f"{QUEUE} --resume latest", SHAPES])
def test_another_run_is_named(refused, tmp_path, arguments):
    folder = tmp_path / "logs" / "x"
    partial = folder / "checkpoints" / "epoch_1.pt.partial"
    with only_user(folder):
        partial.parent.mkdir()
        partial.write_bytes(b"half")
        error = refused(f"{arguments} --name x")
    assert f"--name: the folder '{folder}' is in use by process {os.getpid()} on " in error


def test_a_run_has_its_folder_until_its_end(run, monkeypatch, tmp_path):
    from training_ext.components import summary as module

    def also_used(*args):
        from open_clip_ext.files import InUseError

        with pytest.raises(InUseError), only_user(tmp_path / "logs" / "x"):
            pass
        return summary(*args)

    summary = module.summary
    monkeypatch.setattr(module, "summary", also_used)
    assert not list(run("x", QUEUE).path.glob(".*"))


def test_a_run_that_writes_no_files_uses_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with only_user("none/x"):
        assert not run_main(ext_main, f"{QUEUE} --name x", Path("none"))


class Noon(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime(2026, 1, 1, 12)


@pytest.mark.slow
def test_two_runs_that_name_themselves_alike_in_one_second(pair, tmp_path):
    clock = {"open_clip_train.main.datetime": Noon}
    arguments = f"{QUEUE} --dist-backend gloo"
    assert [process.code for process in pair(arguments, tmp_path, **clock)] == [0, 0]
    (folder,) = tmp_path.iterdir()
    for path in folder.iterdir():
        if path.name != "checkpoints":
            path.unlink()
    with only_user(folder):
        for process in pair(arguments, tmp_path, **clock):
            assert process.code == 2 and f"--name: the folder '{folder}' is in use by process" in process.stderr
    assert not (folder / "params.txt").exists() and not (folder / "recipe.yaml").exists()
