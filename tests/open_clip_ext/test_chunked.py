"""`clip-chunked` and `siglip-chunked` against OpenCLIP's own losses; several processes are in test_distributed.py."""

import pytest
import torch
from numerics import unit
from open_clip.loss import ClipLoss, SigLipLoss

from open_clip_ext import NonFiniteError, create_loss, equations
from open_clip_ext.kernels import streaming

OWN = {"clip-chunked": ClipLoss(), "siglip-chunked": SigLipLoss()}


def inputs(name, batch, dimension, tau, dtype=torch.float64):
    """Features, logit scale, and a bias where the loss has one."""
    generator = torch.Generator().manual_seed(0)
    values = [unit(generator, batch, dimension), unit(generator, batch, dimension), torch.tensor(1 / tau)]
    values += [torch.tensor(-0.7)] if name == "siglip-chunked" else []
    return [value.to(dtype).requires_grad_() for value in values]


def relative_errors(actual, expected):
    return [((one - other).norm() / other.norm()).item() for one, other in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(
    "batch, dimension, tau, tile", [(2, 3, 1.0, (512, 1024)), (37, 16, 0.01, (5, 8)), (37, 5, 0.1, (9, 4))]
)
def test_value_and_gradients_are_openclips(name, batch, dimension, tau, tile, monkeypatch):
    monkeypatch.setattr(streaming, "CPU_TILE", tile)
    given = inputs(name, batch, dimension, tau)
    value, expected = create_loss(name)(*given), OWN[name](*given)
    plain = {"clip-chunked": equations.clip, "siglip-chunked": equations.siglip}[name]
    assert max(relative_errors([value, plain(*given[:2], 1 / given[2], *given[3:])], [expected] * 2)) < 1e-12
    gradients = [torch.autograd.grad(one, given) for one in (value, expected)]
    # A sum of B terms, some of which cancel, of float64's 1.1e-16 each and up to 2 / tau in the exponent.
    assert max(relative_errors(*gradients)) < 1e-12


@pytest.mark.parametrize("name", OWN)
def test_products_in_bfloat16(name):
    """Each factor is rounded by at most 2^-9, so an exponent by at most 2^-8 / tau, and a weight by that part of it."""
    given = inputs(name, 64, 32, 0.1, torch.float32)
    value, expected = create_loss(name, loss_precision="bfloat16")(*given), OWN[name](*given)
    bound = 2**-8 / 0.1
    assert value != expected and abs(value - expected) < bound * expected
    errors = relative_errors(*[torch.autograd.grad(one, given) for one in (value, expected)])
    assert 0 < max(errors[:2]) < 2 * bound


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("count", [2, 3])
def test_micro_batches_equal_one_batch(name, count):
    """The `count` calls of a step add up to the gradient of one call on its whole batch, the temperature's and the
    bias's included, which with OpenCLIP's own losses are `count` times that."""
    given = inputs(name, 12, 8, 0.07)
    expected = torch.autograd.grad(OWN[name](*given), given)
    ours, own = ([torch.zeros_like(one) for one in given] for _ in range(2))
    calls = [(create_loss(name, accum_freq=count), ours), (OWN[name], own)]
    for part in torch.arange(12).chunk(count):
        # As in OpenCLIP's loop the other micro-batches' features are constants.
        is_own = torch.isin(torch.arange(12), part)[:, None]
        for function, sums in calls:
            features = [torch.where(is_own, side, side.detach()) for side in given[:2]]
            for total, more in zip(sums, torch.autograd.grad(function(*features, *given[2:]), given), strict=True):
                total += more
    assert max(relative_errors(ours, expected)) < 1e-12
    assert max(relative_errors(own[:2], expected[:2])) < 1e-12
    assert max(relative_errors(own[2:], [count * one for one in expected[2:]])) < 1e-12


def test_a_large_batch_needs_no_matrix_of_similarities():
    """B x B would be 256 MiB."""
    from measuring import peak_memory

    image, text = (torch.ones(1 << 13, 1, requires_grad=True) for _ in range(2))
    loss = create_loss("clip-chunked")
    assert peak_memory(lambda: loss(image, text, torch.tensor(10.0)).backward(), torch.device("cpu")) < 16 << 20


@pytest.mark.parametrize("name", OWN)
def test_a_value_that_is_not_finite_is_named(name):
    loss = create_loss(name)
    image, text, *rest = (one.detach() for one in inputs(name, 4, 3, 0.1, torch.float32))
    text[2, 1] = torch.nan
    loss(image, text, *rest)
    with pytest.raises(NonFiniteError, match="step 1: text_features"):
        loss.raise_if_not_finite()
