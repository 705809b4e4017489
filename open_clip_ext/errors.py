"""Errors that the user can put right."""


class InputError(ValueError):
    """Bad input from the user: one line that names the argument, the value and what would be right.

    The command prints it and exits with code 2.
    """
