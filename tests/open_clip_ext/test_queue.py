"""The queue and the mixing against `equations.queue` in float64."""

import math

import pytest
import torch
from numerics import unit

from open_clip_ext import InputError, create_loss, equations


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


def test_the_queues_state_survives():
    def step(loss, seed):
        generator = torch.Generator().manual_seed(seed)
        return loss(unit(generator, 5, 8).float(), unit(generator, 5, 8).float(), torch.tensor(20.0))

    first, second = (create_loss("queue", queue_size=12) for _ in range(2))
    for seed in range(4):
        step(first, seed)
    second.load_full_state(first.full_state())
    for seed in range(4, 7):
        assert torch.equal(step(first, seed), step(second, seed))
    with pytest.raises(ValueError, match="queue_size: 9"):
        create_loss("queue", queue_size=9).load_full_state(first.full_state())


def test_a_first_batch_that_is_not_finite_leaves_unit_vectors():
    loss = create_loss("queue", queue_size=30)
    generator = torch.Generator().manual_seed(0)
    image, text = unit(generator, 10, 3), unit(generator, 10, 3)
    loss(image * float("nan"), text, torch.tensor(10.0))
    assert torch.equal(loss.normalizer.ring.rows[:, :10].norm(dim=2), torch.ones(2, 10))


def test_embeddings_from_before_the_keys_are_like_no_cell_without_a_key():
    """A data set numbers its cells without a key -1, -2, ..."""
    loss = create_loss("queue", queue_size=30)
    generator = torch.Generator().manual_seed(0)
    for key in (None, -1 - torch.arange(10)):
        loss(unit(generator, 10, 3), unit(generator, 10, 3), torch.tensor(10.0), key=key)
    assert len(loss.normalizer.ring.keys.unique()) == 30


def test_a_capped_queue_goes_on_within_its_epoch():
    """It is emptied where an epoch begins, not where a state saved in mid-epoch is loaded."""

    def step(loss, seed):
        generator = torch.Generator().manual_seed(seed)
        return loss(unit(generator, 5, 8).float(), unit(generator, 5, 8).float(), torch.tensor(20.0))

    def queued(loss):
        return int(loss.normalizer.ring.active)

    first, second = (create_loss("queue", num_samples=15) for _ in range(2))
    for epoch in range(2):
        first.set_epoch(epoch)
        for seed in range(2):
            step(first, seed)
    second.load_full_state(first.full_state())
    second.set_epoch(1)
    assert torch.equal(step(first, 2), step(second, 2)) and queued(first) == queued(second) == 15
    second.set_epoch(2)
    step(second, 3)
    assert queued(second) == 5


@pytest.mark.parametrize(
    "options, message",
    [(dict(queue_size=0), "queue_size: 0"), (dict(mixing=1.0), "mixing: 1.0"), (dict(gamma=0.5), "gamma")],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(InputError, match=message):
        create_loss("queue", **options)


@pytest.mark.parametrize("options", [dict(queue_size=10**13), dict(normalizer="prototypes", npn_prototypes=10**13)])
def test_more_than_the_memory_holds_is_refused_before_it_is_asked_for(options):
    generator = torch.Generator().manual_seed(0)
    if "normalizer" in options:
        options["mixing"] = 0.0
    loss = create_loss("queue", **options)
    with pytest.raises(ValueError, match=f"{10**13} of dimension 8 needs .* GiB on the host"):
        loss(unit(generator, 4, 8), unit(generator, 4, 8), torch.tensor(10.0))


def fed(loss, count, size=64):
    """`loss` after a pass over `count` samples in batches of `size`."""
    generator = torch.Generator().manual_seed(0)
    loss.set_epoch(0)
    for _ in range(count // size):
        loss(unit(generator, size, 8), unit(generator, size, 8), torch.tensor(10.0))
    return loss


def test_a_sample_never_counts_twice():
    loss = fed(create_loss("queue", num_samples=300), 300)
    assert loss.description().startswith("normalizers queue, 300 for as many samples")
    assert loss.normalizer.ring.rows.shape[1] == 300 and loss.normalizer.ring.active == 256
    # After an epoch the queue is kept, for the report; the next one begins with none of it.
    before = loss.full_state()
    loss.set_epoch(1)
    assert loss.normalizer.ring.active == 256
    generator = torch.Generator().manual_seed(1)
    batch = unit(generator, 64, 8), unit(generator, 64, 8), torch.tensor(10.0)
    loss(*batch)
    assert loss.normalizer.ring.active == 64
    # A resumed training does the same.
    resumed = create_loss("queue", num_samples=300)
    resumed.load_full_state(before)
    resumed.set_epoch(1)
    resumed(*batch)
    assert torch.equal(resumed.full_state()["state.ring"][:, :64], loss.full_state()["state.ring"][:, :64])
    assert resumed.normalizer.ring.active == 64


def test_a_queue_of_a_small_part_of_the_data_goes_on_over_epochs():
    loss = fed(create_loss("queue", queue_size=128, num_samples=300), 300)
    loss.set_epoch(1)
    generator = torch.Generator().manual_seed(1)
    loss(unit(generator, 64, 8), unit(generator, 64, 8), torch.tensor(10.0))
    assert loss.normalizer.ring.active == 128


@pytest.mark.parametrize("size, queued", [(60, 20), (59, 59)])
def test_a_queue_of_half_of_the_data_starts_every_epoch_empty(size, queued):
    loss, generator = create_loss("queue", num_samples=120, queue_size=size), torch.Generator().manual_seed(0)
    for epoch in range(2):
        loss.set_epoch(epoch)
        for _ in range(1 if epoch else 4):
            loss(unit(generator, 20, 8), unit(generator, 20, 8), torch.tensor(10.0))
    assert loss.diagnostics()["queued"] == queued


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(queue_size=64), "queue_size: 64 holds nothing beside a global batch of 64 pairs; give several times"),
        (dict(num_samples=100), "queue_size: 100 samples in global batches of 64 .* lower the global batch to .* 50"),
    ],
)
def test_a_queue_that_would_do_nothing_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        fed(create_loss("queue", **settings), 64)


def test_prototypes_are_no_more_than_the_samples():
    loss = fed(create_loss("neuclip", num_samples=300, npn_updates=0), 600)
    assert loss.normalizer.active == loss.normalizer.weight.shape[1] == 300
    assert "prototypes (restarted every 500 steps, adagrad at 1), 300 for as many samples" in loss.description()
