"""NeuCLIP's ablations against float64 autograd: the network's objective, an MLP for a network, one joint step."""

import pytest
import torch
from numerics import unit

from open_clip_ext import create_loss, equations
from open_clip_ext.equations import batch_g, gaps
from open_clip_ext.networks import PartitionMLP
from open_clip_ext.objectives import Unified

TAU, EPS = torch.tensor(0.2).double(), 1e-6


def batches(number, batch=6, dimension=8):
    generator = torch.Generator().manual_seed(0)
    return [(unit(generator, batch, dimension), unit(generator, batch, dimension)) for _ in range(number)]


def fit(objective, g, alpha):
    if objective == "unified":
        return equations.neuclip(g, TAU, alpha, 0.0, EPS)
    return equations.neuclip_separate(g, alpha, EPS)


@pytest.mark.parametrize(
    "settings, restarts",
    [
        (dict(), [0, 2, 4, 6, 8, 10, 12]),
        (dict(npn_restart_every=5), [0, 5, 10]), (dict(npn_restart_every=0), [0]),
        (dict(npn_joint=True), [0]), (dict(normalizer="mlp"), [0]),
    ],
)
def test_restarts_go_by_the_length_of_an_epoch_unless_given(settings, restarts, monkeypatch):
    """A fifth of 14 steps is 2; a state takes its number along, where none is given."""
    loss, resumed = (create_loss("neuclip", steps_per_epoch=steps, **settings) for steps in (14, 4))
    seen = []
    for one in (loss, resumed):
        monkeypatch.setattr(one.normalizer, "_restart", lambda batch, own=one.normalizer: seen.append(own.steps))
    for step, (e1, e2) in enumerate(batches(13)):
        if step == 7:
            resumed.load_full_state(loss.full_state())
            loss = resumed
        loss(e1, e2, 1 / TAU)
    assert seen == restarts


@pytest.mark.parametrize("steps, every", [(None, 500), (2723, 500), (2500, 500), (2404, 480), (10, 2), (9, 9), (1, 1)])
def test_restarts_by_default(steps, every):
    """Without the length of an epoch, and with CC3M's, the paper's; a whole pass where a fifth is one step."""
    assert create_loss("neuclip", steps_per_epoch=steps).normalizer.restart_every == every
    assert create_loss("neuclip", steps_per_epoch=steps, npn_joint=True).normalizer.restart_every == 0


@pytest.mark.parametrize(
    "steps, epochs, given, rate",
    [
        # CC3M, DFN-14M and lengths that are not known: the paper's
        (2660, 37, {}, 1.0), (3350, 23, {}, 1.0), (4, None, {}, 1.0), (None, 15, {}, 1.0),
        (770, 1, {}, 0.1), (77, 4, {}, 0.02 * 10**0.5),
        (770, 1, dict(npn_lr=0.5), 0.5), (770, 1, dict(npn_opt="adam"), 1e-3), (770, 1, dict(npn_joint=True), 1e-3),
        (770, 1, dict(normalizer="mlp", npn_opt="adagrad"), 1e-3),
    ],
)
def test_the_rate_by_default(steps, epochs, given, rate, caplog):
    loss = create_loss("neuclip", steps_per_epoch=steps, epochs=epochs, **given)
    assert ("came without" in caplog.text) == (steps is None or epochs is None)
    loss(*batches(1)[0], 1 / TAU)
    assert loss.normalizer.network.optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_joint_is_algorithm_3():
    """Encoders' gradient and network's at the same point; then one AdamW step on the network."""
    rho = 5.0
    loss = create_loss("neuclip", npn_prototypes=6, npn_joint=True, npn_lr=0.01, npn_wd=0.1, loss_eps=EPS, rho=rho)
    w = optimizer = None
    for e1, e2 in batches(5):
        e1.requires_grad_(), e2.requires_grad_()
        if w is None:
            w = torch.stack([e2, e1]).detach().requires_grad_()
            optimizer = torch.optim.AdamW([w], lr=0.01, weight_decay=0.1)
        value = loss(e1, e2, 1 / TAU)
        torch.testing.assert_close(loss.full_state()["state.weight"], w.detach(), rtol=1e-5, atol=1e-7)
        alpha = equations.neuclip_alpha(*w, e1, e2, TAU, EPS)
        objective = equations.neuclip(batch_g(gaps(e1, e2), TAU), TAU, alpha, rho, EPS)
        torch.testing.assert_close(value.detach(), objective.detach())
        optimizer.zero_grad()
        expected = torch.autograd.grad(objective, [e1, e2], retain_graph=True)
        for one, other, e in zip(torch.autograd.grad(value, [e1, e2]), expected, (e1, e2), strict=True):
            # The loss takes unit vectors at their word; the equation normalises, which adds a projection.
            along = ((one - other) * e.detach()).sum(dim=1, keepdim=True) * e.detach()
            torch.testing.assert_close(one - along, other, rtol=1e-5, atol=1e-8)
        (w.grad,) = torch.autograd.grad(objective, [w])
        optimizer.step()


