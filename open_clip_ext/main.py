"""The command: `torchrun -m open_clip_ext.main --loss neuclip <any OpenCLIP recipe>`, and the same from Python."""

import gc
import importlib
import logging
import multiprocessing
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from PIL import EpsImagePlugin

from open_clip_ext.errors import InputError
from open_clip_ext.exit_codes import line_and_code
from open_clip_ext.keyboard import interrupt_by_exception

# Pillow passes PostScript to ghostscript whatever the file's extension. Set at import, which loader workers repeat.
EpsImagePlugin.gs_binary = False


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Attributes:
        by_epoch: metrics of every evaluation of this run, by name, with `epoch` (0: before the first step); empty
            without evaluations, and on every process but 0.
        folder: contains `out.log`, `metrics.jsonl` (see `metrics_file.read_metrics`), `params.txt` and, if requested,
            `best.pt`; None with `--logs none` and no checkpoints.
        checkpoints: its files `epoch_N.pt`, in order.
    """

    by_epoch: list[dict[str, float]]
    folder: Path | None
    checkpoints: list[Path]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last evaluation; empty if there was none."""
        return self.by_epoch[-1] if self.by_epoch else {}


def main(argv: list[str] | None = None) -> int:
    """Run OpenCLIP's training with one of this package's losses; without `--loss`, exactly as OpenCLIP does.

    Returns the exit code, see `exit_code`.
    """
    return exit_code(lambda: _run(_as_text(argv)))


def train(flags: Iterable[object]) -> Trained:
    """Run the command from Python, with errors raised as exceptions.

    In a process started by torchrun it can be called once, since a process group forms once; otherwise repeatedly.

    Args:
        flags: the command line, such as `["--loss", "neuclip", "--epochs", 4, "--train-data", Path("pairs.csv"), ...]`.

    Raises:
        InputError: bad input, or whatever OpenCLIP raised before the first step; the message is one line, and no file
            is left of a run that had none before. Later, where only the run itself shows it: data that turn out to be
            unusable.
        MachineError, an InputError: after the first step a full disk or memory, or a loader's worker that was killed.
        NonFiniteError: the training met a NaN or an infinity.
        Stopped: a signal stopped it, and its state is saved.
    """
    return _run([str(flag) for flag in flags])


def _run(argv: list[str]) -> Trained:
    with _forked_workers():
        is_core = {"--bare", "--with"} & {word.partition("=")[0] for word in argv}
        return _run_core(argv) if is_core else _run_whole(argv)


@contextmanager
def _forked_workers() -> Iterator[None]:
    """Fork the loaders' workers on Linux, where Python 3.14 no longer does: OpenCLIP's pipeline of shards has lambdas,
    which cannot be sent to a process that is started anew."""
    method = multiprocessing.get_start_method(allow_none=True)
    if sys.platform == "linux":
        multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)


@contextmanager
def _importing() -> Iterator[None]:
    """Within the block OpenCLIP's training code, and what needs it, is imported; then Ctrl-C raises KeyboardInterrupt.

    Raises:
        InputError: it is missing or not supported.
    """
    from training_ext.core.hosts import cannot_import, supported

    supported()
    try:
        yield
    except ImportError as error:
        raise InputError(cannot_import(error)) from None
    interrupt_by_exception()


def _run_whole(argv: list[str]) -> Trained:
    with _importing():
        from training_ext import launch
        from training_ext.core.run import listing
        from training_ext.flags import params, preflight
        from training_ext.openclip import failures, loading

        args = params.parse_args(argv)
        run = launch.build(args)
    if args.seams:
        print(listing(run))
        return Trained([], None, [])
    if args.dry_run:
        from training_ext.tools import dry_run

        with failures.in_one_line(args):
            dry_run.show(args)
        return Trained([], None, [])
    with ExitStack() as alone, _each_warning_once():
        run.prepare(alone)
        with failures.in_one_line(args):
            with loading.collected_warnings():  # OpenCLIP sets up the log only later
                preflight.check(run)
            with _logging_as_before():
                launch.train(run)
    by_epoch = run.by_epoch
    del run
    return _trained(args, by_epoch)


def _trained(args: Namespace, by_epoch: list[dict[str, float]]) -> Trained:
    from training_ext.core.plan import Plan

    gc.collect()  # frees loader workers and the model's memory
    if (name := Plan(args).folder) is None:
        return Trained(by_epoch, None, [])
    folder = Path(name)
    paths = [path for path in folder.glob("checkpoints/epoch_*.pt") if path.stem.removeprefix("epoch_").isdecimal()]
    return Trained(by_epoch, folder, sorted(paths, key=lambda path: (len(path.name), path.name)))  # in the order of N


def _run_core(argv: list[str]) -> Trained:
    """Train with `--bare` or `--with NAMES`: with no components, or with only those that are named."""
    with _importing():
        from training_ext.core import run
    with _logging_as_before():
        training = run.start(argv)
    args = None if training is None else training.args
    del training
    return Trained([], None, []) if args is None else _trained(args, [])


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Show each distinct text of a warning once; Python's own record of them is lost whenever a filter changes."""
    messages, show = set(), warnings.showwarning

    def once(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        if (category, str(message)) not in messages:
            messages.add((category, str(message)))
            show(message, category, *where, **options)

    warnings.showwarning = once
    try:
        yield
    finally:
        warnings.showwarning = show


@contextmanager
def _logging_as_before() -> Iterator[None]:
    """Undo OpenCLIP's log handlers and levels, which would write the next training's log into this one's file, too."""
    loggers = [logging.root, *map(logging.getLogger, logging.root.manager.loggerDict)]
    levels = [logger.level for logger in loggers]
    handlers = list(logging.root.handlers)
    try:
        yield
    finally:
        for handler in [handler for handler in logging.root.handlers if handler not in handlers]:
            logging.root.removeHandler(handler)
            handler.close()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def exit_code(command: Callable[[], object]) -> int:
    """Run a command and return its exit code: 0, or that of `line_and_code` after its line on stderr."""
    try:
        command()
        return 0
    except BrokenPipeError:  # of a listing's reader that has ended, as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if (ending := line_and_code(error)) is None:
            raise
        if isinstance(error, KeyboardInterrupt) and os.environ.get("RANK", "0") != "0":
            return 130  # process 0 prints the line
        return _print_error(*ending)


def _print_error(line: str, code: int) -> int:
    """Print the line on stderr, unless its reader has ended, and return the exit code."""
    try:
        print(f"open_clip_ext: {line}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return code


def run_module(name: str, argv: list[str] | None) -> int:
    """Run the command in module `name` of `training_ext` on the command line `argv`; return the exit code."""

    def run() -> None:
        with _importing():
            module = importlib.import_module(name)
        module.run(_as_text(argv))

    return exit_code(run)


def _as_text(argv: list[str] | None) -> list[str]:
    """Check the words of a command line, by default the process's, and return them.

    Raises:
        InputError: a word, such as the name of a folder, is not valid UTF-8, so that no log could contain it.
    """
    words = sys.argv[1:] if argv is None else argv
    for word in words:
        if word.encode(errors="ignore").decode() != word:
            raise InputError(f"{word!r} in the command line is not UTF-8; rename what it names")
    return words


def leave(code: int) -> NoReturn:
    """End this process with an exit code.

    After an error the process group is not destroyed: its threads may be waiting for processes that have ended, and
    destroying it would then abort and hide the exit code.
    """
    import torch.distributed as dist

    if code and dist.is_available() and dist.is_initialized():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
