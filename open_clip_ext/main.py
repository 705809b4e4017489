"""The command: `torchrun -m open_clip_ext.main --loss neuclip <any OpenCLIP recipe>`, and the same from Python."""

import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from PIL import EpsImagePlugin

from open_clip_ext.errors import InputError, Stopped
from open_clip_ext.losses import NonFiniteError
from open_clip_ext.options import flag_of

STOPPED = 143  # 128 + SIGTERM; 0 would tell a script that the training is done

# Pillow hands PostScript to ghostscript, whatever the image's name ends in. At import, which loader workers repeat.
EpsImagePlugin.gs_binary = False


@dataclass(frozen=True)
class Trained:
    """What a training has left.

    Attributes:
        by_epoch: the metrics of every evaluation of this run, by name, `epoch` among them (0: before the first step);
            empty without one, and on every process but 0.
        folder: with `out.log`, `metrics.jsonl` (see `metrics_file.read_metrics`), `params.txt` and, if asked for,
            `best.pt`; None with `--logs none`, without checkpoints.
        checkpoints: the files `epoch_N.pt` in it, in order.
    """

    by_epoch: list[dict[str, float]]
    folder: Path | None
    checkpoints: list[Path]

    @property
    def metrics(self) -> dict[str, float]:
        """Those of the last evaluation; empty without one."""
        return self.by_epoch[-1] if self.by_epoch else {}


def main(argv: list[str] | None = None) -> int:
    """Run OpenCLIP's training with a loss of ours, or without `--loss` just as OpenCLIP does.

    Args:
        argv: the command line without the program's name.

    Returns:
        The exit code, see `exit_code`.
    """
    return exit_code(lambda: _run(sys.argv[1:] if argv is None else argv))


def train(flags: Iterable[object]) -> Trained:
    """The command from Python: the same training, with errors as exceptions.

    In a process started by torchrun once, since a group of processes is formed once; else as often as wanted.

    Args:
        flags: the command line, such as `["--loss", "neuclip", "--epochs", 4, "--train-data", Path("pairs.csv"), ...]`.

    Raises:
        InputError: bad input; the message is one line that says what to change, and nothing is written.
        NonFiniteError: the training met a NaN or an infinity.
        Stopped: SIGTERM stopped it, and its state is saved.
    """
    return _run([str(flag) for flag in flags])


def _run(argv: list[str]) -> Trained:
    from training_ext import hosts, versions

    hosts.installed()
    try:
        from training_ext import checkpoint, hooks, params, preflight, recipes
        from training_ext.recipes import plan

        args = params.parse_args(argv)
        hosts.choose(args.legacy_loop)
        hooks.check_seams()
    except ImportError as error:
        raise InputError(versions.cannot_import(error)) from None
    if args.dry_run:
        plan.show(args)
        return Trained([], None, [])
    flags = recipes.resolved_flags(args)  # before anything is added to them
    with _logging_as_before():  # the first line that is logged adds a handler, and each would be shown twice
        rows = preflight.check(args)
    session = hooks.session_class()(args, rows, flags)
    with _logging_as_before():
        hooks.run(session)
    by_epoch = session.metrics
    del session
    gc.collect()  # loader workers and the model's memory go with it
    if not checkpoint.keeps_files(args):
        return Trained(by_epoch, None, [])
    folder = Path(args.logs, args.name)
    whole = [path for path in folder.glob("checkpoints/epoch_*.pt") if "_step_" not in path.name]
    checkpoints = sorted(whole, key=lambda path: (len(path.name), path.name))
    return Trained(by_epoch, folder, checkpoints)


@contextmanager
def _logging_as_before() -> Iterator[None]:
    """OpenCLIP adds log handlers and sets levels, and would write the next training's log into this one's file, too."""
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
    """Run a command and return 0; or after one line on stderr 2, which says what to change, 1 if another process of the
    run has ended, 130 if it was interrupted (process 0 says so), 143 if SIGTERM stopped it and its state is saved."""
    try:
        command()
        return 0
    except (InputError, NonFiniteError) as error:
        if isinstance(error, InputError) and error.argument is not None:
            error = InputError(error.text, flag_of(error.argument))
        # An error of a loader's worker comes with the worker's traceback; its last line is the message.
        line = str(error).strip().splitlines()[-1].removeprefix(f"{InputError.__module__}.{InputError.__name__}: ")
        print(f"open_clip_ext: error: {line}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("open_clip_ext: interrupted; the checkpoints are complete", file=sys.stderr, flush=True)
        return 130
    except Stopped as stopped:
        print(f"open_clip_ext: {stopped}", file=sys.stderr, flush=True)
        return STOPPED
    except RuntimeError as error:
        if not lost_another_process(error):
            raise
        line = str(error).strip().splitlines()[0][:300]
        print(f"open_clip_ext: error: lost another process, whose output says why: {line}", file=sys.stderr, flush=True)
        return 1


def run_module(name: str, argv: list[str] | None) -> int:
    """Run a command of `training_ext`: its module's `run` on the command line; the exit code."""

    def run() -> None:
        from training_ext import hosts, versions

        hosts.installed()
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise InputError(versions.cannot_import(error)) from None
        module.run(sys.argv[1:] if argv is None else argv)

    return exit_code(run)


def lost_another_process(error: RuntimeError) -> bool:
    """Whether a collective failed because a process that took part is gone."""
    import torch.distributed as dist

    signs = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket closed", "remote process")
    text = str(error).lower()
    return dist.is_available() and dist.is_initialized() and any(sign in text for sign in signs)


def leave(code: int) -> NoReturn:
    """End this process with an exit code.

    After an error the process group is left as it is: its threads may wait for processes that are gone, and taking them
    down then aborts, which would hide the code.
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
