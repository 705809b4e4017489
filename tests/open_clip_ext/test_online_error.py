"""The diagnostics that every step keeps, against float64 loops."""

import math

import pytest
import torch
from numerics import unit

from open_clip_ext import create_loss

ERRORS = ("normalizer_mse", "normalizer_bias", "minibatch_mse", "negatives_kl")


def log_mean(similarities, positive, tau, surrogate, eps):
    return math.log(eps + sum(math.exp(surrogate(s - positive) / tau) for s in similarities) / len(similarities))


@pytest.mark.parametrize("negatives", ["cross", "both", "views"])
@pytest.mark.parametrize("surrogate", ["identity", "hinge"])
@pytest.mark.parametrize("temperature", ["fixed", "individual"])
def test_errors_are_those_against_all_that_the_anchors_met(negatives, surrogate, temperature):
    """40 pairs a step. The first 32 of the sixth step are watched from there on, and compared from the tenth on."""
    generator = torch.Generator().manual_seed(0)
    more = {"tau_start": 0.1} if temperature == "individual" else {}
    loss = create_loss(
        "sogclr", num_samples=2000, negatives=negatives, surrogate=surrogate, temperature=temperature, **more
    )
    l, eps = (lambda gap: gap) if surrogate == "identity" else (lambda gap: max(gap + 0.1, 0.0) ** 2), 1e-14
    met = []
    for step in range(12):
        e1, e2 = unit(generator, 40, 8), unit(generator, 40, 8)
        if step >= 5:
            met.append((e1, e2))
        loss(e1, e2, torch.tensor(10.0).double(), index=torch.arange(40) + 40 * step)
        shown = loss.diagnostics()
        assert all((name in shown) == (step >= 9) for name in ERRORS)
        if step == 5:
            taus, log_batch, alpha = (tensor.clone() for tensor in loss._last)

    anchors = met[0]
    exact, effective, divergence = [], [], []
    for side in (0, 1):
        for i in range(32):
            anchor, positive = anchors[side][i], float(anchors[0][i] @ anchors[1][i])
            tau = float(taus[side, i]) if taus.dim() else float(taus)
            similarities, own = [], []
            for step, batch in enumerate(met):
                for other in (1 - side,) if negatives == "cross" else (1 - side, side):
                    found = [float(anchor @ batch[other][j]) for j in range(40) if (step, j) != (0, i)]
                    similarities += found
                    own += found if step == 0 else []
            exact.append(log_mean(similarities, positive, tau, l, eps))
            weights = [math.exp(l(s - positive) / tau) for s in similarities]
            shares = [w / sum(weights) for w in weights]
            divergence.append(sum(p * math.log(p * len(shares)) for p in shares))
            weights = [math.exp(l(s - positive) / tau) for s in own]
            effective.append(sum(weights) ** 2 / sum(w * w for w in weights))
    exact = torch.tensor(exact, dtype=torch.float64)
    if negatives == "views":
        exact = exact.exp().view(2, 32).mean(dim=0).log().repeat(2)
    said, minibatch = alpha[:, :32].reshape(-1), log_batch[:, :32].reshape(-1)
    assert shown["normalizer_mse"] == pytest.approx(float((said - exact).square().mean()))
    assert shown["normalizer_bias"] == pytest.approx(float((said - exact).mean()))
    assert shown["minibatch_mse"] == pytest.approx(float((minibatch - exact).square().mean()))
    assert shown["negatives_kl"] == pytest.approx(sum(divergence) / len(divergence))
    assert shown["effective_negatives"] == pytest.approx(sum(effective) / len(effective))


def test_a_window_ends_and_the_last_comparison_stays():
    generator = torch.Generator().manual_seed(0)
    loss = create_loss("queue", queue_size=200)
    loss.online_error.window, loss.online_error.least, loss.online_error.skip = 6, 3, 2
    seen = []
    for _ in range(2):
        loss(unit(generator, 6, 8), unit(generator, 6, 8), torch.tensor(5.0))
        assert "normalizer_mse" not in loss.diagnostics() and "effective_negatives" in loss.diagnostics()
    for _ in range(9):
        loss(unit(generator, 6, 8), unit(generator, 6, 8), torch.tensor(5.0))
        seen.append(loss.diagnostics().get("normalizer_mse"))
    assert seen[:2] == [None, None] and len(set(map(float, seen[2:6]))) == 4
    assert seen[5] == seen[6] == seen[7] != seen[8]
    loss.set_epoch(1)
    assert "normalizer_mse" not in loss.diagnostics() and "effective_negatives" not in loss.diagnostics()


