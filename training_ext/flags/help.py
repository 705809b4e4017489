"""The texts of --help, by topic or of one loss with the values that it would use, --list-losses and --list-recipes."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, NoReturn

from open_clip_ext import factory
from open_clip_ext.errors import InputError, did_you_mean
from open_clip_ext.options import Derived, Option, Part, flag_of
from training_ext.flags import recipes
from training_ext.flags.params import PART_HELP, Parser, check_given

COLUMN = 34  # start of the second column
REST = "Every other flag, OpenCLIP's and ours: --help all. Every loss with its paper: --list-losses."


# Flags that --help names of the topics that it does not show.
MOST_USED = {
    "losses": ("--rho", "--lr-tau", "--normalizer"),
    "openclip": ("--train-data", "--model", "--batch-size", "--lr", "--epochs", "--precision", "--accum-freq"),
}


class HelpParser(Parser):
    """Prints what the command line asks for instead of parsing it, and exits."""

    def __init__(self) -> None:
        super().__init__(add_help=False)
        self.add_argument("-h", "--help", nargs="?", const="", metavar="TOPIC", help="show this help and exit")
        self.notes = default_texts()

    def _parse(self, args: Sequence[str], namespace: Any) -> NoReturn:
        on_command_line = self._given(args)
        if "list_losses" in on_command_line:
            print(list_losses())
        elif "list_recipes" in on_command_line:
            print(recipes.listing())
        else:
            settings = self._given([*self._of_recipe(on_command_line)[1], *args])
            if "loss" in settings:
                check_given(settings)
                print(loss_help(settings))
            else:
                print(self._on(on_command_line.get("help", "")))
        self.exit(0)

    def _on(self, topic: str) -> str:
        """The flags of one topic, or of "" or "all".

        Raises:
            InputError: there is no such topic.
        """
        if topic not in (*self._topics, "all"):
            topics = [name for name in (*self._topics, "all") if name]
            self.error(f"--help: no topic is called {topic!r}{did_you_mean(topic, topics, 'see --help')}")
        formatter = self._get_formatter()
        if topic in ("", "all"):
            formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
            formatter.add_text(self.description)
        for group in sum(self._topics.values(), []) if topic == "all" else self._topics[topic]:
            formatter.start_section(group.title)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        if topic:
            return formatter.format_help().rstrip()
        rows = [("--loss NAME --help", "the flags of one loss, with the values that it would use")]
        for name, about in {"losses": "the flags of all losses", "openclip": self._optionals.title}.items():
            rows.append((f"--help {name}", f"{about}, such as {', '.join(MOST_USED[name])}"))
        for name, groups in self._topics.items():
            if name not in ("", *MOST_USED):
                flags = (action.option_strings[0] for action in groups[0]._group_actions)
                rows.append((f"--help {name}", " ".join(flags)))
        rows.append(("--help all", "everything"))
        lines = columns([(f"  {words}", text) for words, text in rows], 28)
        return "\n".join([formatter.format_help(), "more help:", *lines])


def list_losses() -> str:
    losses = factory.list_losses()
    return "\n".join(f"{preset.name:16} {preset.summary}\n{'':16} {preset.paper}" for preset in losses)


def default_texts() -> dict[str, str]:
    """Notes on the options' defaults in the help on all flags, by name; empty for a switch."""
    defaults: dict[str, set[Any]] = {}
    for part in factory.all_parts():
        for option in factory.options_of([part]):
            defaults.setdefault(option.name, set()).add(option.default)
    for preset in factory.list_losses():
        for name in defaults.keys() & preset.defaults.keys():
            defaults[name].add(preset.defaults[name])
    return {name: _default_text(values) for name, values in defaults.items()}


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
