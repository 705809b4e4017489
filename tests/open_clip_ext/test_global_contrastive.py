"""Values and gradients of the losses against `open_clip_ext.equations` in float64."""

import math

import pytest
import torch
from numerics import close, unit, visit

from open_clip_ext import InputError, NonFiniteError, create_loss, equations
from open_clip_ext.equations import batch_g, consistency_terms, gaps

SHAPES = [(2, 3, 1.0), (5, 8, 0.07), (17, 64, 0.05), (9, 16, 0.03), (6, 64, 0.01)]


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def inputs(batch, dimension, tau, seed=0, dtype=torch.float32):
    """Embeddings whose pairs match more or less, as leaves of `dtype` and as float64 leaves of the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    e1 = unit(generator, batch, dimension)
    noise = 0.7 if tau > 0.02 else 3.0  # well matched pairs leave nothing to compare at a low temperature
    e2 = torch.nn.functional.normalize(e1 + noise * unit(generator, batch, dimension), dim=1)
    single = [tensor.to(dtype).detach().requires_grad_() for tensor in (e1, e2)]
    double = [tensor.detach().double().clone().requires_grad_() for tensor in single]
    return single, double, torch.tensor(1 / tau, dtype=dtype, requires_grad=True)


def make(name, rows=None, **options):
    """A loss of constant gamma, or with few prototypes, unless the options say otherwise."""
    if name == "neuclip":
        return create_loss(name, **{"npn_prototypes": 8, **options})
    return create_loss(name, num_samples=rows, **{"gamma": 0.2, "gamma_schedule": "constant", **options})


def gradients(loss, single, logit_scale, **kwargs):
    value = loss(*single, logit_scale, **kwargs)
    return (value, *torch.autograd.grad(value, [*single, logit_scale]))


@DTYPES
@pytest.mark.parametrize("batch, dimension, tau", SHAPES)
def test_fastclip_is_equations_3_4_and_13(batch, dimension, tau, dtype, request):
    """Several steps with drifting embeddings, rows that come back and a row twice in a batch."""
    if dtype == torch.float64:
        request.getfixturevalue("float64_rows")
    eps, rho, gamma, rows = 1e-14, 6.5, 0.3, batch + 3
    loss = make("fastclip-v3", rows, gamma=gamma, rho=rho)
    table = torch.zeros(2, rows, dtype=torch.float64)
    visited = set()
    for step in range(4):
        single, (e1, e2), logit_scale = inputs(batch, dimension, tau, seed=step, dtype=dtype)
        index = torch.randperm(rows, generator=torch.Generator().manual_seed(step))[:batch]
        if step == 2:
            index[1] = index[0]
        scale = logit_scale.detach().double().requires_grad_()
        g = batch_g(gaps(e1, e2), 1 / scale)
        u = visit(table, visited, index, gamma, lambda u, gamma, g=g: equations.sogclr_u(u, g, gamma, eps))
        objective = equations.fastclip_v3(g, 1 / scale, u, rho)
        value, *actual = gradients(loss, single, logit_scale, index=index)
        close(value.detach(), objective.detach(), tau)
        for gradient, expected in zip(actual, torch.autograd.grad(objective, [e1, e2, scale]), strict=True):
            close(gradient, expected, tau)
        known = sorted(visited)
        close(loss.full_state()["state.log_u"].T[:, known], table[:, known].log(), tau)


@DTYPES
@pytest.mark.parametrize("batch, dimension, tau", SHAPES)
@pytest.mark.parametrize("eps", [1e-14, 1e-3])
def test_neuclip_is_equation_12(batch, dimension, tau, eps, dtype):
    """With W as it stands after the network's own updates, value and gradients of encoders and temperature."""
    rho = 8.5
    loss = create_loss("neuclip", npn_prototypes=7, npn_lr=0.05, npn_updates=3, loss_eps=eps, rho=rho)
    for step in range(3):
        single, double, logit_scale = inputs(batch, dimension, tau, seed=step, dtype=dtype)
        value, d_image, d_text, d_scale = gradients(loss, single, logit_scale)
        state = loss.full_state()
        w1, w2 = state["state.weight"][:, : int(state["state.active"])].double()
        scale = logit_scale.detach().double().requires_grad_()
        alpha = equations.neuclip_alpha(w1, w2, *double, 1 / scale, eps)
        objective = equations.neuclip(batch_g(gaps(*double), 1 / scale), 1 / scale, alpha, rho, eps)
        expected = torch.autograd.grad(objective, [*double, scale])
        # The loss takes unit vectors at their word; the equation normalises, which adds a projection.
        for actual, wanted, embedding in zip((d_image, d_text), expected[:2], double, strict=True):
            close(tangent(actual.double(), embedding).to(dtype), tangent(wanted, embedding), tau)
        close(d_scale, expected[2], tau)
        close(value.detach(), objective.detach(), tau)