def test_a_queue_that_begins_each_epoch_empty_is_judged_by_what_it_holds_later():
    """30 steps an epoch: the queue holds all samples before, but is emptied where it would hold their copies."""
    generator = torch.Generator().manual_seed(0)
    e1, e2 = unit(generator, 180, 8), unit(generator, 180, 8)
    loss = create_loss("queue", num_samples=180, mixing=0.0, temperature="fixed")
    for epoch in range(2):
        loss.set_epoch(epoch)
        for rows in torch.arange(180).split(6):
            loss(e1[rows], e2[rows], torch.tensor(4.0).double())
        assert loss.diagnostics()["normalizer_mse"] < loss.diagnostics()["minibatch_mse"] / 2


def test_a_batch_that_is_not_finite_is_neither_met_nor_stored():
    """It comes while the anchors of the second step are compared, or when it would replace them."""
    generator = torch.Generator().manual_seed(0)
    batches = [(unit(generator, 6, 8), unit(generator, 6, 8)) for _ in range(6)]
    bad = unit(generator, 6, 8)
    bad[2] = math.nan
    shown = []
    for steps in ([0, 1, None, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4, None, 5]):
        loss = create_loss("queue", queue_size=60)
        loss.online_error.skip = loss.online_error.least = 1
        loss.online_error.window = 4
        for step in steps:
            loss(*(batches[step] if step is not None else (bad, bad)), torch.tensor(4.0).double())
        shown.append({name: float(loss.diagnostics()[name]) for name in (*ERRORS, "effective_negatives")})
    assert shown[0] == pytest.approx(shown[1]) and all(map(math.isfinite, shown[2].values()))


def test_a_number_of_negatives_in_an_older_state_is_read():
    generator = torch.Generator().manual_seed(0)
    batches = [(unit(generator, 6, 8), unit(generator, 6, 8)) for _ in range(4)]
    losses = [create_loss("queue", queue_size=60) for _ in range(2)]
    for loss in losses:
        loss.online_error.skip = loss.online_error.least = 1
        for batch in batches[:3]:
            loss(*batch, torch.tensor(4.0).double())
    state = losses[0].diagnostics_state()
    losses[1].load_diagnostics_state({**state, "watched.negatives": int(state["watched.negatives"])})
    for loss in losses:
        loss(*batches[3], torch.tensor(4.0).double())
    first, second = (loss.diagnostics() for loss in losses)
    assert all(first[name] == second[name] for name in ERRORS)


def test_rows_never_visited():
    generator = torch.Generator().manual_seed(0)
    loss = create_loss("sogclr", num_samples=20)
    for index, left in [([0, 1, 2, 3], 16), ([3, 3, 4, 4], 15), ([0, 1, 2, 3], 15), ([19, 18, 19, 18], 13)]:
        loss(unit(generator, 4, 8), unit(generator, 4, 8), torch.tensor(10.0), index=torch.tensor(index))
        assert loss.diagnostics()["unvisited"] == pytest.approx(left / 20)
    other = create_loss("sogclr", num_samples=20)
    other.load_full_state(loss.full_state())
    other(unit(generator, 4, 8), unit(generator, 4, 8), torch.tensor(10.0), index=torch.tensor([5, 6, 7, 0]))
    assert other.diagnostics()["unvisited"] == pytest.approx(10 / 20)


def test_the_largest_weight_and_the_effective_number_of_anchors():
    """Against a loop over the 2 B anchors of a batch; a weight is at most 1 / gamma."""
    generator = torch.Generator().manual_seed(0)
    loss = create_loss("sogclr", num_samples=8, gamma=0.25)
    for step in range(2):
        loss(unit(generator, 6, 8), unit(generator, 6, 8), torch.tensor(10.0), index=torch.arange(6))
        shown, (_, log_batch, alpha) = loss.diagnostics(), loss._last
        weights = [math.exp(float(log_batch[side, i] - alpha[side, i])) for side in range(2) for i in range(6)]
        # At a first visit u_i = g_i, so that every weight is 1.
        assert (max(weights) == pytest.approx(1, rel=1e-5)) if step == 0 else (1.1 < max(weights) <= 4)
        assert shown["max_weight"] == pytest.approx(max(weights))
        effective = sum(weights) ** 2 / sum(weight**2 for weight in weights)
        assert shown["effective_anchors"] == pytest.approx(effective)
