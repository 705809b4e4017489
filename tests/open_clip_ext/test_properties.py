"""What must hold for every loss, over random batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import unit

from open_clip_ext import create_loss, list_losses

CONSTANT = dict(gamma=0.4, gamma_schedule="constant")
LOSSES = {
    "clip-chunked": ("clip-chunked", {}),
    "siglip-chunked": ("siglip-chunked", {}),
    "cyclip": ("cyclip", {}),
    "sogclr": ("sogclr", {}),
    "isogclr": ("isogclr", {}),
    "fastclip-v0": ("fastclip-v0", CONSTANT),
    "fastclip-v1": ("fastclip-v1", CONSTANT),
    "fastclip-v2": ("fastclip-v2", CONSTANT),
    "fastclip-v3": ("fastclip-v3", CONSTANT),
    "scent": ("scent", {}),
    "tempnet": ("tempnet", dict(tau_min=0.05, tau_max=0.5, tau_net_prototypes=8, tau_net_dropout=0.0)),
    "drrho-clip": ("drrho-clip", CONSTANT),
    "neuclip": ("neuclip", dict(npn_prototypes=40, npn_updates=2, npn_lr=0.01)),
    "neuclip, joint": ("neuclip", dict(npn_prototypes=40, npn_joint=True)),
    "neuclip, mlp": ("neuclip", dict(normalizer="mlp", npn_updates=2)),
    "amorlip": ("amorlip", dict(epochs=2)),
    "amorlip-released": ("amorlip-released", dict(epochs=2)),
    "amorlip-paper": ("amorlip-paper", dict(epochs=2)),
    "amorlip, negatives": ("amorlip", dict(epochs=2, amor_target="negatives")),
    "tuneclip": ("tuneclip", CONSTANT),
    "dcl": ("dcl", {}),
    "queue": ("queue", dict(queue_size=40)),
    "queue, consistency": ("queue", dict(queue_size=40, consistency=0.25)),
    "batch": ("fastclip-v3", dict(normalizer="batch")),
    "both sides": ("sogclr", dict(negatives="both")),
    "hinge, queue, individual": ("queue", dict(surrogate="hinge", margin=0.7, temperature="individual", tau_start=0.1)),
}
ROWS = 20
random_batches = given(seed=st.integers(0, 2**31), batch=st.integers(2, 8), dimension=st.integers(3, 16))
few = settings(max_examples=6, deadline=None)


def test_every_loss_is_here():
    assert {name for name, _ in LOSSES.values()} == {p.name for p in list_losses() if not p.is_open_clip}


def draw(seed, batch, dimension):
    """A batch that comes first and one to look at: image, text, rows."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(2):
        e1 = unit(generator, batch, dimension)
        e2 = torch.nn.functional.normalize(e1 + unit(generator, batch, dimension), dim=1)
        batches.append((e1, e2, torch.randint(ROWS, (batch,), generator=generator)))
    return batches


def second_step(case, batches):
    """Value and gradients of the second of two steps."""
    name, options = LOSSES[case]
    loss = create_loss(name, num_samples=ROWS, **options)
    loss.set_epoch(0)
    for e1, e2, rows in batches:
        e1, e2 = e1.clone().requires_grad_(), e2.clone().requires_grad_()
        scale = torch.tensor(8.0, dtype=torch.float64, requires_grad=True)
        value = loss(e1, e2, scale, index=rows, **reference_of(loss, e1, e2))
    inputs = [e1, e2, scale]
    gradients = torch.autograd.grad(value, inputs, allow_unused=True)
    return value.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True))


def reference_of(loss, image, text):
    """A reference model's features, where the loss takes them, that go with the pairs and the modalities."""
    if not loss.takes_reference:
        return {}
    # Halved in every angle, so that a reference that knows as much as the model does not take off all of a gap.
    first, second = image.detach().double(), text.detach().double()
    sides = [torch.nn.functional.normalize(side + first + second, dim=1) for side in (first, second)]
    return dict(dist_image_features=sides[0], dist_text_features=sides[1])


