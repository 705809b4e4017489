"""Ctrl-C while a command of this package is imported, which takes seconds: one line in place of a traceback."""

import os
import signal
import sys
from typing import Any


def _end(*_: Any) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"open_clip_ext: interrupted before it began\n")
    os._exit(130)


def end_imports_in_one_line() -> None:
    """Let Ctrl-C end this process, if it is `python -m open_clip_ext.NAME`, until `interrupt_by_exception`."""
    is_command = sys.argv[:1] == ["-m"] and any(word.startswith(f"{__package__}.") for word in sys.orig_argv)
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def interrupt_by_exception() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
