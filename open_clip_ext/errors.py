"""Why a command ends before it is done."""


class InputError(ValueError):
    """Bad input from the user: one line that names the argument, the value and what would be right.

    The command prints it and exits with code 2.
    """


class Stopped(Exception):
    """The run was asked to stop (SIGTERM) and has saved where it was; one line that says how it goes on.

    The command prints it and exits with code 143, by which schedulers know a run that was ended by SIGTERM (128 + 15).
    """
