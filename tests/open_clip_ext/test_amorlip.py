"""AmorLIP against `open_clip_ext.equations` in float64, through several epochs of Algorithm 1."""

from copy import deepcopy

import pytest
import torch
from numerics import unit

from open_clip_ext import create_loss, equations
from open_clip_ext.batch import Batch
from open_clip_ext.losses.amortization import DIVERGENCES
from open_clip_ext.networks import PartitionMLP

EPOCHS = 4
PAPER = dict(amor_denominator="target", amor_positive_weight=1.0)


def pairs(seed, batch=6, dimension=8):
    generator = torch.Generator().manual_seed(seed)
    e1 = unit(generator, batch, dimension)
    e2 = torch.nn.functional.normalize(e1 + 0.8 * unit(generator, batch, dimension), dim=1)
    return e1.requires_grad_(), e2.requires_grad_()


F = {"l2-log": None, "kl": equations.kl, "js": equations.js}


class Reference:
    """Algorithm 1 with torch's own Adam and networks that start as the loss's do, and the variants of its flags."""

    def __init__(self, objective, updates, online_every, target_every, ema, beta, weight, denominator, target):
        self.__dict__.update(locals())
        self.online = self.average = self.previous = None

    @torch.no_grad()
    def networks(self, networks, e1, e2):
        return equations.amorlip_networks(networks, e1, e2)

    def step(self, e1, e2, s, epoch, k, started, rho):
        negatives = self.target == "negatives"
        z = equations.amorlip_z(e1, e2, s, 0.0 if negatives else self.weight).detach()
        if k == 0:  # line 4
            self.previous = self.average
            self.online = started(z.log().mean(dim=1))
            self.average = deepcopy(self.online)
            self.adam = torch.optim.Adam(self.online.parameters(), lr=1e-3)
        z_comb = z  # line 6
        if self.previous is not None:
            beta_t = equations.amorlip_beta(epoch + 1, EPOCHS, self.beta)
            z_comb = equations.amorlip_z_comb(z, self.networks(self.previous, e1, e2), beta_t)
        equations.amorlip_lambda(
            self.online, self.average, self.adam, e1, e2, z, z_comb, k,
            T_online=self.online_every, T_target=self.target_every, T_lambda=self.updates, alpha=self.ema,
            f=F[self.objective],
        )
        lam = z_comb if self.denominator == "combined" else self.networks(self.average, e1, e2)
        if negatives:
            lam = lam + self.weight * torch.exp(s * (e1 * e2).sum(dim=1)) / len(e1)
        return equations.amorlip(e1, e2, s, lam, rho, self.weight)


