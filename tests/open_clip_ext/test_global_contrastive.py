"""Values and gradients of the losses, through several steps, against `open_clip_ext.equations` in float64."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from numerics import close, mean_over_equal_rows, unit, visit

from open_clip_ext import create_loss, equations
from open_clip_ext.equations import batch_g, consistency_terms, gaps
from open_clip_ext.kernels import streaming

EPS, RHO, GAMMA, LAM = 1e-6, 4.0, 0.3, 0.7
# Batch, dimension, tau.
SHAPES = pytest.mark.parametrize("shape", [(6, 16, 0.07), (2, 3, 1.0), (17, 64, 0.02), (6, 64, 0.01)], ids=str)


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def dtype(request):
    """Of features and of rows."""
    if request.param == torch.float64:
        request.getfixturevalue("float64_rows")
    return request.param


def draw(shape, dtype, seed=0, matched=False):
    """A step: embeddings of `dtype` and the same numbers in float64, rows of which one comes twice in step 2, keys of
    which some are equal, and a reference model's embeddings, of another dimension."""
    batch, dimension, tau = shape
    generator = torch.Generator().manual_seed(seed)
    e1 = unit(generator, batch, dimension)
    # Well matched pairs leave nothing to compare at a low temperature.
    noise = 0.0 if matched else 0.7 if tau > 0.02 else 3.0
    e2 = torch.nn.functional.normalize(e1 + noise * unit(generator, batch, dimension), dim=1)
    features = [tensor.to(dtype).detach().requires_grad_() for tensor in (e1, e2)]
    e1, e2 = (tensor.detach().double().clone().requires_grad_() for tensor in features)
    index = torch.randperm(batch + 3, generator=generator)[:batch]
    if seed == 2:
        index[1] = index[0]
    scale = torch.tensor(1 / tau, dtype=dtype, requires_grad=True)
    exact = scale.detach().double().requires_grad_()
    reference = [unit(generator, batch, 5).to(dtype) for _ in range(2)]
    key = torch.randint(batch // 2 + 1, (batch,), generator=generator)
    return SimpleNamespace(
        features=features, e1=e1, e2=e2, index=index, logit_scale=scale, scale=exact, tau=1 / exact, key=key,
        reference=reference, r=[side.double() for side in reference],
    )


def normalizer(s):
    return batch_g(gaps(s.e1, s.e2), s.tau)


def hinged(margin, power):
    return lambda s: batch_g((gaps(s.e1, s.e2) + margin).clamp(min=0) ** power, s.tau)


def both_sides(s):
    return batch_g(equations.two_view_gaps(s.e1, s.e2), s.tau)


def moving_average(s, u, gamma):
    return equations.sogclr_u(u, s.g, gamma, EPS)


def sogclr(s):
    return equations.sogclr(s.g, s.tau.detach(), s.u)


def fastclip_v3(s):
    return equations.fastclip_v3(s.g, s.tau, s.u, RHO)


@dataclass(frozen=True)
class Case:
    """How a loss's step is computed by the equations: from `g` to `u` to the objective."""

    preset: str
    options: dict
    objective: Callable
    g: Callable = normalizer
    update: Callable = moving_average
    more: Callable = lambda s: {}  # further arguments of the loss


def reference_of(s):  # with the scale and bias of a SigLIP reference, which have no part in it
    sides = dict(dist_image_features=s.reference[0], dist_text_features=s.reference[1])
    return sides | dict(dist_logit_scale=torch.tensor(3.0), dist_logit_bias=torch.tensor(-9.0))


def with_reference(s):
    return torch.cat([s.e1, s.r[0]], 1), torch.cat([s.e2, -s.r[1]], 1)


def g_of_keys(s):
    return equations.unicl_g(s.e1, s.e2, s.tau, s.key)


def g_of_keys_and_reference(s):
    return equations.unicl_g(*with_reference(s), s.tau, s.key)


def positive_key_of(s):
    return dict(positive_key=s.key)


def several(objective, embeddings=lambda s: (s.e1, s.e2)):
    """The objective with its normalizers relative to the mean of the anchor's positives; `own` are the batch's."""

    def shifted(s):
        x = equations.unicl_shift(*embeddings(s), s.tau, s.key)
        u, own = (constant.detach() * x.detach().exp() for constant in (s.u, EPS + s.g))
        return objective(SimpleNamespace(**{**vars(s), "g": s.g * x.exp(), "u": u, "own": own}))

    return shifted


CASES = {
    "sogclr": Case("sogclr", {}, sogclr),
    "fastclip-v0": Case("fastclip-v0", {}, lambda s: equations.fastclip_v0(s.g, s.u)),
    "fastclip-v1": Case("fastclip-v1", {}, lambda s: equations.fastclip_v1(s.g, s.tau.detach(), s.u)),
    "fastclip-v3": Case("fastclip-v3", dict(rho=RHO), fastclip_v3),
    "fastclip code": Case("fastclip-v3", dict(rho=RHO, fastclip_code=True), fastclip_v3),
    "hinge": Case("sogclr", dict(surrogate="hinge", margin=0.9), sogclr, hinged(0.9, 2)),
    "hinge of power 3": Case(
        "fastclip-v3", dict(rho=RHO, surrogate="hinge", margin=0.7, margin_power=3.0), fastclip_v3, hinged(0.7, 3)
    ),
    # As the paper prints it, with means over B and epsilon beside u: the library's epsilon is B / (B - 1) times it.
    "tuneclip": Case(
        "tuneclip", dict(margin=0.9),
        lambda s: equations.tuneclip(s.g, s.tau.detach(), s.u, EPS) + 2 * s.tau.detach() * math.log(s.share),
        lambda s: equations.tuneclip_phi(gaps(s.e1, s.e2), s.tau, 0.9),
        lambda s, u, gamma: equations.tuneclip_u(u, s.g, gamma),
    ),
    # By `scent_gamma`. A row that comes twice moves once, by the mean of its g.
    "scent": Case(
        "scent", dict(rho=RHO, gamma_exponent=2.0), lambda s: equations.scent(s.g, s.tau, s.u, RHO), normalizer,
        lambda s, u, gamma: equations.scent_u(u, mean_over_equal_rows(s.g.detach(), s.index), 2.0, EPS),
    ),
    "drrho-clip": Case(
        "drrho-clip", {}, lambda s: equations.drrho_clip(s.g, s.tau.detach(), s.u),
        lambda s: batch_g(equations.drrho_gaps(s.e1, s.e2, *s.r), s.tau), more=reference_of,
    ),
    "both sides": Case("fastclip-v3", dict(rho=RHO, negatives="both"), fastclip_v3, both_sides),
    "views": Case(
        "sogclr", dict(negatives="views"), sogclr, lambda s: both_sides(s).mean(dim=0).expand(2, -1)
    ),
    "keys": Case(
        "fastclip-v3", dict(rho=RHO), fastclip_v3, g_of_keys, more=lambda s: dict(key=s.key),
    ),
    "keys and a reference": Case(
        "drrho-clip", {}, lambda s: equations.drrho_clip(s.g, s.tau.detach(), s.u), g_of_keys_and_reference,
        more=lambda s: dict(key=s.key, **reference_of(s)),
    ),
    # With several positives.
    "positive keys": Case("fastclip-v3", dict(rho=RHO), several(fastclip_v3), g_of_keys, more=positive_key_of),
    "positive keys, fixed": Case("fastclip-v1", {}, several(sogclr), g_of_keys, more=positive_key_of),
    "positive keys, unscaled": Case(
        "fastclip-v0", {}, several(lambda s: equations.fastclip_v0(s.g, s.u)), g_of_keys, more=positive_key_of
    ),
    "positive keys, batch": Case(
        "neuclip", dict(normalizer="batch", encoder_objective="compositional", rho=RHO),
        several(lambda s: equations.fastclip_v3(s.g, s.tau, s.own, RHO)), g_of_keys, more=positive_key_of,
    ),
    "positive keys and a reference": Case(
        "drrho-clip", {},
        several(lambda s: equations.drrho_clip(s.g, s.tau.detach(), s.u), with_reference), g_of_keys_and_reference,
        more=lambda s: positive_key_of(s) | reference_of(s),
    ),
    "dcl": Case("dcl", {}, lambda s: equations.dcl(s.e1, s.e2, s.tau) - 2 * math.log(len(s.e1) - 1)),
    "batch": Case(
        "neuclip", dict(normalizer="batch", encoder_objective="compositional", rho=RHO),
        lambda s: equations.global_contrastive(s.g, s.tau, RHO, EPS),
    ),
    "consistency": Case(
        "fastclip-v3", dict(rho=RHO, consistency=LAM),
        lambda s: fastclip_v3(s) + equations.consistency(s.e1, s.e2, s.tau, LAM),
    ),
    "consistency, fixed": Case(
        "fastclip-v1", dict(consistency=LAM), lambda s: sogclr(s) + equations.consistency(s.e1, s.e2, s.tau, LAM)
    ),
    "consistency, unscaled": Case(
        "dcl", dict(consistency=LAM),
        lambda s: CASES["dcl"].objective(s) + equations.consistency(s.e1, s.e2, torch.ones(()).double(), LAM),
    ),
}  # fmt: skip


@SHAPES
@pytest.mark.parametrize("name", CASES)
def test_one_temperature(name, shape, dtype, monkeypatch):
    """Value, gradients in both embeddings and in the scale, and the table."""
    case, (batch, _, tau) = CASES[name], shape
    if "keys" in name:  # in several parts
        monkeypatch.setattr(streaming, "CPU_PART", 1)
        monkeypatch.setattr(streaming, "LEAST_ROWS", 2)
    # Among two pairs a hinge or equal keys may well leave nothing.
    share, nothing = batch / (batch - 1), batch == 2
    has_table = case.preset not in ("dcl", "neuclip")
    rows = dict(num_samples=batch + 3, gamma=GAMMA, gamma_schedule="constant") if has_table else {}
    if name == "scent":
        rows = dict(num_samples=batch + 3)
    eps = {} if case.preset == "dcl" else dict(loss_eps=EPS * share if name == "tuneclip" else EPS)
    loss = create_loss(case.preset, **rows, **eps, **case.options)
    # An exponent of a reference's gap is up to 4 / tau, and of a hinge's 8 / tau.
    lowest = tau / (2 if loss.takes_reference else 4 if loss.surrogate.name == "hinge" else 1)
    table, visited = torch.zeros(2, batch + 3, dtype=torch.float64), set()
    for seed in range(4):
        # Without an epsilon dcl is defined where all normalizers of well matched pairs are below 1e-14.
        s = draw(shape, dtype, seed, matched=name == "dcl" and tau == 0.01)
        s.share, s.g = share, case.g(s)
        s.u = visit(table, visited, s.index, GAMMA, lambda u, gamma, s=s: case.update(s, u, gamma))
        objective = case.objective(s)
        expected = torch.autograd.grad(objective, [s.e1, s.e2, s.scale], retain_graph=True, allow_unused=True)
        if name == "fastclip code":  # which counts dg/dtau twice
            (again,) = torch.autograd.grad(sogclr(s), s.scale)
            expected = *expected[:2], expected[2] + again
        value = loss(*s.features, s.logit_scale, index=s.index, **case.more(s))
        found = torch.autograd.grad(value, [*s.features, s.logit_scale], allow_unused=True)
        addend = tau if loss.temperature.scales_encoders else 1.0
        close(value.detach(), objective.detach(), lowest, nothing, addend)
        assert (found[2] is not None) == loss.trains_logit_scale
        for one, other in zip(found[: 2 + loss.trains_logit_scale], expected, strict=False):
            close(one, other, lowest, nothing)
        if has_table and name != "tuneclip":
            known = sorted(visited)
            close(loss.full_state()["state.log_u"].T[:, known], table[:, known].log(), lowest, nothing)


ETA, LAST_ETA, EPOCHS = 0.02, 1e-4, 4
STEP_SIZES = {
    "constant": lambda epoch: ETA,
    "cosine": lambda epoch: LAST_ETA + (ETA - LAST_ETA) * math.cos(math.pi * min(1, epoch / EPOCHS) / 2),
    "exponential": lambda epoch: LAST_ETA + (ETA - LAST_ETA) * 0.8**epoch,
}


@pytest.mark.parametrize("shape", [(6, 16, 0.07), (2, 3, 1.0), (17, 64, 0.07)], ids=str)
@pytest.mark.parametrize(
    "name, options",
    [
        ("isogclr", {}), ("isogclr", dict(tau_lr_schedule="cosine")), ("isogclr", dict(tau_lr_schedule="exponential")),
        ("isogclr", dict(negatives="both")), ("isogclr", dict(negatives="views")), ("isogclr", dict(consistency=LAM)),
        ("fastclip-v2", {}), ("fastclip-v2", dict(fastclip_code=True)),
        ("fastclip-v2", dict(fastclip_code=True, consistency=LAM)), ("isogclr", dict(positives=True)),
    ],
    ids=str,
)  # fmt: skip
def test_individual_temperatures(name, options, shape, dtype):
    """iSogCLR, Algorithm 2, with one s_i, u_i and tau_i for both views of an image where `negatives` is `views`;
    FastCLIP-v2: Adam per row. Its released loss leaves tau_i out of the encoders' gradient; the value is the objective
    all the same."""
    batch, views, code = shape[0], options.get("negatives") == "views", options.get("fastclip_code")
    options = dict(options)
    has_positives = options.pop("positives", False)
    easy = has_positives and batch == 17  # few negatives in many dimensions: small gradients, and tau at its bound
    lowest = dict(tau_start=0.3, tau_min=0.02, tau_max=0.5, tau_lr=ETA, rho=5.0, gamma=GAMMA, gamma_schedule="constant")
    loss = create_loss(name, num_samples=batch + 3, epochs=EPOCHS, loss_eps=EPS, **lowest, **options)
    table, visited = torch.zeros(2, batch + 3, dtype=torch.float64), set()
    tau = torch.full((2, batch + 3), 0.3, dtype=torch.float64)
    first, second = torch.zeros_like(tau), torch.zeros_like(tau)
    for seed in range(6):
        epoch = seed // 2 * 3  # the last is beyond the cosine's end
        loss.set_epoch(epoch)
        s = draw(shape, dtype, seed)
        old = tau[:, s.index].clone().requires_grad_()
        g = batch_g((equations.two_view_gaps if "negatives" in options else gaps)(s.e1, s.e2), old)
        g = g.mean(dim=0).expand(2, -1) if views else g
        x, more = torch.zeros(()).double(), {}
        if has_positives:
            g, x = equations.unicl_g(s.e1, s.e2, old, s.key), equations.unicl_shift(s.e1, s.e2, old, s.key)
            more = positive_key_of(s)
        update = (lambda u, beta0, g=g: equations.isogclr_s(u, EPS + g, beta0)) if name == "isogclr" else (
            lambda u, gamma, g=g: equations.sogclr_u(u, g, gamma, EPS)
        )
        u = visit(table, visited, s.index, GAMMA, update)
        objective = (equations.isogclr if name == "isogclr" else equations.fastclip_v2)(
            g * x.exp(), old, u.detach() * x.detach().exp(), 5.0
        )
        encoders = equations.fastclip_v0(g, u) if code else objective
        scale = torch.ones(()).double() if code else old
        term = equations.consistency(s.e1, s.e2, scale, options.get("consistency", 0.0))
        expected = torch.autograd.grad(encoders + term, [s.e1, s.e2], retain_graph=True)
        (gradient,) = torch.autograd.grad(batch * objective, old)
        gradient = gradient.mean(dim=0).expand(2, -1) if views else gradient

        value = loss(*s.features, s.logit_scale, index=s.index, **more)
        for one, other in zip(torch.autograd.grad(value, s.features), expected, strict=True):
            close(one, other, 0.02, nothing=batch == 2 or easy)
        close(value.detach(), (objective + term).detach(), 0.02)

        gradient = mean_over_equal_rows(gradient, s.index)
        eta = STEP_SIZES[options.get("tau_lr_schedule", "constant")](epoch)
        if name == "isogclr":
            moved, first[:, s.index] = equations.isogclr_tau(
                old.detach(), first[:, s.index], gradient, beta1=0.9, eta=eta, tau_0=0.02, tau_max=0.5
            )
        else:
            moved, first[:, s.index], second[:, s.index] = equations.fastclip_v2_tau(
                old.detach(), first[:, s.index], second[:, s.index], gradient, epoch, eta, tau_0=0.02, tau_max=0.5
            )
        tau[:, s.index] = moved
        close(loss.full_state()["temperature.tau"].T, tau, 0.02)
    assert easy or tau.unique().numel() > 3, "the temperatures did not become individual"


def tangent(gradient, embedding):
    """The loss takes unit vectors at their word; equations that normalize them add a projection."""
    embedding = embedding.detach()
    return gradient - (gradient * embedding).sum(dim=1, keepdim=True) * embedding


@SHAPES
@pytest.mark.parametrize("eps", [1e-14, 1e-3])
def test_neuclip_is_equation_12(shape, eps, dtype):
    """With W as it stands after the network's own updates, value and gradients of encoders and temperature."""
    loss = create_loss("neuclip", npn_prototypes=7, npn_lr=0.05, npn_updates=3, loss_eps=eps, rho=RHO)
    for seed in range(3):
        s, tau = draw(shape, dtype, seed), shape[2]
        value = loss(*s.features, s.logit_scale)
        *found, d_scale = torch.autograd.grad(value, [*s.features, s.logit_scale])
        state = loss.full_state()
        w1, w2 = state["state.weight"][:, : int(state["state.active"])].double()
        alpha = equations.neuclip_alpha(w1, w2, s.e1, s.e2, s.tau, eps)
        objective = equations.neuclip(normalizer(s), s.tau, alpha, RHO, eps)
        *expected, wanted = torch.autograd.grad(objective, [s.e1, s.e2, s.scale])
        for one, other, embedding in zip(found, expected, (s.e1, s.e2), strict=True):
            close(tangent(one.double(), embedding).to(dtype), tangent(other, embedding), tau)
        close(d_scale, wanted, tau)
        close(value.detach(), objective.detach(), tau)
        shown = loss.diagnostics()
        close(shown["alpha_image_mean"], alpha[0].mean().detach(), tau)
        close(shown["alpha_text_std"], alpha[1].std().detach(), tau)


@pytest.mark.parametrize("options", [dict(mixing=0.3), dict(normalizer="queue", queue_size=30)], ids=str)
def test_consistency_beside_an_estimator_of_embeddings(options, dtype):
    """The difference to the loss without it, where the estimator's gradient goes through alpha; tau gets none of it."""
    losses = [create_loss("neuclip", consistency=lam, **options) for lam in (LAM, 0.0)]
    for seed in range(2):
        s = draw((9, 16, 0.1), dtype, seed)
        values = [loss(*s.features, s.logit_scale) for loss in losses]
        term = equations.consistency(s.e1, s.e2, s.tau.detach(), LAM)
        found, plain = (torch.autograd.grad(value, [*s.features, s.logit_scale]) for value in values)
        for one, other, more in zip(found, plain, torch.autograd.grad(term, [s.e1, s.e2]), strict=False):
            close(one, other.double() + more, 0.1)
        assert torch.equal(found[2], plain[2])
        close(values[0].detach(), values[1].detach().double() + term.detach(), 0.1)
    shown = losses[0].diagnostics()
    for name, expected in zip(("inmodal", "crossmodal"), consistency_terms(s.e1, s.e2), strict=True):
        close(shown[f"{name}_consistency"], expected.detach(), 0.1)
    assert "inmodal_consistency" not in losses[1].diagnostics()
    assert losses[0].value_name == f"{losses[1].value_name}_consistency"


@pytest.mark.parametrize("name", ["fastclip-v3", "fastclip-v0", "isogclr", "tuneclip", "queue", "dcl"])
def test_the_loss_at_chance_is_that_of_equal_similarities(name):
    loss = create_loss(name, num_samples=64, epochs=2, **({"rho": RHO} if name in ("isogclr", "queue") else {}))
    loss.set_epoch(0)
    image, text = (unit(torch.Generator().manual_seed(seed), 1, 5).expand(8, 5) for seed in range(2))
    value = loss(image, text, torch.tensor(20.0, dtype=torch.float64), index=torch.arange(8))
    torch.testing.assert_close(loss.diagnostics()["loss_at_chance"].double(), value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inmodal, crossmodal", [(0.25, 0.25), (0.0, 1.5), (2.0, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("shape", [(2, 3, 1.0), (17, 64, 0.1)], ids=str)
def test_cyclip(shape, inmodal, crossmodal):
    s = draw(shape, torch.float64)
    loss = create_loss("cyclip", cyclip_inmodal=inmodal, cyclip_crossmodal=crossmodal)
    value, expected = loss(*s.features, s.logit_scale), equations.cyclip(s.e1, s.e2, s.tau, inmodal, crossmodal)
    torch.testing.assert_close(value, expected)
    found = torch.autograd.grad(value, [*s.features, s.logit_scale])
    for one, other in zip(found, torch.autograd.grad(expected, [s.e1, s.e2, s.scale]), strict=True):
        torch.testing.assert_close(one, other)
    shown = loss.diagnostics()
    terms = inmodal * shown["inmodal_consistency"] + crossmodal * shown["crossmodal_consistency"]
    torch.testing.assert_close(shown["clip"] + terms, value.detach())


def test_autocast_changes_nothing():
    s = draw((6, 16, 0.02), torch.float32)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            value = create_loss("neuclip", npn_prototypes=4)(*s.features, s.logit_scale)
        found.append([value, *torch.autograd.grad(value, [*s.features, s.logit_scale])])
    assert all(map(torch.equal, *found))


def table_at(log_u):
    """A loss in evaluation whose table is log_u, (2, B)."""
    loss = create_loss("fastclip-v3", num_samples=log_u.shape[1], gamma=0.2, gamma_schedule="constant").eval()
    loss.load_full_state({**loss.full_state(), "state.log_u": log_u.T.float()})
    return loss


def test_one_wrong_normalizer_cannot_take_over_the_step():
    """L - alpha far beyond any exact normalizer's: bounded, and the same for every gradient."""
    s = draw((4, 8, 0.01), torch.float32)
    g = normalizer(s)
    off, bounded = ((1e-14 + g.detach()).log() for _ in range(2))
    off[0, 1] -= 50
    bounded[0, 1] -= 12.5
    value = table_at(off)(*s.features, s.logit_scale, index=torch.arange(4))
    expected = torch.autograd.grad(equations.sogclr(g, s.tau.detach(), bounded.exp()), [s.e1, s.e2])
    for one, other in zip(torch.autograd.grad(value, s.features), expected, strict=True):
        close(one, other, 0.01)


def test_a_bounded_weight_keeps_the_gradient_through_alpha():
    """NeuCLIP, Eq. 12 with exp(L - alpha) bounded by exp(12.5): prototypes that point away from every anchor."""
    s = draw((6, 8, 0.01), torch.float32)
    loss = create_loss("neuclip", npn_prototypes=6, loss_eps=1e-14)
    loss(*s.features, s.logit_scale)
    far = -torch.stack([s.features[0] + s.features[1]] * 2).detach()
    loss.load_full_state({**loss.full_state(), "state.weight": far})
    value = loss.eval()(*s.features, s.logit_scale)
    tau, log_batch = s.tau.detach(), (1e-14 + batch_g(gaps(s.e1, s.e2), s.tau.detach())).log()
    alpha = equations.neuclip_alpha(*far.double(), s.e1, s.e2, tau, 1e-14)
    excess = (log_batch - alpha).detach()
    assert (excess > 13).any() and (excess < 12).any()
    weight = excess.clamp(max=12.5).exp()
    # Its gradient is that of tau * (exp(L - alpha) + alpha), with the bounded weight in place of exp(L - alpha).
    carrier = (tau * (weight * log_batch + (1 - weight) * alpha)).mean(dim=1).sum()
    expected = torch.autograd.grad(carrier, [s.e1, s.e2])
    for one, other, e in zip(torch.autograd.grad(value, s.features), expected, (s.e1, s.e2), strict=True):
        along = ((one - other) * e.detach()).sum(dim=1, keepdim=True) * e.detach()
        close(one - along.to(one), other, 0.01)


def test_at_the_exact_normalizers_the_batches_average_to_the_global_gradient():
    """NeuCLIP, Eq. 2: with u exact, Eq. 4 is unbiased over all batches of two of a set of four."""
    s = draw((4, 8, 0.2), torch.float32)
    tau = s.tau.detach()
    g = batch_g(gaps(s.e1, s.e2), tau)
    expected = torch.autograd.grad(equations.global_contrastive(g, tau, 0.0, 1e-14), [s.e1, s.e2])
    total, loss = [torch.zeros(4, 8) for _ in range(2)], table_at((1e-14 + g.detach()).log())
    for rows in map(torch.tensor, itertools.combinations(range(4), 2)):
        leaves = [side[rows].detach().requires_grad_() for side in s.features]
        value = loss(*leaves, s.logit_scale, index=rows)
        for side, gradient in zip(total, torch.autograd.grad(value, leaves), strict=True):
            side[rows] += gradient / 6
    for one, other in zip(total, expected, strict=True):
        close(one, other, 0.2)


@pytest.mark.parametrize("surrogate", ["identity", "hinge"])
def test_tau_rests_where_the_weights_of_the_negatives_diverge_from_equal_ones_by_rho(surrogate):
    """NeuCLIP, Eq. 13, with the batch as the whole data set: dF/dtau = 2 rho - sum over both directions of KL."""
    s = draw((12, 8, 0.05), torch.float64)
    loss = create_loss("fastclip-v3", normalizer="batch", surrogate=surrogate, rho=1.3)
    loss(*s.features, s.logit_scale).backward()
    h = gaps(s.e1, s.e2) if surrogate == "identity" else (gaps(s.e1, s.e2) + loss.surrogate.margin).clamp(min=0) ** 2
    shares = (h * 20.0).softmax(dim=2)
    divergence = (shares * (shares * 11).log()).sum(dim=2).mean(dim=1).sum()
    # d/dscale = dF/dtau * dtau/dscale = -tau^2 dF/dtau; epsilon is left out here.
    assert float(s.logit_scale.grad) == pytest.approx(-(float(2.6 - divergence)) / 20.0**2, rel=1e-7)