def tangent(gradient, embedding):
    embedding = embedding.detach()
    return gradient - (gradient * embedding).sum(dim=1, keepdim=True) * embedding


def test_batch_normalizer_has_the_gradient_of_the_minibatch_objective():
    eps, rho = 1e-14, 3.0
    loss = create_loss("neuclip", normalizer="batch", encoder_objective="compositional", rho=rho)
    single, double, logit_scale = inputs(8, 16, 0.1)
    value, *actual = gradients(loss, single, logit_scale)
    scale = logit_scale.detach().double().requires_grad_()
    objective = equations.global_contrastive(batch_g(gaps(*double), 1 / scale), 1 / scale, rho, eps)
    for gradient, expected in zip(actual, torch.autograd.grad(objective, [*double, scale]), strict=True):
        close(gradient, expected, 0.1)
    close(value.detach(), objective.detach(), 0.1)


CONSISTENT = {
    "fastclip-v3": dict(rho=3.0),
    "fastclip-v1": {},
    "dcl": {},
    "neuclip": dict(mixing=0.3),
    "queue": dict(queue_size=30),
    "isogclr": dict(tau_lr=0.2, tau_start=0.1, rho=1.0),
    "fastclip-v2": dict(tau_start=0.1, fastclip_code=True),
    "sogclr": dict(negatives="both"),
}


@DTYPES
@pytest.mark.parametrize("name", CONSISTENT)
def test_consistency_is_added_in_the_scale_of_the_objective(name, dtype, request):
    """In any scheme of temperatures and with gradients through alpha or without; tau gets none of its gradient."""
    if dtype == torch.float64:
        request.getfixturevalue("float64_rows")
    lam, batch, tau = 0.7, 9, 0.1
    options = dict(num_samples=40, epochs=2, **CONSISTENT[name])
    with_terms, without = (create_loss(name, **options, **more) for more in ({"consistency": lam}, {}))
    for loss in (with_terms, without):
        loss.set_epoch(0)
    for step in range(2):
        single, double, logit_scale = inputs(batch, 16, tau, seed=step, dtype=dtype)
        taus = torch.tensor(tau, dtype=torch.float64)
        if without.temperature.needs_index and step:
            taus = without.full_state()["temperature.tau"][:batch].double().T
            assert name == "fastclip-v2" or taus.std() > 0.1 * taus.mean()
        if name in ("dcl", "fastclip-v2"):
            taus = torch.ones((), dtype=torch.float64)
        results = []
        for loss in (with_terms, without):
            value = loss(*single, logit_scale, index=torch.arange(batch))
            leaves = [*single, logit_scale]
            results.append([value.detach(), *torch.autograd.grad(value, leaves, allow_unused=True)])
        (value, *grads, d_scale), (plain, *plain_grads, plain_scale) = results
        term = equations.consistency(*double, taus, lam)
        for actual, other, more in zip(grads, plain_grads, torch.autograd.grad(term, double), strict=True):
            close(actual, other.double() + more, tau)
        close(value, plain.double() + term.detach(), tau)
        assert (d_scale is None) == (plain_scale is None) and (d_scale is None or torch.equal(d_scale, plain_scale))
        shown, (inmodal, crossmodal) = with_terms.diagnostics(), consistency_terms(*double)
        close(shown["inmodal_consistency"], inmodal.detach(), tau)
        close(shown["crossmodal_consistency"], crossmodal.detach(), tau)
    assert with_terms.value_name == f"{without.value_name}_consistency"


