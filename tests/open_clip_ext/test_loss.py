"""What every loss does with its arguments and its state."""

import copy

import pytest
import torch
from numerics import unit

from open_clip_ext import create_loss


@pytest.mark.parametrize("name", ["fastclip-v3", "isogclr", "neuclip", "queue", "amorlip"])
def test_no_state_moves_without_gradients(name):
    """In training mode, as where a validation forgets `eval()`."""
    settings = dict(num_samples=10) if name in ("fastclip-v3", "isogclr") else {}
    loss = create_loss(name, epochs=2, **settings)
    loss.set_epoch(0)
    generator = torch.Generator().manual_seed(0)

    def call():
        features = (unit(generator, 6, 4).float().requires_grad_() for _ in range(2))
        return loss(*features, torch.tensor(10.0), index=torch.arange(6))

    call().backward()
    before = {key: copy.deepcopy(value) for key, value in loss.full_state().items()}
    with torch.no_grad():
        assert call().isfinite()
    after = loss.full_state()
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert torch.equal(after[key], value) if isinstance(value, torch.Tensor) else after[key] == value


@pytest.mark.parametrize("name", ["fastclip-v3", "isogclr", "neuclip", "queue"])
def test_without_gradients_training_mode_gives_the_value_of_evaluation(name):
    """For other samples, too, than those of the step before."""
    settings = dict(num_samples=20) if name in ("fastclip-v3", "isogclr") else {}
    loss = create_loss(name, epochs=2, **settings)
    loss.set_epoch(0)
    generator = torch.Generator().manual_seed(0)

    def call(rows):
        features = (unit(generator, len(rows), 4).float().requires_grad_() for _ in range(2))
        return loss(*features, torch.tensor(10.0), index=rows)

    for start in (0, 6, 0, 6):  # the second visits move individual temperatures
        call(torch.arange(start, start + 6)).backward()
    features = unit(generator, 6, 4).float(), unit(generator, 6, 4).float()
    with torch.no_grad():
        values = [loss.train(mode)(*features, torch.tensor(10.0), index=torch.arange(6)) for mode in (True, False)]
    assert torch.equal(*values)


@pytest.mark.parametrize(
    "name, scale, warned",
    [("neuclip", 2.659, True), ("neuclip", 14.3, False), ("sogclr", 2.659, True), ("isogclr", 2.659, False)],
)
def test_a_logarithm_for_the_scale_is_pointed_out_once(name, scale, warned, caplog):
    """Not where the temperatures are the loss's own."""
    loss = create_loss(name, num_samples=6)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        loss(unit(generator, 6, 4), unit(generator, 6, 4), torch.tensor(scale), index=torch.arange(6))
    assert ["pass logit_scale.exp()" in record.message for record in caplog.records] == [True] * warned


def test_a_short_group_of_accumulation_is_found_not_mixed_with_the_next_batch():
    """Three calls of four on one batch; the fourth would get its normalizers on another batch."""
    loss = create_loss("sogclr", num_samples=12, accum_freq=4)
    generator = torch.Generator().manual_seed(0)
    first, second = [[unit(generator, 6, 4), unit(generator, 6, 4), torch.tensor(10.0)] for _ in range(2)]
    for _ in range(3):
        loss(*first, index=torch.arange(6))
    with pytest.raises(ValueError, match=r"^step 1: index: the 4 calls of a step .* must have the same rows"):
        loss(*second, index=torch.arange(6, 12))
    for _ in range(4):  # the next one begins a step
        loss(*second, index=torch.arange(6, 12))
    assert loss.steps == 2
    loss.raise_if_not_finite()
