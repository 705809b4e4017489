"""The queue and the mixing against `equations.queue` in float64."""

import math

import pytest
import torch
from numerics import unit

from open_clip_ext import create_loss, equations
from open_clip_ext.kernels import streaming


@pytest.mark.parametrize("objective", ["unified", "compositional"])
@pytest.mark.parametrize("mixing", [0.0, 0.4])
@pytest.mark.parametrize("size, batches", [(100, [5, 5, 5]), (7, [4, 4, 4, 4]), (6, [4, 5, 3, 3])])
def test_the_queue_holds_the_latest_that_are_not_of_the_batch(mixing, size, batches, objective):
    tau, eps, rho = torch.tensor(0.1).double(), 1e-10, 5.0
    options = dict(queue_size=size, mixing=mixing, loss_eps=eps, rho=rho)
    if objective != "unified":  # the default
        options["encoder_objective"] = objective
    loss = create_loss("queue", **options)
    generator, queue = torch.Generator().manual_seed(0), []
    for batch in batches:
        e1, e2 = (unit(generator, batch, 8).requires_grad_() for _ in range(2))
        queue = (queue + list(zip(e1.detach(), e2.detach(), strict=True)))[-size:]
        others = queue[: max(0, len(queue) - batch)]
        scale = (1 / tau).requires_grad_()
        g = equations.batch_g(equations.gaps(e1, e2), 1 / scale)
        if others:
            images, texts = (torch.stack(side) for side in zip(*others, strict=True))
            alpha = equations.queue_alpha(texts, images, g, e1, e2, 1 / scale, mixing, eps)
        else:
            alpha = (eps + g).detach().log()
        if objective == "unified":
            expected = equations.queue(g, 1 / scale, alpha, rho, eps)
        else:
            expected = equations.fastclip_v3(g, 1 / scale, alpha.detach().exp(), rho)
        value = loss(e1, e2, scale)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)
        inputs = [e1, e2, scale]
        gradients = zip(torch.autograd.grad(value, inputs), torch.autograd.grad(expected, inputs), strict=True)
        for actual, gradient in gradients:
            torch.testing.assert_close(actual, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["neuclip", "queue"])
