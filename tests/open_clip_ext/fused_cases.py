"""The fused kernels in Triton's interpreter, on a CPU, against float64; `test_fused.py` runs them in a process of their
own, since Triton reads TRITON_INTERPRET when it is imported."""

import pytest
import torch
from numerics import close, unit
from test_chunked import test_float32_is_as_close_as_openclips  # noqa: F401  # here by the kernels

from open_clip_ext import create_loss
from open_clip_ext.batch import Batch
from open_clip_ext.kernels import choice, fused
from open_clip_ext.kernels.chunked import Pairs, make_pairs
from open_clip_ext.kernels.similarities import SimilarityBlocks, make_blocks
from open_clip_ext.surrogates import Identity, PowerHinge

deviation = fused.deviation
DIMENSION = 48  # no multiple of a tile's depth


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several programs, of which some are cut off at the end, and several tiles of weights in memory."""
    monkeypatch.setattr(choice, "is_possible", lambda *args: True)
    monkeypatch.setattr(fused, "deviation", lambda *args: 0.0)
    monkeypatch.setattr(fused, "SIZES", {kind: (32, 64, 32, 4, 1) for kind in fused.SIZES})
    monkeypatch.setattr(fused, "JOIN", (2, 32))
    monkeypatch.setattr(fused, "TILE", (96, 80))


def batch_of(size, dtype, processes=1, keys=False, tau=0.02):
    """That of one of so many processes, whose pairs are in the middle."""
    generator = torch.Generator().manual_seed(size)
    text = unit(generator, size, DIMENSION)
    image = torch.nn.functional.normalize(text + 2 * unit(generator, size, DIMENSION), dim=1)
    taus = tau * (1 + torch.rand(2, size, generator=generator, dtype=torch.float64))
    # The same values in either type. A gathered batch's vectors are halves of longer ones.
    image, text = torch.cat([image, text], dim=1).float().to(dtype).chunk(2, dim=1)
    local = slice(0, size) if processes == 1 else slice(size // 3, size // 3 + size // processes)
    batch = Batch._of(image[local], text[local], image, text, taus.float().to(dtype), local.start, None)
    batch.keys = torch.arange(size) // 3 % 20 if keys else None
    return batch


def results_of_blocks(blocks, alpha):
    """L, the gradients, and the sums per anchor."""
    batch = blocks.batch
    features = torch.zeros_like(batch.image), torch.zeros_like(batch.text)
    return [blocks.log_batch_normalizers(), *blocks.add_gradients(features, alpha[:, batch.local], alpha), *features]


@pytest.mark.parametrize("intra_modal", [False, True])
@pytest.mark.parametrize(
    "size, processes, keys, surrogate",
    [
        (70, 1, False, Identity()), (129, 2, False, Identity()), (129, 1, True, Identity()),
        (129, 2, True, PowerHinge()), (70, 1, False, PowerHinge(margin_power=1.0)),
    ],
)
def test_global_losses(size, processes, keys, surrogate, intra_modal):
    exact = SimilarityBlocks(batch_of(size, torch.float64, processes, keys), surrogate, intra_modal)
    generator = torch.Generator().manual_seed(0)
    alpha = exact.log_batch_normalizers().mean() + torch.randn(2, size, generator=generator, dtype=torch.float64)
    blocks = make_blocks(batch_of(size, torch.float32, processes, keys), surrogate, "auto", intra_modal)
    assert type(blocks) is fused.FusedBlocks
    actual, expected = (results_of_blocks(one, alpha.to(one.batch.tau)) for one in (blocks, exact))
    for ours, other in zip(actual, expected, strict=True):
        close(ours, other, exact.batch.tau.min())


def results_of_pairs(pairs, weights):
    """Sums and gradients; the shifts and factors of a softmax are not its own, so that processes are not needed."""
    if pairs.bias is not None:
        return [*pairs.add_sigmoid(), *pairs.finish(1.0)]
    peaks, totals, positives = pairs.sums()
    local = weights[:, pairs.offset : pairs.offset + len(pairs.image)]
    pairs.add_softmax(local * 20, local, weights * 20, weights, positives)
    return [peaks + totals.log(), positives, *pairs.finish(1.0)]


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("bias", [None, -8.0])
@pytest.mark.parametrize("size, processes", [(70, 1), (129, 2)])
def test_openclips_losses(size, processes, bias, low):
    def pairs_of(dtype, make):
        scalars = [None if one is None else torch.tensor(one, dtype=dtype) for one in (20.0, bias)]
        return make(batch_of(size, dtype, processes), *scalars, low)

    weights = torch.rand(2, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs = pairs_of(torch.float32, lambda *args: make_pairs(*args, "auto"))
    assert type(pairs) is fused.FusedPairs
    actual = results_of_pairs(pairs, weights.float())
    for ours, other in zip(actual, results_of_pairs(pairs_of(torch.float64, Pairs), weights), strict=True):
        if low:  # a weight is rounded to bfloat16, by 2^-9, where it lies otherwise by float32's rounding: by 2^-8
            torch.testing.assert_close(ours.double(), other, rtol=0, atol=2**-8 * other.abs().max().item())
        else:
            close(ours, other, 1 / 20)


@pytest.mark.parametrize("name, surrogate", [("clip", None), ("siglip", None), ("global", Identity())])
@pytest.mark.parametrize("processes", [1, 2])
def test_the_check_at_the_first_use_passes(name, surrogate, processes, monkeypatch):
    monkeypatch.setattr(fused, "SIZES", {kind: (128, 128, 32, 4, 1) for kind in fused.SIZES})
    batch = batch_of(70, torch.float32, processes, keys=surrogate is not None)
    assert 0 < deviation(batch, name, False, surrogate) < 2**-16  # 2^-9 would do


@pytest.mark.parametrize("name", ["clip-chunked", "siglip-chunked", "cyclip", "fastclip-v2", "tuneclip", "amorlip"])
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
    for ours, other in zip(*found, strict=True):
        close(ours, other.double(), 1e-2)
