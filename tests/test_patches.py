"""The patches for forks: each applies to its OpenCLIP, trains to the same losses as the command, and resumes.

Every step is on the whole data set, whose order then does not matter, and crops are of the whole picture.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from make_shards import main as make_shards

from open_clip_ext.metrics_file import read_metrics

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests/training_ext/model_configs"
WHEEL = "OPEN_CLIP_WHEEL"  # of OpenCLIP's main branch, which is not on PyPI
PATCHES = {
    "v2.24.0": ("open_clip_torch==2.24.0", "training.main"),
    "v2.32.0": ("open_clip_torch==2.32.0", "open_clip_train.main"),
    "v3.3.0": ("open_clip_torch==3.3.0", "open_clip_train.main"),
    "main": (WHEEL, "open_clip_train.legacy_main"),
}
RUN = (
    "import importlib, sys, open_clip; open_clip.add_model_config(sys.argv[1]); "
    "sys.exit(importlib.import_module(sys.argv[2]).main(sys.argv[3:]))"
)
FLAGS = (
    "--model ViT-test --precision fp32 --lr 1e-3 --warmup 1 --epochs 4 --workers 0 --aug-cfg scale=(1.0,1.0) "
    "--log-every-n-steps 1 --batch-size 16 --accum-freq 3 --loss fastclip-v3 "
    "--dataset-type webdataset --train-data {}/train-{{000000..000005}}.tar"
)
pytestmark = pytest.mark.slow


def run(main: str, path: list[Path], flags: str, folder: Path, name: str) -> tuple[list[float], dict]:
    """The loss of every step, and the last checkpoint."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])), "OMP_NUM_THREADS": "1"}
    words = f"{flags} --logs {folder} --name {name}".split()
    command = [sys.executable, "-c", RUN, str(CONFIGS), main, *words]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    if main == "open_clip_ext.main":
        losses = [line["objective_learnable"] for line in read_metrics(folder / name, "train")]
    else:
        losses = re.findall(r"Train Epoch: .* Loss: (\S+) \(", (folder / name / "out.log").read_text())
    return [float(value) for value in losses], torch.load(folder / name / "checkpoints/epoch_4.pt", weights_only=True)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "shards"
    flags = f"shapes --out {folder} --num-samples 48 --val-samples 8 --samples-per-shard 8 --image-size 48"
    assert not make_shards(flags.split())
    return folder


@pytest.fixture(scope="module", params=PATCHES)
def patched(request, tmp_path_factory) -> tuple[str, Path]:
    """The main module of a patched OpenCLIP, and its folder."""
    package, main = PATCHES[request.param]
    if package == WHEEL and not (package := os.environ.get(WHEEL, "")):
        pytest.skip(f"{WHEEL} in the environment names no wheel of OpenCLIP's main branch")
    folder = tmp_path_factory.mktemp("fork")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "src"), package]
    subprocess.run(pip, check=True)
    subprocess.run(["git", "apply", "-p1", str(ROOT / f"patches/{request.param}.patch")], cwd=folder, check=True)
    return main, folder / "src"


@pytest.fixture(scope="module")
def expected(shards, tmp_path_factory) -> tuple[list[float], dict]:
    """The losses and the state of the command with the installed OpenCLIP."""
    flags = f"{FLAGS.format(shards)} --rho 5 --lr-tau-scheduler model"
    losses, checkpoint = run("open_clip_ext.main", [], flags, tmp_path_factory.mktemp("command"), "command")
    assert len(losses) == 4 and len(set(losses)) == 4
    return losses, checkpoint["open_clip_ext"]["state"]


def test_a_patched_open_clip_trains_as_the_command_and_resumes(patched, expected, shards, tmp_path):
    (main, source), (wanted, state) = patched, expected
    flags = f"{FLAGS.format(shards)} --loss-options rho=5.0"
    losses, whole = run(main, [source], flags, tmp_path, "patched")
    # Logs show five digits; sums over the batch come in another order.
    assert losses == pytest.approx(wanted, rel=1e-4)
    half = f"--resume {tmp_path}/patched/checkpoints/epoch_2.pt"
    again, resumed = run(main, [source], f"{flags} {half}", tmp_path, "resumed")
    assert again == pytest.approx(losses[2:], rel=1e-4)
    # A row of the table is the same sample's, whoever counted.
    for checkpoint in (whole, resumed):
        own = checkpoint["loss"]["_extra_state"]
        assert own["steps"] == state["steps"] == 4
        torch.testing.assert_close(own["state.log_u"], state["state.log_u"], rtol=1e-3, atol=1e-3)
