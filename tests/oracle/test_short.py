"""What metrics.jsonl holds and means, and that `--loss clip` trains as OpenCLIP does."""

import json
import math
import re
import subprocess
import sys

import pytest
import short
import torch
import trainings

from open_clip_ext.metrics_file import read_metrics

pytestmark = pytest.mark.slow
EVERY_STEP = """stage epoch step steps samples time throughput lr scale tau batch_time data_time samples_per_second
    samples_per_second_per_gpu"""
OF_LOSS = {
    "neuclip": """objective_learnable loss_at_chance alpha_image_mean alpha_image_std alpha_text_mean alpha_text_std
        max_weight effective_anchors effective_negatives prototypes npn_unified_before npn_unified_after loss""",
    "clip": "loss contrastive_loss",
}
RECALLS = [f"{way}_{name}" for way in ("image_to_text", "text_to_image") for name in ("R@1", "R@5", "R@10")]
RANKS = [f"{way}_{name}_rank" for way in ("image_to_text", "text_to_image") for name in ("mean", "median")]
EVALUATION = {"stage", "epoch", "step", "time", "num_samples", "clip_val_loss", *RECALLS, *RANKS}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("short")
    with open(folder / "output.txt", "wb") as output:
        command = [sys.executable, short.__file__, str(folder)]
        assert not subprocess.run(command, stdout=output, stderr=output).returncode, folder / "output.txt"
    return folder


@pytest.fixture(params=short.LOSSES)
def lines(request, trained):
    """Name of the loss, and what was logged of its steps and of its evaluations."""
    return request.param, read_metrics(trained / request.param, "train"), read_metrics(trained / request.param, "eval")


def test_names(lines):
    loss, steps, evaluations = lines
    assert set().union(*steps) == {*EVERY_STEP.split(), *OF_LOSS[loss].split()}
    assert set().union(*evaluations) == EVALUATION


def test_the_clock(lines):
    _, steps, evaluations = lines
    per_epoch = short.STEPS // trainings.EPOCHS
    assert [(line["epoch"], line["step"]) for line in steps] == [
        (epoch, step) for epoch in range(trainings.EPOCHS) for step in range(1, per_epoch + 1)
    ]
    assert [(line["epoch"], line["step"]) for line in evaluations] == [(1, 0), (2, 0)]
    assert all(line["steps"] == per_epoch for line in steps)
    assert [line["samples"] for line in steps] == [trainings.GLOBAL_BATCH * (i + 1) for i in range(short.STEPS)]
    # Three steps of warm-up to 1e-3, then a cosine to the end.
    cosine = [0.5 * (1 + math.cos(math.pi * i / (short.STEPS - 3))) for i in range(short.STEPS - 3)]
    assert [line["lr"] for line in steps] == pytest.approx([1e-3 * part for part in (1 / 3, 2 / 3, 1, *cosine)])


def test_the_ranges(lines):
    loss, steps, evaluations = lines
    assert [line["scale"] for line in steps] == pytest.approx([1 / line["tau"] for line in steps], rel=1e-5)
    for line in evaluations:
        assert line["num_samples"] == trainings.PAIRS
        first, fifth, tenth = (line[f"image_to_text_R@{k}"] for k in (1, 5, 10))
        assert 0 <= first <= fifth <= tenth <= 1 <= line["image_to_text_mean_rank"] <= trainings.PAIRS
    if loss == "neuclip":
        assert steps[-1]["prototypes"] == 20 and 0 < steps[-1]["effective_anchors"] <= 2 * trainings.GLOBAL_BATCH
        counts = [line["effective_negatives"] for line in steps if "effective_negatives" in line]
        assert counts and all(1 <= count <= trainings.GLOBAL_BATCH - 1 for count in counts)


def test_open_clips_loss_is_logged_as_open_clip_logs_it(trained):
    losses = re.findall(r"Train Epoch: .* Loss: (\S+) \(", (trained / "theirs/out.log").read_text())
    ours = read_metrics(trained / "clip", "train")
    assert [line["loss"] for line in ours] == pytest.approx([float(loss) for loss in losses], rel=1e-3)
    theirs = [json.loads(line) for line in (trained / "theirs/checkpoints/results.jsonl").read_text().splitlines()]
    for line, other in zip(read_metrics(trained / "clip", "eval"), theirs, strict=True):
        assert {name: line[name] for name in other} == other


def test_open_clips_loss_trains_as_open_clip_trains_it(trained):
    """To the last bit."""
    ours, theirs = (
        torch.load(trained / f"{name}/checkpoints/epoch_{trainings.EPOCHS}.pt", weights_only=True)
        for name in ("clip", "theirs")
    )
    assert ours.pop("name") == "clip" and theirs.pop("name") == "theirs"
    trainings.assert_same(ours, theirs)
