"""The defaults of each loss are those that were published: by the paper, else by the authors' released commands."""

import pytest
import torch

from open_clip_ext import create_loss
from open_clip_ext.factory import find_preset, resolve_options

ISOGCLR = "the authors' run_sogclrdro.sh, image-text pairs"
AMORLIP = "the command of AmorLIP's README, for CC12M"
AMORLIP_PAPER = "AmorLIP, Section 4 and Appendix C, for CC12M"
FASTCLIP = "the commands of FastCLIP's README"
GAMMA = dict(gamma=0.2, gamma_schedule="cosine", gamma_decay_epochs=18, loss_eps=1e-14)


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
        ("fastclip-v0", GAMMA | dict(temperature="unscaled"), FASTCLIP),
        ("dcl", dict(normalizer="batch", temperature="unscaled", encoder_objective="compositional"), "DCL, L_DC"),
        ("fastclip-v1", GAMMA | dict(temperature="fixed"), FASTCLIP),
        ("sogclr", dict(gamma=0.8, gamma_schedule="constant", temperature="fixed"), "the authors' run_sogclrdro.sh"),
        (
            "neuclip",
            dict(npn_prototypes=4096, npn_updates=10, npn_opt="adagrad", npn_wd=0.0, npn_objective="unified",
                 mixing=0.0, rho=8.5, encoder_objective="unified"),
            "NeuCLIP, Tables 3 (CC12M) and 4",
        ),
        (
            "tuneclip",
            dict(margin=0.1, margin_power=2.0, gamma=0.9, gamma_schedule="cosine", gamma_decay_epochs=4,
                 temperature="fixed"),
            "TuneCLIP, Section 5",
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
            "amorlip",
            dict(rho=6.5, rho_annealed=-8.0, rho_annealed_from=28, mlp_width=0.5, amor_online_every=8, amor_ema=0.999,
                 amor_beta=0.8, amor_beta_epochs=37, amor_updates=3, amor_objective="l2-log"),
            "AmorLIP, Section 4 and Appendix C, for CC3M",
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
    assert name != "amorlip-released" or find_preset(name).training_defaults == {"grad_clip_norm": 1.0}


@pytest.mark.parametrize(
    "name, ratio, source",
    [
        ("fastclip-v0", 1.0, FASTCLIP + ": none, so --lr"),
        ("dcl", 1.0, "one learning rate, as in OpenCLIP's loss"),
        ("fastclip-v3", 1e-4 / 4e-4, FASTCLIP + ": CC12M; LAION400M has the same ratio"),
        ("neuclip", 1.25e-4 / 1e-3, "NeuCLIP, Table 3: on all five data sets"),
        ("amorlip", 1e-4 / 4e-4, AMORLIP),
        ("amorlip-released", 1e-4 / 4e-4, AMORLIP),
        ("amorlip-paper", 1e-4 / 4e-4, AMORLIP_PAPER),
    ],
)
def test_learning_rate_of_the_temperature(name, ratio, source):
    assert find_preset(name).lr_tau_ratio == pytest.approx(ratio), source


@pytest.mark.parametrize("name, positive", [("amorlip-released", 11), ("amorlip-paper", 22)])
def test_amorlips_schedule_of_rho(name, positive):
    """33 epochs in three parts: 8.5, -8.5, -8.5 as released, 8.5, 8.5, -8.5 in Appendix C."""
    loss = create_loss(name, epochs=33)
    rho = []
    for epoch in range(33):
        loss.set_epoch(epoch)
        rho.append(loss.current_rho)
    assert rho == [8.5] * positive + [-8.5] * (33 - positive)


@pytest.mark.parametrize(
    "samples, batch, epochs",
    [(2_723_840, 1024, 37), (9_187_328, 2048, 33), (13_710_637, 4096, 23), (192_160_462, 5120, 7), (10**9, 5120, 3)],
)
def test_neuclips_network_in_the_papers_trainings(samples, batch, epochs):
    """NeuCLIP, Tables 1 and 4; shorter trainings have other values."""
    loss = create_loss("neuclip", steps_per_epoch=samples // batch, epochs=epochs)
    loss.materialize(8, torch.device("cpu"), torch.float32)
    (group,) = loss.normalizer.network.optimizer.param_groups
    assert loss.normalizer.restart_every == 500
    assert group["lr"] == pytest.approx(1, abs=1e-3)  # DFN-14M has 76,981 steps of the rule's 77,000
