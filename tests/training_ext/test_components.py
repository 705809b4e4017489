"""A component can be left out, or its file be absent: a training without its flags trains."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import LOSSES, SHIPPED, ext_main, run_main

import open_clip_ext
from training_ext.core.component import registry

ROOT = Path(open_clip_ext.__file__).parents[1]
FILES = sorted(path for path in (ROOT / "training_ext/components").iterdir() if not path.name.startswith("_"))
FLAGS = f"--train-num-samples 16 --val-num-samples 8 {LOSSES['neuclip']} --workers 0 --epochs 1 --name x"


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


def train_without(paths, flags: str, folder: Path) -> None:
    """Train in a copy of both packages in `folder` that lacks these paths in `training_ext`."""
    for package in ("open_clip_ext", "training_ext"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in paths:
        gone = folder / "training_ext" / path
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    command = [sys.executable, "-m", "open_clip_ext.main", *f"{SHIPPED} {flags} --logs {folder}".split()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert (folder / "x/checkpoints/epoch_1.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_training_without_the_file_of_a_component(datasets, tmp_path, file):
    if file.stem == "scenes":
        flags = f"{datasets['csv']} {FLAGS.replace('--train-num-samples 16 --val-num-samples 8', '')}"
    else:
        flags = f"{datasets['shapes']} {FLAGS}"
    train_without([f"components/{file.name}"], flags, tmp_path)


@pytest.mark.slow
def test_a_bare_training_needs_only_the_core(tmp_path):
    """Neither what is around it nor its own modules that only a run with components uses."""
    around = {path.name for path in (ROOT / "training_ext").iterdir()} - {"core", "__init__.py", "__pycache__"}
    of_components = ["component", "component_state", "epoch", "events", "hosts/v3_events", "hosts/v4_events", "older"]
    synthetic = "--dataset-type synthetic --train-num-samples 16 --workers 0 --epochs 1 --name x"
    paths = [*around, *(f"core/{name}.py" for name in of_components)]
    train_without(paths, f"--bare --loss neuclip {synthetic}", tmp_path)


def imports(path: Path) -> set[str]:
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return modules | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


def test_only_tools_import_a_component():
    training = ROOT / "training_ext"
    for path in [training / "launch.py", *training.glob("[fdo]*/**/*.py")]:  # flags, data, openclip
        assert not {name for name in imports(path) if name.startswith("training_ext.components")}, path


def test_what_a_component_does_is_not_imported_before_it_is_wanted():
    implementations = {
        "training_ext.scoring.scores", "training_ext.scoring.folders", "training_ext.components.lora.additions",
        "training_ext.components.scenes.classification", "training_ext.components.recovery.recovered",
        "training_ext.components.recovery.recovery",
    }
    with patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "training_ext"]:
            del sys.modules[name]
        importlib.import_module("training_ext.core.component").registry()
        assert "training_ext.components.lora.component" in sys.modules and not implementations & {*sys.modules}
