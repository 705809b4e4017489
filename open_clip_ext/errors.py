"""Exceptions that end a command, and helpers that word their messages."""

import difflib
import signal
from collections.abc import Collection


class InputError(ValueError):
    """Bad input from the user: one line that names the argument, the value and what would be right.

    A command prints the line with the argument as a flag and exits with code 2.

    Args:
        text: the line, without the argument's name.
        argument: name of the argument in Python; the message starts with it.
    """

    def __init__(self, text: str, argument: str | None = None):
        super().__init__(text if argument is None else f"{argument}: {text}")
        self.text = text
        self.argument = argument


def last_line(error: Exception) -> str:
    """The message of an error that a loader worker may have raised, whose text is then the worker's traceback."""
    line = str(error).strip().splitlines()[-1]
    return line.removeprefix(f"{InputError.__module__}.{InputError.__name__}: ")


class Stopped(Exception):
    """A signal stopped the run, and its state is saved; the message is one line that says how to resume it.

    The command prints the line and exits with `code`, which shells and schedulers read as ended by the signal: 143
    after SIGTERM, 130 after Ctrl-C.

    Args:
        after: number of the signal.
        where: the place in the training, and how to resume there.
    """

    def __init__(self, after: int, where: str):
        super().__init__(f"stopped by {signal.Signals(after).name} {where}")
        self.code = 128 + after


def did_you_mean(given: object, known: Collection[str], otherwise: str = "") -> str:
    """The end of a message about an unknown name: the closest known name, or `otherwise` if none is close."""
    near = difflib.get_close_matches(str(given), known, n=1)
    end = f"did you mean {near[0]!r}?" if near else otherwise
    return f"; {end}" if end else ""


def not_one_of(given: object, known: Collection[str]) -> str:
    """A message about a value that should be one of the known names."""
    return f"{given!r} is not one of {', '.join(known)}{did_you_mean(given, known)}"
