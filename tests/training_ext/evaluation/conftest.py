"""A small folder of tasks and checkpoints of an untrained model."""

import shutil
from pathlib import Path

import open_clip
import pytest
import torch
from make_shards import main as make_shards

from open_clip_ext.evaluate import main as evaluate

PARAMS = "model: ViT-test\nforce_image_size: None\nimage_mean: None\nname: run\n"


@pytest.fixture(scope="session")
def evalset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evalset") / "data"
    assert not make_shards(f"evalset --out {folder} --num-samples 42 --samples-per-shard 20 --image-size 48".split())
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> list[Path]:
    """Two, as a training leaves them."""
    folder = tmp_path_factory.mktemp("logs") / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "params.txt").write_text(PARAMS)
    paths = []
    for epoch in (1, 2):
        torch.manual_seed(epoch)
        model = open_clip.create_model("ViT-test")
        paths.append(folder / "checkpoints" / f"epoch_{epoch}.pt")
        weights = {f"module.{name}": value for name, value in model.state_dict().items()}
        torch.save({"epoch": epoch, "state_dict": weights, "optimizer": {"state": {}}}, paths[-1])
    return paths


@pytest.fixture
def tasks(evalset, tmp_path) -> Path:
    """A copy of the folder that may be damaged."""
    return Path(shutil.copytree(evalset, tmp_path / "tasks"))


@pytest.fixture
def refused(tmp_path, capsys):
    """refused(arguments) -> the one line of stderr; the command must end with code 2 and write nothing."""

    def refused(arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        assert evaluate(["--device", "cpu", "--workers", "0", *arguments.split()]) == 2
        lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
        (line,) = [line for line in lines if line.startswith("open_clip_ext: error: ")]
        assert sorted(tmp_path.rglob("*")) == before
        return line.removeprefix("open_clip_ext: error: ")

    return refused
