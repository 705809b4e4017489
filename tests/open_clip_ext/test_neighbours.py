"""The later methods against `open_clip_ext.equations` in float64, and their equations against what they are for."""

import math

import pytest
import torch
from numerics import close, mean_over_equal_rows, unit, visit

from open_clip_ext import InputError, create_loss, equations
from open_clip_ext.equations import batch_g, gaps
from open_clip_ext.kernels import streaming

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


# TempNet

NETWORK = dict(rho=3.0, tau_min=0.05, tau_max=0.4, tau_net_prototypes=4, tau_net_lr=0.01, tau_net_dropout=0.0)


def networks(loss, dtype):
    """The parameters of both sides' networks as float64 leaves."""
    parts = loss.temperature.named(loss.temperature.weights)
    names = ("inner", "inner_bias", "prototypes", "log_phi", "out", "out_bias")
    return [[parts[name][side].double().clone().requires_grad_() for name in names] for side in range(2)]


def test_tempnet(dtype):
    """Embeddings' gradients, and the networks by torch's own Adam, through two epochs."""
    loss = create_loss("tempnet", num_samples=ROWS, gamma=0.3, **NETWORK)
    loss.materialize(16, torch.device("cpu"), dtype)
    table, visited, spread = torch.zeros(2, ROWS, dtype=torch.float64), set(), 0.0
    for seed in range(6):
        loss.set_epoch(seed // 3)
        features, (e1, e2), index = step_inputs(seed, dtype)
        if seed == 0:
            reference = networks(loss, dtype)
            for side, others in enumerate((e2, e1)):
                reference[side][2].data.copy_(others[:4])
            optimizer = torch.optim.Adam([leaf for side in reference for leaf in side])
        optimizer.param_groups[0]["lr"] = 0.01 * 0.9 ** (seed // 3)
        taus = torch.stack([
            equations.tempnet_tau(e, *side, 0.05, 0.4) for e, side in zip((e1, e2), reference, strict=True)
        ])
        g = batch_g(gaps(e1, e2), taus)
        s = visit(table, visited, index, 0.3, lambda s, beta0, g=g: equations.isogclr_s(s, 1e-14 + g, beta0))
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
            for ours, theirs in zip(networks(loss, dtype), reference, strict=True):
                for one, other in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert spread > 1e-3, "the temperatures did not become individual"


def test_the_network_lowers_its_objective():
    """On one batch again and again, as far from it as it starts; held, it stays as it is."""
    loss = create_loss("tempnet", num_samples=ROWS, **NETWORK)
    loss.set_epoch(0)
    features, _, index = step_inputs(0, torch.float64)
    values = [loss(*features, torch.tensor(10.0).double(), index=index).item() for _ in range(40)]
    assert values[-1] < values[0] - 0.05
    loss.temperature.hold = True
    before = loss.full_state()
    loss(*features, torch.tensor(10.0).double(), index=index)
    assert torch.equal(loss.full_state()["temperature.weights"], before["temperature.weights"])
    assert not torch.equal(loss.full_state()["temperature.moments"], before["temperature.moments"])


def test_dropout_is_of_the_step_alone_and_of_training():
    features, _, index = step_inputs(0, torch.float64)
    first, second = (create_loss("tempnet", num_samples=ROWS, **{**NETWORK, "tau_net_dropout": 0.5}) for _ in range(2))
    scale = torch.tensor(10.0).double()
    first.set_epoch(0)
    second.set_epoch(0)
    values = [loss(*features, scale, index=index) for loss in (first, second)]
    torch.rand(7)  # the global generator has no part in it
    values += [loss(*features, scale, index=index) for loss in (first, second)]
    assert values[0] == values[1] and values[2] == values[3]
    evaluated = [first.eval()(*features, scale, index=index) for _ in range(2)]
    assert evaluated[0] == evaluated[1] != values[2]


def test_tempnet_resumes_and_keeps_out_what_is_not_finite():
    features, _, index = step_inputs(0, torch.float64)
    scale = torch.tensor(10.0).double()
    first, second, third = (create_loss("tempnet", num_samples=ROWS, **NETWORK) for _ in range(3))
    for loss in (first, second, third):
        loss.set_epoch(0)
    first(*features, scale, index=index)
    before = first.full_state()
    first(features[0] * float("nan"), features[1], scale, index=index)
    for key in ("temperature.weights", "temperature.moments"):
        assert torch.equal(before[key], first.full_state()[key])
    second.load_full_state(before)
    others, _, index = step_inputs(1, torch.float64)
    third.load_full_state(before)
    assert torch.equal(second(*others, scale, index=index), third(*others, scale, index=index))
    with pytest.raises(ValueError, match="tau_net_prototypes: 8 where the state has another number"):
        create_loss("tempnet", num_samples=ROWS, **{**NETWORK, "tau_net_prototypes": 8}).load_full_state(before)
    with pytest.raises(InputError, match="tau_max: 0.01 is below tau_min, 0.05"):
        create_loss("tempnet", num_samples=ROWS, **{**NETWORK, "tau_max": 0.01})


# DRRho-CLIP


def reference_of(seed, batch=6):
    """A reference model's embeddings, of another dimension, (batch, 5) each."""
    generator = torch.Generator().manual_seed(100 + seed)
    return unit(generator, batch, 5), unit(generator, batch, 5)


@pytest.mark.parametrize("tau", [1.0, 0.07, 0.02])
def test_drrho_clip(tau, dtype):
    """Each gap less the reference's, by loops over the pairs; then SogCLR's equations over these gaps."""
    loss = create_loss("drrho-clip", num_samples=ROWS, gamma=0.3, gamma_schedule="constant")
    table, visited = torch.zeros(2, ROWS, dtype=torch.float64), set()
    for seed in range(4):
        features, (e1, e2), index = step_inputs(seed, dtype)
        r1, r2 = (side.to(dtype) for side in reference_of(seed))
        logit_scale = torch.tensor(1 / tau, dtype=dtype)
        exact = 1 / logit_scale.double()
        h = equations.drrho_gaps(e1, e2, r1.double(), r2.double())
        for i, j in ((0, 3), (4, 1)):
            student, teacher = e1[i] @ e2[j] - e1[i] @ e2[i], (r1[i] @ r2[j] - r1[i] @ r2[i]).double()
            assert h[0, i, j - (j > i)].item() == pytest.approx((student - teacher).item(), abs=1e-6)
        g = batch_g(h, exact)
        u = visit(table, visited, index, 0.3, lambda u, gamma, g=g: equations.sogclr_u(u, g, gamma, 1e-4))
        objective = equations.drrho_clip(g, exact, u)
        value = loss(
            *features, logit_scale, index=index, dist_image_features=r1, dist_text_features=r2,
            dist_logit_scale=torch.tensor(3.0), dist_logit_bias=torch.tensor(-9.0),  # of a SigLIP reference
        )
        for actual, expected in zip(
            torch.autograd.grad(value, features), torch.autograd.grad(objective, [e1, e2]), strict=True
        ):
            close(actual, expected, tau / 2)  # the exponents are up to 4 / tau
        close(value.detach(), objective.detach(), tau / 2)


def test_drrho_clips_rule_for_gamma():
    """As its README has it: for 30 epochs 0.35, at the end of them; 1 up to 7 epochs."""
    for epochs, expected in ((7, 1.0), (30, 4.177 * 30**-0.7265)):
        loss = create_loss("drrho-clip", num_samples=ROWS, epochs=epochs)
        gammas = []
        for epoch in (0, epochs):
            loss.set_epoch(epoch)
            gammas.append(loss.normalizer.current_gamma)
        assert gammas == [1.0, pytest.approx(expected)]


def test_a_queue_takes_a_reference_too():
    """At mixing 0 its normalizers are those over the batch before, which is all that it holds of others."""
    loss = create_loss("queue", queue_size=12, mixing=0.0, reference_gap=True, rho=0.0)
    steps = [(step_inputs(seed, torch.float64)[0], reference_of(seed)) for seed in (0, 1)]
    for features, (r1, r2) in steps:
        loss(*features, torch.tensor(5.0).double(), dist_image_features=r1, dist_text_features=r2)
    (old, (o1, o2)), (new, (n1, n2)) = steps
    gap = (new[0] @ old[1].T - n1 @ o2.T) - ((new[0] * new[1]).sum(1) - (n1 * n2).sum(1))[:, None]
    expected = (1e-14 + (5 * gap).exp().mean(dim=1)).log()
    torch.testing.assert_close(loss._last[2][0], expected.detach())


def test_a_reference_is_needed_and_refused_where_it_has_no_place():
    features, _, index = step_inputs(0, torch.float32)
    r1, r2 = (side.float() for side in reference_of(0))
    drrho = create_loss("drrho-clip", num_samples=ROWS, epochs=1)
    drrho.set_epoch(0)
    scale = torch.tensor(10.0)
    for given, message in (
        ({}, "this loss needs both"),
        (dict(dist_image_features=r1), "this loss needs both"),
        (dict(dist_image_features=r1[:4], dist_text_features=r2[:4]), "must both be \\(6, d'\\)"),
        (dict(dist_image_features=2 * r1, dist_text_features=r2), "dist_image_features must be unit vectors"),
    ):
        with pytest.raises(ValueError, match=message):
            drrho(*features, scale, index=index, **given)
    with pytest.raises(ValueError, match="has no use for either"):
        create_loss("queue")(*features, scale, dist_image_features=r1, dist_text_features=r2)
    for name, options, what in (
        ("neuclip", {}, "'prototypes'"), ("tempnet", {}, "'network'"), ("sogclr", dict(negatives="both"), "'both'"),
    ):
        with pytest.raises(InputError, match=f"reference_gap: with .*{what}"):
            create_loss(name, num_samples=ROWS, reference_gap=True, **options)
    with pytest.raises(InputError, match="consistency: with reference_gap"):
        create_loss("queue", reference_gap=True, consistency=0.25)


# Known false negatives


def g_without(e1, e2, tau, keys):
    """NeuCLIP, Eq. 1's underbraces, (2, B), where samples with the anchor's key are no negatives; by loops."""
    sides = []
    for a, b in ((e1, e2), (e2, e1)):
        values = []
        for i in range(len(a)):
            terms = [((a[i] @ b[j] - a[i] @ b[i]) / tau).exp() for j in range(len(a)) if keys[j] != keys[i]]
            values.append(sum(terms) / len(terms) if terms else 0 * a[i].sum())
        sides.append(torch.stack(values))
    return torch.stack(sides)


KEYS = {"pairs": [7, 3, 7, 5, 3, 9], "none": [1, 2, 3, 4, 5, 6], "all": [4] * 6}


@pytest.mark.parametrize("parts", ["whole", "parts"])
@pytest.mark.parametrize("case", KEYS)
@pytest.mark.parametrize("name", ["fastclip-v3", "drrho-clip"])
def test_samples_with_the_same_key_are_no_negatives(name, case, parts, dtype, monkeypatch):
    if parts == "parts":
        monkeypatch.setattr(streaming, "CPU_PART", 1)
        monkeypatch.setattr(streaming, "LEAST_ROWS", 2)
    rho = {} if name == "drrho-clip" else dict(rho=4.0)
    loss = create_loss(name, num_samples=ROWS, gamma=0.3, gamma_schedule="constant", loss_eps=EPS, **rho)
    table, visited = torch.zeros(2, ROWS, dtype=torch.float64), set()
    tau, keys = 0.2, torch.tensor(KEYS[case])
    for seed in range(3):
        features, (e1, e2), index = step_inputs(seed, dtype)
        logit_scale = torch.tensor(1 / tau, dtype=dtype, requires_grad=True)
        exact = (1 / logit_scale.detach().double()).requires_grad_()
        reference, sides = {}, (e1, e2)
        if loss.takes_reference:
            r1, r2 = (side.to(dtype) for side in reference_of(seed))
            reference = dict(dist_image_features=r1, dist_text_features=r2)
            sides = torch.cat([e1, r1.double()], dim=1), torch.cat([e2, -r2.double()], dim=1)
        g = g_without(*sides, exact, keys.tolist())
        u = visit(table, visited, index, 0.3, lambda u, gamma, g=g: equations.sogclr_u(u, g, gamma, EPS))
        objective = equations.fastclip_v3(g, exact, u, rho.get("rho", 0.0))
        value = loss(*features, logit_scale, index=index, key=keys, **reference)
        expected = torch.autograd.grad(objective, [e1, e2])
        for actual, wanted in zip(torch.autograd.grad(value, features), expected, strict=True):
            close(actual, wanted, tau / 2, nothing=case == "all")
        close(value.detach(), objective.detach(), tau / 2)


def test_keys_are_refused_where_they_would_be_forgotten():
    features, _, index = step_inputs(0, torch.float32)
    mlp, both = dict(normalizer="mlp"), dict(negatives="both")
    for name, options in (("neuclip", mlp), ("sogclr", both), ("cyclip", {}), ("amorlip", {})):
        loss = create_loss(name, num_samples=ROWS, epochs=1, **options)
        with pytest.raises(ValueError, match="key: .* takes no keys"):
            loss(*features, torch.tensor(10.0), index=index, key=index)
    with pytest.raises(ValueError, match="key must be int64 .* got torch.int32"):
        create_loss("fastclip-v3", num_samples=ROWS, normalizer="batch")(*features, torch.tensor(9.0), key=index.int())


@pytest.mark.parametrize("surrogate", ["identity", "hinge"])
@pytest.mark.parametrize("objective", ["compositional", "unified"])
@pytest.mark.parametrize("queued", [[1, 2, 3, 4, 5, 1], [2] * 6])
def test_a_queue_leaves_out_the_same_key(surrogate, objective, queued, monkeypatch):
    """alpha and its gradient over the batch before, which is all that the queue holds of others, or over the batch if
    that leaves none; in several tiles."""
    monkeypatch.setattr(streaming, "CPU_TILE", (3, 4))
    hinge = dict(surrogate=surrogate, margin=0.9) if surrogate == "hinge" else {}
    loss = create_loss("queue", queue_size=12, mixing=0.0, rho=0.0, loss_eps=EPS, encoder_objective=objective, **hinge)
    keys = torch.tensor([queued, [1, 6, 2, 2, 1, 7]])
    steps = [step_inputs(seed, torch.float64)[1] for seed in (0, 1)]
    for (e1, e2), key in zip(steps, keys, strict=True):
        value = loss(e1, e2, torch.tensor(5.0).double(), key=key)
    (old_1, old_2), (e1, e2) = [[e.detach() for e in step] for step in steps]
    leaves = [e.clone().requires_grad_() for e in (e1, e2)]
    of_batch = gaps_of_all(*leaves)
    if surrogate == "hinge":
        of_batch = [(gap + 0.9).clamp(min=0) ** 2 for gap in of_batch]
    counts = (keys[1][:, None] != keys[1]).double()
    g = torch.stack([((5 * gap).exp() * counts).sum(dim=1) / counts.sum(dim=1) for gap in of_batch])
    alphas = []
    for anchors, others, own in ((leaves[0], old_2, g[0]), (leaves[1], old_1, g[1])):
        gap = anchors @ others.T - (leaves[0] * leaves[1]).sum(dim=1)[:, None]
        gap = (gap + 0.9).clamp(min=0) ** 2 if surrogate == "hinge" else gap
        counts = keys[1][:, None] != keys[0]
        mean = ((5 * gap).exp() * counts).sum(dim=1) / counts.sum(dim=1).clamp(min=1)
        alphas.append((EPS + mean.where(counts.any(dim=1), own.detach())).log())
    alpha = torch.stack(alphas)
    torch.testing.assert_close(loss._last[2], alpha.detach())
    if objective == "unified":
        expected = torch.autograd.grad(0.2 * ((EPS + g) / alpha.exp() + alpha).mean(dim=1).sum(), leaves)
        for actual, wanted in zip(torch.autograd.grad(value, steps[1]), expected, strict=True):
            torch.testing.assert_close(actual, wanted)
    state = loss.full_state()
    other = create_loss("queue", queue_size=12, mixing=0.0, rho=0.0, loss_eps=EPS, encoder_objective=objective, **hinge)
    other.load_full_state(state)
    assert other(e1, e2, torch.tensor(5.0), key=keys[1]) == loss(e1, e2, torch.tensor(5.0), key=keys[1])


def gaps_of_all(e1, e2):
    """s_ij - s_ii for all pairs, i itself included, of both sides."""
    s = e1 @ e2.T
    return [side - s.diagonal()[:, None] for side in (s, s.T)]
