"""`open_clip_ext.main.train`: the command from Python."""

import json
import logging
import multiprocessing

import pytest
import torch
from conftest import TINY

from open_clip_ext import InputError
from open_clip_ext.main import Trained, train

DATA = "--dataset-type shapes --train-num-samples 24 --val-num-samples 8"
FLAGS = f"{DATA} --loss fastclip-v3 --rho 5 --lr 1e-3 --epochs 2 --workers 1"


def test_it_is_the_command(run, tmp_path):
    handlers, level, children = list(logging.root.handlers), logging.root.level, multiprocessing.active_children()
    trained = train([*TINY.split(), *FLAGS.split(), "--seed", 1, "--logs", tmp_path, "--name", "own"])
    assert (logging.root.handlers, logging.root.level) == (handlers, level)
    assert set(multiprocessing.active_children()) <= set(children)  # the loader's workers are gone
    command = run("command", f"{FLAGS} --seed 1")

    assert trained.folder == tmp_path / "own"
    assert trained.checkpoints == [tmp_path / f"own/checkpoints/epoch_{epoch}.pt" for epoch in (1, 2)]
    for tensor, other in zip(
        torch.load(trained.checkpoints[-1], "cpu", weights_only=True)["state_dict"].values(),
        command.checkpoint(2)["state_dict"].values(),
        strict=True,
    ):
        assert torch.equal(tensor, other)
    results = (command.path / "checkpoints/results.jsonl").read_text().splitlines()
    assert trained.by_epoch == [json.loads(line) for line in results]
    assert [metrics["epoch"] for metrics in trained.by_epoch] == [1, 2]
    assert trained.metrics["image_to_text_R@1"] == trained.by_epoch[-1]["image_to_text_R@1"]
    assert (trained.folder / "out.log").read_text().count("Epoch 1 1/3") == 1  # not the next one's, too


def test_the_file_of_the_most_recent_epoch_is_not_one_of_an_epoch(tmp_path):
    flags = f"{FLAGS} --save-most-recent --logs {tmp_path} --name own"
    trained = train([*TINY.split(), *flags.split()])
    assert [path.name for path in trained.checkpoints] == ["epoch_1.pt", "epoch_2.pt"]
    assert (tmp_path / "own/checkpoints/epoch_latest.pt").exists()


def test_a_run_that_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # OpenCLIP makes a folder of that name for its log
    flags = "--dataset-type shapes --train-num-samples 16 --loss clip --epochs 1 --workers 0 --logs none"
    assert train([*TINY.split(), *flags.split()]) == Trained([], None, [])
    assert not list(tmp_path.rglob("recipe.yaml"))


def test_bad_input_is_an_exception(tmp_path):
    with pytest.raises(InputError, match="--rho"):
        train(["--loss", "fastclip-v3", "--rho", "much", "--logs", tmp_path])
    assert not list(tmp_path.iterdir())
