"""The defaults of each loss are those that were published: by the paper, else by the authors' released commands."""

import pytest
import torch
from numerics import unit

from open_clip_ext import create_loss
from open_clip_ext.factory import find_preset, resolve_options

ISOGCLR = "the authors' run_sogclrdro.sh, image-text pairs"
AMORLIP = "the command of AmorLIP's README, for CC12M"
AMORLIP_PAPER = "AmorLIP, Section 4 and Appendix C, for CC12M"
FASTCLIP = "the commands of FastCLIP's README"


@pytest.mark.parametrize(
    "name, published, source",
    [
        (
            "isogclr",
            dict(gamma=0.8, gamma_schedule="constant", rho=6.0, tau_start=0.01, tau_min=0.005, tau_max=1.0, tau_lr=0.03,
                 tau_lr_schedule="constant", tau_optimizer="momentum", tau_beta=0.9),
            ISOGCLR,
        ),
        (
            "fastclip-v2",
            dict(gamma=0.2, gamma_schedule="cosine", gamma_decay_epochs=18, rho=7.0, tau_start=0.03, tau_min=0.01,
                 tau_max=1.0, tau_lr=0.0133, tau_lr_schedule="constant", tau_optimizer="adam"),
            FASTCLIP,
        ),
        (
            "fastclip-v3",
            dict(gamma=0.2, gamma_schedule="cosine", gamma_decay_epochs=18, lr_tau_scheduler="fastclip", rho=8.5,
                 loss_eps=1e-14),
            FASTCLIP,
        ),
        (
            "scent",
            dict(gamma_schedule="proximal", gamma_exponent=10.0, lr_tau_scheduler="fastclip", loss_eps=1e-6),
            "the command of SCENT's contrastive/README.md",
        ),
        (
            "drrho-clip",
            dict(tau_init=0.01, loss_eps=1e-4, gamma_schedule="cosine", gamma_decay_epochs=37,
                 gamma=4.177 * 37**-0.7265, reference_gap=True),
            "the command and the rule of DRRho-CLIP's README",
        ),
        (
            "tempnet",
            dict(gamma=0.8, gamma_schedule="constant", rho=7.0, tau_min=0.005, tau_max=0.05, tau_net_prototypes=256,
                 tau_net_lr=3e-5, tau_net_dropout=0.5),
            "the authors' run_isogclr_tempnet.sh and models/losses.py",
        ),
        (
            "amorlip-released",
            dict(rho=8.5, rho_annealed=-8.5, rho_annealed_from=12, amor_beta=0.8, amor_beta_epochs=18, amor_updates=3,
                 amor_online_every=1, amor_target_every=2, amor_ema=0.92, amor_lr=1e-3, mlp_width=1.0,
                 amor_objective="l2-log", amor_denominator="combined", amor_positive_weight=1e-3, amor_reinit_every=1),
            AMORLIP,
        ),
        (
            "amorlip-paper",
            dict(rho=8.5, rho_annealed=-8.5, rho_annealed_from=25, amor_beta_epochs=37, amor_denominator="target",
                 amor_positive_weight=1.0, amor_online_every=1, amor_ema=0.92, mlp_width=1.0),
            AMORLIP_PAPER,
        ),
    ],
)
def test_settings(name, published, source):
    settings = resolve_options(name, {}, epochs=37)
    assert {key: settings[key] for key in published} == published, source


@pytest.mark.parametrize(
    "name, ratio, source",
    [
        ("fastclip-v0", 1.0, FASTCLIP + ": none, so --lr"),
        ("fastclip-v3", 1e-4 / 4e-4, FASTCLIP + ": CC12M; LAION400M has the same ratio"),
        ("neuclip", 1.25e-4 / 1e-3, "NeuCLIP, Table 3: on all five data sets"),
        ("amorlip", 1e-4 / 4e-4, AMORLIP),
        ("amorlip-released", 1e-4 / 4e-4, AMORLIP),
    ],
)
def test_learning_rate_of_the_temperature(name, ratio, source):
    assert find_preset(name).lr_tau_ratio == pytest.approx(ratio), source


def test_amorlips_schedule_of_rho_as_released():
    """33 epochs in three parts: 8.5, -8.5, -8.5; and its command clips gradients."""
    loss = create_loss("amorlip-released", epochs=33)
    rho = []
    for epoch in range(33):
        loss.set_epoch(epoch)
        rho.append(loss.current_rho)
    assert rho == [8.5] * 11 + [-8.5] * 22
    assert find_preset("amorlip-released").training_defaults == {"grad_clip_norm": 1.0}


def test_isogclrs_temperatures_become_individual():
    """At eta = 0.03 a gradient of 1 moves tau_i by 0.03: within a few visits it must have left where it began."""
    rows = 12
    loss = create_loss("isogclr", num_samples=rows, rho=1.0)  # log 11 is the most that 12 rows can pull against
    generator = torch.Generator().manual_seed(0)
    image, text = unit(generator, rows, 8), unit(generator, rows, 8)
    for _ in range(3):
        loss(image, text, torch.tensor(100.0), index=torch.arange(rows))
    tau = loss.full_state()["temperature.tau"]
    assert (tau - 0.01).abs().max() > 0.03 and tau.unique().numel() > rows
