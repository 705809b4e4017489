"""The base class of the replaceable parts, and their options: each is declared once, as a typed class attribute, and is
both a keyword argument and a command-line flag."""

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from types import NoneType
from typing import Any, ClassVar, get_args

import torch

from open_clip_ext.errors import InputError, did_you_mean, not_one_of

ACCEPTED = {int: Integral, float: Real}  # NumPy's numbers, too


def flag_of(name: str) -> str:
    """The command-line flag of an argument: `--npn-lr` of `npn_lr`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Derived:
    """A default that is computed from something else, such as the number of epochs; None until that is known."""

    words: str  # description for `--help`
    from_epochs: Callable[[int], Any] | None = None  # of the training's length to the value; None: the part computes it


def default_value(default: Any, epochs: int | None = None) -> Any:
    """Value of an option that the user did not set; None for a `Derived` default that is not known yet."""
    if not isinstance(default, Derived):
        return default
    return None if default.from_epochs is None or epochs is None else default.from_epochs(epochs)


@dataclass(frozen=True)
class Option:
    """One setting of a part, see `option`."""

    default: Any  # value if neither the user nor the preset gives one; may be `Derived`
    help: str  # one line for `--help`, without the default
    choices: tuple[str, ...] = ()  # valid values of a str
    valid: Callable[[Any], bool] | None = None
    expected: str = ""  # what `valid` accepts, in words
    in_state: bool = False  # whether the shape of the part's state depends on it; resuming then needs the same value
    metavar: str = ""  # what stands for the value in `--help`, if not its choices or its type
    name: str = ""  # this and the type: filled in by `WithOptions`
    type: type = str

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    def with_default(self, default: Any) -> Any:
        """The same option with another default."""
        return replace(self, default=default)

    def check(self, value: Any) -> Any:
        """Return `value`; raise InputError naming the option and what would be right if it is not valid."""
        wrong_bool = isinstance(value, bool) and self.type is not bool  # Python's bool is an int
        if wrong_bool or not isinstance(value, ACCEPTED.get(self.type, self.type)):
            raise InputError(f"{value!r} is not of type {self.type.__name__}", self.name)
        if self.choices and value not in self.choices:
            raise InputError(not_one_of(value, self.choices), self.name)
        if self.valid is not None and not self.valid(value):
            raise InputError(f"{value!r} is out of range; it must be {self.expected}", self.name)
        return value


def option(default: Any, help: str, **settings: Any) -> Any:
    """Declare a setting of a part: `gamma: float = option(0.2, "weight of the new estimate")` in the class's body.

    The annotation is its type: int, float, str or bool (a switch, with a `--no-` flag if its default is `Derived`),
    with `| None` if the value may be missing. The arguments are those of `Option`.
    """
    return Option(default, help, **settings)


def refuse_unused(explicit: Collection[str], names: Iterable[str], why: str) -> None:
    """Raise InputError if one of the options `names`, which have no effect, is among the `explicit` ones.

    Args:
        explicit: names of the options that the user set.
        why: the condition under which they have no effect; ends the message.
    """
    for name in names:
        if name in explicit:
            raise InputError(f"has no effect {why}; leave it out", name)


def positive(value: float) -> bool:
    return 0 < value < float("inf")


def not_negative(value: float) -> bool:
    return 0 <= value < float("inf")


# What many options accept, with the words for it: `option(..., **POSITIVE)`.
POSITIVE: dict[str, Any] = dict(valid=positive, expected="a number > 0")
NOT_NEGATIVE: dict[str, Any] = dict(valid=not_negative, expected="a number >= 0")
AT_LEAST_0: dict[str, Any] = dict(valid=not_negative, expected="at least 0")
AT_LEAST_1: dict[str, Any] = dict(valid=lambda value: value >= 1, expected="at least 1")


class WithOptions:
    """Base of classes that declare options as class attributes and take them as keyword arguments.

    A declaration is `lr: float = option(0.1, "learning rate")`.

    Class attributes:
        options: all options of the class and its bases, collected from their bodies.

    Raises:
        InputError: an option has the wrong type or is out of range; the message names it.
        TypeError: there is no such option.
    """

    options: ClassVar[tuple[Option, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = [base.__dict__.get("options", ()) for base in reversed(cls.__mro__[1:])]
        options = {option.name: option for inherited in bases for option in inherited}
        body = {name: value for name, value in vars(cls).items() if isinstance(value, Option) or name in options}
        types = inspect.get_annotations(cls, eval_str=True) if body else {}
        for name, value in body.items():
            if isinstance(value, Option):
                kind = types[name]
                kind = next((type for type in get_args(kind) if type is not NoneType), kind)
                options[name] = replace(value, name=name, type=kind)
            else:
                options[name] = replace(options[name], default=value)
        cls.options = tuple(options.values())

    def __init__(self, **values: Any) -> None:
        super().__init__()
        names = [option.name for option in self.options]
        for name in values:
            if name not in names:
                raise TypeError(f"{type(self).__name__} has no option {name!r}{did_you_mean(name, names)}")
        for option in self.options:
            value = values.get(option.name)
            value = default_value(option.default) if value is None else option.check(value)
            setattr(self, option.name, value)


class Part(WithOptions):
    """Base of losses, normalizers, temperatures and surrogates.

        class Shifted(Normalizer):
            name = "shifted"
            shift: float = option(0.5, "what is added to every log-normalizer")

    takes `Shifted(shift=0.3)`, or the flag `--shift 0.3`, and stores the value as `self.shift`. A subclass changes the
    default with `shift = 0.1`.

    Class attributes:
        name: value of the flag that chooses the part.
        optimizer_options: settings of `logit_scale`'s optimizer group; the training command uses them, not the part.
        needs_index: whether the part keeps state per sample; its constructor then takes `num_samples` and `device`.
        follows_epochs: whether training depends on the epoch and needs `set_epoch`; an instance may change it.
    """

    name: ClassVar[str]
    optimizer_options: ClassVar[tuple[Option, ...]] = ()
    needs_index = False
    follows_epochs = False
    num_samples: int  # where `needs_index`
    epoch: int = 0

    @classmethod
    def complete(cls, settings: dict, epochs: int | None, explicit: Collection[str]) -> None:
        """Fill in settings that are None and follow from others; refuse given settings that have no effect.

        Args:
            settings: settings of the whole loss, by option name; changed in place.
            epochs: length of the training, if known.
            explicit: names of the settings that the user set.

        Raises:
            InputError: see `options.refuse_unused`.
        """

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch, 0-based."""
        self.epoch = epoch

    def set_steps_per_pass(self, steps: int, passes: float | None = None) -> None:
        """Set defaults that depend on the length of the training; called before the first step.

        Args:
            steps: optimizer steps in one pass over the data.
            passes: passes over the data in the whole training, None if unknown; an epoch need not be one pass.
        """

    def settings_of_length(self) -> dict[str, float]:
        """Options and their values that have followed from the length of the training, for its recipe."""
        return {}

    def memory(self, dimension: int, processes: int) -> dict[str, int]:
        """Bytes of state on each of `processes` for embeddings of `dimension`, by purpose; without rows per sample and
        the temporary memory of a step."""
        return {}

    def limit_to(self, num_samples: int) -> None:
        """Limit the number of samples that a part stores to n = `num_samples`, so that none is stored twice.

        Called before the first step if n is known.
        """

    def materialize(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate the state that depends on the embeddings' dimension, dtype or device.

        Called once, at the first batch or when a state is loaded. Afterwards `Module.to` moves the state; a batch on
        another device or of another dtype moves it, too.
        """

    def full_state(self) -> dict[str, Any]:
        """The state as CPU tensors, all of it on process 0 under any world size. Every process must call it."""
        return {}

    def check_state(self, state: dict[str, Any], dimension: int) -> None:
        """Raise ValueError if `load_full_state` cannot load the state of embeddings of `dimension`; change nothing."""

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Load the result of `full_state` under any world size; after `materialize`, if the state has a dimension."""
