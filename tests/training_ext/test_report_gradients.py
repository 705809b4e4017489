"""The estimators' gradients in a report, against float64 loops over batches and against the losses themselves."""

import copy
import itertools
import math

import pytest
import torch
from torch.nn.functional import normalize

from open_clip_ext import create_loss
from open_clip_ext.batch import Batch
from open_clip_ext.diagnostics.embeddings import Pairs
from open_clip_ext.diagnostics.exact import exact_log_normalizers
from open_clip_ext.surrogates import Identity
from training_ext.report.gradients import batches_with, draw, given, minibatch, of_loss, statistics
from training_ext.report.objective import Objective
from training_ext.report.queues import nearest_pairs

N, B, TAU = 12, 4, 0.2


def pairs(n=N, d=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    image = normalize(torch.randn(n, d, generator=generator), dim=1)
    return image, normalize(image + torch.randn(n, d, generator=generator), dim=1)


def objective_of(image, text, tau=TAU, scale=None, loss=None):
    tau = torch.as_tensor(tau)
    surrogate = Identity() if loss is None else loss.surrogate
    more = (1e-14, False, False) if loss is None else (loss.eps, loss.intra_modal, loss.one_per_pair)
    return Objective(image, text, torch.arange(len(image)), tau, tau if scale is None else scale, surrogate, *more)


def autograd(image, text):
    """B times the gradient of the minibatch's tau * log(g), both directions summed; with all pairs the exact one."""
    image, text = (side.double().requires_grad_() for side in (image, text))
    similarities, total = image @ text.T, 0.0
    for i in range(len(image)):
        others = [j for j in range(len(image)) if j != i]
        for row in (similarities[i], similarities[:, i]):
            total = total + TAU * torch.log(((row[others] - row[i]) / TAU).exp().mean())
    return torch.stack(torch.autograd.grad(total, [image, text]))


@pytest.fixture(scope="module")
def all_batches():
    """The minibatch gradient of each row in each of the 165 batches that hold it, (165, 2, n, d), and the exact one."""
    image, text = pairs()
    found = [[] for _ in range(N)]
    for places in itertools.combinations(range(N), B):
        gradient = autograd(image[list(places)], text[list(places)])
        for own, place in enumerate(places):
            found[place].append(gradient[:, own])
    return torch.stack([torch.stack(rows) for rows in found], dim=2), autograd(image, text)


def test_bias_and_variance_are_those_over_all_batches(all_batches):
    """`draw` finds them with the errors that `statistics` says; true normalizers have no bias."""
    minibatches, exact = all_batches
    mean = minibatches.mean(dim=0)
    expected = {
        "bias": (mean - exact).norm() / exact.norm(),
        "variance": (minibatches - mean).square().mean(dim=0).sum() / exact.norm() ** 2,
        "cosine": (mean * exact).sum() / (mean.norm() * exact.norm()),
    }
    image, text = pairs()
    true = exact_log_normalizers(image, text, torch.arange(N), TAU)
    estimators = {"minibatch": minibatch, "exact": given(true)}
    draws = draw(objective_of(image, text), torch.arange(N), B, 100, 0, estimators)
    found = statistics(draws["minibatch"], exact)
    for name, value in expected.items():
        assert abs(found[name] - value) < 4 * found[f"{name}_error"] < 0.4 * value, name
    assert found["bias"] > 5 * found["bias_noise"]
    control = statistics(draws["exact"], exact)
    # |mean - exact|^2 has the mean bias_noise^2 and, over many numbers, a small spread.
    assert control["bias"] < 2 * control["bias_noise"] and control["cosine"] > 0.99


def test_statistics_of_a_few_draws():
    draws = torch.tensor([[3.0, 0.0], [5.0, 2.0], [4.0, 4.0]])
    found = statistics(draws[:, None], torch.tensor([[2.0, 0.0]]))
    assert found["bias"] == pytest.approx(math.sqrt(2**2 + 2**2) / 2)
    assert found["variance"] == pytest.approx((5 + 1 + 4) / 2 / 4)
    assert found["bias_noise"] == pytest.approx(math.sqrt(1.25 / 3))
    assert found["cosine"] == pytest.approx(4 / math.sqrt(20))
    cosines = [1.0, 5 / math.sqrt(29), 4 / math.sqrt(32)]
    assert found["batch_cosine"] == pytest.approx(sum(cosines) / 3)
    errors = [(torch.stack([a, b]).mean(dim=0) - torch.tensor([2.0, 0.0])).norm() / 2 for a, b in
              itertools.combinations(draws, 2)]
    middle = sum(errors) / 3
    assert found["bias_error"] == pytest.approx(math.sqrt(2 / 3 * sum((error - middle) ** 2 for error in errors)))
    assert set(statistics(draws, torch.zeros(2)).values()) == {None}


def test_a_rows_others_are_a_random_choice():
    """7 rows in batches of 3, the last of them filled up: each other row is there with probability 2/6."""
    generator, rounds = torch.Generator().manual_seed(0), 1000
    rows, met = torch.tensor([5, 2]), torch.zeros(2, 7)
    for _ in range(rounds):
        seen = torch.zeros(2)
        for places, members in batches_with(rows, 7, 3, generator):
            assert len(places.unique()) == 3
            for member in members:
                assert rows[member] in places
                seen[member] += 1
                met[member, places] += 1
        assert seen.tolist() == [1, 1]
    others = torch.stack([met[k, torch.arange(7) != row] for k, row in enumerate(rows)]) / rounds
    assert (others - 1 / 3).abs().max() < 4 * math.sqrt(1 / 3 * 2 / 3 / rounds)


SETTINGS = {
    "table": ("sogclr", {"gamma": 0.3, "num_samples": N}),
    "mixing": ("sogclr", {"gamma": 0.3, "mixing": 0.5, "num_samples": N, "surrogate": "hinge"}),
    "unscaled": ("fastclip-v0", {"gamma": 0.3, "num_samples": N, "gamma_decay_epochs": 1}),
    "individual": ("isogclr", {"num_samples": N, "tau_start": TAU}),
    "views": ("sogclr", {"gamma": 0.3, "num_samples": N, "negatives": "views"}),
    "prototypes": ("neuclip", {"npn_prototypes": 6, "npn_updates": 1}),
    "queue": ("queue", {"queue_size": 40, "mixing": 0.2, "encoder_objective": "compositional"}),
    "through a queue": ("queue", {"queue_size": 40, "mixing": 0.2}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_estimators_gradient_is_that_of_a_training_step(name):
    preset, settings = SETTINGS[name]
    loss = create_loss(preset, **settings)
    loss.set_epoch(2)
    scale = torch.tensor(1 / TAU)
    for seed in (1, 2):  # of other pairs, in the rows of some of these
        index = torch.arange(4) + 4 * (seed - 1) if loss.needs_index else None
        loss(*pairs(4, seed=seed), scale, index=index)
    loss.eval()
    image, text = pairs()
    everyone = Batch.of_process(image, text, 1 / scale, torch.arange(N))
    taus = loss.temperature.taus(1 / scale, loss.temperature.lookup(everyone))
    places = torch.tensor([9, 0, 7, 3, 10])  # some visited, some not
    step_of = objective_of(image, text, taus, loss.temperature.scale(taus), loss).at(places)
    queued = torch.full((8,), -1) if preset == "queue" else None  # others than these pairs
    state = copy.deepcopy(loss.full_state())
    alpha, through_alpha = of_loss(loss, queued)(step_of.batch(), places)
    found = step_of.gradients(torch.arange(5), alpha) + (0 if through_alpha is None else through_alpha)
    assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)) for key, value in
               loss.full_state().items() if not isinstance(value, str))

    leaves = [side[places].requires_grad_() for side in (image, text)]
    loss.train()(*leaves, scale, index=places).backward()
    expected = 5 * torch.stack([leaf.grad for leaf in leaves]).double()
    # 5 x 6 numbers in float32; exponents of at most 2 / TAU.
    torch.testing.assert_close(found, expected, rtol=0, atol=64 * 2 / TAU * 1.2e-7 * expected.abs().max().item())
    assert (through_alpha is not None) == (name in ("prototypes", "through a queue"))


def test_pairs_of_a_queue_are_found_though_they_have_moved_a_little(monkeypatch):
    image, text = pairs(200, d=16)
    index = torch.randperm(200, generator=torch.Generator().manual_seed(2))[:60]
    noise = torch.randn(2, 60, 16, generator=torch.Generator().manual_seed(3))
    moved = [normalize(side[index] + 0.02 * off, dim=1) for side, off in zip((image, text), noise, strict=True)]
    widths = []
    chunks = Pairs.chunks
    monkeypatch.setattr(Pairs, "chunks", lambda own, width: widths.append(width) or chunks(own, width))
    assert torch.equal(nearest_pairs(Pairs(image, text), *moved, chunk_mib=1000 / 2**18), index)
    assert set(widths) == {1000 // len(index)}  # a block has a column for each of them
