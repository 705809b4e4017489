"""The fused kernels in Triton's interpreter, on a CPU, against float64; `test_fused.py` runs them in a process of their
own, since Triton reads TRITON_INTERPRET when it is imported."""

import pytest
import torch
from numerics import close, unit

from open_clip_ext import create_loss
from open_clip_ext.batch import Batch
from open_clip_ext.kernels import choice, fused
from open_clip_ext.kernels.chunked import make_pairs
from open_clip_ext.kernels.similarities import SimilarityBlocks, make_blocks
from open_clip_ext.surrogates import Identity

DIMENSION = 48  # no multiple of a tile's depth
TAU = 0.02


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several programs, of which some are cut off at the end, and several tiles of weights in memory."""
    monkeypatch.setattr(choice, "is_large", lambda *args: True)
    monkeypatch.setattr(choice, "has_tf32", lambda: True)
    monkeypatch.setattr(choice, "is_possible", lambda batch: True)
    monkeypatch.setattr(choice, "works", lambda *args: True)
    monkeypatch.setattr(fused, "SIZES", {kind: (32, 64, 32, 4, 1) for kind in fused.SIZES})
    monkeypatch.setattr(fused, "JOIN", (2, 32))
    monkeypatch.setattr(fused, "TILE", (96, 80))


def batch_of(size, dtype, processes=1, keys=False, low=False):
    """That of one of so many processes, whose pairs are in the middle; features that 16 bits hold exactly."""
    generator = torch.Generator().manual_seed(size)
    text = unit(generator, size, DIMENSION)
    image = torch.nn.functional.normalize(text + 2 * unit(generator, size, DIMENSION), dim=1)
    taus = (TAU * (1 + torch.rand(2, size, generator=generator))).to(dtype)
    both = fused.half(torch.cat([image, text], dim=1), low).to(dtype) / fused.FACTOR
    image, text = both.chunk(2, dim=1)  # as of a gathered batch
    local = slice(0, size) if processes == 1 else slice(size // 3, size // 3 + size // processes)
    batch = Batch._of(image[local], text[local], image, text, taus, local.start, None)
    batch.keys = torch.arange(size) // 3 % 20 if keys else None
    return batch


def close_product(actual, expected, rounding, weights, vectors, tau):
    """Assert that `actual` is weights @ vectors but for float32's rounding and for one of each weight, relative or of
    that below which its type has no normal numbers, which is a part 2^-24 of the largest."""
    size = weights.abs() @ vectors.abs()
    sizes = rounding * size + 2**-24 * weights.abs().amax() * vectors.abs().sum(dim=0)
    bound = sizes + 64 * 2**-24 * 2 / tau * size.amax()
    assert ((actual - expected).abs() <= bound).all(), ((actual - expected).abs() / bound).amax()


def results_of_blocks(blocks, alpha):
    """L, the sums per anchor, and the gradients."""
    batch = blocks.batch
    features = torch.zeros_like(batch.image), torch.zeros_like(batch.text)
    return [blocks.log_batch_normalizers(), *blocks.add_gradients(features, alpha), *features]


@pytest.mark.parametrize("intra_modal", [False, True])
@pytest.mark.parametrize("size, processes, keys", [(70, 1, False), (129, 2, False), (129, 2, True)])
def test_global_losses(size, processes, keys, intra_modal):
    whole = SimilarityBlocks(batch_of(size, torch.float64, keys=keys), Identity(), intra_modal)
    exact = SimilarityBlocks(batch_of(size, torch.float64, processes, keys), Identity(), intra_modal)
    generator, log_batch = torch.Generator().manual_seed(0), whole.log_batch_normalizers()
    alpha = log_batch.mean() + torch.randn(2, size, generator=generator, dtype=torch.float64)
    batch = batch_of(size, torch.float32, processes, keys)
    batch.all_log_batch = log_batch.float()
    blocks = make_blocks(batch, Identity(), "auto", intra_modal)
    assert type(blocks) is fused.FusedBlocks
    actual, expected = (results_of_blocks(one, alpha.to(one.batch.tau)) for one in (blocks, exact))
    for ours, other in zip(actual[:3], expected[:3], strict=True):
        close(ours, other, TAU)
    # A row of weights adds up to its anchor's and to those of the other direction, which are those of a column.
    sums = results_of_blocks(whole, alpha)[1]
    for ours, other in zip(actual[3:], expected[3:], strict=True):
        weights = torch.full((len(ours), 1), 2 * sums.sum(dim=0).max().item() / size, dtype=torch.float64)
        close_product(ours.double(), other, 2**-11, weights, torch.ones(1, DIMENSION, dtype=torch.float64), TAU)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("bias", [None, -8.0])
@pytest.mark.parametrize("size, processes", [(70, 1), (129, 2)])
def test_openclips_losses(size, processes, bias, low):
    """Against the formulas; shifts and factors of a softmax are not its own, so that processes are not needed."""
    batch, exact = (batch_of(size, dtype, processes, low=low) for dtype in (torch.float32, torch.float64))
    scalars = [None if one is None else torch.tensor(one) for one in (1 / TAU, bias)]
    pairs = make_pairs(batch, *scalars, low, "auto")
    assert type(pairs) is fused.FusedPairs
    local, is_pair = exact.local, torch.eye(size, dtype=torch.float64)
    logits = exact.all_image @ exact.all_text.T / TAU
    if bias is None:
        shift, factors = torch.rand(2, 2, size, generator=torch.Generator().manual_seed(0)).double()
        shift, of_pairs = shift + 0.8 / TAU, torch.rand(size, generator=torch.Generator().manual_seed(1)).double()
        peaks, totals, positives = pairs.sums()
        close(positives * pairs.unit, logits.diagonal()[local], TAU)
        negatives = logits.masked_fill(is_pair.bool(), -torch.inf)
        log_sums = torch.stack([negatives.logsumexp(1), negatives.logsumexp(0)])[:, local]
        close(peaks * pairs.unit + totals.log(), log_sums, TAU)
        weights = (logits - shift[0, :, None]).exp() * factors[0, :, None] + (logits - shift[1]).exp() * factors[1]
        weights = torch.where(is_pair > 0, of_pairs, weights)
        given = [(shift / pairs.unit).float(), factors.float()]
        local_given = [one[:, local] for one in given]
        pairs.add_softmax(*local_given, *given, of_pairs[local].float(), lambda: weights.max().float())
    else:
        logits = logits + bias
        weights, signed = logits.sigmoid() - is_pair, torch.where(is_pair > 0, -logits, logits)
        value, sum_of_weights = pairs.add_sigmoid()
        close(value, torch.nn.functional.softplus(signed)[local].sum(), TAU)
        close(sum_of_weights, weights[local].sum(), TAU)
    rounding = 2**-9 if low else 2**-11
    sides = zip(pairs.gradients, (weights, weights.T), (exact.all_text, exact.all_image), strict=True)
    for ours, one, vectors in sides:
        close_product(ours.double(), one[local] @ vectors, rounding, one[local], vectors, TAU)


@pytest.mark.parametrize("name, processes", [("clip", 1), ("siglip", 2), ("global", 1), ("global", 2)])
def test_the_check_at_the_first_use_passes(name, processes, monkeypatch):
    monkeypatch.setattr(fused, "SIZES", {kind: (128, 128, 32, 4, 1) for kind in fused.SIZES})
    batch = batch_of(70, torch.float32, processes, keys=name == "global")
    assert 0 < fused.deviation(batch, name, False) < 2**-10  # of 2^-9


@pytest.mark.parametrize("name", ["clip-chunked", "siglip-chunked", "cyclip", "fastclip-v2", "amorlip"])
def test_a_loss_by_kernels_is_that_by_single_operations(name):
    batch = batch_of(70, torch.float32)
    found = []
    for kernels in ("auto", "eager"):
        torch.manual_seed(0)
        loss = create_loss(name, num_samples=70, epochs=2, kernels=kernels)
        loss.set_epoch(0)
        inputs = [one.detach().clone().requires_grad_() for one in (batch.image, batch.text, torch.tensor(20.0))]
        value = loss(*inputs, index=torch.arange(70))
        found.append([value.detach(), *torch.autograd.grad(value, inputs[:2])])
    for ours, other in zip(*found, strict=True):  # each weight is rounded to float16, and they add up to the largest
        assert (ours - other).norm() < 2**-10 * other.norm()
