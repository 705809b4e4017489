"""The presets: the parts and defaults that each loss name stands for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from open_clip_ext.losses import (
    AmorLIPLoss,
    ChunkedCLIPLoss,
    ChunkedSigLIPLoss,
    CyCLIPLoss,
    GlobalContrastiveLoss,
    Loss,
)
from open_clip_ext.options import Derived


@dataclass(frozen=True)
class LossPreset:
    """A loss by name: its parts, defaults and description, selected by `--loss NAME`."""

    name: str
    summary: str  # one line for `--list-losses`
    paper: str  # source of the method
    loss: type[Loss] | None = GlobalContrastiveLoss  # None for OpenCLIP's own losses, which are left untouched
    normalizer: str = "batch"  # this and the next three: names of the parts of a GlobalContrastiveLoss
    temperature: str = "learnable"
    surrogate: str = "identity"
    encoder_objective: str = "compositional"
    # Defaults where they differ from the parts', by option; a value, or `Derived`.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    lr_tau_ratio: float = 1 / 8  # default of --lr-tau divided by --lr; NeuCLIP, Table 3: on all five data sets
    # Defaults of the training command's flags, by name with underscores.
    training_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_open_clip(self) -> bool:
        return self.loss is None

    @property
    def has_parts(self) -> bool:
        return self.loss is GlobalContrastiveLoss


def drrho_gamma(epochs: int) -> float:
    """DRRho-CLIP's rule for the final gamma of a table, given the length of the training."""
    return min(1.0, 4.177 * epochs**-0.7265)


# What AmorLIP's paper and its released command agree on for CC12M.
AMORLIP_CC12M: dict[str, Any] = {
    "rho": 8.5, "rho_annealed": -8.5, "amor_online_every": 1, "amor_ema": 0.92, "mlp_width": 1.0,
}

