"""Why a command ends before it is done."""

import difflib
from collections.abc import Collection


class InputError(ValueError):
    """Bad input from the user: one line that names the argument, the value and what would be right.

    A command prints it, the argument as its flag, and exits with code 2.

    Args:
        text: the line, without the argument's name.
        argument: name of the argument in Python, which the message then starts with.
    """

    def __init__(self, text: str, argument: str | None = None):
        super().__init__(text if argument is None else f"{argument}: {text}")
        self.text = text
        self.argument = argument


class Stopped(Exception):
    """The run was asked to stop (SIGTERM) and has saved where it was; one line that says how it goes on.

    The command prints it and exits with code 143, by which schedulers know a run that was ended by SIGTERM (128 + 15).
    """


def did_you_mean(given: object, known: Collection[str], otherwise: str = "") -> str:
    """The end of a message about an unknown name: the nearest of the known ones, or `otherwise` if none is near."""
    near = difflib.get_close_matches(str(given), known, n=1)
    end = f"did you mean {near[0]!r}?" if near else otherwise
    return f"; {end}" if end else ""


def not_one_of(given: object, known: Collection[str]) -> str:
    """A message about a value that should be one of the known names."""
    return f"{given!r} is not one of {', '.join(known)}{did_you_mean(given, known)}"
