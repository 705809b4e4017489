"""Names of losses, and the loss that a name stands for.

A name is a preset over the replaceable parts; each part can also be chosen on its own.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from open_clip_ext import plugins
from open_clip_ext.errors import InputError
from open_clip_ext.losses import AmorLIPLoss, CyCLIPLoss, GlobalContrastiveLoss, Loss
from open_clip_ext.normalizers import NORMALIZERS, Normalizer
from open_clip_ext.objectives import ENCODER_OBJECTIVES
from open_clip_ext.options import Option, flag_of
from open_clip_ext.surrogates import SURROGATES, Surrogate
from open_clip_ext.temperatures import TEMPERATURES, Temperature

# The replaceable parts of GlobalContrastiveLoss: the option's name, and the valid names.
PARTS: dict[str, dict[str, Any]] = {
    "normalizer": NORMALIZERS,
    "temperature": TEMPERATURES,
    "surrogate": SURROGATES,
    "encoder_objective": ENCODER_OBJECTIVES,
}
PART_CLASSES: dict[str, type] = {"normalizer": Normalizer, "temperature": Temperature, "surrogate": Surrogate}


@dataclass(frozen=True)
class LossPreset:
    """What `--loss NAME` means.

    Args:
        name: as given to `--loss`.
        summary: one line for `--list-losses`.
        paper: where the method is from.
        loss: its class; None stands for OpenCLIP's own losses, which are left untouched.
        normalizer, temperature, surrogate, encoder_objective: names of the parts of a GlobalContrastiveLoss.
        defaults: options that this method sets otherwise than the parts do; a value, or a function of the length of the
            training in epochs.
        lr_tau_ratio: the default of `--lr-tau` over `--lr`.
        training_defaults: flags of the training command, OpenCLIP's or ours, that this method sets otherwise where the
            user gives none; by name with underscores.
    """

    name: str
    summary: str
    paper: str
    loss: type[Loss] | None = GlobalContrastiveLoss
    normalizer: str = "batch"
    temperature: str = "learnable"
    surrogate: str = "identity"
    encoder_objective: str = "compositional"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    lr_tau_ratio: float = 1 / 8  # NeuCLIP, Table 3: on all five data sets
    training_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_open_clip(self) -> bool:
        return self.loss is None

    @property
    def has_parts(self) -> bool:
        return self.loss is GlobalContrastiveLoss


# What AmorLIP's paper and its released command agree on for CC12M.
AMORLIP_CC12M = {"rho": 8.5, "rho_annealed": -8.5, "amor_online_every": 1, "amor_ema": 0.92, "mlp_width": 1.0}

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
            "cyclip",
            "OpenCLIP's softmax loss and two terms that make the similarities consistent; no normalizer",
            "Goel et al. 2022, arXiv 2205.14459",
            loss=CyCLIPLoss,
            lr_tau_ratio=1.0,
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
            "as sogclr, with a temperature of its own for each image and each text",
            "Qiu et al. 2023, PMLR 202",
            normalizer="table",
            temperature="individual",
            defaults={"gamma": 0.8, "gamma_schedule": "constant", "rho": 6.0},
        ),
        LossPreset(
            "fastclip-v0",
            "moving average, cosine gamma, learnable temperature; the loss without its factor tau",
            "Wei et al. 2024, arXiv 2407.01445",
            normalizer="table",
            temperature="unscaled",
            lr_tau_ratio=1.0,  # the released command gives none, so that it is the model's
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
            "moving average, cosine gamma, a temperature for each image and each text by Adam",
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
            "neuclip",
            "a network of prototypes predicts each sample's normalizer; one objective for it and the encoders",
            "NeuCLIP: Efficient Large-Scale CLIP Training with Neural Normalizer Optimization",
            normalizer="prototypes",
            encoder_objective="unified",
        ),
        LossPreset(
            "amorlip",
            "MLPs learn each sample's partition function, which the encoders divide by",
            "AmorLIP: Efficient Language-Image Pretraining via Amortization",
            loss=AmorLIPLoss,
            # The paper's own form, a full positive over the target network, collapses where we could measure it.
            defaults={"rho": 6.5, "amor_denominator": "combined", "amor_positive_weight": 1e-3},
            lr_tau_ratio=1 / 4,
        ),
        LossPreset(
            "amorlip-released",
            "as amorlip, with the settings of the authors' command for CC12M",
            "AmorLIP's README",
            loss=AmorLIPLoss,
            defaults={
                **AMORLIP_CC12M, "amor_denominator": "combined", "amor_positive_weight": 1e-3,
                "rho_annealed_from": lambda epochs: epochs // 3, "amor_beta_epochs": lambda epochs: max(1, epochs // 2),
            },
            lr_tau_ratio=1 / 4,
            training_defaults={"grad_clip_norm": 1.0},
        ),
        LossPreset(
            "amorlip-paper",
            "as amorlip, with the paper's own form of the loss and its settings for CC12M",
            "AmorLIP: Efficient Language-Image Pretraining via Amortization, Algorithm 1, Appendix C",
            loss=AmorLIPLoss,
            defaults={**AMORLIP_CC12M, "rho_annealed_from": lambda epochs: epochs - epochs // 3},
            lr_tau_ratio=1 / 4,
        ),
        LossPreset(
            "tuneclip",
            "for fine-tuning: recovery of the optimizer's statistics, then hinged gaps over moving averages, fixed tau",
            "TuneCLIP: Breaking the Limits of Open-Weight CLIP, Algorithms 1-2, Eq. 8-9",
            normalizer="table",
            temperature="fixed",
            surrogate="hinge",
            defaults={"gamma": 0.9, "gamma_decay_epochs": 4},
            # TuneCLIP, Section 5 and Table 6, but for what is the machine's. They say nothing of a warm-up of the
            # learning rate: the recovery takes its place.
            training_defaults={
                "lr": 1e-5, "beta1": 0.9, "beta2": 0.98, "wd": 0.02, "lr_scheduler": "cosine", "warmup": 0,
                "epochs": 5, "osr_epochs": 5.0, "zeroshot_frequency": 1,
            },
        ),
        LossPreset(
            "queue",
            "a queue of the latest embeddings, mixed with the batch's own estimate; nothing to train",
            "of no paper: open_clip_ext",
            normalizer="queue",
            defaults={"mixing": 0.6},
        ),
    )
}


ALIASES = {"fastclip": "fastclip-v3"}


@cache
def presets() -> dict[str, LossPreset]:
    """Every loss by name, with those of other packages; loads their parts, too.

    Raises:
        InputError: another package's entry point is broken.
    """
    for part, base in PART_CLASSES.items():
        plugins.load(
            f"open_clip_ext.{part}s", PARTS[part], partial(_is_class, base=base),
            f"a subclass of {base.__module__}.{base.__name__}",
        )
    plugins.load("open_clip_ext.losses", PRESETS, lambda loaded: isinstance(loaded, LossPreset), "a LossPreset")
    return PRESETS


def _is_class(loaded: Any, base: type) -> bool:
    return isinstance(loaded, type) and issubclass(loaded, base)


def list_losses() -> list[LossPreset]:
    """Every loss that `create_loss` or `--loss` knows, in the order to show them."""
    return list(presets().values())


def find_preset(name: str) -> LossPreset:
    """The preset called `name`, or by an alias; raises InputError that lists the valid names."""
    name = ALIASES.get(name, name)
    if name not in presets():
        raise InputError(f"--loss: {name!r} is unknown; choose one of {', '.join(presets())}")
    return presets()[name]


def options_of(parts: Iterable[type[Any]]) -> list[Option]:
    """The options of some classes, each name once, those of logit_scale's optimizer group included."""
    options: dict[str, Option] = {}
    for part in parts:
        for option in (*part.options, *getattr(part, "optimizer_options", ())):
            first = options.setdefault(option.name, option)
            if replace(first, default=None) != replace(option, default=None):
                where = f"{part.__module__}.{part.__name__}"
                raise InputError(f"{option.flag}: {where} has an option whose name another part uses otherwise")
    return list(options.values())


