"""Names of losses, and the loss that a name stands for.

A name is a preset over the replaceable parts; each part can also be chosen on its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from open_clip_ext.errors import InputError
from open_clip_ext.losses import OBJECTIVES, GlobalContrastiveLoss
from open_clip_ext.normalizers import NORMALIZERS
from open_clip_ext.options import Option
from open_clip_ext.surrogates import SURROGATES
from open_clip_ext.temperature import TEMPERATURES

# The replaceable parts: flag, the valid names, and the option's name in a preset.
PARTS = {
    "normalizer": NORMALIZERS,
    "temperature": TEMPERATURES,
    "surrogate": SURROGATES,
    "encoder_objective": OBJECTIVES,
}


@dataclass(frozen=True)
class LossPreset:
    """What `--loss NAME` means.

    Args:
        name: as given to `--loss`.
        summary: one line for `--list-losses`.
        paper: where the method is from.
        normalizer, temperature, surrogate, encoder_objective: names of its parts; a normalizer of None stands for
            OpenCLIP's own losses, which are left untouched.
        defaults: options that this method sets otherwise than the parts do.
    """

    name: str
    summary: str
    paper: str
    normalizer: str | None = None
    temperature: str = "learnable"
    surrogate: str = "identity"
    encoder_objective: str = "compositional"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_open_clip(self) -> bool:
        return self.normalizer is None


PRESETS = {
    preset.name: preset
    for preset in (
        LossPreset(
            "clip",
            "OpenCLIP's own softmax loss over the batch, untouched",
            "Radford et al. 2021, arXiv 2103.00020",
        ),
        LossPreset(
            "siglip",
            "OpenCLIP's own sigmoid loss, untouched (same as --siglip)",
            "Zhai et al. 2023, arXiv 2303.15343",
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
            defaults={"rho": 7.0, "tau_start": 0.03, "tau_min": 0.01, "tau_optimizer": "adam"},
        ),
        LossPreset(
            "fastclip-v3",
            "moving average, cosine gamma, learnable temperature with rho",
            "Wei et al. 2024, arXiv 2407.01445",
            normalizer="table",
            defaults={"lr_tau_scheduler": "fastclip"},
        ),
        LossPreset(
            "neuclip",
            "a network of prototypes predicts each sample's normalizer; one objective for it and the encoders",
            "NeuCLIP: Efficient Large-Scale CLIP Training with Neural Normalizer Optimization",
            normalizer="prototypes",
            encoder_objective="unified",
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


def list_losses() -> list[LossPreset]:
    """Every loss that `create_loss` or `--loss` knows, in the order to show them."""
    return list(PRESETS.values())


ALIASES = {"fastclip": "fastclip-v3"}


def find_preset(name: str) -> LossPreset:
    """The preset called `name`, or by an alias; raises InputError that lists the valid names."""
    name = ALIASES.get(name, name)
    if name not in PRESETS:
        raise InputError(f"--loss: {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def all_options() -> list[Option]:
    """Every option of every part, once, for a command line."""
    parts = [GlobalContrastiveLoss, *NORMALIZERS.values(), *TEMPERATURES.values(), *SURROGATES.values()]
    options = [option for part in parts for option in (*part.options, *getattr(part, "optimizer_options", ()))]
    return list({option.name: option for option in options}.values())


def parts_of(settings: Mapping[str, Any]) -> tuple[type, ...]:
    """The classes that have options, for settings that name the parts."""
    names = ("normalizer", "temperature", "surrogate")
    return (GlobalContrastiveLoss, *(PARTS[name][settings[name]] for name in names))


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
    known = {option.name: option for option in all_options()}
    flags = {name: "--" + name.replace("_", "-") for name in (*PARTS, *known)}
    for key in given:
        if key not in flags:
            raise InputError(f"{key}: no loss has this setting; known are {', '.join(flags)}")
    if preset.is_open_clip:
        if given:
            raise InputError(f"{flags[next(iter(given))]}: --loss {name} is OpenCLIP's own and does not use it")
        return {}

    settings = {}
    for part, valid in PARTS.items():
        settings[part] = given.get(part, getattr(preset, part))
        if settings[part] not in valid:
            raise InputError(f"{flags[part]}: {settings[part]!r} is not one of {', '.join(valid)}")
    parts = parts_of(settings)
    used = {
        option.name: option for part in parts for option in (*part.options, *getattr(part, "optimizer_options", ()))
    }
    for key in given:
        if key in known and key not in used:
            chosen = " ".join(f"{flags[part]} {settings[part]}" for part in PARTS)
            raise InputError(f"{flags[key]}: --loss {name}, which is {chosen}, does not use it")
    for key, option in used.items():
        settings[key] = given.get(key, preset.defaults.get(key, option.default))
        if settings[key] is not None:
            option.check(settings[key])
    if "gamma_decay_epochs" in used and settings["gamma_decay_epochs"] is None:
        if epochs is None and settings["gamma_schedule"] == "cosine":
            raise InputError("gamma_decay_epochs: the cosine of gamma needs its length, or the number of epochs")
        settings["gamma_decay_epochs"] = max(1, (epochs or 2) // 2)
    return settings


def create_loss(
    name: str,
    num_samples: int | None = None,
    epochs: int | None = None,
    accum_freq: int = 1,
    device: torch.device | str = "cpu",
    validate: bool = False,
    **options: Any,
) -> GlobalContrastiveLoss:
    """Build a loss by its name, for one's own training loop.

    Args:
        name: one of `list_losses()` that is not OpenCLIP's own.
        num_samples: n, rows of the data set; needed by normalizers with state per sample.
        epochs: length of the training; schedules that are not given a length take half of it. A loss with a schedule
            wants `set_epoch(epoch)` before each epoch.
        accum_freq: calls per optimiser step, see `GlobalContrastiveLoss`.
        device: where state per sample is kept, the embeddings' device.
        validate: check also what needs a wait for the device.
        options: settings and parts by the flags' names with underscores.

    Raises:
        InputError: an unknown name, a setting out of range or unused by this loss, or a missing `num_samples`.
    """
    if find_preset(name).is_open_clip:
        raise InputError(f"--loss: {name!r} is OpenCLIP's own; create it with open_clip.create_loss")
    for scheme in TEMPERATURES.values():
        for option in scheme.optimizer_options:
            if option.name in options:
                raise InputError(f"{option.name}: belongs to your model and its optimizer, not to the loss")
    settings = resolve_options(name, options, epochs)

    def build(part: type, **more: Any) -> Any:
        if getattr(part, "needs_index", False):
            if num_samples is None:
                raise InputError(f"num_samples: {part.name!r} keeps state per sample and needs their number")
            more |= {"num_samples": num_samples, "device": device}
        return part(**{option.name: settings[option.name] for option in part.options}, **more)

    _, normalizer, temperature, surrogate_class = parts_of(settings)
    surrogate = build(surrogate_class)
    more = {"eps": settings["loss_eps"], "surrogate": surrogate} if normalizer.differentiable else {}
    return GlobalContrastiveLoss(
        normalizer=build(normalizer, **more),
        temperature=build(temperature),
        objective=OBJECTIVES[settings["encoder_objective"]],
        surrogate=surrogate,
        mixing=settings["mixing"],
        eps=settings["loss_eps"],
        accum_freq=accum_freq,
        validate=validate,
    )