@pytest.mark.parametrize(
    "objective, target, denominator, weight, batch, dimension, scale",
    [
        ("l2-log", "all", "target", 1.0, 6, 8, 4.0), ("kl", "all", "target", 1.0, 6, 8, 4.0),
        ("js", "all", "target", 1.0, 6, 8, 4.0), ("l2-log", "all", "combined", 1e-3, 17, 64, 14.0),
        ("kl", "all", "target", 0.0, 2, 3, 1.0), ("js", "negatives", "target", 1.0, 17, 64, 14.0),
        ("kl", "negatives", "combined", 1e-3, 6, 8, 4.0),
    ],
)  # fmt: skip
def test_algorithm_1(objective, denominator, weight, target, batch, dimension, scale):
    settings = dict(online_every=2, target_every=3, ema=0.7, beta=1.0 if batch == 6 else 0.6, updates=2)
    loss = create_loss(
        "amorlip", epochs=EPOCHS, rho=6.5, rho_annealed=-8.0, amor_objective=objective, amor_target=target,
        amor_denominator=denominator, amor_positive_weight=weight, **{f"amor_{k}": v for k, v in settings.items()},
    )
    reference = Reference(objective=objective, weight=weight, denominator=denominator, target=target, **settings)
    for epoch in range(EPOCHS):
        loss.set_epoch(epoch)
        for k in range(5):
            e1, e2 = pairs(10 * epoch + k, batch, dimension)
            s = torch.tensor(scale + epoch).double().requires_grad_()
            value = loss(e1, e2, s)
            state = loss.full_state()

            def started(levels, epoch=epoch):
                with torch.random.fork_rng():
                    torch.manual_seed(epoch)
                    sides = torch.nn.ModuleList(PartitionMLP(dimension, 0.5) for _ in levels)
                for side, level in zip(sides, levels, strict=True):
                    torch.nn.init.constant_(side.out.bias, level.float())
                return sides.double()

            rho = 6.5 if epoch < 3 else -8.0  # the last quarter
            expected = reference.step(e1, e2, s, epoch, k, started, rho)
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
            actual = torch.autograd.grad(value, [e1, e2, s])
            for one, other in zip(actual, torch.autograd.grad(expected, [e1, e2, s]), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
            for name, networks in (("online", reference.online), ("target", reference.average)):
                for key, parameter in networks.state_dict().items():
                    torch.testing.assert_close(state[f"{name}:{key}"], parameter, rtol=1e-5, atol=1e-6)
    assert float(loss.diagnostics()["amor_beta"]) == pytest.approx(settings["beta"])


@pytest.mark.parametrize("every, last", [(2, 3), (0, 9)])
def test_networks_that_stay(every, last):
    """New ones at epochs 0 and 2, or never."""
    loss = create_loss("amorlip", **PAPER, epochs=EPOCHS, amor_reinit_every=every)
    states = []
    for epoch in range(3):
        loss.set_epoch(epoch)
        for k in range(3):
            loss(*pairs(k), torch.tensor(5.0).double())
            states.append(loss.full_state())
    steps = [int(state["adam:0.up.weight:step"]) for state in states]
    assert steps == [3] * 3 + [6] * 3 + [last] * 3
    assert "previous:0.up.weight" not in states[2]
    assert torch.equal(states[3]["previous:0.up.weight"], states[2]["target:0.up.weight"])
    assert torch.equal(states[6]["previous:0.up.weight"], states[5]["target:0.up.weight"])


def test_stage_2_over_parts_of_the_batch_averages_to_the_whole(monkeypatch):
    """With the same networks, over all ways to give two processes two pairs each."""
    from open_clip_ext.losses import amorlip

    loss = create_loss("amorlip", **PAPER, epochs=2)
    loss.set_epoch(0)
    e1, e2 = pairs(0, 4)
    loss(e1, e2, torch.tensor(30.0).double())
    loss.eval()
    scale = torch.tensor(30.0).double().requires_grad_()
    expected = torch.autograd.grad(loss(e1, e2, scale), [e1, e2, scale])
    monkeypatch.setattr(amorlip, "world_size", lambda: 2)
    total = 0.0
    for half in ([0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]):
        total = total + loss(e1[half], e2[half], scale) / 6
    for actual, wanted in zip(torch.autograd.grad(total, [e1, e2, scale]), expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    with pytest.raises(ValueError, match="1 pair.* in this process; amorlip needs 2"):
        monkeypatch.setattr("open_clip_ext.losses.base.world_size", lambda: 2)
        loss(e1[:1], e2[:1], scale)


def test_new_networks_leave_cuda_generators_alone(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    loss = create_loss("amorlip", **PAPER, epochs=2)
    for epoch in range(2):
        loss.set_epoch(epoch)
        loss(*pairs(0), torch.tensor(5.0))
    assert not seeded


def test_nothing_is_gathered_on_steps_without_stage_1(monkeypatch):
    gathers = []
    monkeypatch.setattr(Batch, "gather", classmethod(lambda cls, *e: gathers.append(1) or cls.of_process(*e)))

    loss = create_loss("amorlip", **PAPER, epochs=1, amor_online_every=4)
    loss.set_epoch(0)
    seen = []
    for k in range(9):
        loss(*pairs(k), torch.tensor(5.0))
        seen.append(len(gathers))
    assert seen == [1, 1, 1, 1, 2, 2, 2, 2, 3]


@pytest.mark.parametrize("name", ["kl", "js"])
def test_divergences_beyond_their_bound_are_those_at_it(name):
    at, beyond = (DIVERGENCES[name](torch.tensor(r, dtype=torch.float64)) for r in (12.5, 40.0))
    assert at == beyond
    r = torch.tensor([-3.0, 0.0, 12.0], dtype=torch.float64, requires_grad=True)
    values, slopes = DIVERGENCES[name](r)
    torch.testing.assert_close(torch.autograd.grad(values.sum(), r)[0], slopes.detach(), rtol=1e-12, atol=1e-12)


def test_the_networks_objective_is_logged_after_a_resume():
    """It is computed at every eighth step only, before the step's updates."""
    first, once, second = (create_loss("amorlip", epochs=2, amor_updates=updates) for updates in (3, 1, 3))
    for loss in (first, once):
        loss.set_epoch(0)
        for seed in range(3):
            loss(*pairs(seed), torch.tensor(10.0))
    second.load_full_state(first.full_state())
    second.set_epoch(0)
    second.load_diagnostics_state(first.diagnostics_state())
    second(*pairs(3), torch.tensor(10.0))
    for loss in (once, second):
        assert torch.equal(loss.diagnostics()["amor_objective"], first.diagnostics()["amor_objective"])
