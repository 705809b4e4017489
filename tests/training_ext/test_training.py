"""Runs of the command: what OpenCLIP does it does; test_midepoch has resumed ones."""

import math

import open_clip
import pytest
import torch
from conftest import LOSSES

from open_clip_ext import MODEL_CONFIGS
from training_ext.core import hosts


def same(a: dict, b: dict, path: str = "") -> None:
    """Assert that two checkpoints hold the same values, bit for bit."""
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            if key != "name":
                same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}[{number}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b, path


@pytest.mark.parametrize("arguments", ["", "--loss siglip"])
def test_open_clips_own_losses_train_as_open_clip_trains_them(run, datasets, arguments):
    open_clip.add_model_config(MODEL_CONFIGS)
    common = f"{datasets['csv']} --workers 0 --epochs 2"
    plain = "--siglip" if "siglip" in arguments else ""
    theirs = run("theirs", f"{common} {plain}", main=hosts.installed().main().main)
    ours = run("ours", f"{common} {arguments} {'--log-all' if '--loss' in arguments else ''}")
    assert len(theirs.open_clips_losses()) == 12 and ours.open_clips_losses() == theirs.open_clips_losses()
    same(ours.checkpoint(2), theirs.checkpoint(2))


def test_open_clips_own_losses_resume(run, datasets):
    common = f"{datasets['csv']} --workers 0 --loss siglip"
    first = run("first", f"{common} --epochs 1")
    resumed = run("resumed", f"{common} --epochs 2 --resume {first.path}/checkpoints/epoch_1.pt").checkpoint(2)
    steps = {step["step"].item() for step in resumed["optimizer"]["state"].values()}
    assert resumed["epoch"] == 2 and steps == {12}


@pytest.mark.slow
def test_restarts_by_default_come_every_fifth_of_an_epoch(run, datasets):
    """Of a pass over the data, 48 pairs, however long an epoch is made; what was not recovered does so, too."""
    flags = "--loss neuclip --npn-prototypes 20 --workers 0 --epochs 1 --batch-size 4"
    for name, data, more, every in (
        ("default", "shapes", "", 2),
        ("short", "shards", "--train-num-samples 24 --temperature individual", 2),
        ("given", "shapes", "--npn-restart-every 5", 5),
        ("accumulated", "shapes", "--accum-freq 2", 6),  # a fifth would be one step
        ("recovered", "shapes", "--osr-epochs 0.5 --osr-transfer moments", 2),
    ):
        experiment = run(name, f"{datasets[data]} {flags} {more}")
        state = experiment.checkpoint(1)["open_clip_ext"]["state"]
        assert state["state.restart_every"] == every, name
        assert f"Loss neuclip: normalizers prototypes (restarted every {every} steps, adagrad at 0.0" in experiment.log


def test_unmodified_open_clip_loads_the_model(run, datasets):
    experiment = run("x", f"{datasets['shapes']} {LOSSES['neuclip']} --workers 0 --epochs 1")
    open_clip.add_model_config(MODEL_CONFIGS)
    model, _, _ = open_clip.create_model_and_transforms(
        "ViT-test", pretrained=str(experiment.path / "checkpoints" / "epoch_1.pt")
    )
    saved = experiment.checkpoint(1)["state_dict"]
    assert model.state_dict().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[key]) for key, tensor in model.state_dict().items())


def test_the_log_carries_the_diagnostics(run, datasets):
    neuclip = run("n", f"{datasets['shapes']} {LOSSES['neuclip']} --workers 0 --epochs 1")
    fastclip = run("f", f"{datasets['shapes']} {LOSSES['fastclip-v3']} --workers 0 --epochs 3")
    for name in (None, "tau", "alpha_image_mean", "alpha_image_std", "alpha_text_mean", "alpha_text_std"):
        assert len(neuclip.logged(name)) == 6 and len(fastclip.logged(name)) == 18
    assert len(neuclip.logged("npn_unified_before")) == len(neuclip.logged("npn_unified_after")) == 6
    assert [value for _, value in fastclip.logged("gamma")] == pytest.approx([1.0] * 6 + [0.6] * 6 + [0.2] * 6)


def test_the_temperature_has_its_own_learning_rate(run, datasets):
    common = f"{datasets['shapes']} --workers 0 --epochs 1 --lr 1e-3"
    groups = run("a", f"{common} {LOSSES['neuclip']}").checkpoint(1)["optimizer"]["param_groups"]
    # The last of 6 steps, 2 of them warm-up: cosine at 3/4.
    cosine = 0.5 * (1 + math.cos(math.pi * 3 / 4))
    assert [group["lr"] for group in groups] == pytest.approx([1e-3 * cosine] * 2 + [1.25e-4 * cosine])
    assert len(groups[-1]["params"]) == 1 and groups[-1]["weight_decay"] == 0
    groups = run("b", f"{common} {LOSSES['fastclip-v3']} --lr-tau 3e-4").checkpoint(1)["optimizer"]["param_groups"]
    assert groups[-1]["lr"] == pytest.approx(3e-4)


def test_a_fixed_temperature_stays_even_beyond_open_clips_clamp(run, datasets):
    """1 / 0.005 is above the 100 that OpenCLIP clamps to; individual temperatures leave the model's alone too."""
    for name, loss, expected in (("fixed", "sogclr", 1 / 0.005), ("individual", "isogclr", 1 / 0.07)):
        checkpoint = run(name, f"{datasets['shapes']} {LOSSES[loss]} --workers 0 --epochs 1").checkpoint(1)
        assert checkpoint["state_dict"]["logit_scale"].exp().item() == pytest.approx(expected, rel=1e-6)
        assert len(checkpoint["optimizer"]["param_groups"]) == 2


@pytest.mark.parametrize("least", [0.05, 0.005])
def test_the_learned_temperature_stops_at_tau_min(run, datasets, least):
    """A large rho pulls tau down faster than six steps need; 0.005 is below what OpenCLIP's own clamp allows."""
    flags = f"{LOSSES['queue']} --rho 50 --lr-tau 1 --lr-tau-scheduler fastclip --tau-init 0.06 --tau-min {least}"
    checkpoint = run("a", f"{datasets['shapes']} {flags} --workers 0 --epochs 1").checkpoint(1)
    assert checkpoint["state_dict"]["logit_scale"].exp().item() == pytest.approx(1 / least, rel=1e-6)
