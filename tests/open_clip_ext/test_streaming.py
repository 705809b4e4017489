"""Similarities in parts give what they give at once, and never stand in memory whole."""

import math
from pathlib import Path

import pytest
import torch
from numerics import unit

from open_clip_ext import create_loss
from open_clip_ext.batch import Batch
from open_clip_ext.kernels import prototype_gradient, streaming
from open_clip_ext.kernels.log_sum import log_sum, log_sums
from open_clip_ext.kernels.similarities import SimilarityBlocks
from open_clip_ext.objectives import NETWORK_OBJECTIVES
from open_clip_ext.surrogates import Identity, PowerHinge

ROWS, BATCH, DIMENSION = 23, 13, 6
CONSTANT = dict(num_samples=ROWS, gamma=0.4, gamma_schedule="constant")
LOSSES = {
    "table": ("fastclip-v3", CONSTANT),
    "unscaled": ("fastclip-v0", CONSTANT),
    "individual": ("fastclip-v2", {**CONSTANT, "tau_lr": 0.01}),
    "hinge": ("tuneclip", {**CONSTANT, "margin": 0.8}),
    "hinge of power 1": ("tuneclip", {**CONSTANT, "margin": 0.8, "margin_power": 1.0}),
    "both sides": ("isogclr", {**CONSTANT, "negatives": "both"}),
    "network": ("neuclip", dict(npn_prototypes=17, npn_lr=0.05)),
    "network, hinge": ("neuclip", dict(npn_prototypes=17, npn_lr=0.05, surrogate="hinge", margin=0.8)),
    "network, individual": (
        "neuclip", dict(npn_prototypes=17, npn_lr=0.05, temperature="individual", num_samples=ROWS, tau_lr=0.01)
    ),
    "queue": ("queue", dict(queue_size=20, mixing=0.6)),
    "queue, unified": ("queue", dict(queue_size=20, mixing=0.3, encoder_objective="unified")),
    "cyclip": ("cyclip", dict(cyclip_inmodal=0.7)),
    "amorlip": ("amorlip", dict(epochs=4, amor_online_every=2)),
}


@pytest.fixture
def few_at_a_time(monkeypatch):
    monkeypatch.setattr(streaming, "CPU_PART", 1)
    monkeypatch.setattr(streaming, "LEAST_ROWS", 1)
    monkeypatch.setattr(streaming, "CPU_TILE", (2, 3))
    monkeypatch.setattr(prototype_gradient, "CPU_PROTOTYPES", 5)


def features(seed, batch=BATCH, dimension=DIMENSION):
    generator = torch.Generator().manual_seed(seed)
    image = unit(generator, batch, dimension)
    text = torch.nn.functional.normalize(image + 0.7 * unit(generator, batch, dimension), dim=1)
    return image.requires_grad_(), text.requires_grad_(), torch.randperm(ROWS, generator=generator)[:batch]


def steps(name):
    """Values and gradients of some steps, and the state after them."""
    preset, settings = LOSSES[name]
    loss = create_loss(preset, **settings)
    loss.set_epoch(0)
    found = []
    for seed in range(4):
        image, text, index = features(seed)
        scale = torch.tensor(1 / 0.1, dtype=torch.float64, requires_grad=True)
        value = loss(image, text, scale, index=index)
        gradients = torch.autograd.grad(value, [image, text, scale], allow_unused=True)
        found += [value.detach(), *(gradient for gradient in gradients if gradient is not None)]
    state = loss.full_state()
    return found + [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]


