"""Options of the replaceable parts: each is declared once and is both a keyword argument and a command-line flag."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from open_clip_ext.errors import InputError, not_one_of

ACCEPTED = {int: Integral, float: Real}  # NumPy's numbers, too


def flag_of(name: str) -> str:
    """The command-line flag of an argument: `--npn-lr` of `npn_lr`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Derived:
    """A default that is computed from something else; the part gets None until that is known.

    Args:
        words: description for `--help`.
        from_epochs: maps the length of the training in epochs to the value; None if the part computes it.
    """

    words: str
    from_epochs: Callable[[int], Any] | None = None

    def value(self, epochs: int | None) -> Any:
        """The value, or None while it is not known."""
        return None if self.from_epochs is None or epochs is None else self.from_epochs(epochs)


def default_value(default: Any, epochs: int | None = None) -> Any:
    """The value of an option that is not given; None for a `Derived` one that is not known yet."""
    return default.value(epochs) if isinstance(default, Derived) else default


@dataclass(frozen=True)
class Option:
    """One setting of a part, see `option`; `Part` fills in the name and the type."""

    default: Any
    help: str
    choices: tuple[str, ...] = ()
    valid: Callable[[Any], bool] | None = None
    expected: str = ""
    in_state: bool = False
    metavar: str = ""
    name: str = ""
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


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    valid: Callable[[Any], bool] | None = None,
    expected: str = "",
    in_state: bool = False,
    metavar: str = "",
) -> Any:
    """Declare a setting of a part: `gamma: float = option(0.2, "weight of the new estimate")` in the class's body.

    The annotation is its type: int, float, str or bool (a switch), with `| None` if the value may be missing.

    Args:
        default: value if neither the user nor the preset gives one; may be `Derived`.
        help: one line for `--help`, without the default.
        choices: the valid values of a str.
        valid: predicate on a value; `expected` says in words what it accepts.
        in_state: whether the shape of the part's state depends on it; a checkpoint then needs the same value to resume.
        metavar: what stands for the value in `--help`, if not its choices or its type.
    """
    return Option(default, help, choices, valid, expected, in_state, metavar)


def refuse_unused(given: Collection[str], names: Iterable[str], why: str) -> None:
    """Raise InputError if one of the options `names`, which have no effect, is among those `given`.

    Args:
        why: the condition under which they have no effect; ends the message.
    """
    for name in names:
        if name in given:
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
