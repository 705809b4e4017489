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
from open_clip_ext.temperature import LearnableTemperature


@dataclass(frozen=True)
class LossPreset:
    """What `--loss NAME` means.

    Args:
        name: as given to `--loss`.
        summary: one line for `--list-losses`.
        paper: where the method is from.
        normalizer, objective: names of its parts; None for OpenCLIP's own losses, which are left untouched.
        defaults: options that this method sets otherwise than the parts do.
    """

    name: str
    summary: str
    paper: str
    normalizer: str | None = None
    objective: str | None = None
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
            "fastclip-v3",
            "moving average of each sample's normalizer, cosine gamma, learnable temperature with rho",
            "Wei et al. 2024, arXiv 2407.01445",
            normalizer="table",
            objective="compositional",
            defaults={"lr_tau_scheduler": "fastclip"},
        ),
        LossPreset(
            "neuclip",
            "a network of prototypes predicts each sample's normalizer; one objective for it and the encoders",
            "NeuCLIP: Efficient Large-Scale CLIP Training with Neural Normalizer Optimization",
            normalizer="prototypes",
            objective="unified",
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
    parts = [GlobalContrastiveLoss, LearnableTemperature, *NORMALIZERS.values()]
    return [option for part in parts for option in part.options] + list(LearnableTemperature.optimizer_options)


def loss_options_of(normalizer: str) -> list[Option]:
    """The options of a loss with this normalizer."""
    return [*GlobalContrastiveLoss.options, *LearnableTemperature.options, *NORMALIZERS[normalizer].options]


def options_of(normalizer: str) -> list[Option]:
    """The same, and those of the optimizer group that trains its temperature."""
    return [*loss_options_of(normalizer), *LearnableTemperature.optimizer_options]


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
    flags = {key: option.flag for key, option in known.items()}
    flags |= {"normalizer": "--normalizer", "encoder_objective": "--encoder-objective"}
    for key in given:
        if key not in flags:
            raise InputError(f"{key}: no loss has this setting; known are {', '.join(flags)}")
    if preset.is_open_clip:
        if given:
            raise InputError(f"{flags[next(iter(given))]}: --loss {name} is OpenCLIP's own and does not use it")
        return {}

    settings = {"normalizer": preset.normalizer, "encoder_objective": preset.objective}
    for part, valid in (("normalizer", NORMALIZERS), ("encoder_objective", OBJECTIVES)):
        settings[part] = given.get(part, settings[part])
        if settings[part] not in valid:
            raise InputError(f"{flags[part]}: {settings[part]!r} is not one of {', '.join(valid)}")
    used = {option.name: option for option in options_of(settings["normalizer"])}
    for key in given:
        if key in known and key not in used:
            chosen = f"--loss {name} with --normalizer {settings['normalizer']}"
            raise InputError(f"{flags[key]}: {chosen} does not use it")
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
        options: settings by the flags' names with underscores, and `normalizer`, `encoder_objective`.

    Raises:
        InputError: an unknown name, a setting out of range or unused by this loss, or a missing `num_samples`.
    """
    if find_preset(name).is_open_clip:
        raise InputError(f"--loss: {name!r} is OpenCLIP's own; create it with open_clip.create_loss")
    for option in LearnableTemperature.optimizer_options:
        if option.name in options:
            raise InputError(f"{option.name}: belongs to the optimizer of your logit_scale, not to the loss")
    settings = resolve_options(name, options, epochs)
    normalizer_class = NORMALIZERS[settings["normalizer"]]
    arguments = {option.name: settings[option.name] for option in normalizer_class.options}
    if normalizer_class.needs_index:
        if num_samples is None:
            raise InputError(f"num_samples: the {normalizer_class.name} normalizer needs the number of rows")
        arguments.update(num_samples=num_samples, device=device)
    if normalizer_class.differentiable:
        arguments.update(eps=settings["loss_eps"])
    return GlobalContrastiveLoss(
        normalizer=normalizer_class(**arguments),
        temperature=LearnableTemperature(rho=settings["rho"]),
        objective=OBJECTIVES[settings["encoder_objective"]],
        eps=settings["loss_eps"],
        accum_freq=accum_freq,
        validate=validate,
    )
