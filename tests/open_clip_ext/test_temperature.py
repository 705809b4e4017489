"""The temperature schemes and the hinge against `open_clip_ext.equations` in float64."""

import math

import pytest
import torch
from numerics import close, mean_over_equal_rows, unit, visit

from open_clip_ext import InputError, create_loss, equations
from open_clip_ext.equations import batch_g, gaps

BATCH, DIMENSION, ROWS, EPS = 6, 16, 9, 1e-14


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def dtype(request):
    """Of features and of rows."""
    if request.param == torch.float64:
        request.getfixturevalue("float64_rows")
    return request.param


@pytest.fixture(params=[(6, 16, 9), (2, 3, 5), (17, 64, 20)], ids=str)
def shape(request, monkeypatch):
    """Other B, d and n for a test."""
    for name, value in zip(("BATCH", "DIMENSION", "ROWS"), request.param, strict=True):
        monkeypatch.setitem(globals(), name, value)


def embeddings(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    e1 = unit(generator, BATCH, DIMENSION)
    e2 = torch.nn.functional.normalize(e1 + 0.8 * unit(generator, BATCH, DIMENSION), dim=1)
    single = [tensor.to(dtype).detach().requires_grad_() for tensor in (e1, e2)]
    index = torch.randperm(ROWS, generator=generator)[:BATCH]
    if seed == 2:
        index[1] = index[0]
    return single, [tensor.detach().double().clone().requires_grad_() for tensor in single], index


def identity(h):
    return h


def hinge(margin, power):
    """TuneCLIP's, with any power."""
    return lambda h: (h + margin).clamp(min=0) ** power


METHODS = {
    "sogclr": lambda g, tau, u, rho: equations.sogclr(g, tau.detach(), u),
    "fastclip-v0": lambda g, tau, u, rho: equations.fastclip_v0(g, u),
    "fastclip-v1": lambda g, tau, u, rho: equations.fastclip_v1(g, tau.detach(), u),
    "fastclip-v3": equations.fastclip_v3,
}


@pytest.mark.parametrize("tau", [1.0, 0.07, 0.01])
@pytest.mark.usefixtures("shape")
def test_dcl_is_its_equation(tau, dtype):
    """Without an epsilon: at tau 0.01 all normalizers of well matched pairs are below 1e-14."""
    loss = create_loss("dcl")
    for seed in range(3):
        single, (e1, e2), _ = embeddings(seed, dtype)
        if tau == 0.01:
            single[1] = single[0].detach().clone().requires_grad_()
            e2 = e1.detach().clone().requires_grad_()
        logit_scale = torch.tensor(1 / tau, dtype=dtype, requires_grad=True)
        scale = logit_scale.detach().double().requires_grad_()
        objective = equations.dcl(e1, e2, 1 / scale) - 2 * math.log(BATCH - 1)
        value = loss(*single, logit_scale)
        for one, other in zip([*single, logit_scale], [e1, e2, scale], strict=True):
            (actual,) = torch.autograd.grad(value, one, retain_graph=True)
            (expected,) = torch.autograd.grad(objective, other, retain_graph=True)
            close(actual, expected, tau)
        close(value.detach(), objective.detach(), tau)


@pytest.mark.parametrize(
    "name, options, surrogate",
    [
        ("sogclr", {}, identity),
        ("fastclip-v0", {}, identity),
        ("fastclip-v1", {}, identity),
        ("sogclr", dict(surrogate="hinge", margin=0.9), hinge(0.9, 2)),
        ("fastclip-v3", dict(surrogate="hinge", margin=0.7, margin_power=3.0, rho=4.0), hinge(0.7, 3)),
        ("fastclip-v3", dict(rho=4.0, fastclip_code=True), identity),
    ],
)
@pytest.mark.parametrize("tau", [1.0, 0.07, 0.02])
@pytest.mark.usefixtures("shape")
def test_one_temperature_and_any_surrogate(name, options, surrogate, tau, dtype):
    loss = create_loss(name, num_samples=ROWS, **{"gamma": 0.3, "gamma_schedule": "constant", **options})
    rho = options.get("rho", 0.0)
    table, visited = torch.zeros(2, ROWS, dtype=torch.float64), set()
    for seed in range(3):
        single, (e1, e2), index = embeddings(seed, dtype)
        logit_scale = torch.tensor(1 / tau, dtype=dtype, requires_grad=True)
        exact = (1 / logit_scale.detach().double()).requires_grad_()
        g = batch_g(surrogate(gaps(e1, e2)), exact)
        u = visit(table, visited, index, 0.3, lambda u, gamma, g=g: equations.sogclr_u(u, g, gamma, EPS))
        objective = METHODS[name](g, exact, u, rho)
        d_image, d_text, d_tau = torch.autograd.grad(objective, [e1, e2, exact], retain_graph=True)
        if options.get("fastclip_code"):  # the released code counts dg/dtau twice
            d_tau = d_tau + torch.autograd.grad(equations.sogclr(g, exact.detach(), u), exact)[0]

        value = loss(*single, logit_scale, index=index)
        actual = torch.autograd.grad(value, [*single, logit_scale], allow_unused=True)
        # Among two pairs a hinge or a low temperature may well leave nothing.
        nothing = BATCH == 2
        close(actual[0], d_image, tau, nothing)
        close(actual[1], d_text, tau, nothing)
        if name in ("sogclr", "fastclip-v1"):
            assert actual[2] is None
        else:
            close(actual[2], -(exact.detach() ** 2) * d_tau, tau, nothing)
        close(value.detach(), objective.detach(), tau, nothing)


@pytest.mark.parametrize("tau", [1.0, 0.07, 0.02])
@pytest.mark.usefixtures("shape")
def test_tuneclip(tau, dtype):
    """As the paper prints it, with means over B and epsilon beside u: the library's epsilon is B / (B - 1) times it."""
    margin, eps, share = 0.9, 1e-3, BATCH / (BATCH - 1)
    loss = create_loss(
        "tuneclip", num_samples=ROWS, gamma=0.3, gamma_schedule="constant", margin=margin, loss_eps=eps * share
    )
    table, visited = torch.zeros(2, ROWS, dtype=torch.float64), set()
    for seed in range(3):
        single, (e1, e2), index = embeddings(seed, dtype)
        logit_scale = torch.tensor(1 / tau, dtype=dtype)
        exact = 1 / logit_scale.double()
        phi = equations.tuneclip_phi(gaps(e1, e2), exact, margin)
        u = visit(table, visited, index, 0.3, lambda u, gamma, phi=phi: equations.tuneclip_u(u, phi, gamma))
        objective = equations.tuneclip(phi, exact, u, eps)
        value = loss(*single, logit_scale, index=index)
        for actual, expected in zip(
            torch.autograd.grad(value, single), torch.autograd.grad(objective, [e1, e2]), strict=True
        ):
            close(actual, expected, tau, nothing=BATCH == 2)
        close(value.detach(), objective.detach() + 2 * exact * math.log(share), tau)


ETA, LAST_ETA, EPOCHS = 0.02, 1e-4, 4
STEP_SIZES = {
    "constant": lambda epoch: ETA,
    "cosine": lambda epoch: LAST_ETA + (ETA - LAST_ETA) * math.cos(math.pi * epoch / EPOCHS / 2),
    "exponential": lambda epoch: LAST_ETA + (ETA - LAST_ETA) * 0.8**epoch,
}


@pytest.mark.parametrize(
    "name, schedule, code",
    [
        ("isogclr", "constant", False),
        ("isogclr", "cosine", False),
        ("isogclr", "exponential", False),
        ("fastclip-v2", "constant", False),
        ("fastclip-v2", "constant", True),
    ],
)
@pytest.mark.usefixtures("shape")
def test_individual_temperatures_follow_their_algorithms(name, schedule, code, dtype):
    """iSogCLR, Algorithm 2; FastCLIP-v2: Adam per row. FastCLIP-v2's released loss leaves tau_i out of the encoders'
    gradient; the value is the objective all the same."""
    options = dict(gamma=0.3, gamma_schedule="constant", rho=5.0, tau_start=0.3, tau_min=0.02, tau_max=0.5, tau_lr=ETA)
    options |= dict(tau_lr_schedule=schedule, fastclip_code=code)
    loss = create_loss(name, num_samples=ROWS, epochs=EPOCHS, **options)
    table, visited = torch.zeros(2, ROWS, dtype=torch.float64), set()
    tau = torch.full((2, ROWS), 0.3, dtype=torch.float64)
    first, second = torch.zeros_like(tau), torch.zeros_like(tau)
    for seed in range(6):
        epoch = seed // 2
        loss.set_epoch(epoch)
        single, (e1, e2), index = embeddings(seed, dtype)
        old = tau[:, index].clone().requires_grad_()
        g = batch_g(gaps(e1, e2), old)
        if name == "isogclr":
            s = visit(table, visited, index, 0.3, lambda s, beta0, g=g: equations.isogclr_s(s, EPS + g, beta0))
            objective = equations.isogclr(g, old, s, 5.0)
        else:
            s = visit(table, visited, index, 0.3, lambda u, gamma, g=g: equations.sogclr_u(u, g, gamma, EPS))
            objective = equations.fastclip_v2(g, old, s, 5.0)
        encoders = equations.fastclip_v0(g, s) if code else objective
        d_image, d_text = torch.autograd.grad(encoders, [e1, e2], retain_graph=True)
        (gradient,) = torch.autograd.grad(BATCH * objective, old)

        value = loss(*single, torch.tensor(10.0, dtype=dtype), index=index)
        actual = torch.autograd.grad(value, single)
        close(actual[0], d_image, options["tau_min"], nothing=BATCH == 2)
        close(actual[1], d_text, options["tau_min"], nothing=BATCH == 2)
        close(value.detach(), objective.detach(), options["tau_min"])

        gradient, eta = mean_over_equal_rows(gradient, index), STEP_SIZES[schedule](epoch)
        if name == "isogclr":
            moved, first[:, index] = equations.isogclr_tau(
                old.detach(), first[:, index], gradient, beta1=0.9, eta=eta, tau_0=0.02, tau_max=0.5
            )
        else:
            moved, first[:, index], second[:, index] = equations.fastclip_v2_tau(
                old.detach(), first[:, index], second[:, index], gradient, epoch, eta, tau_0=0.02, tau_max=0.5
            )
        tau[:, index] = moved
        close(loss.full_state()["temperature.tau"].T, tau, options["tau_min"])
    assert tau.unique().numel() > ROWS, "the temperatures did not become individual"


def test_individual_temperatures_survive_and_keep_out_what_is_not_finite():
    def make():
        return create_loss("isogclr", num_samples=ROWS, tau_lr=0.01)

    first, second = make(), make()
    for seed in range(2):
        single, _, index = embeddings(seed)
        first(*single, torch.tensor(10.0), index=index)
    before = first.full_state()
    single, _, index = embeddings(3)
    first(single[0] * float("nan"), single[1], torch.tensor(10.0), index=index)
    for key, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, first.full_state()[key]), key
    second.load_full_state(before)
    expected, actual = (loss(*single, torch.tensor(10.0), index=index) for loss in (first, second))
    assert torch.equal(expected, actual)
    with pytest.raises(ValueError, match="tau_optimizer"):
        create_loss("fastclip-v2", num_samples=ROWS, epochs=2).load_full_state(before)


