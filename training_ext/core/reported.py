"""How a training ends that fails: its error in one line, the last of its log."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from open_clip_ext.errors import InputError, MachineError, Stopped, fault_of_machine, last_line
from open_clip_ext.exit_codes import line_and_code
from open_clip_ext.losses import NonFiniteError
from training_ext.core.plan import Plan

if TYPE_CHECKING:
    from training_ext.core.run import Run


def reported(error: BaseException, run: "Run", advice: Callable[[BaseException], str]) -> BaseException:
    """The error of a training as its command tells it, once it is in the log: InputError for bad input or where the
    machine failed before the first step, MachineError where it failed later, others as they are.

    Args:
        advice: gives the end of an error's line.
    """
    described = _in_words(error, run, advice)
    _add_to_log(described, "" if isinstance(error, Stopped) or described is not error else advice(error))
    return described


def _in_words(error: BaseException, run: "Run", advice: Callable[[BaseException], str]) -> BaseException:
    """The error with advice; of the machine's faults one line; any other as it is."""
    if isinstance(error, NonFiniteError):
        return NonFiniteError(f"{error}{advice(error)}")
    if isinstance(error, MemoryError | OSError | RuntimeError):
        if (fault := fault_of_machine(error, Plan(run.args).folder)) is None:
            return error
        error = MachineError(fault)
    if not isinstance(error, InputError) or not (run.training.steps or isinstance(error, MachineError)):
        return error
    kind = type(error) if run.training.steps else InputError
    text = last_line(error) if error.argument is None else error.text
    return kind(f"{text}{advice(error)}", error.argument)


def _add_to_log(error: BaseException, advice: str) -> None:
    """Let the reason be the last line of out.log; the terminal gets it from the command."""
    ending = line_and_code(error)
    text = f"error: {error!r}"[:300] if ending is None else ending[0]
    record = logging.LogRecord("root", logging.ERROR, __file__, 0, text, None, None)
    for handler in logging.root.handlers:
        if isinstance(handler, logging.FileHandler):
            # Not by the handler, which would print a traceback if the disk is full.
            with suppress(OSError), open(handler.baseFilename, "a", encoding=handler.encoding) as file:
                file.write(f"{handler.format(record)}{advice}\n")
