"""An option of one replaceable part, declared beside the part and turned into a command-line flag."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from open_clip_ext.errors import InputError


def flag_of(name: str) -> str:
    """The command-line flag of an argument: `--npn-lr` of `npn_lr`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Option:
    """One setting of a part.

    Args:
        name: keyword argument of the part; the flag is the same with hyphens (`npn_lr`, `--npn-lr`).
        type: int, float, str or bool; a bool is a switch.
        default: value where neither the user nor the preset gives one; None if the part works it out.
        help: one line for `--help`, without the default.
        choices: the valid values of a str.
        valid: predicate on a value; `wanted` says in words what it accepts.
        in_state: the form of the part's state depends on it, so that a checkpoint goes on with the same value only.
    """

    name: str
    type: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    valid: Callable[[Any], bool] | None = None
    wanted: str = ""
    in_state: bool = False

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    def check(self, value: Any) -> Any:
        """Return `value`; raise InputError naming the option and what would be right if it is out of range."""
        if self.choices and value not in self.choices:
            raise InputError(f"{self.flag}: {value!r} is not one of {', '.join(self.choices)}")
        if self.valid is not None and not self.valid(value):
            raise InputError(f"{self.flag}: {value!r} is out of range; it must be {self.wanted}")
        return value

    def check_given(self, given: dict[str, Any]) -> None:
        """`check` the value of this option among keyword arguments, where it is not None."""
        if given[self.name] is not None:
            self.check(given[self.name])


def refuse_unused(given: Collection[str], names: Iterable[str], why: str) -> None:
    """Raise InputError if one of the options `names` was given, though it has no effect.

    Args:
        why: ends the message.
    """
    for name in names:
        if name in given:
            raise InputError(f"{flag_of(name)}: has no effect {why}; leave it out")


def positive(value: float) -> bool:
    return 0 < value < float("inf")


def not_negative(value: float) -> bool:
    return 0 <= value < float("inf")
