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


@given(
    n=st.integers(2, 24), k=st.integers(1, 8), elements=st.integers(1, 600), parts=st.integers(1, 5),
    tau=st.sampled_from([1.0, 0.07, 0.01, 0.005, "individual"]), both=st.booleans(),
    surrogate=st.sampled_from([Identity(), PowerHinge(), PowerHinge(margin=0.3, margin_power=1.0)]),
    kind=st.sampled_from(["alike", "opposite", "equal"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_exact_is_the_equation(n, k, elements, parts, tau, both, surrogate, kind):
    """In any chunks and blocks, with badly matched pairs, whose exponents reach 400, and with equal ones, of which
    nothing but epsilon remains where they are orthogonal."""
    image, text = embeddings(n, seed=n)
    if kind != "alike":
        text = -image if kind == "opposite" else image
    generator = torch.Generator().manual_seed(k)
    anchors = torch.randint(n, (k,), generator=generator)
    tau = torch.rand(2, k, generator=generator) * 0.2 + 0.005 if tau == "individual" else tau
    blocks = [tuple(side.tensor_split(min(parts, n))) for side in (image, text)]
    found = exact_log_normalizers(*blocks, anchors, tau, surrogate, intra_modal=both, chunk_mib=elements / 2**18)
    lowest = float(torch.as_tensor(tau).min())
    expected = loop(image, text, anchors, tau, surrogate, both=both)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=3e-6 / lowest)
    whole = minibatch_log_normalizers(image, text, anchors, tau, n, surrogate) if not both else found
    torch.testing.assert_close(whole, found, rtol=1e-5, atol=5e-6 / lowest)


def test_progress_counts_every_anchor_once():
    image, text = embeddings(37)
    steps = []
    exact_log_normalizers(image, text, torch.arange(5), 0.1, chunk_mib=20 / 2**18, progress=steps.append)
    assert sum(steps) == pytest.approx(5) and len(steps) > 1


def test_the_minibatch_estimate_is_unbiased_in_exp():
    image, text = embeddings(12, noise=1.0)
    anchors = torch.tensor([0, 5, 11])
    true = exact_log_normalizers(image, text, anchors, 0.5).exp()
    seeds = 2000
    values = torch.stack([minibatch_log_normalizers(image, text, anchors, 0.5, 4, seed=s).exp() for s in range(seeds)])
    error = values.std(dim=0) / math.sqrt(seeds)
    assert ((values.mean(dim=0) - true).abs() < 4 * error).all()
    assert (values.log().mean(dim=0) < true.log()).all()  # Jensen: biased in the logarithm


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
        ({"image": [torch.ones(9, 16), torch.ones(1)]}, ValueError, r"\(n, d\)"),
        ({"image": torch.ones(1, 2), "text": torch.ones(1, 2)}, ValueError, "image: 1 pair.* at least 2 are needed"),
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
        with pytest.raises(ValueError, match="chunk_mib"):
            exact_log_normalizers(image, text, torch.arange(4), 0.1, chunk_mib=0)
