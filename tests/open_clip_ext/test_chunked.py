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


def situation(name, kind):
    """float32 inputs: "learned", pairs as far apart as so many can be, where a negative's probability is a few of
    float32's eps; or "equal", pairs that are each one of two, at a scale where a logit is rounded by 5e-4."""
    sigmoid = name == "siglip-chunked"
    image, text = (side.detach() for side in inputs(name, 2 if sigmoid else 8, 16, 1.0)[:2])
    rows, scale = torch.arange(64) % 2, 1e4
    if kind == "learned":
        rows, scale = torch.arange(len(image)), 12.0
        apart = torch.eye(len(image), 16, dtype=image.dtype)
        image = torch.nn.functional.normalize(apart - apart.mean(dim=0), dim=1)
        text = torch.nn.functional.normalize(image + 0.1 * text, dim=1)
    return [image[rows].float(), text[rows].float(), torch.tensor(scale), *[torch.tensor(0.0)] * sigmoid]


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


@pytest.mark.parametrize("kind", ["learned", "equal"])
@pytest.mark.parametrize("name", ["clip-chunked", "cyclip", "siglip-chunked"])
def test_float32_is_as_close_as_openclips(name, kind):
    """Twice the error of OpenCLIP's loss, and 64 roundings (`close`) of the size that a sum's terms have without signs:
    ours are other roundings of the same logits."""
    loss = create_loss(name, **(dict(cyclip_inmodal=0.0, cyclip_crossmodal=0.0) if name == "cyclip" else {}))
    own = OWN.get(name, OWN["clip-chunked"])

    def results(function, dtype):
        given = [one.to(dtype).requires_grad_() for one in situation(name, kind)]
        value = function(*given)
        return [one.double() for one in (value, *torch.autograd.grad(value, given))]

    expected = results(own, torch.float64)
    image, text, scale, *bias = (one.double() for one in situation(name, kind))
    logits = (scale * image @ text.T).requires_grad_()
    of_logits = own(logits, torch.eye(len(logits), dtype=torch.float64), torch.ones((), dtype=torch.float64), *bias)
    weights, sizes = torch.autograd.grad(of_logits, logits)[0].abs(), (logits / scale).abs()
    terms = [expected[0] + scale * (weights * sizes).sum(), scale * weights @ text.abs()]
    terms += [scale * weights.T @ image.abs(), (weights * sizes).sum(), weights.sum()]
    errors = zip(results(loss, torch.float32), results(own, torch.float32), expected, terms, strict=False)
    for actual, openclips, exact, size in errors:
        bound = 2 * (openclips - exact).norm() + 64 * torch.finfo(torch.float32).eps * size.norm()
        assert (actual - exact).norm() <= bound


def test_siglip_is_defined_for_one_pair():
    given = inputs("siglip-chunked", 1, 4, 0.1)
    ours, own = (torch.autograd.grad(loss(*given), given) for loss in (create_loss("siglip-chunked"), SigLipLoss()))
    assert max(relative_errors(ours, own)) < 1e-12


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
    loss = create_loss(name, accum_freq=count)
    loss.one_batch_per_step = True
    calls = [(loss, ours), (OWN[name], own)]
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
