"""Temperatures of a network (TempNet), those of samples beside other normalizers, and the table's schedules."""

import math

import pytest
import torch
from numerics import close, unit, visit

from open_clip_ext import create_loss, equations
from open_clip_ext.equations import batch_g, gaps

BATCH, DIMENSION, ROWS, EPS = 6, 16, 9, 1e-14
NETWORK = dict(rho=3.0, tau_min=0.05, tau_max=0.4, tau_net_prototypes=4, tau_net_lr=0.01, tau_net_dropout=0.0)


def embeddings(seed, dtype=torch.float64):
    """Leaves of `dtype`, the same numbers as float64 leaves, and rows, of which one comes twice in step 2."""
    generator = torch.Generator().manual_seed(seed)
    e1 = unit(generator, BATCH, DIMENSION)
    e2 = torch.nn.functional.normalize(e1 + 0.8 * unit(generator, BATCH, DIMENSION), dim=1)
    features = [tensor.to(dtype).detach().requires_grad_() for tensor in (e1, e2)]
    index = torch.randperm(ROWS, generator=generator)[:BATCH]
    if seed == 2:
        index[1] = index[0]
    return features, [tensor.detach().double().clone().requires_grad_() for tensor in features], index


def networks(loss):
    """The parameters of both sides' networks as float64 leaves."""
    parts = loss.temperature.named(loss.temperature.weights)
    names = ("inner", "inner_bias", "prototypes", "log_phi", "out", "out_bias")
    return [[parts[name][side].double().clone().requires_grad_() for name in names] for side in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tempnet(dtype, request):
    """Embeddings' gradients, and the networks by torch's own Adam, through two epochs."""
    if dtype == torch.float64:
        request.getfixturevalue("float64_rows")
    loss = create_loss("tempnet", num_samples=ROWS, gamma=0.3, **NETWORK)
    loss.materialize(16, torch.device("cpu"), dtype)
    table, visited, spread = torch.zeros(2, ROWS, dtype=torch.float64), set(), 0.0
    for seed in range(6):
        loss.set_epoch(seed // 3)
        features, (e1, e2), index = embeddings(seed, dtype)
        if seed == 0:
            reference = networks(loss)
            for side, others in enumerate((e2, e1)):
                reference[side][2].data.copy_(others[:4])
            optimizer = torch.optim.Adam([leaf for side in reference for leaf in side])
        optimizer.param_groups[0]["lr"] = 0.01 * 0.9 ** (seed // 3)
        taus = torch.stack([
            equations.tempnet_tau(e, *side, 0.05, 0.4) for e, side in zip((e1, e2), reference, strict=True)
        ])
        g = batch_g(gaps(e1, e2), taus)
        s = visit(table, visited, index, 0.3, lambda s, beta0, g=g: equations.isogclr_s(s, EPS + g, beta0))
        objective = equations.tempnet(g, taus, s, 3.0)
        optimizer.zero_grad()
        objective.backward()

        value = loss(*features, torch.tensor(10.0, dtype=dtype), index=index)
        for actual, expected in zip(torch.autograd.grad(value, features), (e1.grad, e2.grad), strict=True):
            close(actual, expected, 0.05)
        close(value.detach(), objective.detach(), 0.05)
        optimizer.step()
        spread = max(spread, (taus.max() - taus.min()).item())
        # Adam divides by the root of a moment, which may amplify the rounding of a gradient near zero to a whole step.
        if dtype == torch.float64:
            for ours, theirs in zip(networks(loss), reference, strict=True):
                for one, other in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert spread > 1e-3, "the temperatures did not become individual"


def test_a_network_that_is_held_stays_and_its_moments_move():
    """On one batch again and again, it lowers the objective before."""
    loss = create_loss("tempnet", num_samples=ROWS, **NETWORK)
    loss.set_epoch(0)
    features, _, index = embeddings(0)
    values = [loss(*features, torch.tensor(10.0).double(), index=index).item() for _ in range(40)]
    assert values[-1] < values[0] - 0.05
    loss.temperature.hold = True
    before = loss.full_state()
    loss(*features, torch.tensor(10.0).double(), index=index)
    assert torch.equal(loss.full_state()["temperature.weights"], before["temperature.weights"])
    assert not torch.equal(loss.full_state()["temperature.moments"], before["temperature.moments"])


def test_dropout_is_of_the_step_alone_and_of_training():
    """So is the network's start: the global generator has no part in either."""
    features, _, index = embeddings(0)
    losses, scale = [], torch.tensor(10.0).double()
    for seed in range(2):
        torch.manual_seed(seed)
        losses.append(create_loss("tempnet", num_samples=ROWS, **{**NETWORK, "tau_net_dropout": 0.5}))
        losses[-1].set_epoch(0)
    values = [loss(*features, scale, index=index) for loss in losses]
    torch.rand(7)
    values += [loss(*features, scale, index=index) for loss in losses]
    assert values[0] == values[1] and values[2] == values[3]
    evaluated = [losses[0].eval()(*features, scale, index=index) for _ in range(2)]
    assert evaluated[0] == evaluated[1] != values[2]


def test_a_network_with_a_hinge_and_individual_temperatures():
    """No paper's combination, one of the library's: the network's update lowers its objective."""
    options = dict(temperature="individual", surrogate="hinge", margin=1.0, tau_start=0.1)
    loss = create_loss("neuclip", num_samples=ROWS, npn_prototypes=6, npn_lr=0.01, **options)
    for seed in (0, 1, 3):
        features, _, index = embeddings(seed, torch.float32)
        value = loss(*features, torch.tensor(10.0), index=index)
        assert all(found.isfinite().all() for found in (value, *torch.autograd.grad(value, features)))
        shown = loss.diagnostics()
        assert shown["npn_unified_after"] < shown["npn_unified_before"]


@pytest.mark.usefixtures("float64_rows")
def test_individual_temperatures_also_move_through_a_unified_normalizer():
    """tau_i's derivative of Eq. 12 with one tau per anchor, through alpha too; beta_1 = 1 and no clipping."""
    start, lr, rho = 0.3, 1e-2, 0.2
    loss = create_loss(
        "neuclip", temperature="individual", num_samples=ROWS, npn_prototypes=BATCH, npn_updates=2, npn_lr=0.1,
        tau_start=start, tau_lr=lr, tau_beta=1.0, rho=rho, tau_max=10.0, loss_eps=EPS,
    )
    features, double, index = embeddings(0)
    loss(*features, torch.tensor(1.0), index=index)
    w = loss.full_state()["state.weight"].double()
    taus = torch.full((2, BATCH), start, dtype=torch.float64, requires_grad=True)
    e1, e2 = (e.detach() for e in double)
    alpha = equations.neuclip_alpha(*w, e1, e2, taus, EPS)
    ratio = (EPS + batch_g(gaps(e1, e2), taus)) / alpha.exp()
    (gradient,) = torch.autograd.grad((taus * (ratio + alpha - 1 + rho)).sum(), taus)
    assert gradient.abs().max() < 5 and gradient.abs().min() > 1e-3
    moved = loss.full_state()["temperature.tau"][index].T.double()
    close((start - moved) / lr, gradient, lr * start)  # the difference loses the digits of lr


# The table


@pytest.mark.parametrize("epoch", [0, 5, 10, 30])
def test_gamma(epoch):
    """A cosine, that of half of the epochs unless given; constant; and DRRho-CLIP's rule, as its README has it: for 30
    epochs 0.35, at the end of them, and 1 up to 7 epochs."""

    def gamma(name="fastclip-v3", epoch=epoch, **options):
        loss = create_loss(name, num_samples=4, **options)
        loss.set_epoch(epoch)
        return loss.normalizer.current_gamma

    cosine = 0.2 + 0.4 * (1 + math.cos(math.pi * min(epoch, 10) / 10))
    assert equations.fastclip_gamma(epoch, 0.2, 10) == pytest.approx(cosine)
    for length in (dict(gamma_decay_epochs=10), dict(epochs=20), dict(epochs=21)):
        assert gamma(gamma=0.2, **length) == pytest.approx(cosine)
    assert gamma(gamma=0.2, gamma_schedule="constant") == 0.2
    assert create_loss("fastclip-v3", num_samples=4, epochs=1).normalizer.gamma_decay_epochs == 1
    if epoch == 0:
        for epochs, last in ((7, 1.0), (30, 4.177 * 30**-0.7265)):
            found = [gamma("drrho-clip", epoch, epochs=epochs) for epoch in (0, epochs)]
            assert found == [1.0, pytest.approx(last)]


def test_the_order_of_the_batch_does_not_matter_to_rows_that_repeat():
    """And rows never visited take the batch's estimate in evaluation."""
    generator = torch.Generator().manual_seed(0)
    e1, e2 = unit(generator, 8, 16).float(), unit(generator, 8, 16).float()
    index = torch.tensor([3, 1, 3, 0, 3, 2, 1, 4])
    tables = []
    for order in (torch.arange(8), torch.randperm(8, generator=generator)):
        loss = create_loss("fastclip-v3", num_samples=20, gamma=0.4, gamma_schedule="constant")
        for _ in range(2):
            loss(e1[order], e2[order], torch.tensor(20.0), index=index[order])
        tables.append(loss.full_state()["state.log_u"])
    torch.testing.assert_close(*tables)
    assert (tables[0][5:] == -math.inf).all()
    batch = create_loss("neuclip", normalizer="batch", encoder_objective="compositional")
    found = []
    for one in (loss.eval(), batch):
        leaves = e1.clone().requires_grad_(), e2.clone().requires_grad_(), torch.tensor(20.0, requires_grad=True)
        value = one(*leaves, index=torch.arange(8) + 8)
        found.append([value, *torch.autograd.grad(value, leaves)])
    for one, other in zip(*found, strict=True):
        close(one.detach(), other.detach().double(), 0.05)