def test_without_consistency_nothing_of_it_is_computed(monkeypatch):
    monkeypatch.setattr("open_clip_ext.losses.global_contrastive.add_consistency", lambda *_: pytest.fail("computed"))
    single, _, logit_scale = inputs(5, 8, 0.1)
    loss = create_loss("queue")
    loss(*single, logit_scale).backward()
    assert "inmodal_consistency" not in loss.diagnostics()


@pytest.mark.parametrize("name", ["fastclip-v3", "neuclip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ["matched", "mismatched", "equal", "one-hot"])
def test_extreme_batches_stay_finite_at_the_lowest_temperature(name, dtype, case):
    batch, dimension = 8, 16
    e1 = unit(torch.Generator().manual_seed(0), batch, dimension)
    if case == "equal":
        e1 = e1[:1].expand(batch, -1)
    elif case == "one-hot":
        e1 = torch.eye(dimension, dtype=torch.float64)[:batch]
    e2 = -e1 if case == "mismatched" else e1
    single = [tensor.to(dtype).requires_grad_() for tensor in (e1, e2)]
    logit_scale = torch.tensor(100.0, requires_grad=True)
    loss = make(name, batch)
    for _ in range(3):
        value, *grads = gradients(loss, single, logit_scale, index=torch.arange(batch))
        assert value.isfinite() and all(gradient.isfinite().all() for gradient in grads)
        assert value.dtype == torch.float32 and grads[0].dtype == dtype
    loss.raise_if_not_finite()
    if name == "fastclip-v3":
        double = [tensor.detach().double() for tensor in single]
        exact = (1e-14 + batch_g(gaps(*double), torch.tensor(0.01).double())).log().T
        torch.testing.assert_close(
            loss.full_state()["state.log_u"].double(), exact, rtol=1e-3, atol=1e-3
        )


def test_autocast_changes_nothing():
    single, _, logit_scale = inputs(6, 16, 0.02)
    outside = gradients(create_loss("neuclip", npn_prototypes=4), single, logit_scale)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = create_loss("neuclip", npn_prototypes=4)(*single, logit_scale)
    inside = (value, *torch.autograd.grad(value, [*single, logit_scale]))
    for a, b in zip(outside, inside, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["fastclip-v3", "neuclip"])
def test_accumulation_equals_one_call(name):
    """OpenCLIP's scheme: accum_freq calls on the same concatenation, each with the graph of one chunk."""
    index = torch.arange(8)
    single, _, logit_scale = inputs(8, 16, 0.05)
    whole = make(name, 8)
    expected = gradients(whole, single, logit_scale, index=index)
    chunked = make(name, 8, accum_freq=4)
    # A call in evaluation mode must not count as one of the four.
    chunked.eval()(*[tensor.detach() for tensor in single], logit_scale.detach(), index=index)
    chunked.train()
    parts = [tensor.detach().chunk(4) for tensor in single]
    total_scale = torch.zeros(())
    for call in range(4):
        leaves = [part[call].clone().requires_grad_() for part in parts]
        full = [
            torch.cat([*part[:call], leaf, *part[call + 1 :]]) for part, leaf in zip(parts, leaves, strict=True)
        ]
        value = chunked(*full, logit_scale, index=index)
        image, text, scale = torch.autograd.grad(value, [*leaves, logit_scale])
        total_scale += scale
        torch.testing.assert_close(image, expected[1][2 * call : 2 * call + 2])
        torch.testing.assert_close(text, expected[2][2 * call : 2 * call + 2])
    torch.testing.assert_close(total_scale, expected[3])
    assert chunked.steps == whole.steps == 1
    for key, tensor in whole.full_state().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, chunked.full_state()[key]), key


GROWING = dict(npn_prototypes=40, npn_restart_every=4)  # still growing when saved, restarting afterwards


@pytest.mark.parametrize(
    "name, options", [("fastclip-v3", {}), ("neuclip", GROWING), ("neuclip", {"npn_opt": "adamw"})]
)
def test_state_survives_and_training_goes_on_the_same(name, options, tmp_path):
    def step(loss, seed):
        single, _, logit_scale = inputs(5, 8, 0.05, seed)
        index = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:5]
        return gradients(loss, single, logit_scale, index=index)

    first, second, nested = (make(name, 20, **options) for _ in range(3))
    for seed in range(3):
        step(first, seed)
    torch.save(first.full_state(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    second.load_full_state(loaded)
    # As a part of a user's own module.
    holder = torch.nn.ModuleDict({"loss": first})
    torch.nn.ModuleDict({"loss": nested}).load_state_dict(holder.state_dict())
    for seed in range(3, 12):
        wanted = step(first, seed)
        for loss in (second, nested):
            for a, b in zip(step(loss, seed), wanted, strict=True):
                assert torch.equal(a, b)
    for key, value in torch.load(tmp_path / "state.pt", weights_only=True).items():
        assert not isinstance(value, torch.Tensor) or torch.equal(loaded[key], value), f"{key} was trained in place"


@pytest.mark.parametrize("other", [dict(npn_prototypes=9), dict(npn_opt="adamw"), dict(normalizer="batch")])
def test_state_of_another_loss_is_refused(other):
    single, _, logit_scale = inputs(5, 8, 0.05)
    loss = make("neuclip")
    gradients(loss, single, logit_scale)
    if "normalizer" in other:
        another = create_loss("neuclip", normalizer="batch", encoder_objective="compositional")
    else:
        another = make("neuclip", **other)
    with pytest.raises(ValueError, match=next(iter(other))):
        another.load_full_state(loss.full_state())


@pytest.mark.parametrize("name", ["fastclip-v3", "neuclip"])
@pytest.mark.parametrize("where", ["image_features", "logit_scale"])
@pytest.mark.parametrize("good_steps", [0, 1, 5])
def test_a_non_finite_batch_never_enters_the_state(name, where, good_steps):
    """During growth, at the very start, and when the prototypes are complete."""
    index = torch.arange(6)
    loss = make(name, 6, **(dict(npn_prototypes=20, npn_lr=0.01) if name == "neuclip" else {}))
    single, _, logit_scale = inputs(6, 8, 0.05)
    for _ in range(good_steps):
        gradients(loss, single, logit_scale, index=index)
    before = loss.full_state()
    bad = list(single)
    bad_scale = logit_scale
    if where == "image_features":
        bad[0] = single[0].detach().clone().index_fill_(0, torch.tensor(2), math.nan).requires_grad_()
    else:
        bad_scale = torch.tensor(math.nan, requires_grad=True)
    gradients(loss, bad, bad_scale, index=index)
    for _ in range(2):
        gradients(loss, single, logit_scale, index=index)
    gradients(loss, [tensor.detach().requires_grad_() * math.inf for tensor in single], logit_scale, index=index)
    after = loss.full_state()
    for key, value in after.items():
        if key.startswith("state."):
            assert value.isfinite().all(), key
    if name == "fastclip-v3":
        reference = make(name, 6)
        for _ in range(good_steps + 2):
            gradients(reference, single, logit_scale, index=index)
        assert torch.equal(after["state.log_u"], reference.full_state()["state.log_u"])
    else:
        weight = after["state.weight"][:, : int(after["state.active"])]
        assert (weight.norm(dim=2) > 0.5).all(), "a prototype without a direction"
        assert after["state.adagrad:weight:sum"].max() < 1e6
        if good_steps == 5:
            assert torch.equal(before["state.ring"][0].unique(dim=0), after["state.ring"][0].unique(dim=0))
    with pytest.raises(NonFiniteError, match=f"step {good_steps + 1}: {where}"):
        loss.raise_if_not_finite()


def test_an_infinite_scale_is_named():
    (image, text), _, _ = inputs(4, 8, 0.05)
    loss = make("fastclip-v3", 4)
    loss(image, text, torch.tensor(math.inf), index=torch.arange(4))
    with pytest.raises(NonFiniteError, match="step 1: logit_scale is not finite"):
        loss.raise_if_not_finite()


def test_the_scale_may_be_a_number():
    (image, text), _, _ = inputs(4, 8, 0.05)
    values = [make("sogclr", 4)(image, text, scale, index=torch.arange(4)) for scale in (14, 14.0, torch.tensor(14.0))]
    assert values[0] == values[1] == values[2]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(index=None), "index: this loss has state per sample and needs"),
        (dict(index=torch.tensor([0, 1, 2, 9])), r"index: rows must lie in \[0, 9\); got 9"),
        (dict(index=torch.tensor([0, 1, 2, -1])), r"got -1"),
        (dict(index=torch.tensor([0.0, 1, 2, 3])), "index must be int64"),
        (dict(index=torch.tensor([0, 1])), r"index must be int64 of shape \(4,\)"),
        (dict(index=[0, 1, 2, 3]), r"index must be an int64 tensor of shape \(4,\); got list"),
        (dict(index=torch.arange(4).numpy()), "index must be an int64 tensor .* got ndarray"),
        (dict(logit_scale=torch.ones(2)), "logit_scale must be one number"),
        (dict(text_features=torch.zeros(3, 8)), "must both be"),
        (dict(image_features=torch.zeros(1, 8), text_features=torch.zeros(1, 8)), "batch of 1 .* no negatives"),
        (dict(image_features=torch.zeros(0, 8), text_features=torch.zeros(0, 8)), "batch of 0 .* no negatives"),
        (dict(image_features=2 * torch.ones(4, 8)), "image_features must be unit vectors"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    (image, text), _, logit_scale = inputs(4, 8, 0.05)
    arguments = dict(image_features=image, text_features=text, logit_scale=logit_scale, index=torch.arange(4))
    loss = make("fastclip-v3", 9, validate=True)
    with pytest.raises(ValueError, match=message):
        loss(**{**arguments, **change})


@pytest.mark.parametrize("name", ["fastclip-v3", "cyclip", "amorlip"])
def test_one_later_batch_of_other_norms_is_found_at_the_next_look(name):
    (image, text), _, logit_scale = inputs(4, 8, 0.05)
    loss = create_loss(name, num_samples=4, epochs=2)
    loss.set_epoch(0)
    for factor in (1, 1, 1.03, 1):
        loss(image, factor * text, logit_scale, index=torch.arange(4))
        if factor == 1 and loss.steps < 3:
            loss.raise_if_not_finite()
    with pytest.raises(ValueError, match="^step 3: text_features must be unit vectors"):
        loss.raise_if_not_finite()
    loss.raise_if_not_finite()


def test_a_cosine_gamma_without_epochs_is_an_error_not_the_minibatch_estimator():
    (image, text), _, logit_scale = inputs(4, 8, 0.05)
    loss = create_loss("fastclip-v3", num_samples=4, epochs=4)
    with pytest.raises(ValueError, match="set_epoch"):
        loss(image, text, logit_scale, index=torch.arange(4))
    with pytest.raises(InputError, match="gamma_decay_epochs"):
        create_loss("fastclip-v3", num_samples=4)
    with pytest.raises(InputError, match="lr_tau: belongs to your model"):
        create_loss("neuclip", lr_tau=1e-4)


def test_a_row_out_of_range_on_the_device_is_found_without_waiting_for_it(monkeypatch):
    """What a CUDA index meets: no check when called, nothing enters the table, an error at the next look."""
    (image, text), _, logit_scale = inputs(4, 8, 0.05)
    loss = make("fastclip-v3", 4)
    monkeypatch.setattr(loss, "_check", lambda *args: None)
    loss(image, text, logit_scale, index=torch.tensor([0, 1, 2, 4]))
    assert (loss.full_state()["state.log_u"] == -math.inf).all()
    with pytest.raises(ValueError, match=r"index: step 1 has a row outside \[0, 4\)"):
        loss.raise_if_not_finite()


def test_rows_never_visited_take_the_batchs_estimate_in_evaluation():
    single, _, logit_scale = inputs(4, 8, 0.05)
    table = make("fastclip-v3", 9).eval()
    batch = create_loss("neuclip", normalizer="batch", encoder_objective="compositional")
    actual = gradients(table, single, logit_scale, index=torch.arange(4))
    for tensor, expected in zip(actual, gradients(batch, single, logit_scale), strict=True):
        assert torch.equal(tensor, expected)


def test_one_wrong_normalizer_cannot_take_over_the_step():
    """L - alpha far beyond any exact normalizer's: bounded, and the same for every gradient."""
    single, double, logit_scale = inputs(4, 8, 0.01)
    tau = 1 / logit_scale.detach().double()
    g = batch_g(gaps(*double), tau)
    exact = (1e-14 + g.detach()).log()
    off = exact.clone()
    off[0, 1] -= 50
    bounded = exact.clone()
    bounded[0, 1] -= 12.5
    loss = make("fastclip-v3", 4).eval()
    loss.load_full_state({**loss.full_state(), "state.log_u": off.T.float()})
    _, d_image, d_text, _ = gradients(loss, single, logit_scale, index=torch.arange(4))
    expected = torch.autograd.grad(equations.sogclr(g, tau, bounded.exp()), double)
    close(d_image, expected[0], tau)
    close(d_text, expected[1], tau)


def test_a_bounded_weight_keeps_the_gradient_through_alpha():
    """NeuCLIP, Eq. 12 with exp(L - alpha) bounded by exp(12.5): prototypes that point away from every anchor."""
    single, double, logit_scale = inputs(6, 8, 0.01)
    loss = create_loss("neuclip", npn_prototypes=6, loss_eps=1e-14)
    gradients(loss, single, logit_scale)
    far = -torch.stack([single[0] + single[1], single[0] + single[1]])
    loss.load_full_state({**loss.full_state(), "state.weight": far.detach()})
    loss.eval()
    _, *actual, _ = gradients(loss, single, logit_scale)
    tau = 1 / logit_scale.detach().double()
    log_batch = (1e-14 + batch_g(gaps(*double), tau)).log()
    alpha = equations.neuclip_alpha(*far.detach().double(), *double, tau, 1e-14)
    excess = (log_batch - alpha).detach()
    assert (excess > 13).any() and (excess < 12).any()
    weight = excess.clamp(max=12.5).exp()
    # Its gradient is that of tau * (exp(L - alpha) + alpha), with the bounded weight in place of exp(L - alpha).
    carrier = tau * (weight * log_batch + (1 - weight) * alpha)
    expected = torch.autograd.grad(carrier.mean(dim=1).sum(), double)
    for found, wanted, unit_vectors in zip(actual, expected, double, strict=True):
        # Equations 10 and 11 normalize the embeddings, which removes the gradient's radial part.
        along = ((found - wanted) * unit_vectors.detach()).sum(dim=1, keepdim=True) * unit_vectors.detach()
        close(found - along.to(found), wanted, 0.01)


def test_unified_needs_a_normalizer_of_embeddings():
    with pytest.raises(InputError, match="encoder_objective"):
        make("fastclip-v3", 4, encoder_objective="unified")


def test_at_the_exact_normalizers_the_batches_average_to_the_global_gradient():
    """NeuCLIP, Eq. 2: with u exact, Eq. 4 is unbiased over all batches of two of a set of four."""
    from itertools import combinations

    single, double, logit_scale = inputs(4, 8, 0.2)
    tau, eps = 1 / logit_scale.detach().double(), 1e-14
    g = batch_g(gaps(*double), tau)
    exact = (eps + g.detach()).log()
    expected = torch.autograd.grad(equations.global_contrastive(g, tau, 0.0, eps), double)
    total = [torch.zeros_like(tensor) for tensor in single]
    batches = list(combinations(range(4), 2))
    for batch in batches:
        rows = torch.tensor(batch)
        loss = make("fastclip-v3", 4).eval()
        loss.load_full_state({**loss.full_state(), "state.log_u": exact.T.float()})
        leaves = [tensor[rows].detach().requires_grad_() for tensor in single]
        _, *grads = gradients(loss, leaves, logit_scale, index=rows)
        for sum_, gradient in zip(total, grads, strict=False):
            # The mean over the batch's anchors estimates the mean over all; each row is in half of the batches.
            sum_[rows] += gradient / len(batches)
    for actual, wanted in zip(total, expected, strict=True):
        close(actual, wanted, tau)


def test_the_prototypes_own_predictions_are_equations_10_and_11():
    single, double, logit_scale = inputs(6, 8, 0.05)
    loss = create_loss("neuclip", npn_prototypes=5, loss_eps=1e-3)
    gradients(loss, single, logit_scale)
    w1, w2 = loss.full_state()["state.weight"].double()
    alpha = equations.neuclip_alpha(w1, w2, *double, 1 / logit_scale.detach().double(), 1e-3)
    shown = loss.diagnostics()
    close(shown["alpha_image_mean"], alpha[0].mean().detach(), 0.05)
    close(shown["alpha_text_std"], alpha[1].std().detach(), 0.05)