PRESETS = {
    preset.name: preset
    for preset in (
        LossPreset(
            "clip",
            "OpenCLIP's own softmax loss over the batch, untouched",
            "Radford et al. 2021, arXiv 2103.00020",
            loss=None,
        ),
        LossPreset(
            "siglip",
            "OpenCLIP's own sigmoid loss, untouched (same as --siglip)",
            "Zhai et al. 2023, arXiv 2303.15343",
            loss=None,
        ),
        LossPreset(
            "clip-chunked",
            "OpenCLIP's softmax loss, exact, without a B x B matrix in memory; for large batches",
            "Radford et al. 2021, arXiv 2103.00020",
            loss=ChunkedCLIPLoss,
            lr_tau_ratio=1.0,
        ),
        LossPreset(
            "siglip-chunked",
            "OpenCLIP's sigmoid loss, exact, without a B x B matrix in memory; for large batches",
            "Zhai et al. 2023, arXiv 2303.15343",
            loss=ChunkedSigLIPLoss,
            lr_tau_ratio=1.0,
        ),
        LossPreset(
            "cyclip",
            "OpenCLIP's softmax loss plus in-modal and cross-modal consistency terms; no normalizer",
            "Goel et al. 2022, arXiv 2205.14459",
            loss=CyCLIPLoss,
            lr_tau_ratio=1.0,
        ),
        LossPreset(
            "dcl",
            "OpenCLIP's softmax loss without the positive in the denominator; no state, learnable temperature",
            "Yeh et al. 2022, arXiv 2110.06848",
            temperature="unscaled",
            defaults={"loss_eps": 1e-300},  # the paper has none
            lr_tau_ratio=1.0,  # the temperature is the model's parameter, as in `clip`
        ),
        LossPreset(
            "sogclr",
            "moving average of each sample's normalizer, constant gamma, fixed temperature",
            "Yuan et al. 2022, PMLR 162",
            normalizer="table",
            temperature="fixed",
            defaults={"gamma": 0.8, "gamma_schedule": "constant"},
        ),
        LossPreset(
            "isogclr",
            "as sogclr, with one temperature per image and per text",
            "Qiu et al. 2023, PMLR 202",
            normalizer="table",
            temperature="individual",
            defaults={"gamma": 0.8, "gamma_schedule": "constant"},
        ),
        LossPreset(
            "fastclip-v0",
            "moving average, cosine gamma, learnable temperature; the loss without the factor tau",
            "Wei et al. 2024, arXiv 2407.01445",
            normalizer="table",
            temperature="unscaled",
            lr_tau_ratio=1.0,  # the released command sets none, so it is the model's learning rate
        ),
        LossPreset(
            "fastclip-v1",
            "moving average, cosine gamma, fixed temperature",
            "Wei et al. 2024, arXiv 2407.01445",
            normalizer="table",
            temperature="fixed",
        ),
        LossPreset(
            "fastclip-v2",
            "moving average, cosine gamma, one temperature per image and per text, trained by Adam",
            "Wei et al. 2024, arXiv 2407.01445",
            normalizer="table",
            temperature="individual",
            defaults={"rho": 7.0, "tau_start": 0.03, "tau_min": 0.01, "tau_optimizer": "adam", "tau_lr": 0.0133},
        ),
        LossPreset(
            "fastclip-v3",
            "moving average, cosine gamma, learnable temperature with rho",
            "Wei et al. 2024, arXiv 2407.01445",
            normalizer="table",
            defaults={"lr_tau_scheduler": "fastclip"},
            lr_tau_ratio=1 / 4,  # the released commands' on CC12M and LAION400M; on CC3M they have 1 / 5
        ),
        LossPreset(
            "scent",
            "moving average whose gamma follows each sample's own estimate, by proximal mirror descent; learnable tau",
            "Wei et al. 2026, arXiv 2602.02877",
            normalizer="table",
            # From the authors' command for DFN-14M; its rho, 11, is the papers' for that data set.
            defaults={"gamma_schedule": "proximal", "loss_eps": 1e-6, "lr_tau_scheduler": "fastclip"},
        ),
        LossPreset(
            "tempnet",
            "as isogclr, with temperatures predicted from the embeddings by a small network",
            "Qiu et al. 2024, arXiv 2404.04575",
            normalizer="table",
            temperature="network",
            defaults={"gamma": 0.8, "gamma_schedule": "constant"},
        ),
        LossPreset(
            "drrho-clip",
            "as fastclip-v1, minus the similarity gaps of a frozen reference model (--distill-model)",
            "Wei et al. 2025, arXiv 2505.06699",
            normalizer="table",
            temperature="fixed",
            # From the authors' command for DFN-192M, with their rule for gamma.
            defaults={
                "reference_gap": True, "tau_init": 0.01, "loss_eps": 1e-4,
                "gamma": Derived("min(1, 4.177 E^-0.7265) of E epochs", drrho_gamma),
                "gamma_decay_epochs": Derived("all epochs", lambda epochs: epochs),
            },
        ),
        LossPreset(
            "neuclip",
            "a network of prototypes predicts each sample's normalizer; one objective for it and the encoders",
            "Wei, Lin and Yang 2026, arXiv 2511.08417, Eq. 10-12, Algorithm 1",
            normalizer="prototypes",
            encoder_objective="unified",
        ),
        LossPreset(
            "amorlip",
            "MLPs learn each sample's partition function, which the encoders divide by",
            "Sun et al. 2025, arXiv 2505.18983, Eq. 6-12, Algorithm 1",
            loss=AmorLIPLoss,
            lr_tau_ratio=1 / 4,
        ),
        LossPreset(
            "amorlip-released",
            "as amorlip, with the settings of the authors' command for CC12M",
            "AmorLIP's README",
            loss=AmorLIPLoss,
            defaults={
                **AMORLIP_CC12M,
                "rho_annealed_from": Derived("the last two thirds", lambda epochs: max(1, epochs // 3)),
                "amor_beta_epochs": Derived("half of the epochs", lambda epochs: max(1, epochs // 2)),
            },
            lr_tau_ratio=1 / 4,
            training_defaults={"grad_clip_norm": 1.0},
        ),
        LossPreset(
            "amorlip-paper",
            "as amorlip, with the paper's own form of the loss and its settings for CC12M",
            "Sun et al. 2025, arXiv 2505.18983, Algorithm 1, Appendix C",
            loss=AmorLIPLoss,
            # A positive of weight 1, divided by the target network: this trained on icons and collapsed on scenes.
            defaults={
                **AMORLIP_CC12M, "amor_denominator": "target", "amor_positive_weight": 1.0,
                "rho_annealed_from": Derived(
                    "the last third", lambda epochs: epochs - max(epochs // 3, min(1, epochs - 1))
                ),
            },
            lr_tau_ratio=1 / 4,
        ),
        LossPreset(
            "tuneclip",
            "for fine-tuning: recovery of the optimizer's statistics, then hinged gaps over moving averages, fixed tau",
            "Mehta et al. 2026, arXiv 2601.09859, Eq. 8-9, Algorithms 1-2",
            normalizer="table",
            temperature="fixed",
            surrogate="hinge",
            defaults={"gamma": 0.9, "gamma_decay_epochs": 4},
            # TuneCLIP, Section 5 and Table 6, except what depends on the hardware. They mention no warm-up of the
            # learning rate; the recovery takes its place.
            training_defaults={
                "lr": 1e-5, "beta1": 0.9, "beta2": 0.98, "wd": 0.02, "lr_scheduler": "cosine", "warmup": 0,
                "epochs": 5, "osr_epochs": 5.0, "zeroshot_frequency": 1,
            },
        ),
        LossPreset(
            "queue",
            "a queue of the latest embeddings, mixed with the batch's own estimate; nothing to train",
            "not from a paper",
            normalizer="queue",
            encoder_objective="unified",
            defaults={"mixing": 0.6},
        ),
    )
}

SHIPPED = frozenset(PRESETS)  # before a script or another package adds its own

ALIASES = {"fastclip": "fastclip-v3"}
