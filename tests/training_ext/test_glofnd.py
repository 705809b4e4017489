"""examples/glofnd.py: its thresholds, its loss in float64, its command on one process, and its state."""

import importlib.util
from pathlib import Path

import pytest
import torch
from conftest import run_main
from numerics import unit

from open_clip_ext.factory import create_loss
from open_clip_ext.main import main
from open_clip_ext.presets import PRESETS

PATH = Path(__file__).parents[2] / "examples/glofnd.py"


@pytest.fixture(scope="module")
def glofnd():
    spec = importlib.util.spec_from_file_location("glofnd", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def registered(glofnd, monkeypatch):
    monkeypatch.setitem(PRESETS, glofnd.PRESET.name, glofnd.PRESET)


def test_a_threshold_goes_to_the_quantile(glofnd):
    """Of 1,000 fixed similarities, of which a tenth shall lie above it."""
    similarities = torch.rand(1000, generator=torch.Generator().manual_seed(0)).mul(2).sub(1)
    m, v = torch.zeros(1), torch.zeros(1)
    lam = torch.ones(1)
    for _ in range(3000):
        above = (similarities > lam).float().mean()[None]
        lam, m, v = glofnd.glofnd_lambda(lam, m, v, above, share=0.1, epoch=30, lr=0.002)
    assert lam.item() == pytest.approx(similarities.quantile(0.9).item(), abs=0.03)


@pytest.mark.parametrize("start", [0, 5])
def test_the_loss_against_loops(glofnd, registered, float64_rows, start):
    """Two steps in epoch 1: before `start` all negatives count, after it those below the threshold."""
    loss = create_loss(
        "glofnd", num_samples=9, glofnd_share=0.3, glofnd_start=start, glofnd_lr=0.4, glofnd_gamma=0.25,
        glofnd_eps=1e-6,
    )
    loss.set_epoch(1)
    tau, index = 0.2, torch.tensor([4, 0, 7, 2, 5])
    lam, u = torch.ones(2, 5).double(), torch.zeros(2, 5).double()
    m, v = torch.zeros(2, 2, 5).double()
    left_out = 0
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        e1, e2 = (unit(generator, 5, 3).requires_grad_() for _ in range(2))
        s = [e1 @ e2.T, e2 @ e1.T]
        if start == 0:
            above = torch.tensor([[
                sum((s[side][i, j] > lam[side, i]).item() for j in range(5) if j != i) / 4 for i in range(5)
            ] for side in range(2)]).double()
            lam, m, v = glofnd.glofnd_lambda(lam, m, v, above, 0.3, 1, 0.4)
        objective = 0.0
        for side in range(2):
            for i in range(5):
                kept = [j for j in range(5) if j != i and (start == 5 or s[side][i, j] <= lam[side, i])]
                left_out += 4 - len(kept)
                g = 1e-6 + sum(((s[side][i, j] - s[side][i, i]) / tau).exp() for j in kept) / max(1, len(kept))
                g = torch.as_tensor(g)
                old = u[side, i].clone()
                u[side, i] = g.detach() if old == 0 else 0.75 * old + 0.25 * g.detach()
                objective = objective + tau * g / u[side, i].clone() / 5
        value = loss(e1, e2, torch.tensor(1 / tau).double(), index=index)
        for actual, expected in zip(
            torch.autograd.grad(value, [e1, e2]), torch.autograd.grad(objective, [e1, e2]), strict=True
        ):
            torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(value, tau * u.log().mean(dim=1).sum())
        torch.testing.assert_close(loss.full_state()["rows"][index].T, torch.cat([u, lam, m, v]))
    assert (left_out > 0) == (start == 0)


def test_the_command_resumes(registered, tmp_path):
    """Three epochs are one and two more; the thresholds of all rows have moved."""
    common = "--dataset-type shapes --train-num-samples 24 --workers 0 --lr 1e-3 --loss glofnd --glofnd-start 1"
    for name, epochs in (("whole", "3"), ("parts", "2"), ("parts", "3 --resume latest")):
        assert not run_main(main, f"{common} --name {name} --epochs {epochs} --lr-scheduler const", tmp_path)
    checkpoints = [
        torch.load(tmp_path / name / "checkpoints/epoch_3.pt", weights_only=True) for name in ("whole", "parts")
    ]
    rows = [checkpoint["optimizer"]["open_clip_ext"]["state"]["rows"] for checkpoint in checkpoints]
    assert torch.equal(*rows) and (rows[0][:, 2:4] != 1).all()
    for key, value in checkpoints[0]["state_dict"].items():
        assert torch.equal(value, checkpoints[1]["state_dict"][key]), key