def close(actual, expected):
    # Tables are float32; the prototypes' AdaGrad divides gradients that may be near zero by their own size.
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", LOSSES)
@random_batches
@few
def test_permuting_the_batch_permutes_the_gradients(case, seed, batch, dimension):
    batches = draw(seed, batch, dimension)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    value, *gradients = second_step(case, batches)
    permuted, *theirs = second_step(case, [tuple(x[order] for x in triple) for triple in batches])
    close(permuted, value)
    close(theirs[0], gradients[0][order])
    close(theirs[1], gradients[1][order])
    close(theirs[2], gradients[2])


ALIKE = [case for case in LOSSES if "amorlip" not in case and case not in ("neuclip, mlp", "tempnet")]


@pytest.mark.parametrize("case", ALIKE)
@random_batches
@few
def test_swapping_the_modalities_swaps_the_sides(case, seed, batch, dimension):
    """But for MLPs, whose two sides start from other weights."""
    batches = draw(seed, batch, dimension)
    value, *gradients = second_step(case, batches)
    swapped, *theirs = second_step(case, [(e2, e1, rows) for e1, e2, rows in batches])
    for actual, expected in zip((swapped, *theirs), (value, gradients[1], gradients[0], gradients[2]), strict=True):
        close(actual, expected)


@pytest.mark.parametrize("case", [case for case in ALIKE if case != "neuclip, joint"])
@random_batches
@few
def test_a_rotation_of_all_embeddings_changes_nothing(case, seed, batch, dimension):
    """But for MLPs and for optimisers that treat each coordinate alone, as AdaGrad and Adam do."""
    name, options = LOSSES[case]
    if case == "neuclip":
        options = {**options, "npn_opt": "sgd", "npn_lr": 0.1}
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(dimension, dimension, generator=generator, dtype=torch.float64))[0]
    batches = draw(seed, batch, dimension)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOSSES, case, (name, options))
        value, *gradients = second_step(case, batches)
        rotated, *theirs = second_step(case, [(e1 @ rotation, e2 @ rotation, rows) for e1, e2, rows in batches])
    close(rotated, value)
    close(theirs[0], gradients[0] @ rotation)
    close(theirs[1], gradients[1] @ rotation)
    close(theirs[2], gradients[2])


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("batch", ["matched", "mismatched", "equal", "one-hot", "repeated row"])
def test_extreme_batches_stay_finite_at_the_lowest_temperature(case, dtype, batch):
    """Finite, and the value as in float64 on the same rounded features."""
    name, options = LOSSES[case]
    options = {**options, "tau_start": 0.01} if name in ("isogclr", "fastclip-v2") else options
    e1 = unit(torch.Generator().manual_seed(0), 8, 16)
    e2 = {"mismatched": -e1, "one-hot": torch.eye(16)[:8].double()}.get(batch, e1)
    if batch == "equal":
        e1 = e2 = e1[:1].expand(8, 16)
    elif batch == "one-hot":
        e1 = e2
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 0 if batch == "repeated row" else 7])
    values = []
    for kind in (dtype, torch.float64):
        loss = create_loss(name, num_samples=ROWS, **options)
        loss.set_epoch(0)
        for _ in range(2):
            image, text = (e.to(dtype).to(kind, copy=True).requires_grad_() for e in (e1, e2))
            scale = torch.tensor(100.0, dtype=torch.promote_types(kind, torch.float32), requires_grad=True)
            value = loss(image, text, scale, index=rows, **reference_of(loss, image, text))
            value.backward()
            for leaf in (image, text, scale):
                assert leaf.grad is None or leaf.grad.isfinite().all()
        loss.raise_if_not_finite()
        values.append(value.detach().double())
    # A float32 exponent of 200 carries an absolute error of 1e-5, of which AdaGrad and Adam make a step of lr where the
    # true gradient is zero; 0.01 in a direction is 1 in an exponent at tau = 0.01, and so 0.02 in the value.
    learns = "neuclip" in case or "amorlip" in case
    torch.testing.assert_close(*values, rtol=1e-4, atol=0.05 if learns else 1e-4)
