"""The line and the exit code with which a command ends after an error."""

from open_clip_ext.errors import InputError, Stopped, fault_of_machine, last_line, lost_another_process
from open_clip_ext.losses import NonFiniteError
from open_clip_ext.options import flag_of


def line_and_code(error: BaseException) -> tuple[str, int] | None:
    """The line and the code; None for an error that is a bug.

    2: bad input or non-finite numbers, and what to change; 75: the machine ended a training that had made a step; 1:
    another process of the run has ended; 128 + its number: stopped by a signal, with the state saved, or 130: ended by
    Ctrl-C at once.
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; what was not yet saved is lost", 130
    if isinstance(error, Stopped):
        return str(error), error.code
    if isinstance(error, InputError | NonFiniteError):
        if isinstance(error, InputError) and error.argument is not None and not error.argument.startswith("--"):
            return f"error: {InputError(error.text, flag_of(error.argument))}", error.code
        return f"error: {last_line(error)}", getattr(error, "code", 2)
    if not isinstance(error, MemoryError | OSError | RuntimeError | ValueError):
        return None
    if (fault := fault_of_machine(error)) is not None:
        return f"error: {fault}", 2
    if isinstance(error, RuntimeError) and lost_another_process(error):
        line = str(error).strip().splitlines()[0][:300]
        return f"error: lost another process, whose output says why: {line}", 1
    return None