def mlp_alpha(sides, e1, e2):
    """alpha = logaddexp(log eps, MLP(e) - s_ii / tau)."""
    log_z = torch.stack([side(e) for side, e in zip(sides, (e1, e2), strict=True)])
    return torch.log(EPS + torch.exp(log_z - (e1 * e2).sum(dim=1) / TAU))


@pytest.mark.parametrize("objective", ["unified", "l2-log"])
@pytest.mark.parametrize("encoder_objective", ["unified", "compositional"])
def test_an_mlp_for_a_network(objective, encoder_objective):
    """Its training by Adam, its prediction, and the encoders' gradient through it."""
    rho = 5.0
    loss = create_loss(
        "neuclip", normalizer="mlp", npn_objective=objective, encoder_objective=encoder_objective, npn_updates=2,
        npn_lr=0.01, mlp_width=0.75, loss_eps=EPS, rho=rho,
    )
    sides = optimizer = None
    for e1, e2 in batches(3):
        e1.requires_grad_(), e2.requires_grad_()
        g = batch_g(gaps(e1, e2), TAU)
        value = loss(e1, e2, 1 / TAU)
        if sides is None:  # started as ours did, which the next test looks at
            fresh = create_loss("neuclip", normalizer="mlp", npn_updates=0, mlp_width=0.75, loss_eps=EPS)
            fresh(e1, e2, 1 / TAU)
            sides = torch.nn.ModuleList(PartitionMLP(8, 0.75).double() for _ in range(2))
            started = {key.removeprefix("state."): value for key, value in fresh.full_state().items()}
            sides.load_state_dict({key: started[key] for key in sides.state_dict()})
            optimizer = torch.optim.Adam(sides.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            fit(objective, g.detach(), mlp_alpha(sides, e1.detach(), e2.detach())).backward()
            optimizer.step()
        state = loss.full_state()
        for key, expected in sides.state_dict().items():
            torch.testing.assert_close(state[f"state.{key}"], expected, rtol=1e-6, atol=1e-8)
        e1.grad = e2.grad = None
        alpha = mlp_alpha(sides, e1, e2)
        if encoder_objective == "unified":
            objective_value = equations.neuclip(g, TAU, alpha, rho, EPS)
        else:
            objective_value = equations.sogclr(g, TAU, alpha.exp().detach())
        expected = torch.autograd.grad(objective_value, [e1, e2])
        for one, other in zip(torch.autograd.grad(value, [e1, e2]), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)
        if encoder_objective == "unified":
            torch.testing.assert_close(value.detach(), objective_value.detach(), rtol=1e-6, atol=1e-8)


def test_the_mlp_starts_at_the_level_of_the_batch_and_alike_everywhere():
    (e1, e2), = batches(1)
    losses = [create_loss("neuclip", normalizer="mlp", npn_updates=0) for _ in range(2)]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for loss in losses:
        loss(e1, e2, 1 / TAU)
    assert torch.equal(torch.get_rng_state(), before), "initialisation must leave the global generator alone"
    first, second = (loss.full_state() for loss in losses)
    assert all(torch.equal(first[key], second[key]) for key in first if key.startswith("state."))
    log_z = ((e1 @ e2.T) / TAU).fill_diagonal_(-torch.inf).logsumexp(dim=1).mean() - torch.tensor(5.0).log()
    torch.testing.assert_close(first["state.0.out.bias"][0], log_z, rtol=1e-4, atol=1e-4)


def test_the_optimum_over_alpha_is_the_log_normalizer():
    """NeuCLIP, Eq. 5: min over alpha of exp(-alpha) (eps + g) + alpha is log(eps + g) + 1, at alpha = log(eps + g);
    for a batch's random g, at the logarithm of its mean."""
    generator = torch.Generator().manual_seed(0)
    g = torch.rand(2, 400, generator=generator, dtype=torch.float64) ** 4
    log_batch = (EPS + g).log()
    torch.testing.assert_close(Unified.value(log_batch, log_batch), log_batch)
    for away in (-1.0, -0.01, 0.01, 1.0):
        assert (Unified.value(log_batch, log_batch + away) > log_batch).all()
    shared = torch.zeros(2, 1, dtype=torch.float64)
    for _ in range(300):
        shared -= 0.5 * Unified.slope(log_batch, shared).mean(dim=1, keepdim=True)
    torch.testing.assert_close(shared[:, 0], (EPS + g).mean(dim=1).log(), rtol=1e-6, atol=1e-6)
