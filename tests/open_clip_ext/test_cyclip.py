"""CyCLIP against `equations.cyclip` in float64."""

import pytest
import torch
from numerics import unit

from open_clip_ext import InputError, NonFiniteError, create_loss
from open_clip_ext.equations import cyclip


@pytest.mark.parametrize("inmodal, crossmodal", [(0.25, 0.25), (0.0, 1.5), (2.0, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("batch, dimension, tau", [(2, 3, 1.0), (7, 16, 0.07), (17, 64, 0.1)])
def test_value_and_gradients(batch, dimension, tau, inmodal, crossmodal):
    generator = torch.Generator().manual_seed(0)
    e1, e2 = (unit(generator, batch, dimension).requires_grad_() for _ in range(2))
    scale = torch.tensor(1 / tau).double().requires_grad_()
    loss = create_loss("cyclip", cyclip_inmodal=inmodal, cyclip_crossmodal=crossmodal)
    value, expected = loss(e1, e2, scale), cyclip(e1, e2, 1 / scale, inmodal, crossmodal)
    torch.testing.assert_close(value, expected)
    actual = torch.autograd.grad(value, [e1, e2, scale])
    for one, other in zip(actual, torch.autograd.grad(expected, [e1, e2, scale]), strict=True):
        torch.testing.assert_close(one, other)


def test_without_its_terms_it_is_openclips_own_loss():
    from open_clip.loss import ClipLoss

    generator = torch.Generator().manual_seed(0)
    e1, e2 = (unit(generator, 9, 16).float() for _ in range(2))
    loss = create_loss("cyclip", cyclip_inmodal=0.0, cyclip_crossmodal=0.0)
    torch.testing.assert_close(loss(e1, e2, torch.tensor(20.0)), ClipLoss()(e1, e2, torch.tensor(20.0)))


def test_the_log_shows_both_terms_and_a_nan_is_named():
    generator = torch.Generator().manual_seed(0)
    e1, e2 = (unit(generator, 5, 8).float() for _ in range(2))
    loss = create_loss("cyclip")
    assert loss.diagnostics() == {}
    value = loss(e1, e2, torch.tensor(20.0))
    shown = loss.diagnostics()
    total = shown["clip"] + 0.25 * (shown["inmodal_consistency"] + shown["crossmodal_consistency"])
    torch.testing.assert_close(total, value)
    loss.raise_if_not_finite()
    loss(e1, e2 * float("nan"), torch.tensor(20.0))
    with pytest.raises(NonFiniteError, match="step 2: text_features"):
        loss.raise_if_not_finite()


def test_another_losss_state_is_refused():
    with pytest.raises(ValueError, match="loss: 'cyclip' where the state is of 'global contrastive'"):
        create_loss("cyclip").load_full_state(create_loss("neuclip").full_state())


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(cyclip_inmodal=-1.0), "cyclip_inmodal: -1.0"),
        (dict(normalizer="table"), "normalizer: the loss 'cyclip' does not use it"),
        (dict(rho=5.0), "rho: the loss 'cyclip' does not use it"),
        (dict(lr_tau=1e-3), "lr_tau: belongs to your model"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(InputError, match=message):
        create_loss("cyclip", **options)
