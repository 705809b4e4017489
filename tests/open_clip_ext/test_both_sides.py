"""Negatives of both sides, for two views of images: isogclr.txt Eq. 2-4 and 11-14 in float64 loops."""

import pytest
import torch
from reference import both_views, eq3, unit

from open_clip_ext import InputError, create_loss

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
    u = torch.zeros(2, ROWS, dtype=torch.float64)
    tau = torch.full((2, ROWS), start, dtype=torch.float64)
    momentum = torch.zeros(2, ROWS, dtype=torch.float64)
    visited = set()
    for seed in range(4):
        e1, e2, index = views(seed)
        scale = torch.tensor(1 / start).double().requires_grad_()
        taus = (tau[:, index] if individual else (1 / scale).expand(2, BATCH)).clone()
        taus = taus.detach().requires_grad_() if individual else taus
        g = both_views(e1, e2, taus)
        if negatives == "views":
            g = g.mean(dim=0).expand(2, -1)
        for side in range(2):
            for i, row in enumerate(index.tolist()):
                u[side, row] = eq3(u[side, row], g[side, i].item(), GAMMA, EPS, row not in visited)
        visited |= set(index.tolist())
        s = u[:, index]
        value = loss(e1, e2, scale, index=index)
        inputs = [e1, e2] if name != "fastclip-v3" else [e1, e2, scale]
        actual = torch.autograd.grad(value, inputs, retain_graph=True)
        surrogate = (taus.detach() * g / s).mean(dim=1).sum()
        for one, other in zip(actual, torch.autograd.grad(surrogate, [e1, e2], retain_graph=True), strict=False):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        expected = (taus.detach() * (s.log() + (0 if name == "sogclr" else RHO))).mean(dim=1).sum()
        torch.testing.assert_close(value.detach(), expected, rtol=1e-5, atol=1e-8)
        if individual:
            (slope,) = torch.autograd.grad((g / s).sum(), taus)
            if negatives == "views":
                slope = slope.mean(dim=0)
            gradient = (taus.detach() * slope + s.log() + RHO).clamp(-5, 5)
            momentum[:, index] = (1 - beta) * momentum[:, index] + beta * gradient
            tau[:, index] = (tau[:, index] - lr * momentum[:, index]).clamp(0.005, 1.0)
            actual_tau = loss.full_state()["temperature.tau"].T.double()
            torch.testing.assert_close(actual_tau, tau, rtol=1e-5, atol=1e-7)
        elif name == "fastclip-v3":
            (slope,) = torch.autograd.grad((g / s).mean(dim=1).sum(), scale)
            d_tau = (s.log() + RHO).mean(dim=1).sum() + slope * -scale.detach()  # tau * dg/dtau = -scale * dg/dscale
            torch.testing.assert_close(actual[2], -d_tau / scale.detach() ** 2, rtol=1e-5, atol=1e-8)


def test_swapping_the_views_changes_nothing():
    e1, e2, index = views(0)
    losses = [create_loss("sogclr", num_samples=ROWS, negatives="both") for _ in range(2)]
    first = losses[0](e1, e2, torch.tensor(10.0), index=index)
    second = losses[1](e2, e1, torch.tensor(10.0), index=index)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("negatives", ["both", "views"])
@pytest.mark.parametrize("normalizer", ["prototypes", "queue", "mlp"])
def test_estimators_over_one_side_are_refused(normalizer, negatives):
    with pytest.raises(InputError, match=f"--negatives: {negatives!r} with --normalizer {normalizer}"):
        create_loss("neuclip", normalizer=normalizer, negatives=negatives)