def all_options() -> list[Option]:
    """Every option of every part, once, for a command line."""
    losses = dict.fromkeys(preset.loss for preset in list_losses() if preset.loss is not None)
    parts = (part for name in PART_CLASSES for part in PARTS[name].values())
    return options_of((*losses, *parts))


def parts_of(name: str, settings: Mapping[str, Any]) -> tuple[type[Any], ...]:
    """The classes that have options, of the loss `name` with settings that name its parts; none for OpenCLIP's own."""
    preset = find_preset(name)
    if preset.loss is None:
        return ()
    if not preset.has_parts:
        return (preset.loss,)
    return (preset.loss, *(PARTS[part][settings[part]] for part in PART_CLASSES))


def resolve_options(name: str, given: Mapping[str, Any], epochs: int | None = None) -> dict[str, Any]:
    """Settings of the loss `name`: what is given, else the preset's, else the parts' defaults.

    Args:
        given: option or part name to value; None means not given.
        epochs: length of the training, from which schedules take their length where it is not given.

    Raises:
        InputError: an unknown loss or part, a value out of range, or a setting that this loss does not use.
    """
    preset = find_preset(name)
    given = {key: value for key, value in given.items() if value is not None}
    flags = {name: flag_of(name) for name in (*PARTS, *(option.name for option in all_options()))}
    for key in given:
        if key not in flags:
            raise InputError(f"{key}: no loss has this setting; known are {', '.join(flags)}")
    if preset.is_open_clip and given:
        raise InputError(f"{flags[next(iter(given))]}: --loss {name} is OpenCLIP's own and does not use it")

    settings = {}
    for part, valid in PARTS.items() if preset.has_parts else ():
        settings[part] = given.get(part, getattr(preset, part))
        if settings[part] not in valid:
            raise InputError(f"{flags[part]}: {settings[part]!r} is not one of {', '.join(valid)}")
    parts = parts_of(name, settings)
    used = {option.name: option for option in options_of(parts)}
    for key in given:
        if key not in used and key not in settings:
            chosen = ", which is " + " ".join(f"{flags[part]} {settings[part]}" for part in settings)
            raise InputError(f"{flags[key]}: --loss {name}{chosen if settings else ''} does not use it")
    for key, option in used.items():
        default = preset.defaults.get(key, option.default)
        if callable(default):
            default = None if epochs is None else default(epochs)
        settings[key] = given.get(key, default)
        if settings[key] is not None:
            option.check(settings[key])
    for owner in parts:
        owner.complete(settings, epochs, given)
    return settings


