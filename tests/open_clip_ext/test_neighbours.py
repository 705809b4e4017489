"""The later methods against `open_clip_ext.equations` in float64, and their equations against what they are for."""

import math

import pytest
import torch
from numerics import close, mean_over_equal_rows, unit

from open_clip_ext import InputError, create_loss, equations
from open_clip_ext.equations import batch_g, gaps

ROWS, EPS = 9, 1e-6


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def dtype(request):
    """Of features and of rows."""
    if request.param == torch.float64:
        request.getfixturevalue("float64_rows")
    return request.param


def step_inputs(seed, dtype, batch=6, dimension=16):
    """Embeddings of `dtype`, the same numbers as float64 leaves, and rows, of which one comes twice in step 2."""
    generator = torch.Generator().manual_seed(seed)
    e1 = unit(generator, batch, dimension)
    e2 = torch.nn.functional.normalize(e1 + 0.8 * unit(generator, batch, dimension), dim=1)
    features = [tensor.to(dtype).detach().requires_grad_() for tensor in (e1, e2)]
    index = torch.randperm(ROWS, generator=generator)[:batch]
    if seed == 2:
        index[1] = index[0]
    return features, [tensor.detach().double().clone().requires_grad_() for tensor in features], index


# SCENT


@pytest.mark.parametrize("c", [-3.0, 0.0, 10.0])
def test_scent_is_the_proximal_step(c):
    """With `scent_gamma`, u is where the derivative in nu of what the step minimises is 0, by halving an interval."""
    generator = torch.Generator().manual_seed(0)
    u, g = (torch.randn(2, 5, generator=generator, dtype=torch.float64).mul(3).exp() for _ in range(2))
    nu_t = u.log()

    def slope(nu):
        return 1 - g * (-nu).exp() + math.exp(-c) * ((-nu_t).exp() - (-nu).exp())

    low, high = torch.full_like(u, -40.0), torch.full_like(u, 40.0)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = low.where(slope(middle) > 0, middle), high.where(slope(middle) <= 0, middle)
    torch.testing.assert_close(equations.scent_u(u, g, c, eps=0.0).log(), low, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tau", [1.0, 0.07, 0.02])
@pytest.mark.parametrize("c", [2.0, 10.0])
def test_scent(tau, c, dtype):
    loss = create_loss("scent", num_samples=ROWS, rho=4.0, gamma_exponent=c)
    table = torch.zeros(2, ROWS, dtype=torch.float64)
    for seed in range(4):
        features, (e1, e2), index = step_inputs(seed, dtype)
        logit_scale = torch.tensor(1 / tau, dtype=dtype, requires_grad=True)
        exact = (1 / logit_scale.detach().double()).requires_grad_()
        g = batch_g(gaps(e1, e2), exact)
        # A row that comes twice moves once, by the mean of its g.
        table[:, index] = equations.scent_u(table[:, index], mean_over_equal_rows(g.detach(), index), c, EPS)
        u = table[:, index]
        objective = equations.scent(g, exact, u, 4.0)
        d_image, d_text, d_tau = torch.autograd.grad(objective, [e1, e2, exact])
        value = loss(*features, logit_scale, index=index)
        actual = torch.autograd.grad(value, [*features, logit_scale])
        close(actual[0], d_image, tau)
        close(actual[1], d_text, tau)
        close(actual[2], -(exact.detach() ** 2) * d_tau, tau)
        close(value.detach(), objective.detach(), tau)
        known = table[0] > 0
        close(loss.full_state()["state.log_u"].T[:, known], table[:, known].log(), tau)


def test_scent_refuses_the_other_schedules_settings():
    for option in (dict(gamma=0.5), dict(gamma_decay_epochs=3)):
        with pytest.raises(InputError, match="has no effect with gamma_schedule 'proximal'"):
            create_loss("scent", num_samples=ROWS, **option)
    with pytest.raises(InputError, match="gamma_exponent: has no effect with gamma_schedule 'cosine'"):
        create_loss("fastclip-v3", num_samples=ROWS, epochs=2, gamma_exponent=1.0)