def test_a_network_with_a_hinge_and_individual_temperatures():
    """No paper's combination, one of the library's: the network's update lowers its objective."""
    options = dict(temperature="individual", surrogate="hinge", margin=1.0, tau_start=0.1)
    options |= dict(npn_prototypes=6, npn_lr=0.01)
    loss = create_loss("neuclip", num_samples=ROWS, **options)
    for seed in (0, 1, 3):
        single, _, index = embeddings(seed)
        value = loss(*single, torch.tensor(10.0), index=index)
        grads = torch.autograd.grad(value, single)
        assert value.isfinite() and all(gradient.isfinite().all() for gradient in grads)
        shown = loss.diagnostics()
        assert shown["npn_unified_after"] < shown["npn_unified_before"]


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("sogclr", dict(rho=5.0), "rho: the loss 'sogclr'"),
        ("isogclr", dict(tau_min=0.0), "tau_min: 0.0"),
        ("isogclr", dict(tau_optimizer="sgd"), "tau_optimizer: 'sgd' is not one of momentum, adam"),
        ("sogclr", dict(surrogate="hinge", margin=-0.1), "margin: -0.1"),
        ("sogclr", dict(margin=0.1), "margin: the loss 'sogclr'"),
        ("sogclr", dict(temperature="cold"), "temperature: 'cold' is not one of fixed, learnable"),
        ("sogclr", dict(tau_init=0.1), "tau_init: belongs to your model"),
        ("isogclr", dict(tau_lr_schedule="cosine"), "tau_lr_epochs: the cosine of tau_lr needs its length"),
        ("isogclr", dict(tau_lr_epochs=3), "tau_lr_epochs: has no effect with tau_lr_schedule 'constant'"),
        ("fastclip-v2", dict(tau_beta=0.5, epochs=2), "tau_beta: has no effect with tau_optimizer 'adam'"),
        ("fastclip-v0", dict(fastclip_code=True, epochs=2), "fastclip_code: the loss 'fastclip-v0'"),
        ("neuclip", dict(fastclip_code=True), "fastclip_code: with encoder_objective 'unified'"),
    ],
)
def test_wrong_settings_are_named(name, options, message):
    with pytest.raises(InputError, match=message):
        create_loss(name, num_samples=ROWS, **options)


