"""The command line: OpenCLIP's flags and, in a group of their own, this package's, from one parser."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from open_clip_train import params

from open_clip_ext import factory
from open_clip_ext.errors import InputError, did_you_mean
from open_clip_ext.losses import Loss
from open_clip_ext.options import flag_of
from training_ext.core.component import Component, choose, names_of, registry
from training_ext.core.flags import NEEDS_LOSS, OneLineParser, add_option, settle
from training_ext.core.patching import replaced
from training_ext.core.plan import world_info
from training_ext.openclip.hosts import complete

if TYPE_CHECKING:
    from training_ext.flags.recipes import Recipe

PART_HELP = {
    "normalizer": "estimator of the normalizers",
    "temperature": "temperature scheme",
    "surrogate": "function of a negative's similarity gap",
    "encoder_objective": "objective of the encoders",
}
FIRST_SCREENS = ("the run", "data", "evaluation")  # topics of components that --help shows


class Parser(OneLineParser):
    """The parser that OpenCLIP's parse_args creates and fills; it adds this package's flags before it parses."""

    notes: Mapping[str, str] = {}  # ends of the help on options of losses, by name

    def __init__(self, add_help: bool = True) -> None:
        super().__init__(
            add_help=add_help,
            prog="open_clip_ext.main",
            usage="python -m open_clip_ext.main --loss NAME [flags]",
            description="OpenCLIP's training with global contrastive losses. Without --loss it is OpenCLIP's own.",
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
        )

    def parse_args(  # type: ignore[override]  # the overloads of argparse return other namespaces, too
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        args = [] if args is None else args  # OpenCLIP always gives them
        for action in self._actions:
            if action.dest == "dataset_type":
                action.choices = [*(action.choices or ()), "folder", "shapes"]
        theirs = len(self._actions)
        self._optionals.title = "OpenCLIP's flags"
        self._topics: dict[str, list[Any]] = {}
        self._add_ours()
        self._topics["openclip"] = [self._optionals]
        self._ours = self._actions[theirs:]
        return self._parse(args, namespace)

    def _parse(self, args: Sequence[str], namespace: argparse.Namespace | None) -> argparse.Namespace:
        on_command_line = self._given(args)
        recipe, from_recipe = self._of_recipe(on_command_line)
        parsed, unknown = self._parse_known([*from_recipe, *args], namespace)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            name = unknown[0].partition("=")[0]
            near = f"; {FASTCLIP[name]}" if name in FASTCLIP else did_you_mean(name, flags, "see --help")
            self.error(f"unknown: {' '.join(unknown)}{near}")
        parsed.given_flags = frozenset(on_command_line).union(self._given(from_recipe) if from_recipe else ())
        if recipe is not None and "batch_size" not in on_command_line:
            batch_size = recipe.batch_size(world_info()[2], max(1, parsed.accum_freq))
            if batch_size is not None:
                parsed.batch_size = batch_size
                parsed.given_flags |= {"batch_size"}
        parsed.recipe_flags = parsed.given_flags - on_command_line.keys()
        return parsed

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What argparse takes an abbreviation for: OpenCLIP's flags alone, so that it means what it means there."""
        return [match for match in super()._get_option_tuples(option_string) if match[0] not in self._ours]

    def _parse_known(
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        try:
            return self.parse_known_args(args, namespace)
        except InputError:
            raise
        except (ValueError, SyntaxError) as error:  # OpenCLIP's action for pairs
            self.error(f"--aug-cfg: must be NAME=VALUE, such as scale=(0.9,1.0); {error}")

    def _of_recipe(self, on_command_line: dict[str, Any]) -> "tuple[Recipe | None, list[str]]":
        """The recipe, and its arguments, to be put before those of the command line, which override them."""
        if "recipe" not in on_command_line:
            return None, []
        from training_ext.flags import recipes

        recipe, loss = recipes.find(on_command_line["recipe"]), on_command_line.get("loss")
        # Another loss than the recipe's has settings of its own.
        recipe_loss = recipe.flags.get("loss")
        if loss and recipe_loss and factory.find_preset(loss).name != factory.find_preset(str(recipe_loss)).name:
            own_settings = factory.setting_names()
            flags = {name: value for name, value in recipe.flags.items() if name not in own_settings}
            recipe = replace(recipe, flags=flags)
        arguments = recipes.arguments(recipe, self._actions)
        try:
            self._parse_known(arguments)
        except InputError as error:
            raise InputError(f"{recipe.name!r}: {error}", "--recipe") from None
        return recipe, arguments

    def _given(self, args: Sequence[str]) -> dict[str, Any]:
        """The flags given in the arguments, by name; a value equal to its default counts, too."""
        defaults = [(action, action.default) for action in self._actions]
        for action in self._actions:
            action.default = argparse.SUPPRESS
        try:
            return vars(self._parse_known(args)[0])
        finally:
            for action, default in defaults:
                action.default = default

    def _add_ours(self) -> None:
        groups: dict[str, argparse._ArgumentGroup] = {}

        def under(title: str, topic: str | None = None) -> argparse._ArgumentGroup:
            """The group of that title; `topic`: where --help shows it, or None for its first screens."""
            if title not in groups:
                groups[title] = self.add_argument_group(title)
                self._topics.setdefault(topic or "", []).append(groups[title])
            return groups[title]

        group = under("which training")
        prints: dict[str, Any] = {"action": "store_true", "default": argparse.SUPPRESS}
        group.add_argument("--loss", metavar="NAME", help=f"one of {', '.join(factory.presets())}")
        group.add_argument("--list-losses", **prints, help="print every loss with its paper, and exit")
        group.add_argument(
            "--recipe",
            metavar="NAME|FILE",
            help="use the flags of a published training or a YAML file as defaults; see --list-recipes",
        )
        group.add_argument("--list-recipes", **prints, help="print every recipe in a line, and exit")
        group.add_argument("--bare", action="store_true", help="train by the core alone, which has few of these flags")
        group.add_argument("--with", dest="added", metavar="NAMES", help="train by the core and these components alone")
        group.add_argument("--without", metavar="NAMES", help="train without these, with commas between them")
        group.add_argument(
            "--dry-run",
            action="store_true",
            help="print the resulting flags, the steps and the memory of each process, and exit; needs no data if "
            "--train-num-samples is given. WORLD_SIZE=8 in the environment stands for 8 processes",
        )
        for kind in registry().values():
            for option in kind.options:
                topic = None if kind.topic in FIRST_SCREENS else kind.name
                add_option(under(kind.topic or kind.name.replace("_", " "), topic), option)
        group = under("the run")
        group.add_argument(
            "--seams", action="store_true", help="print what is replaced in OpenCLIP, and by which component"
        )
        group.add_argument(
            "--traceback",
            action="store_true",
            help="show Python's traceback besides the line that an error before the first step ends with",
        )
        left = {option.name for option in factory.all_options()}
        for part, base in (factory.PART_CLASSES | {"encoder_objective": Loss}).items():
            names, group = ", ".join(factory.PARTS[part]), under(PART_HELP[part], "losses")
            group.add_argument(flag_of(part), metavar="PART", help=f"instead of the loss's own: {names}")
            for option in factory.options_of(cls for cls in factory.all_parts() if issubclass(cls, base)):
                if option.name in left:
                    left.remove(option.name)
                    add_option(group, option, self.notes.get(option.name, ""))


# Flags of FastCLIP's code, by what to give instead; for others the closest name is.
FASTCLIP = {
    "--data_size": "leave it out, since the samples are counted; for remote shards give --train-num-samples",
    "--fastclip_eps": "give --loss-eps",
    "--multiply_tau": "leave it out; it makes the difference between --loss fastclip-v3 and fastclip-v0",
    "--temperature_scheme": "give --loss: global_constant is fastclip-v1, individual_learnable fastclip-v2, "
    "global_learnable fastclip-v3",
}


MOST_EPOCHS = 10**6


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line into OpenCLIP's namespace, with all settings of the chosen loss filled in.

    `uses_ext_loss` tells whether the loss is one of this package's; settings that the loss does not use stay None.

    Raises:
        InputError: a wrong flag or value, a flag that the loss does not use, an unknown loss.
    """
    parser: type[Parser] = Parser
    if {"-h", "--help", "--list-losses", "--list-recipes"} & {*argv}:
        from training_ext.flags.help import HelpParser

        parser = HelpParser
    with replaced({("open_clip_train.params", "argparse.ArgumentParser"): parser}):
        try:
            args = params.parse_args(argv)
        except InputError:
            raise
        except ValueError as error:  # flags that contradict each other, in 4.x
            raise InputError(" ".join(str(error).split())) from None
    complete(args)
    try:
        return _resolve(args)
    except InputError as error:
        if error.argument is None or error.argument.removeprefix("--").replace("-", "_") not in args.recipe_flags:
            raise
        raise InputError(f"{error.text} (from --recipe {args.recipe})", error.argument) from None


def _resolve(args: argparse.Namespace) -> argparse.Namespace:
    """Set each flag of the chosen loss that was not given to its default for that loss and length of training."""
    args.epochs_before = 0.0
    settings = {name: getattr(args, name) for name in factory.setting_names() if getattr(args, name) is not None}
    if re.fullmatch(r"[\d.e-]+", settings.get("temperature", "")):
        text = f"{args.temperature} is no scheme; FastCLIP's --temperature is --tau-init here"
        raise InputError(text, "--temperature")
    if args.loss is None:
        for name in [*settings, *given_of(args, lambda kind: kind.needs_loss or kind.needs_ext_loss)]:
            raise InputError(NEEDS_LOSS, flag_of(name))
        settle(args, settings)
        return args
    preset = factory.find_preset(args.loss)
    args.loss = preset.name
    args.uses_ext_loss = not preset.is_open_clip
    args.given_settings = settings
    for name, value in preset.training_defaults.items():
        if name not in args.given_flags and hasattr(args, name):  # not that of a component that was taken out
            setattr(args, name, value)
    check_given(vars(args))  # before defaults are derived from them
    for kind in choose(registry(), names_of(args.without)):
        kind.resolve(args)
    settle(args, settings)
    for name in [] if args.uses_ext_loss else given_of(args, lambda kind: kind.needs_ext_loss):
        raise InputError(f"--loss {args.loss} is OpenCLIP's own and does not use it", flag_of(name))
    return args


def given_of(args: argparse.Namespace, chosen: Callable[[type[Component]], bool]) -> list[str]:
    """Names of the options of the chosen components that are given."""
    names = [option.name for kind in registry().values() if chosen(kind) for option in kind.options]
    return [name for name in names if getattr(args, name) is not None]


def check_given(settings: dict[str, Any]) -> None:
    """Raise InputError for a length, or an option of a component, that is out of range."""
    epochs = settings.get("epochs", 1)
    if not 0 <= epochs <= MOST_EPOCHS:
        raise InputError(f"{epochs} is out of range; it must be a whole number from 0 to {MOST_EPOCHS}", "--epochs")
    for option in (option for kind in registry().values() for option in kind.options):
        if settings.get(option.name) is not None:
            option.check(settings[option.name])
