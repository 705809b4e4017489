"""The true log-normalizers against the papers' equations in plain float64 loops, and the minibatch estimates."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from open_clip_ext.diagnostics.embeddings import Pairs
from open_clip_ext.diagnostics.exact import (
    exact_log_normalizers,
    group_size,
    minibatch_log_normalizers,
)
from open_clip_ext.errors import InputError
from open_clip_ext.surrogates import Identity, PowerHinge

EPS = 1e-14


def embeddings(n, d=16, seed=0, noise=0.3):
    generator = torch.Generator().manual_seed(seed)
    image = normalize(torch.randn(n, d, generator=generator), dim=1)
    return image, normalize(image + noise * torch.randn(n, d, generator=generator), dim=1)


def naive(image, text, i, tau, surrogate, eps=EPS, both=False):
    """NeuCLIP, Eq. 1 and 9 of one anchor, (2,), float64: each exponential as it stands."""
    image, text = image.double(), text.double()
    own = torch.dot(image[i], text[i])
    sums, count = [0.0, 0.0], 0
    for j in range(len(image)):
        if j == i:
            continue
        columns = [(image[i], text[j]), (text[i], image[j])]
        for side, (anchor, other) in enumerate(columns):
            sums[side] += torch.exp(surrogate.value(torch.dot(anchor, other) - own) / tau[side]).item()
            if both:
                same = (image, text)[side][j]
                sums[side] += torch.exp(surrogate.value(torch.dot(anchor, same) - own) / tau[side]).item()
        count += 2 if both else 1
    return [math.log(eps + total / count) for total in sums]


def loop(image, text, anchors, tau, surrogate=None, **more):
    taus = torch.as_tensor(tau, dtype=torch.float64).expand(2, len(anchors))
    rows = [naive(image, text, int(i), taus[:, p], surrogate or Identity(), **more) for p, i in enumerate(anchors)]
    return torch.tensor(rows, dtype=torch.float64).T


@pytest.mark.parametrize("surrogate", [Identity(), PowerHinge(), PowerHinge(margin=0.3, margin_power=1.0)])
@pytest.mark.parametrize("tau", [1.0, 0.07, 0.01, 0.005])
def test_exact_is_the_equation(surrogate, tau):
    image, text = embeddings(53)
    anchors = torch.tensor([0, 52, 7, 7, 31])
    # A block of 4 x 4 divides neither the anchors nor the rows.
    found = exact_log_normalizers(image, text, anchors, tau, surrogate, chunk_mib=16 / 2**18)
    torch.testing.assert_close(found, loop(image, text, anchors, tau, surrogate), rtol=0, atol=2e-6 / tau)


@given(n=st.integers(2, 40), k=st.integers(1, 40), elements=st.integers(1, 2000), parts=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_chunks_and_blocks_make_no_difference(n, k, elements, parts):
    image, text = embeddings(n, d=4, seed=n)
    anchors = torch.randint(n, (k,), generator=torch.Generator().manual_seed(k))
    blocks = [tuple(side.tensor_split(min(parts, n))) for side in (image, text)]
    found = exact_log_normalizers(*blocks, anchors, 0.05, chunk_mib=elements / 2**18)
    whole = exact_log_normalizers(image, text, anchors, 0.05)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


def test_individual_temperatures_belong_to_anchor_and_side():
    image, text = embeddings(23)
    anchors = torch.arange(0, 23, 2)
    tau = torch.rand(2, len(anchors), generator=torch.Generator().manual_seed(1)) * 0.2 + 0.005
    found = exact_log_normalizers(image, text, anchors, tau, chunk_mib=50 / 2**18)
    torch.testing.assert_close(found, loop(image, text, anchors, tau), rtol=0, atol=2e-4)


def test_intra_modal_are_negatives_where_asked_for():
    image, text = embeddings(19)
    anchors = torch.arange(19)
    found = exact_log_normalizers(image, text, anchors, 0.1, intra_modal=True)
    torch.testing.assert_close(found, loop(image, text, anchors, 0.1, both=True), rtol=0, atol=2e-5)


def test_badly_matched_pairs_overflow_at_no_temperature():
    image, text = embeddings(30)
    text = -image  # every gap is positive, up to 2: exp(400) at tau = 0.005
    found = exact_log_normalizers(image, text, torch.arange(30), 0.005, chunk_mib=100 / 2**18)
    gaps = (image.double() @ text.double().T + 1) / 0.005
    gaps.fill_diagonal_(-math.inf)
    expected = gaps.logsumexp(dim=1) - math.log(29)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-3)


def test_eps_is_what_remains_of_easy_anchors():
    image = torch.eye(8)
    found = exact_log_normalizers(image, image, torch.arange(8), 0.005)
    torch.testing.assert_close(found, torch.full((2, 8), math.log(EPS), dtype=torch.float64))


def test_progress_counts_every_anchor_once():
    image, text = embeddings(37)
    steps = []
    exact_log_normalizers(image, text, torch.arange(5), 0.1, chunk_mib=20 / 2**18, progress=steps.append)
    assert sum(steps) == pytest.approx(5) and len(steps) > 1


@pytest.mark.parametrize("surrogate", [Identity(), PowerHinge()])
def test_a_batch_of_all_pairs_is_exact(surrogate):
    image, text = embeddings(41)
    anchors = torch.arange(1, 41, 3)
    exact = exact_log_normalizers(image, text, anchors, 0.05, surrogate)
    found = minibatch_log_normalizers(image, text, anchors, 0.05, 41, surrogate)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-4)


def test_the_minibatch_estimate_is_unbiased_in_exp():
    image, text = embeddings(12, noise=1.0)
    anchors = torch.tensor([0, 5, 11])
    true = exact_log_normalizers(image, text, anchors, 0.5).exp()
    seeds = 2000
    values = torch.stack([minibatch_log_normalizers(image, text, anchors, 0.5, 4, seed=s).exp() for s in range(seeds)])
    error = values.std(dim=0) / math.sqrt(seeds)
    assert ((values.mean(dim=0) - true).abs() < 4 * error).all()
    assert (values.log().mean(dim=0) < true.log()).all()  # Jensen: biased in the logarithm


def test_a_minibatch_estimate_of_two_is_one_other_pair():
    image, text = embeddings(9)
    gaps = image @ text.T - (image * text).sum(dim=1, keepdim=True)
    found = minibatch_log_normalizers(image, text, torch.tensor([4]), 0.3, 2, seed=3)[0]
    others = torch.cat([gaps[4, :4], gaps[4, 5:]]) / 0.3
    assert (others - found).abs().min() < 1e-5


def test_minibatches_depend_on_the_seed_and_not_on_the_division():
    image, text = embeddings(300)
    anchors, size = torch.arange(150), group_size(8)
    found = minibatch_log_normalizers(image, text, anchors, 0.1, 8, seed=5)
    assert torch.equal(found, minibatch_log_normalizers(image, text, anchors, 0.1, 8, seed=5))
    assert not torch.equal(found, minibatch_log_normalizers(image, text, anchors, 0.1, 8, seed=6))
    parts = [minibatch_log_normalizers(image, text, part, 0.1, 8, seed=5) for part in anchors.split(size)]
    assert len(parts) > 1
    torch.testing.assert_close(torch.cat(parts, dim=1), found)


def test_rows_are_taken_from_blocks_in_any_order():
    image = torch.arange(20.0).view(10, 2)
    text = -image
    pairs = Pairs(*([side[:3], side[3:4], side[4:]] for side in (image, text)))
    index = torch.tensor([9, 0, 3, 3, 2, 4])
    assert all(map(torch.equal, pairs.take(index), (image[index], text[index])))
    with pytest.raises(ValueError, match=r"\[0, 10\)"):
        pairs.take(torch.tensor([10]))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"tau": 0.0}, ValueError, "tau must be > 0"),
        ({"tau": torch.ones(2, 3)}, ValueError, "tau must be 0-d or"),
        ({"anchors": torch.tensor([0, 10])}, ValueError, r"\[0, 10\)"),
        ({"text": torch.ones(9, 16)}, ValueError, "same shape"),
        ({"batch_size": 1}, InputError, "batch_size: 1 is out of range"),
        ({"batch_size": 11}, InputError, "from 2 to the 10 pairs"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    image, text = embeddings(10)
    given = {"image": image, "text": text, "anchors": torch.tensor([0, 1]), "tau": 0.1, "batch_size": 4, **change}
    with pytest.raises(error, match=message):
        minibatch_log_normalizers(**given)
    if "batch_size" not in change:
        del given["batch_size"]
        with pytest.raises(error, match=message):
            exact_log_normalizers(**given)


def test_a_chunk_of_nothing_is_refused():
    image, text = embeddings(4)
    with pytest.raises(ValueError, match="chunk_mib"):
        exact_log_normalizers(image, text, torch.arange(4), 0.1, chunk_mib=0)