def create_loss(
    name: str,
    num_samples: int | None = None,
    epochs: int | None = None,
    accum_freq: int = 1,
    device: torch.device | str = "cpu",
    validate: bool = False,
    steps_per_epoch: int | None = None,
    **options: Any,
) -> Loss:
    """Build a loss by its name, for one's own training loop.

    Args:
        name: one of `list_losses()` that is not OpenCLIP's own.
        num_samples: n, rows of the data set; needed by normalizers with state per sample. A queue or a network of
            prototypes then holds at most n, see `Loss.description`.
        epochs: length of the training; schedules that are not given a length take theirs from it. A loss with a
            schedule wants `set_epoch(epoch)` before each epoch.
        accum_freq: calls per optimiser step, see `Loss`.
        device: where state per sample is kept, the embeddings' device.
        validate: check also what needs a wait for the device.
        steps_per_epoch: optimiser steps of one pass over the data; neuclip's network is restarted at least every fifth
            of it unless told otherwise.
        options: settings and parts by the flags' names with underscores.

    Raises:
        InputError: an unknown name, a setting out of range or unused by this loss, or a missing `num_samples`.
    """
    preset = find_preset(name)
    if preset.loss is None:
        raise InputError(f"--loss: {name!r} is OpenCLIP's own; create it with open_clip.create_loss")
    settings = resolve_options(name, options, epochs)
    parts = parts_of(name, settings)
    for part in parts:
        for option in getattr(part, "optimizer_options", ()):
            if option.name in options:
                raise InputError(f"{option.name}: belongs to your model and its optimizer, not to the loss")

    def build(part: type[Any], **more: Any) -> Any:
        if part.needs_index:
            if num_samples is None:
                raise InputError(f"num_samples: {part.name!r} keeps state per sample and needs their number")
            more |= {"num_samples": num_samples, "device": device}
        return part(**{option.name: settings[option.name] for option in part.options}, **more)

    calls = {"accum_freq": accum_freq, "validate": validate}
    if preset.has_parts:
        loss = _from_parts(parts, settings, build, calls)
    else:
        loss = build(preset.loss, **calls)
    if steps_per_epoch is not None:
        loss.set_steps_per_epoch(steps_per_epoch)
    if num_samples is not None:
        loss.limit_to(num_samples)
    return loss.to(device)


def _from_parts(
    parts: tuple[type[Any], ...], settings: dict[str, Any], build: Callable[..., Any], calls: dict[str, Any]
) -> GlobalContrastiveLoss:
    _, normalizer, temperature, surrogate_class = parts
    surrogate = build(surrogate_class)
    more = {"eps": settings["loss_eps"], "surrogate": surrogate} if normalizer.differentiable else {}
    return GlobalContrastiveLoss(
        normalizer=build(normalizer, **more),
        temperature=build(temperature),
        objective=ENCODER_OBJECTIVES[settings["encoder_objective"]],
        surrogate=surrogate,
        mixing=settings["mixing"],
        eps=settings["loss_eps"],
        negatives=settings["negatives"],
        **calls,
    )
