"""Settings that a loss cannot have are refused where it is made, by the setting's name."""

import pytest
import torch

from open_clip_ext import InputError, create_loss

WRONG = [
    # Out of range, of another type or not among the choices
    ("amorlip", dict(amor_ema=1.0)), ("amorlip", dict(amor_online_every=0)), ("amorlip", dict(amor_objective="l2")),
    ("amorlip", dict(rho_annealed=float("inf"))), ("cyclip", dict(cyclip_inmodal=-1.0)),
    ("neuclip, mlp", dict(mlp_width=0.0)), ("neuclip", dict(npn_objective="kl")), ("neuclip", dict(npn_prototypes=0)),
    ("neuclip", dict(npn_restart_every=-1)), ("neuclip", dict(npn_lr=0.0)), ("neuclip", dict(npn_lr=float("nan"))),
    ("neuclip", dict(npn_opt="lion")), ("neuclip", dict(loss_eps=0.0)), ("neuclip", dict(npn_prototypes=True)),
    ("queue", dict(queue_size=0)), ("queue", dict(mixing=1.0)), ("fastclip-v3", dict(gamma=0.0)),
    ("fastclip-v3", dict(gamma=1.5)), ("fastclip-v3", dict(gamma=True)), ("fastclip-v3", dict(gamma_schedule="linear")),
    ("fastclip-v3", dict(gamma_decay_epochs=0)), ("fastclip-v3", dict(rho=-1.0)), ("isogclr", dict(tau_min=0.0)),
    ("isogclr", dict(tau_optimizer="sgd")), ("isogclr", dict(tau_min=0.5, tau_max=0.1), "tau_max"),
    ("isogclr", dict(tau_start=5.0)), ("isogclr", dict(tau_start=1e-4)), ("sogclr", dict(temperature="cold")),
    ("sogclr", dict(surrogate="hinge", margin=-0.1), "margin"), ("tempnet", dict(tau_max=0.001)),
    # Lengths of the training
    ("fastclip-v3", dict(accum_freq=0)), ("fastclip-v3", dict(accum_freq=1.5)), ("fastclip-v3", dict(epochs=0)),
    ("drrho-clip", dict(epochs=-1)), ("neuclip", dict(steps_per_epoch=0)), ("fastclip-v3", dict(num_samples=0)),
    ("queue", dict(num_samples=-3)),
    # What a default or a schedule needs
    ("fastclip-v3", dict(epochs=None), "gamma_decay_epochs"), ("fastclip-v3", dict(num_samples=None)),
    ("drrho-clip", dict(epochs=None, gamma_decay_epochs=10), "gamma"),
    ("amorlip", dict(epochs=None), "amor_beta_epochs"),
    ("amorlip", dict(epochs=None, amor_beta_epochs=5), "rho_annealed_from"),
    ("isogclr", dict(epochs=None, tau_lr_schedule="cosine"), "tau_lr_epochs"),
    # What another setting leaves without effect
    ("amorlip", dict(amor_l2_weight=3.0)), ("neuclip", dict(npn_joint=True, npn_updates=5), "npn_updates"),
    ("neuclip, mlp", dict(npn_initial_accumulator=0.5)), ("neuclip, mlp", dict(npn_reset_optimizer=True)),
    ("scent", dict(gamma=0.5)), ("scent", dict(gamma_decay_epochs=3)), ("fastclip-v3", dict(gamma_exponent=1.0)),
    ("isogclr", dict(tau_lr_epochs=3)), ("fastclip-v2", dict(tau_beta=0.5)),
    # Another loss's, or another part's
    ("amorlip", dict(normalizer="mlp")), ("amorlip", dict(gamma=0.5)), ("cyclip", dict(normalizer="table")),
    ("cyclip", dict(rho=5.0)), ("neuclip, mlp", dict(npn_prototypes=5)), ("neuclip", dict(mlp_width=1.0)),
    ("fastclip-v3", dict(npn_lr=1.0)), ("sogclr", dict(margin=0.1)), ("fastclip-v0", dict(fastclip_code=True)),
    ("fastclip-v3", dict(nonsense=1)), ("sogclr", dict(tau_init=0.1)), ("neuclip", dict(lr_tau=1e-4)),
    # Parts that do not go together
    ("fastclip-v3", dict(encoder_objective="unified")), ("neuclip", dict(fastclip_code=True)),
    ("neuclip, mlp", dict(surrogate="hinge")), ("tempnet", dict(negatives="views")),
    ("neuclip", dict(negatives="both")), ("queue", dict(negatives="views")), ("neuclip, mlp", dict(negatives="both")),
    ("neuclip", dict(reference_gap=True)), ("tempnet", dict(reference_gap=True)),
    ("sogclr", dict(negatives="both", reference_gap=True), "reference_gap"),
    ("queue", dict(consistency=0.25, reference_gap=True), "consistency"),
]  # fmt: skip


@pytest.mark.parametrize("name, options, argument", [(*row, next(iter(row[1])))[:3] for row in WRONG], ids=str)
def test_a_wrong_setting_is_named(name, options, argument):
    name, _, normalizer = name.partition(", ")
    given = {"num_samples": 8, "epochs": 3, **({"normalizer": normalizer} if normalizer else {}), **options}
    with pytest.raises(InputError, match=f"^{argument}: ") as caught:
        create_loss(name, **given)
    assert caught.value.argument == argument and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(queue_size=4), "queue_size: 4 holds nothing beside a global batch of 4 pairs"),
        (dict(num_samples=7), "queue_size: 7 samples in global batches of 4 .* lower the global batch to .* 3"),
        (dict(queue_size=10**13), f"{10**13} of dimension 8 needs .* GiB on the host"),
        (dict(normalizer="prototypes", npn_prototypes=10**13, mixing=0.0), f"{10**13} of dimension 8 needs .* GiB"),
    ],
)
def test_what_the_first_batch_shows_to_be_of_no_use_is_refused(options, message):
    """Memory before it is asked for."""
    loss = create_loss("queue", **options)
    loss.set_epoch(0)
    image, text = torch.nn.functional.normalize(torch.randn(2, 4, 8), dim=2)
    with pytest.raises(ValueError, match=message):
        loss(image, text, torch.tensor(10.0))