@pytest.mark.parametrize("name", LOSSES)
def test_parts_make_no_difference(name, request):
    whole = steps(name)
    request.getfixturevalue("few_at_a_time")
    assert len(streaming.parts(BATCH, BATCH, torch.device("cpu"), least=2)) == 7
    for one, other in zip(steps(name), whole, strict=True):
        # The state of tables and temperatures is float32.
        tolerance = dict(rtol=1e-5, atol=1e-6) if one.dtype == torch.float32 else dict(rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("name", ["network", "network, hinge", "queue, unified", "minibatch"])
def test_gradcheck(name, few_at_a_time):
    """Where the value is the function whose gradient is given: Eq. 12, and the objective of the batch alone."""
    preset, settings = LOSSES.get(name, ("fastclip-v3", dict(normalizer="batch", rho=2.0)))
    loss = create_loss(preset, **{**settings, **({} if name == "minibatch" else {"mixing": 0.0})})
    for seed in range(2):
        image, text, index = features(seed)
        loss(image, text, torch.tensor(10.0, dtype=torch.float64), index=index)
    loss.eval()
    image, text, _ = features(5, batch=6)
    scale = torch.tensor(8.0, dtype=torch.float64, requires_grad=True)
    # Of vectors of length 1: the loss takes them at their word. For the minibatch d/dalpha vanishes at alpha = L.
    assert torch.autograd.gradcheck(lambda i, t, s: loss(i, t, s), (image, text, scale), atol=1e-6)


@pytest.mark.parametrize(
    "surrogate", [Identity(), PowerHinge(margin=0.5), PowerHinge(margin=0.5, margin_power=3.0)], ids=lambda s: s.name
)
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("individual", [False, True])
def test_log_sum_over_others(surrogate, lengths, some, individual, few_at_a_time):
    generator = torch.Generator().manual_seed(0)
    image, text, _ = features(1, batch=9)
    others = torch.randn(2, 7, DIMENSION, generator=generator, dtype=torch.float64)
    norms = others.norm(dim=2) if lengths else None
    tau = torch.rand(2, 9, generator=generator).double() + 0.1 if individual else torch.full((2, 9), 0.2).double()
    tau.requires_grad_()
    positives = (image * text).sum(dim=1).detach().requires_grad_()
    seen = [slice(0, 1), slice(2, 4), slice(5, 7)] if some else None

    def streamed(*inputs):
        return log_sum(*inputs, others, surrogate, norms, seen)

    expected = torch.empty(2, 9, dtype=torch.float64)
    for side, anchors in enumerate((image, text)):
        for i in range(9):
            terms = []
            for j in range(7):
                if some and j in (1, 4):
                    continue
                cosine = anchors[i] @ others[side, j] / (norms[side, j] if lengths else 1.0)
                terms.append(torch.exp(surrogate.value(cosine - positives[i]) / tau[side, i]))
            expected[side, i] = sum(terms).log()
    inputs = (image, text, positives, tau)
    weights = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    found = streamed(*inputs)
    torch.testing.assert_close(found, expected)
    slopes = (torch.autograd.grad((weights * values).sum(), inputs) for values in (found, expected))
    for slope, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(slope, wanted)
    with torch.no_grad():
        torch.testing.assert_close(streamed(*inputs), expected)


@pytest.mark.parametrize("objective", NETWORK_OBJECTIVES)
@pytest.mark.parametrize("surrogate", [Identity(), PowerHinge(margin=0.5)], ids=lambda s: s.name)
@pytest.mark.parametrize("individual", [False, True])
@pytest.mark.parametrize("keys", [False, True])
def test_the_prototypes_gradient_is_autograds(objective, surrogate, individual, keys, few_at_a_time):
    """To float64's accuracy, 1 / B included, which no other float is exactly; over what stood there before. The alpha
    of an anchor for which no prototype counts is L, so that it adds nothing to the objective."""
    generator = torch.Generator().manual_seed(0)
    image, text = (side.detach() for side in features(1)[:2])
    eps = 1e-3
    tau = torch.rand(2, 13, generator=generator).double() + 0.2 if individual else torch.tensor(0.3).double()
    batch = Batch.of_process(image, text, tau, log_batch=torch.randn(2, 13, generator=generator).double())
    prototypes = torch.randn(2, 12, DIMENSION, generator=generator).double().requires_grad_()

    cosines = torch.stack([image, text]) @ torch.nn.functional.normalize(prototypes, dim=2).mT
    exponents = surrogate.value(cosines - batch.positives[:, None]) / batch.tau[:, :, None]
    counted = torch.arange(13) != 3 if keys else torch.ones(13, dtype=torch.bool)
    alpha = torch.where(counted, (eps + exponents.exp().mean(dim=2)).log(), batch.log_batch)
    values = (batch.tau if objective == "unified" else 1) * NETWORK_OBJECTIVES[objective].value(batch.log_batch, alpha)
    (expected,) = torch.autograd.grad(values.mean(dim=1).sum(), prototypes)

    more = dict(keys=(torch.arange(13), torch.full((12,), 3))) if keys else {}
    step = prototype_gradient.PrototypeGradient(
        batch, NETWORK_OBJECTIVES[objective], surrogate, eps, active=12, own_active=12, split=False,
        counts=12.0 * counted.double(), **more,
    )
    gradient = torch.full_like(expected, math.nan)
    with torch.no_grad():
        for _ in range(2):
            found = step.write(gradient, prototypes, prototypes.norm(dim=2))
            torch.testing.assert_close(found, alpha, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_processes_with_more_and_fewer_prototypes_take_the_same_parts(monkeypatch):
    """Else they would wait for each other: they exchange sums once per part."""
    monkeypatch.setattr(streaming, "CPU_PART", 48)
    monkeypatch.setattr(streaming, "LEAST_ROWS", 1)
    monkeypatch.setattr(prototype_gradient, "world_size", lambda: 2)
    image, text = (side.detach() for side in features(1)[:2])
    batch = Batch.of_process(
        image, text, torch.tensor(0.2).double(), log_batch=torch.zeros(2, BATCH).double()
    )
    more, fewer = (
        prototype_gradient.PrototypeGradient(
            batch, NETWORK_OBJECTIVES["unified"], Identity(), 1e-3, active=7, own_active=own, split=True,
            counts=torch.full((BATCH,), 7.0, dtype=torch.float64),
        ).parts
        for own in (4, 3)
    )
    assert more == fewer and len(more) > 1


def test_the_gradient_of_a_batch_may_be_asked_for_again(few_at_a_time):
    """It overwrites the similarities that it used."""
    image, text = (side.detach() for side in features(1)[:2])
    blocks = SimilarityBlocks(Batch.of_process(image, text, torch.tensor(0.2).double()), Identity())
    found = []
    for _ in range(2):
        alpha = blocks.log_batch_normalizers()
        gradients = torch.zeros_like(image), torch.zeros_like(text)
        found.append((alpha, *blocks.add_gradients(gradients, alpha), *gradients))
        gradients = torch.zeros_like(image), torch.zeros_like(text)
        found.append((alpha, *blocks.add_gradients(gradients, alpha), *gradients))
    for again in found[1:]:
        for one, other in zip(again, found[0], strict=True):
            assert torch.equal(one, other)


def test_tiles_cover_what_counts_once(few_at_a_time):
    rows, columns = streaming.tiles(5, [slice(0, 4), slice(5, 6), slice(7, 7)], torch.device("cpu"))
    assert rows == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert columns == [slice(0, 3), slice(3, 4), slice(5, 6)]


def test_sums_of_exponentials_at_their_ends():
    """What has no normal number in float32, alone or in the gradient, counts as exp(-60), not as 40 times the time; and
    a line of nothing adds nothing."""
    found = streaming.exp_(torch.tensor([0.0, -1.0, -59.0, -95.0, -1e4, -math.inf]))
    expected = torch.tensor([0.0, -1.0, -59.0, -60.0, -60.0, -60.0]).double().exp()
    torch.testing.assert_close(found.double(), expected, rtol=2**-22, atol=0)  # twice the last bit
    assert streaming.exp_(torch.tensor([math.nan])).isnan().all()
    nothing = streaming.log_sum_exp_(torch.full((2, 1), torch.finfo().min), 1)
    assert torch.equal(torch.logaddexp(nothing, torch.tensor([-1e4, 3.0])), torch.tensor([-1e4, 3.0]))
    lines = torch.tensor([[-500.0, -501.0, -math.inf], [3.0, 900.0, -math.inf]])
    torch.testing.assert_close(streaming.log_sum_exp_(lines.clone(), 1), lines.logsumexp(1))
    torch.testing.assert_close(streaming.log_sum_exp_(lines.clone()[:, :2], 0), lines[:, :2].logsumexp(0))
    # A process may hold none of the prototypes; the slopes are multiplied with their share of all, which is 0.
    image, text, _ = features(1)
    none, positives = torch.empty(2, 0, DIMENSION, dtype=torch.float64), (image * text).sum(dim=1)
    with torch.no_grad():
        values, slopes = log_sums(image, text, positives, torch.full((2, BATCH), 0.1), none, Identity())
    assert (values == -math.inf).all() and all(slope.isfinite().all() for slope in slopes)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_are_not_finite(bad):
    for shape in ((), (3, 4)):
        tensor = torch.full(shape, -3e38)
        if bad is not None:
            tensor.view(-1)[-1] = bad
        found = streaming.are_not_finite(torch.ones(2), tensor, torch.zeros(()))
        assert found.tolist() == [False, bad is not None, False]


def test_a_gradient_of_the_log_sum_is_taken_once():
    image, text, _ = features(1)
    positives = (image * text).sum(dim=1).detach()
    tau, others = torch.full((2, BATCH), 0.1), torch.randn(2, 5, DIMENSION).double()
    value = log_sum(image, text, positives, tau, others, Identity()).sum()
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize(
    "name, settings",
    [
        ("fastclip-v3", CONSTANT),
        ("tuneclip", CONSTANT),
        ("isogclr", {**CONSTANT, "negatives": "both"}),
        ("neuclip", dict(npn_prototypes=8192, npn_updates=2)),
        ("queue", dict(queue_size=8192)),
        ("amorlip", dict(epochs=1, amor_online_every=1)),
        ("cyclip", {}),
    ],
)
def test_memory_does_not_grow_with_the_square_of_the_batch(name, settings, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import measuring

    batch, dimension = 4096, 4
    loss = create_loss(name, **settings)
    loss.set_epoch(0)
    image, text, _ = features(0, batch, dimension)
    image, text = (side.detach().float().requires_grad_() for side in (image, text))
    index = torch.arange(batch) % ROWS

    def step():
        loss(image, text, torch.tensor(10.0), index=index).backward()

    step()
    whole = batch * batch * 4
    assert 0 < measuring.peak_memory(step, torch.device("cpu")) < 0.6 * whole
