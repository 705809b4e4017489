"""The command: `torchrun -m open_clip_ext.main --loss neuclip <any OpenCLIP recipe>`."""

import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from PIL import EpsImagePlugin

from open_clip_ext.errors import InputError, Stopped
from open_clip_ext.losses import NonFiniteError
from open_clip_ext.options import flag_of

STOPPED = 143  # 128 + SIGTERM; 0 would tell a script that the training is done

# Pillow hands PostScript to ghostscript, whatever the image's name ends in. At import, which loader workers repeat.
EpsImagePlugin.gs_binary = False


def main(argv: list[str] | None = None) -> int:
    """Run OpenCLIP's training with a loss of ours, or without `--loss` just as OpenCLIP does.

    Args:
        argv: the command line without the program's name.

    Returns:
        The exit code, see `exit_code`.
    """

    def train() -> None:
        from training_ext import versions

        versions.check_version()
        try:
            from training_ext import hooks, params, preflight, recipes
            from training_ext.recipes import plan
            from training_ext.session import Session
        except ImportError as error:
            raise InputError(versions.cannot_import(error)) from None
        hooks.check_seams()
        args = params.parse_args(sys.argv[1:] if argv is None else argv)
        if args.dry_run:
            return plan.show(args)
        flags = recipes.resolved_flags(args)  # before anything is added to them
        hooks.run(Session(args, preflight.check(args), flags))

    return exit_code(train)


def exit_code(command: Callable[[], None]) -> int:
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
