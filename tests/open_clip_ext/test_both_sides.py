"""Negatives of both sides, for two views of images: iSogCLR, Eq. 2-4 and 11-14, in float64."""

import pytest
import torch
from numerics import unit, visit

from open_clip_ext import InputError, create_loss, equations

BATCH, DIMENSION, ROWS, EPS, GAMMA, RHO = 5, 8, 7, 1e-14, 0.3, 6.0


def views(seed):
    generator = torch.Generator().manual_seed(seed)
    e1 = unit(generator, BATCH, DIMENSION)
    e2 = torch.nn.functional.normalize(e1 + 0.8 * unit(generator, BATCH, DIMENSION), dim=1)
    return e1.requires_grad_(), e2.requires_grad_(), torch.randperm(ROWS, generator=generator)[:BATCH]


@pytest.mark.parametrize("negatives", ["both", "views"])
@pytest.mark.parametrize("name", ["sogclr", "isogclr", "fastclip-v3"])
def test_sogclr_and_isogclr_on_two_views(name, negatives):
    """Several steps: the moving average (Eq. 12), the encoders' gradient (Eq. 14), and tau's (Eq. 13); with `views` one
    s_i, u_i and tau_i for both views of an image."""
    start, lr, beta = 0.1, 0.005, 0.1
    common = dict(num_samples=ROWS, gamma=GAMMA, gamma_schedule="constant", negatives=negatives, loss_eps=EPS)
    individual = name == "isogclr"
    if individual:
        common |= dict(tau_start=start, tau_lr=lr, tau_beta=beta, rho=RHO)
    elif name == "fastclip-v3":
        common |= dict(rho=RHO)
    loss = create_loss(name, **common)
    table = torch.zeros(2, ROWS, dtype=torch.float64)
    tau = torch.full((2, ROWS), start, dtype=torch.float64)
    momentum = torch.zeros(2, ROWS, dtype=torch.float64)
    visited = set()
    for seed in range(4):
        e1, e2, index = views(seed)
        scale = torch.tensor(1 / start).double().requires_grad_()
        taus = tau[:, index].clone().requires_grad_() if individual else 1 / scale
        g = equations.batch_g(equations.two_view_gaps(e1, e2), taus)
        if negatives == "views":
            g = g.mean(dim=0).expand(2, -1)
        s = visit(table, visited, index, GAMMA, lambda s, beta0, g=g: equations.isogclr_s(s, EPS + g, beta0))
        if individual:
            expected = equations.isogclr(g, taus, s, RHO)
        elif name == "sogclr":
            expected = equations.sogclr(g, taus.detach(), s)
        else:
            expected = equations.fastclip_v3(g, taus, s, RHO)
        value = loss(e1, e2, scale, index=index)
        inputs = [e1, e2] if name != "fastclip-v3" else [e1, e2, scale]
        actual = torch.autograd.grad(value, inputs, retain_graph=True)
        for one, other in zip(actual, torch.autograd.grad(expected, inputs, retain_graph=True), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(value.detach(), expected.detach(), rtol=1e-5, atol=1e-8)
        if individual:
            (gradient,) = torch.autograd.grad(BATCH * expected, taus)
            if negatives == "views":
                gradient = gradient.mean(dim=0).expand(2, -1)
            tau[:, index], momentum[:, index] = equations.isogclr_tau(
                taus.detach(), momentum[:, index], gradient, beta, lr, tau_0=0.005, tau_max=1.0
            )
            actual_tau = loss.full_state()["temperature.tau"].T.double()
            torch.testing.assert_close(actual_tau, tau, rtol=1e-5, atol=1e-7)


def test_swapping_the_views_changes_nothing():
    e1, e2, index = views(0)
    losses = [create_loss("sogclr", num_samples=ROWS, negatives="both") for _ in range(2)]
    first = losses[0](e1, e2, torch.tensor(10.0), index=index)
    second = losses[1](e2, e1, torch.tensor(10.0), index=index)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("negatives", ["both", "views"])
@pytest.mark.parametrize("normalizer", ["prototypes", "queue", "mlp"])
def test_estimators_over_one_side_are_refused(normalizer, negatives):
    with pytest.raises(InputError, match=f"negatives: {negatives!r} with normalizer {normalizer!r}"):
        create_loss("neuclip", normalizer=normalizer, negatives=negatives)
