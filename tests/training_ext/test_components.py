"""A component can be left out, or its file be absent: a training without its flags trains."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import LOSSES, ext_main, run_main

import open_clip_ext
from training_ext.core.component import registry

ROOT = Path(open_clip_ext.__file__).parents[1]
FILES = sorted(path for path in (ROOT / "training_ext/components").iterdir() if not path.name.startswith("_"))
FLAGS = f"--val-num-samples 8 {LOSSES['neuclip']} --workers 0 --epochs 1 --name x"


@pytest.mark.parametrize("name", sorted(registry()))
def test_a_training_without_a_component(datasets, tmp_path, name):
    if name == "scenes":
        pytest.skip("the data of this test are scenes")
    assert run_main(ext_main, f"{datasets['shapes']} {FLAGS} --without {name}", tmp_path) == 0
    assert (tmp_path / "x/checkpoints/epoch_1.pt").exists()


DATA = ["bad_samples", "counted_rows", "exact_resume", "pair_tables", "retrieval"]


@pytest.mark.parametrize("data", ["csv", "shards"])
@pytest.mark.parametrize("without", ["counted_rows", ",".join(DATA)])
def test_read_data_without_their_components(datasets, told, tmp_path, data, without):
    """The core numbers the samples by itself: shards by their sizes.json."""
    flags = f"{LOSSES['fastclip-v2']} --workers 0 --epochs 1 --name x --without {without}"
    assert run_main(ext_main, f"{datasets[data]} {flags}", tmp_path) == 0
    rows, _ = told()
    assert sorted(rows.tolist()) == list(range(48))


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_training_without_the_file_of_a_component(datasets, tmp_path, file):
    for package in ("open_clip_ext", "training_ext"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    gone = tmp_path / "training_ext/components" / file.name
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    data = datasets["csv" if file.stem == "scenes" else "shapes"]
    val = "" if file.stem == "scenes" else "--val-num-samples 8"
    flags = f"{data} {FLAGS.replace('--val-num-samples 8', val)} --logs {tmp_path}".split()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "open_clip_ext.main", *flags]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert (tmp_path / "x/checkpoints/epoch_1.pt").exists()
