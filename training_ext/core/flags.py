"""The command line: this package's flags and components', taken from OpenCLIP's."""

import argparse
from argparse import Namespace
from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, Any, NoReturn

from open_clip_train import params

from open_clip_ext import factory
from open_clip_ext.errors import InputError
from open_clip_ext.options import Derived, Option, flag_of
from training_ext.core.temperature import trains_logit_scale

if TYPE_CHECKING:
    from training_ext.core.component import Component

NEEDS_LOSS = "needs --loss; without it the loss is OpenCLIP's own"
OPEN_CLIP_TAU_MIN = 0.01  # its clamp of logit_scale at log 100
# What a version lacks has its default.
ABSENT = {"device": "cuda", "opt": "adamw"}


class OneLineParser(argparse.ArgumentParser):
    """Raises InputError for a wrong flag."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def add_option(group: Any, option: Option, note: str = "") -> None:
    """Add the flag of an option, whose value is None where it is not given; `note` ends its help."""
    settings: dict[str, Any] = {"default": None, "help": (option.help + note).replace("%", "%%")}
    if option.type is bool:
        # Where the default depends on the training, a switch can be off, too.
        derived = isinstance(option.default, Derived)
        settings["action"] = argparse.BooleanOptionalAction if derived else "store_true"
    else:
        choices = "{" + ",".join(option.choices) + "}" if option.choices else option.type.__name__.upper()
        settings |= {"type": option.type, "metavar": option.metavar or choices}
    try:
        group.add_argument(option.flag, **settings)
    except argparse.ArgumentError:
        raise InputError("another package's option has the name of another flag", option.flag) from None


def parse(argv: list[str]) -> "tuple[Namespace, list[type[Component]]]":
    """The command line as OpenCLIP's namespace, with every setting of the loss; and the classes of the components.

    Raises:
        InputError: a wrong flag or value of this package's, a flag that the loss does not use, an unknown loss.
        SystemExit: OpenCLIP's parser refused its flags, or --help was printed.
    """
    names = OneLineParser(add_help=False, allow_abbrev=False)
    names.add_argument("--bare", action="store_true", help="train without any component")
    names.add_argument("--with", dest="added", metavar="NAMES", help="with these components, with commas between them")
    names.add_argument("--without", metavar="NAMES", help="without these components")
    chosen, _ = names.parse_known_args(argv)
    classes: list[type[Component]] = []
    if chosen.added or chosen.without:
        from training_ext.core.component import choose, names_of

        classes = choose(names_of(chosen.added), names_of(chosen.without))

    parser = OneLineParser(prog="open_clip_ext.main", add_help=False, allow_abbrev=False, parents=[names])
    parser.add_argument("--loss", metavar="NAME", help=f"one of {', '.join(factory.presets())}")
    parser.add_argument("--seams", action="store_true", help="print what is replaced in OpenCLIP, and by whom")
    group = parser.add_argument_group("the loss")
    for part in factory.PARTS:
        known = ", ".join(factory.PARTS[part])
        group.add_argument(flag_of(part), metavar="PART", help=f"instead of the loss's own: {known}")
    for option in factory.all_options():
        add_option(group, option)
    for kind in classes:
        for option in kind.options:
            add_option(parser.add_argument_group(kind.name), option)
    if {"-h", "--help"} & {*argv}:
        parser.print_help()
    ours, theirs = parser.parse_known_args(argv)
    args = params.parse_args(theirs)
    for name, value in ABSENT.items():
        vars(args).setdefault(name, value)
    of_loss = {name for name in factory.setting_names() if getattr(ours, name) is not None}
    vars(args).update(vars(ours))
    given = {name: getattr(args, name) for name in factory.setting_names() if name in of_loss}
    args.epochs_before = 0.0
    defaults = {} if args.loss is None else factory.find_preset(args.loss).training_defaults
    for name, value in defaults.items():
        if not any(word.partition("=")[0] == flag_of(name) for word in theirs):
            setattr(args, name, value)
    settle(args, given)
    return args, classes


def settle(args: Namespace, given: Mapping[str, Any]) -> None:
    """Fill in every setting of the chosen loss; `uses_ext_loss` tells whether it is one of this package's.

    Args:
        given: settings of the loss that were given, by name.

    Raises:
        InputError: an unknown loss, or a setting that is out of range or that the loss does not use.
    """
    args.given_settings = dict(given)
    if args.loss is None:
        args.uses_ext_loss = False
        for name in given:
            raise InputError(NEEDS_LOSS, flag_of(name))
        return
    preset = factory.find_preset(args.loss)
    args.loss = preset.name
    args.uses_ext_loss = not preset.is_open_clip
    # Without any epoch the loss's schedules still have a length.
    args.loss_epochs = max(1, args.epochs + ceil(args.epochs_before))
    for name, value in factory.resolve_options(args.loss, given, args.loss_epochs).items():
        setattr(args, name, value)
    if args.loss == "siglip" or (preset.loss and preset.loss.takes_bias):
        args.siglip = True  # by which OpenCLIP gives the model a bias, and both parameters their start
    elif args.siglip:
        raise InputError(f"--loss {args.loss} is another loss; give one of the two", "--siglip")
    if trains_logit_scale(args):
        if args.lr_tau is None and args.lr is not None:
            args.lr_tau = args.lr * preset.lr_tau_ratio
        args.tau_min = OPEN_CLIP_TAU_MIN if args.tau_min is None else args.tau_min
        if args.tau_init is not None and args.tau_init < args.tau_min:
            raise InputError(f"{args.tau_init:g} is below --tau-min {args.tau_min:g}; give at least that", "--tau-init")