@pytest.mark.usefixtures("float64_rows")
def test_individual_temperatures_also_move_through_a_unified_normalizer():
    """tau_i's derivative of Eq. 12 with one tau per anchor, through alpha too; beta_1 = 1 and no clipping."""
    start, lr, rho = 0.3, 1e-2, 0.2
    loss = create_loss(
        "neuclip", temperature="individual", num_samples=ROWS, npn_prototypes=BATCH, npn_updates=2, npn_lr=0.1,
        tau_start=start, tau_lr=lr, tau_beta=1.0, rho=rho, tau_max=10.0, loss_eps=EPS,
    )
    single, double, index = embeddings(0, torch.float64)
    loss(*single, torch.tensor(1.0), index=index)
    w = loss.full_state()["state.weight"].double()
    taus = torch.full((2, BATCH), start, dtype=torch.float64, requires_grad=True)
    e1, e2 = (e.detach() for e in double)
    alpha = equations.neuclip_alpha(*w, e1, e2, taus, EPS)
    ratio = (EPS + batch_g(gaps(e1, e2), taus)) / alpha.exp()
    (gradient,) = torch.autograd.grad((taus * (ratio + alpha - 1 + rho)).sum(), taus)
    assert gradient.abs().max() < 5 and gradient.abs().min() > 1e-3
    moved = loss.full_state()["temperature.tau"][index].T.double()
    close((start - moved) / lr, gradient, lr * start)  # the difference loses the digits of lr


@pytest.mark.parametrize("surrogate", ["identity", "hinge"])
def test_tau_rests_where_the_weights_of_the_negatives_diverge_from_equal_ones_by_rho(surrogate):
    """NeuCLIP, Eq. 13, with the batch as the whole data set: dF/dtau = 2 rho - sum over both directions of KL."""
    generator = torch.Generator().manual_seed(0)
    e1, e2, rho = unit(generator, 12, 8), unit(generator, 12, 8), 1.3
    scale = torch.tensor(20.0, dtype=torch.float64, requires_grad=True)
    loss = create_loss("fastclip-v3", normalizer="batch", surrogate=surrogate, rho=rho)
    loss(e1, e2, scale).backward()

    exponents = (identity if surrogate == "identity" else hinge(loss.surrogate.margin, 2))(gaps(e1, e2)) * 20.0
    shares = exponents.softmax(dim=2)
    divergence = (shares * (shares * shares.shape[2]).log()).sum(dim=2).mean(dim=1).sum()
    # d/dscale = dF/dtau * dtau/dscale = -tau^2 dF/dtau
    assert float(scale.grad) == pytest.approx(-(float(2 * rho - divergence)) / 20.0**2, rel=1e-9)
