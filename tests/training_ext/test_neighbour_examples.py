"""examples/glofnd.py and nuclr.py: their equations in float64, several processes, their command, and their state."""

import importlib.util
import math
import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from conftest import run_main
from numerics import unit
from ports import free_ports

from open_clip_ext.main import main
from open_clip_ext.presets import PRESETS

SETTINGS = {
    "glofnd": dict(glofnd_share=0.3, glofnd_start=0, glofnd_lr=0.4),
    "nuclr": dict(nuclr_start=0, nuclr_epochs=4, nuclr_eta=0.3),
}


def load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def glofnd():
    return load("glofnd")


@pytest.fixture(params=SETTINGS)
def registered(request, monkeypatch):
    """Its name, once it is one of `--loss`."""
    monkeypatch.setitem(PRESETS, request.param, load(request.param).PRESET)
    return request.param


@pytest.mark.parametrize("start", [0, 5])
def test_glofnd_against_loops(glofnd, float64_rows, start):
    """Steps in epoch 1: before `start` all negatives count, after it those below the threshold."""
    options = dict(glofnd_share=0.3, glofnd_start=start, glofnd_lr=0.4, glofnd_gamma=0.25, glofnd_eps=1e-6)
    loss = glofnd.GloFND(num_samples=9, **options)
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
        torch.testing.assert_close(rows_of(loss.full_state())[index].T, torch.cat([u, lam, m, v]))
    assert (left_out > 0) == (start == 0)


def test_nuclr_against_loops(float64_rows):
    """Every pair by itself; tau 0.2, gamma 0.8, theta 0.9, eta 0.3, for images 0.1 of it; offsets move in epoch 1."""
    loss = load("nuclr").NUCLR(num_samples=9, **{**SETTINGS["nuclr"], "nuclr_start": 1, "nuclr_epochs": 8})
    tau, n, index = 0.2, 9, [4, 0, 7, 2, 5]
    u, z = [{}, {}], [{}, {}]
    zeta = [dict.fromkeys(range(n), -0.05) for _ in range(2)]
    for step in range(4):
        epoch = step // 2
        loss.set_epoch(epoch)
        if step in (0, 2):  # of the epoch before
            xi = [max(0.0, *side.values()) for side in zeta]
        e1, e2 = (unit(torch.Generator().manual_seed(10 * step + side), 5, 3).requires_grad_() for side in range(2))
        objective, counts = 0.0, torch.zeros(2, 5, 5).double()
        for side, (a, b) in enumerate([(e1, e2), (e2, e1)]):
            other = 1 - side
            for i, row in enumerate(index):
                gaps = [a[i] @ b[j] - a[i] @ b[i] for j in range(5)]
                sizes = [math.exp((gaps[j].item() - zeta[other][index[j]]) / tau) for j in range(5)]
                g = sum(size for j, size in enumerate(sizes) if j != i) / 4
                u[side][row] = 0.2 * u[side][row] + 0.8 * g if row in u[side] else g
                of_all = u[side][row] + math.exp(-xi[other] / tau) / (n - 1)
                objective = objective + sum(sizes[j] / of_all * gaps[j] for j in range(5) if j != i) / 4 / 5
                of_own = u[side][row] + math.exp(-zeta[other][row] / tau) / (n - 1)
                counts[side, i] = torch.tensor(sizes, dtype=torch.float64) / of_own
        if epoch == 1:
            eta = 0.3 * 0.5 * (1 + math.cos(math.pi * 0 / 6))
            for side, factor in ((0, 0.1), (1, 1.0)):  # as negatives, images are met by texts
                for j, row in enumerate(index):
                    new = 1 - n / (n - 1) * counts[1 - side, :, j].mean().item()
                    z[side][row] = 0.1 * z[side][row] + 0.9 * new if row in z[side] else new
                    zeta[side][row] -= factor * eta * z[side][row]
        value = loss(e1, e2, torch.tensor(1 / tau).double(), index=torch.tensor(index))
        for actual, expected in zip(
            torch.autograd.grad(value, [e1, e2]), torch.autograd.grad(objective, [e1, e2]), strict=True
        ):
            torch.testing.assert_close(actual, expected)
        rows = rows_of(loss.full_state())[index]
        expected = [[math.log(side[row]) for side in u] + [side[row] for side in zeta] for row in index]
        torch.testing.assert_close(rows[:, :4], torch.tensor(expected, dtype=torch.float64))


def rows_of(state):
    return torch.cat([state[name] for name in ("log_u", "u", "zeta", "lambda", "z", "m", "v") if name in state], dim=1)


def two_steps(name, rank, world):
    """Gradients of both steps in this process's embeddings, averaged over processes as DistributedDataParallel does."""
    loss = load(name).PRESET.loss(num_samples=12, **SETTINGS[name])
    local, gradients = slice(rank * 8 // world, (rank + 1) * 8 // world), []
    for step in range(2):
        loss.set_epoch(step)
        generator = torch.Generator().manual_seed(step)
        sides = [unit(generator, 8, 3)[local].requires_grad_() for _ in range(2)]
        index = torch.randperm(12, generator=generator)[:8]
        value = loss(*sides, torch.tensor(5.0).double(), index=index[local])
        gradients += [gradient / world for gradient in torch.autograd.grad(value, sides)]
    return torch.stack(gradients), loss.full_state()


def process(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.save({name: two_steps(name, rank, 2) for name in SETTINGS}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tmp_path):
    mp.start_processes(process, (free_ports(), str(tmp_path)), nprocs=2, start_method="fork")
    halves = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for name in SETTINGS:
        expected, state = two_steps(name, 0, 1)
        # Of rows in float32, whose u is a divisor.
        actual = torch.cat([half[name][0] for half in halves], dim=1)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(rows_of(halves[0][name][1]), rows_of(state), rtol=1e-5, atol=1e-6)


def test_the_command_resumes(registered, tmp_path):
    """Three epochs are two and one more; the thresholds or offsets of all rows have moved. The log names no command
    that does not know the loss."""
    flags = f"--loss {registered} --{registered}-start 1"
    common = f"--dataset-type shapes --train-num-samples 24 --workers 0 --lr 1e-3 {flags}"
    if registered == "nuclr":
        common += " --nuclr-epochs 3"
    for name, epochs in (("whole", "3"), ("parts", "2"), ("parts", "3 --resume latest")):
        assert not run_main(main, f"{common} --name {name} --epochs {epochs} --lr-scheduler const", tmp_path)
    *_, commands = (tmp_path / "parts/out.log").read_text().split("Next:")
    assert ".evaluate " in commands and ".normalizers_report" not in commands and ".main" not in commands
    checkpoints = [
        torch.load(tmp_path / name / "checkpoints/epoch_3.pt", weights_only=True) for name in ("whole", "parts")
    ]
    rows = [rows_of(checkpoint["open_clip_ext"]["state"]) for checkpoint in checkpoints]
    assert torch.equal(*rows) and (rows[0][:, 2:4] != (1 if registered == "glofnd" else -0.05)).all()
    for key, value in checkpoints[0]["state_dict"].items():
        assert torch.equal(value, checkpoints[1]["state_dict"][key]), key
