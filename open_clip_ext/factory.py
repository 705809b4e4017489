"""Build a loss from its name and settings.

A name is a preset over the replaceable parts (`presets`); each part can also be chosen separately. Other packages add
to both by entry points of that name:

| group | the entry point is |
|---|---|
| `open_clip_ext.losses` | a `LossPreset` |
| `open_clip_ext.normalizers`, `open_clip_ext.temperatures`, `open_clip_ext.surrogates` | a subclass of the base class |
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch

from open_clip_ext.errors import InputError, did_you_mean, not_one_of
from open_clip_ext.losses import Loss
from open_clip_ext.normalizers import NORMALIZERS, Normalizer
from open_clip_ext.objectives import ENCODER_OBJECTIVES
from open_clip_ext.options import Derived, Option, Part, default_value
from open_clip_ext.presets import ALIASES, PRESETS, SHIPPED, LossPreset
from open_clip_ext.surrogates import SURROGATES, Surrogate
from open_clip_ext.temperatures import TEMPERATURES, Temperature

# The replaceable parts of GlobalContrastiveLoss: option -> name -> part.
PARTS: dict[str, dict[str, Any]] = {
    "normalizer": NORMALIZERS,
    "temperature": TEMPERATURES,
    "surrogate": SURROGATES,
    "encoder_objective": ENCODER_OBJECTIVES,
}
PART_CLASSES: dict[str, type[Part]] = {"normalizer": Normalizer, "temperature": Temperature, "surrogate": Surrogate}


@cache
def presets() -> dict[str, LossPreset]:
    """Every loss by name, with the losses and parts of other packages.

    Raises:
        InputError: another package's entry point is broken.
    """
    for part, base in PART_CLASSES.items():
        add_entry_points(f"open_clip_ext.{part}s", PARTS[part], base)
    add_entry_points("open_clip_ext.losses", PRESETS)
    return PRESETS


def add_entry_points(group: str, table: dict[str, Any], base: type[Part] | None = None) -> None:
    """Add the entry points of a group to its table: subclasses of `base`, or presets.

    Raises:
        InputError: an entry point cannot be imported, has another type or name, or its name is taken; the message names
            the package to fix or uninstall.
    """
    for point in entry_points(group=group):
        package = point.dist.name if point.dist is not None else point.value
        entry_point = f"entry point {point.name!r} of {package} in group {group}"
        try:
            loaded = point.load()
        except Exception as error:
            raise InputError(f"{entry_point}: {point.value!r} cannot be imported: {error!r}") from None
        if base is None:
            fits, expected = isinstance(loaded, LossPreset), "a LossPreset"
        else:
            fits = isinstance(loaded, type) and issubclass(loaded, base)
            expected = f"a subclass of {base.__module__}.{base.__name__}"
        if not fits or loaded.name != point.name:
            raise InputError(f"{entry_point}: {point.value!r} must be {expected} with that name")
        if table.get(point.name, loaded) is not loaded:
            raise InputError(f"{entry_point}: the name is taken; choose another")
        table[point.name] = loaded


def list_losses() -> list[LossPreset]:
    """Every loss that `create_loss` or `--loss` knows, in display order."""
    return list(presets().values())


def find_preset(name: str) -> LossPreset:
    """Preset with this name or alias; InputError, which lists the valid names, if there is none."""
    name = ALIASES.get(name, name)
    if name not in presets():
        raise InputError(not_one_of(name, presets()), "loss")
    return presets()[name]


def is_installed(name: str) -> bool:
    """Whether every command knows the loss, and not only the script that added it to `PRESETS`."""
    return name in SHIPPED or name in entry_points(group="open_clip_ext.losses").names


def options_of(parts: Iterable[type[Part]]) -> list[Option]:
    """List the options that the classes `parts` declare, without repeats, and those of logit_scale's optimizer group.

    Raises:
        InputError: two parts declare different options of the same name.
    """
    options: dict[str, Option] = {}
    for part in parts:
        for option in (*part.options, *part.optimizer_options):
            same_name = options.setdefault(option.name, option)
            if same_name is not option and replace(same_name, default=None) != replace(option, default=None):
                where = f"{part.__module__}.{part.__name__}"
                raise InputError(f"{where} has an option whose name another part uses otherwise", option.name)
    return list(options.values())


def all_parts() -> list[type[Part]]:
    """All classes that declare options: losses, normalizers, temperatures and surrogates, also of other packages."""
    losses = dict.fromkeys(preset.loss for preset in list_losses() if preset.loss is not None)
    return [*losses, *(part for name in PART_CLASSES for part in PARTS[name].values())]


def all_options() -> list[Option]:
    """All options of all parts, without repeats, for a command line."""
    return options_of(all_parts())


def setting_names() -> list[str]:
    """Names of the parts and of every option."""
    return [*PARTS, *(option.name for option in all_options())]


def parts_of(name: str, settings: Mapping[str, Any]) -> tuple[type[Part], ...]:
    """Classes with options that the loss `name` consists of; empty for OpenCLIP's own losses.

    Args:
        settings: contains the name of each part, such as `normalizer`.
    """
    preset = find_preset(name)
    if not preset.has_parts or preset.loss is None:
        return () if preset.loss is None else (preset.loss,)
    return (preset.loss, *(PARTS[part][settings[part]] for part in PART_CLASSES))


def defaults_of(name: str, parts: Iterable[type[Part]]) -> dict[str, Any]:
    """Default of each option of the loss `name` with these `parts`: a value, or `Derived`."""
    preset = find_preset(name)
    return {option.name: preset.defaults.get(option.name, option.default) for option in options_of(parts)}


def resolve_options(name: str, explicit: Mapping[str, Any], epochs: int | None = None) -> dict[str, Any]:
    """Settings of the loss `name`: explicit values, then the preset's, then the parts' defaults.

    Args:
        explicit: option or part name to value; None means not given.
        epochs: length of the training; if None, settings derived from it stay None.

    Raises:
        InputError: an unknown loss or part, a value out of range, or a setting that this loss does not use.
    """
    preset = find_preset(name)
    explicit = {key: value for key, value in explicit.items() if value is not None}
    valid_names = setting_names()
    for key in explicit:
        if key not in valid_names:
            near = did_you_mean(key, valid_names) or f"; known are {', '.join(valid_names)}"
            raise InputError(f"no loss has this setting{near}", key)
    if preset.is_open_clip and explicit:
        raise InputError(f"the loss {name!r} is OpenCLIP's own and does not use it", next(iter(explicit)))

    settings = {}
    for part, valid in PARTS.items() if preset.has_parts else ():
        settings[part] = explicit.get(part, getattr(preset, part))
        if settings[part] not in valid:
            raise InputError(not_one_of(settings[part], valid), part)
    parts = parts_of(name, settings)
    defaults = defaults_of(name, parts)
    for key in explicit:
        if key not in defaults and key not in settings:
            made_of = ", ".join(f"{part} {settings[part]!r}" for part in settings)
            raise InputError(f"the loss {name!r}{f' with {made_of}' if settings else ''} does not use it", key)
    for option in options_of(parts):
        value = explicit.get(option.name, default_value(defaults[option.name], epochs))
        settings[option.name] = value if value is None else option.check(value)
    for owner in parts:
        owner.complete(settings, epochs, explicit)
    return settings


@torch.inference_mode(False)  # whose tensors could never be trained
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
    """Build a loss by its name, for your own training loop.

    Args:
        name: one of `list_losses()` that is not OpenCLIP's own.
        num_samples: n, rows of the data set; required by parts with state per sample. A queue or a network of
            prototypes then holds at most n, see `Loss.description`.
        epochs: length of the training; the default length of schedules. A loss with a schedule needs
            `set_epoch(epoch)` before each epoch.
        accum_freq: calls per optimizer step, see `Loss`.
        device: the embeddings' device, where state per sample is kept.
        validate: make also the checks that wait for the device, see `Loss`.
        steps_per_epoch: optimizer steps in one pass over the data. By default neuclip's network then restarts every
            fifth of a pass (a whole pass below 10 steps), at most 500 steps apart; with `epochs` its learning rate
            follows from the length of the training.
        options: settings and parts, by the flags' names with underscores.

    Raises:
        InputError: an unknown name, a setting out of range or unused by this loss, or a missing `num_samples`.
    """
    preset = find_preset(name)
    if preset.loss is None:
        raise InputError(f"{name!r} is OpenCLIP's own; create it with open_clip.create_loss", "loss")
    for length, value in (("num_samples", num_samples), ("epochs", epochs), ("steps_per_epoch", steps_per_epoch)):
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{value!r} must be an integer of at least 1", length)
    settings = resolve_options(name, options, epochs)
    if (epochs is None) != (steps_per_epoch is None) and settings.get("npn_lr", 0) is None:
        missing, other = ("epochs", "steps_per_epoch") if epochs is None else ("steps_per_epoch", "epochs")
        logging.warning(f"npn_lr: 1.0, the default of a long training, as {other} came without {missing}; give both")
    parts = parts_of(name, settings)
    loss_options = {option.name for part in parts for option in part.options}
    for key in options:
        if key not in loss_options and key not in PARTS:
            raise InputError("belongs to your model and its optimizer, not to the loss", key)

    defaults = defaults_of(name, parts)
    for option in options_of(parts):
        default = defaults[option.name]
        is_derived = isinstance(default, Derived) and not isinstance(option.default, Derived)
        if is_derived and option.name in loss_options and settings[option.name] is None:
            # The part would take its own default, which is not the preset's.
            raise InputError(f"{default.words} by default; give it, or the number of epochs", option.name)

    def build(part: type[Part], **more: Any) -> Any:
        if part.needs_index:
            if num_samples is None:
                raise InputError(f"{part.name!r} keeps state per sample and needs their number", "num_samples")
            more |= {"num_samples": num_samples, "device": device}
        return part(**{option.name: settings[option.name] for option in part.options}, **more)

    arguments: dict[str, Any] = {"accum_freq": accum_freq, "validate": validate}
    if preset.has_parts:
        classes: tuple[type[Any], ...] = parts[1:]
        normalizer, temperature, surrogate = classes
        arguments["surrogate"] = own_surrogate = build(surrogate)
        of_loss = {"eps": settings["loss_eps"], "surrogate": own_surrogate} if normalizer.differentiable else {}
        arguments["normalizer"] = build(normalizer, **of_loss)
        arguments["temperature"] = build(temperature)
        arguments["objective"] = ENCODER_OBJECTIVES[settings["encoder_objective"]]
    loss = build(preset.loss, **arguments)
    if steps_per_epoch is not None:
        loss.set_steps_per_pass(steps_per_epoch, epochs)
    if num_samples is not None:
        loss.limit_to(num_samples)
    return loss.to(device)