@pytest.mark.parametrize("mixing", [0.0, 0.25])
def test_mixing_bounds_the_weights_and_unified_is_a_true_gradient_without_it(name, mixing):
    options = {"npn_prototypes": 6} if name == "neuclip" else {"queue_size": 30}
    loss = create_loss(name, mixing=mixing, **options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        e1, e2 = unit(generator, 6, 8), unit(generator, 6, 8)
        loss(e1, e2, torch.tensor(100.0))
        _, log_batch, alpha = loss._last
        assert mixing == 0 or (log_batch - alpha).max() <= -math.log(mixing) + 1e-9
    if mixing:
        return  # the batch's estimate in alpha is held constant there
    loss.eval()
    e1.requires_grad_()

    def value(x):
        return loss(x, e2, torch.tensor(5.0).double())

    assert torch.autograd.gradcheck(value, [e1], atol=1e-6)


def gaps_of_all(e1, e2):
    """s_ij - s_ii for all pairs, i itself included, of both sides."""
    s = e1 @ e2.T
    return [side - s.diagonal()[:, None] for side in (s, s.T)]


@pytest.mark.parametrize(
    "surrogate, name", [("identity", "key"), ("hinge", "key"), ("identity", "positive_key")]
)
@pytest.mark.parametrize("objective", ["compositional", "unified"])
@pytest.mark.parametrize("queued", [[1, 2, 2, 2, 2, 2], [2] * 6])
def test_a_queue_leaves_out_the_same_key(surrogate, name, objective, queued, monkeypatch):
    """alpha and its gradient over the batch before, which is all that the queue holds of others, be it one pair, or
    over the batch if that leaves none; in several tiles. With positives alpha is the same, and the objective has their
    mean."""
    monkeypatch.setattr(streaming, "CPU_TILE", (3, 4))
    hinge = dict(surrogate=surrogate, margin=0.9) if surrogate == "hinge" else {}
    loss = create_loss("queue", queue_size=12, mixing=0.0, rho=0.0, loss_eps=1e-6, encoder_objective=objective, **hinge)
    generator, keys = torch.Generator().manual_seed(0), torch.tensor([queued, [1, 6, 2, 2, 1, 7]])

    def exponentials(gap):
        return (5 * ((gap + 0.9).clamp(min=0) ** 2 if hinge else gap)).exp()

    old_1, old_2, *leaves = (unit(generator, 6, 16) for _ in range(4))
    loss(old_1, old_2, torch.tensor(5.0).double(), **{name: keys[0]})
    leaves = [leaf.requires_grad_() for leaf in leaves]
    value = loss(*leaves, torch.tensor(5.0).double(), **{name: keys[1]})
    counts = (keys[1][:, None] != keys[1]).double()
    g = torch.stack([(exponentials(gap) * counts).sum(dim=1) / counts.sum(dim=1) for gap in gaps_of_all(*leaves)])
    alphas, counts = [], keys[1][:, None] != keys[0]
    for anchors, others, own in ((leaves[0], old_2, g[0]), (leaves[1], old_1, g[1])):
        gap = anchors @ others.T - (leaves[0] * leaves[1]).sum(dim=1)[:, None]
        mean = (exponentials(gap) * counts).sum(dim=1) / counts.sum(dim=1).clamp(min=1)
        alphas.append((1e-6 + mean.where(counts.any(dim=1), own.detach())).log())
    alpha = torch.stack(alphas)
    torch.testing.assert_close(loss._last[2], alpha.detach())
    if objective == "unified":
        x = equations.unicl_shift(*leaves, torch.tensor(0.2).double(), keys[1]) * (name == "positive_key")
        relative = (1e-6 * x.detach().exp() + g * x.exp()) / (alpha + x).exp() + alpha + x
        expected = torch.autograd.grad(0.2 * relative.mean(dim=1).sum(), leaves)
        for actual, wanted in zip(torch.autograd.grad(value, leaves), expected, strict=True):
            torch.testing.assert_close(actual, wanted)


def test_a_queue_takes_a_reference_too():
    """At mixing 0 its normalizers are those over the batch before, which is all that it holds of others."""
    loss = create_loss("queue", queue_size=12, mixing=0.0, reference_gap=True, rho=0.0)
    generator = torch.Generator().manual_seed(0)
    steps = [[unit(generator, 6, d) for d in (16, 16, 5, 5)] for _ in range(2)]
    for e1, e2, r1, r2 in steps:
        loss(e1, e2, torch.tensor(5.0).double(), dist_image_features=r1, dist_text_features=r2)
    (_, old, _, o2), (e1, e2, r1, r2) = steps
    gap = (e1 @ old.T - r1 @ o2.T) - ((e1 * e2).sum(1) - (r1 * r2).sum(1))[:, None]
    torch.testing.assert_close(loss._last[2][0], (1e-14 + (5 * gap).exp().mean(dim=1)).log())


def test_keys_of_overwritten_embeddings_are_forgotten():
    """What came without keys is like no other sample, nor like a data set's own -1, -2, ... for samples without one."""
    for given, expected in (
        ([0, 4, 8], [4, 5, 6, 7, 8, 9, 10, 11]), ([0, 4, None], [4, 5, 6, 7]), ([None, None, -4], [-4, -3, -2, -1]),
    ):
        loss, generator = create_loss("queue", queue_size=8), torch.Generator().manual_seed(0)
        for first in given:
            key = None if first is None else torch.arange(4) + first
            loss(unit(generator, 4, 3), unit(generator, 4, 3), torch.tensor(10.0), key=key)
        keys = loss.normalizer.ring.keys.tolist()
        assert len(set(keys)) == 8 and set(expected) <= set(keys)
        assert None in given or sorted(keys) == expected


def test_a_batch_that_is_not_finite_leaves_the_keys_of_the_embeddings_that_stay():
    loss, generator = create_loss("queue", queue_size=8), torch.Generator().manual_seed(0)
    for first, factor in ((0, 1.0), (4, 1.0), (8, math.nan)):
        loss(unit(generator, 4, 3) * factor, unit(generator, 4, 3), torch.tensor(10.0), key=torch.arange(4) + first)
    assert loss.normalizer.ring.keys.tolist() == [*range(8)]


def batches(loss, number, seed=0, size=20):
    """The last value of some steps."""
    generator = torch.Generator().manual_seed(seed)
    return [loss(unit(generator, size, 8), unit(generator, size, 8), torch.tensor(10.0)) for _ in range(number)][-1]


@pytest.mark.parametrize(
    "options, cells, after", [({}, 120, 20), (dict(queue_size=60), 60, 20), (dict(queue_size=59), 59, 59)], ids=str
)
def test_a_sample_never_counts_twice(options, cells, after):
    """A queue of half of the 120 samples or more begins each epoch with none of the last; it keeps them to the end of
    it, for the report, and where a state saved in mid-epoch is loaded. A smaller one goes on."""
    loss, resumed = (create_loss("queue", num_samples=120, **options) for _ in range(2))
    loss.set_epoch(0)
    batches(loss, 5)
    assert loss.normalizer.ring.rows.shape[1] == cells and loss.normalizer.ring.active == min(cells, 100)
    resumed.load_full_state(loss.full_state())
    for one in (loss, resumed):  # in mid-epoch
        one.set_epoch(0)
    assert torch.equal(*(batches(one, 1, seed=1) for one in (loss, resumed)))
    for one in (loss, resumed):
        one.set_epoch(1)
        assert one.normalizer.ring.active == cells
    assert torch.equal(*(batches(one, 1, seed=2) for one in (loss, resumed)))
    assert loss.diagnostics()["queued"] == resumed.normalizer.ring.active == after
    assert options or loss.description().startswith("normalizers queue, 120 for as many samples")


def test_prototypes_are_no_more_than_the_samples():
    loss = create_loss("neuclip", num_samples=120, npn_updates=0)
    batches(loss, 8)
    assert loss.normalizer.active == loss.normalizer.weight.shape[1] == 120
    assert "prototypes (restarted every 500 steps, adagrad at 1), 120 for as many samples" in loss.description()


def test_places_never_filled_of_an_earlier_state_are_unit_vectors():
    """They were zeros, and a batch that is not finite fills a place with what is there."""
    loss = create_loss("queue", epochs=1, queue_size=6)
    loss.set_epoch(0)
    loss(*(torch.eye(3, 8), torch.eye(3, 8)), torch.tensor(10.0))
    state = loss.full_state()
    state["state.ring"][:, 3:] = 0
    loss.load_full_state(state)
    assert (loss.normalizer.ring.rows.norm(dim=2) == 1).all()
