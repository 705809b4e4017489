"""The text of `--loss NAME --help`: only the flags of that loss, with the values that it would use."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from open_clip_ext import factory
from open_clip_ext.errors import InputError
from open_clip_ext.options import Derived, Option, Part, flag_of

PART_HELP = {
    "normalizer": "estimator of the normalizers",
    "temperature": "temperature scheme",
    "surrogate": "function of a negative's similarity gap",
    "encoder_objective": "objective of the encoders",
}
COLUMN = 34  # start of the second column
REST = "Every other flag, OpenCLIP's and ours: --help all. Every loss with its paper: --list-losses."


def default_texts() -> dict[str, str]:
    """Notes on the options' defaults in the help on all flags, by name; empty for a switch."""
    options = [option for part in factory.all_parts() for option in factory.options_of([part])]
    defaults: dict[str, set[Any]] = {}
    for option in options:
        defaults.setdefault(option.name, set()).add(option.default)
    for preset in factory.list_losses():
        for name, default in preset.defaults.items():
            if name in defaults:
                defaults[name].add(default)
    return {option.name: _default_text(defaults[option.name]) for option in options}


def _default_text(defaults: set[Any]) -> str:
    if len(defaults) > 1:
        return " (default: per loss)"
    (default,) = defaults
    if default is False:
        return ""
    return f" (default: {default.words if isinstance(default, Derived) else default})"


def loss_help(flag_values: Mapping[str, Any]) -> str:
    """The help on the loss `flag_values["loss"]`.

    Args:
        flag_values: flags of the command line by name. The values shown are those with these flags; values that
            depend on `epochs` are described in words if it is not among them.

    Raises:
        InputError: as `factory.resolve_options`.
    """
    preset = factory.find_preset(flag_values["loss"])
    names = [*factory.PARTS, *(option.name for option in factory.all_options())]
    loss_settings = {name: flag_values[name] for name in names if name in flag_values}
    epochs = flag_values.get("epochs", preset.training_defaults.get("epochs"))
    if epochs is not None:
        epochs = max(1, epochs + ceil(flag_values.get("osr_epochs", 0)))
    settings = factory.resolve_options(preset.name, loss_settings, epochs)
    parts = factory.parts_of(preset.name, settings)
    defaults = factory.defaults_of(preset.name, parts)
    if "lr_tau" in defaults:
        defaults["lr_tau"] = Derived("--lr" + ("" if preset.lr_tau_ratio == 1 else f" / {1 / preset.lr_tau_ratio:g}"))

    rows = []
    listed_names: set[str] = set()
    for kind, part in zip(("loss", *factory.PART_CLASSES), parts, strict=False):
        rows.append(("the loss:", "") if kind == "loss" else _choice(kind, settings[kind]))
        unused = []
        for option in factory.options_of([part]):
            if option.name in listed_names:
                continue
            listed_names.add(option.name)
            if _has_effect(option, parts, settings, epochs):
                rows.append(_option(option, settings[option.name], defaults[option.name]))
            else:
                unused.append(option.flag)
        if unused:
            rows.append(("", f"(no effect with these: {', '.join(unused)})"))
    if preset.has_parts:
        rows.append(_choice("encoder_objective", settings["encoder_objective"]))
    if preset.training_defaults:
        flags = " ".join(f"{flag_of(name)} {value}" for name, value in preset.training_defaults.items())
        rows.append(("the training, by default:", flags))
    lines = columns(rows) or ["It has no flags of its own."]
    return "\n".join([f"--loss {preset.name}: {preset.summary}", preset.paper, "", *lines, "", REST])


def _choice(kind: str, name: str) -> tuple[str, str]:
    """The row of a replaceable part, above those of its options."""
    return f"{flag_of(kind)} {name}", f"{PART_HELP[kind]}: {', '.join(factory.PARTS[kind])}"


def _option(option: Option, value: Any, default: Any) -> tuple[str, str]:
    notes = []
    if option.choices:
        notes.append(", ".join(option.choices))
    if option.type is bool and value is not None:
        notes.append("on" if value else "off")
        value = None
    elif value is None:
        notes.append(f"default: {default.words}")
    flag = option.flag if value is None else f"{option.flag} {value}"
    return f"  {flag}", option.help + (f" ({'; '.join(notes)})" if notes else "")


def _has_effect(option: Option, parts: Sequence[type[Part]], settings: dict[str, Any], epochs: int | None) -> bool:
    """Whether the option has an effect with the settings; a switch is tried in its on position."""
    changed = {option.name: True} if option.type is bool else {}
    try:
        for part in parts:
            part.complete(settings | changed, epochs, [option.name])
    except InputError:
        return False
    return True


def columns(rows: list[tuple[str, str]], start: int = COLUMN) -> list[str]:
    """The two columns, the second from `start` on and wrapped to the terminal."""
    width = max(80, shutil.get_terminal_size().columns) - start
    lines = []
    for label, right in rows:
        first_line, *further_lines = textwrap.wrap(right, width, break_on_hyphens=False) or [""]
        lines += [f"{label:<{start - 1}} {first_line}".rstrip(), *(" " * start + other for other in further_lines)]
    return lines
