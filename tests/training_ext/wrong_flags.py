"""Wrong values for every flag of both packages, made from the parser itself, and what the command answers.

    python tests/training_ext/wrong_flags.py                   # the table, as in docs/wrong-flags.md
    python tests/training_ext/wrong_flags.py --only osr 2>&1  # of some flags, with what is not answered

Each command line runs in a process of its own, forked from one that has imported everything, in an empty folder. An
answer is exit code 2, one line that names the flag (or the other one of a pair), and no file written, within 20 seconds
of CPU time, which do not pass while a busy machine does something else.
"""

import argparse
import os
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

LIMIT, ASLEEP = 20, 600  # seconds of CPU time, and of the clock for a process that only waits
ANSWERED, ACCEPTED, SILENT, LATE, TRACEBACK, HANG = "answered", "accepted", "silent", "late", "traceback", "hang"
GOOD = (ANSWERED, ACCEPTED)
PREFIX = "open_clip_ext: error: "


@dataclass(frozen=True)
class Case:
    """One wrong command line.

    Args:
        flag: what is wrong.
        value: as it stands in the table.
        arguments: the command line behind the common flags, in which {data} is the folder of `wrong_data.make`.
        is_right: the value is a good one, and its training or evaluation ends with exit code 0.
    """

    flag: str
    value: str
    arguments: str
    is_right: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a command line ended: one of the words above, its output, and the files that it wrote."""

    kind: str
    output: str
    written: tuple[str, ...]
    seconds: float

    @property
    def line(self) -> str:
        """The answer's one line."""
        return next((line for line in self.output.splitlines() if line.startswith(PREFIX)), "").removeprefix(PREFIX)


def run_case(case: Case, data: Path) -> Outcome:
    """Run a case in a fork of this process, which must not have run a backward pass."""
    folder = Path(tempfile.mkdtemp(prefix="wrong-"))
    output = folder.with_suffix(".out")
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_in_child(case, folder, output, data)
    code = None
    while code is None and time.monotonic() - start < ASLEEP:
        ended, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.005)
    seconds = time.monotonic() - start
    if code is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    text = output.read_text(errors="replace")
    written = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))
    shutil.rmtree(folder)
    output.unlink()
    return Outcome(_kind(code, text, written, case), text, written, seconds)


def _run_in_child(case: Case, folder: Path, output: Path, data: Path) -> None:
    code = 99
    try:
        os.setsid()
        os.chdir(folder)
        file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        # A wrong number must not take the machine's memory.
        resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 5))
        from conftest import TINY

        from open_clip_ext.main import main

        arguments = [part.replace("{data}", str(data)) for part in shlex.split(case.arguments)]
        code = main([*TINY.split(), "--logs", "logs", *arguments])
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def _kind(code: int | None, output: str, written: tuple[str, ...], case: Case) -> str:
    if code in (None, -signal.SIGXCPU):
        return HANG
    if code == 0:
        return ACCEPTED if case.is_right else SILENT
    if code != 2 or "Traceback" in output:
        return TRACEBACK
    lines = [line for line in output.splitlines() if line and "Counting samples" not in line]
    flags = [case.flag, *(part for part in case.value.split() if part.startswith("--"))]
    answers = len(lines) == 1 and lines[0].startswith(PREFIX) and any(flag in lines[0] for flag in flags)
    return ANSWERED if answers and not written and not case.is_right else LATE


def warm() -> None:
    """Import what a run imports, so that a fork of this process need not."""
    import timm.optim  # noqa: F401
    import torch
    import torch.utils.tensorboard  # noqa: F401

    import training_ext.seams  # noqa: F401

    torch.set_num_threads(1)


def run_all(only: str = "", every: int = 1) -> Iterator[tuple[Case, Outcome]]:
    """Each case and how it ended, with the folder of data written as DATA and that of Python as PREFIX.

    Args:
        only: a part of the flags' names.
        every: run each so-many-th case alone.
    """
    import wrong_cases

    data = Path(tempfile.mkdtemp(prefix="wrong-data-"))
    os.environ["XDG_CACHE_HOME"] = str(data / "cache")
    try:
        wrong_cases.make_data(data)
        for number, case in enumerate(wrong_cases.all_cases()):
            if only in case.flag and number % every == 0:
                outcome = run_case(case, data)
                output = outcome.output.replace(str(data), "DATA").replace(sys.prefix, "PREFIX")
                yield case, replace(outcome, output=output)
    finally:
        shutil.rmtree(data)


def send_all(pipe: Connection, every: int) -> None:
    """For a process of its own: the fork of one that has run a backward pass cannot run one."""
    warm()
    pipe.send(list(run_all(every=every)))


def shortened(text: str, most: int = 100) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def table(outcomes: list[tuple[Case, Outcome]]) -> str:
    """Markdown: the counts, and for each flag its values by how they ended, with one of the answers."""
    counts = Counter(outcome.kind for _, outcome in outcomes)
    lines = [f"{len(outcomes)} command lines: " + ", ".join(f"{counts[kind]} {kind}" for kind in sorted(counts)) + "."]
    lines += ["", "| flag | values | one of the answers |", "|---|---|---|"]
    flags = dict.fromkeys(case.flag for case, _ in outcomes)
    for flag in sorted(flags):
        own = [(case.value.replace("{data}", "DATA"), outcome) for case, outcome in outcomes if case.flag == flag]
        kinds = sorted({outcome.kind for _, outcome in own})
        values = "; ".join(
            f"{kind}: " + ", ".join(f"`{shortened(value) or ' '}`" for value, outcome in own if outcome.kind == kind)
            for kind in kinds
        )
        # The longest says most; the parser's own come first.
        answer = max((outcome.line for _, outcome in own if outcome.kind == ANSWERED), key=len, default="")
        lines.append(f"| `{flag}` | {values} | {shortened(answer, 300)} |".replace("\t", " "))
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="a part of the flags' names")
    options = parser.parse_args()
    warm()
    outcomes = []
    for case, outcome in run_all(options.only):
        outcomes.append((case, outcome))
        if outcome.kind not in GOOD:
            last = outcome.output.strip().splitlines()[-1:] or [""]
            print(f"{outcome.kind}: {case.flag} {case.value!r} [{case.arguments}] {last[0][:240]}", file=sys.stderr)
    print(table(outcomes))
    return any(outcome.kind not in GOOD for _, outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
