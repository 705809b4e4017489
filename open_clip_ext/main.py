"""The command: `torchrun -m open_clip_ext.main --loss neuclip <any OpenCLIP recipe>`."""

import sys

from open_clip_ext.errors import InputError
from open_clip_ext.losses import NonFiniteError


def main(argv: list[str] | None = None) -> int:
    """Run OpenCLIP's training with a loss of ours, or without `--loss` just as OpenCLIP does.

    Args:
        argv: the command line without the program's name.

    Returns:
        The exit code: 0, or 2 after one line on stderr that says what to change.
    """
    try:
        from training_ext import versions

        versions.check_version()
        try:
            from training_ext import hooks, params, preflight
            from training_ext.session import Session
        except ImportError as error:
            raise InputError(versions.cannot_import(error)) from None
        hooks.check_seams()
        args = params.parse_args(sys.argv[1:] if argv is None else argv)
        hooks.run(Session(args, preflight.check(args)))
        return 0
    except (InputError, NonFiniteError) as error:
        # An error of a loader's worker comes with the worker's traceback; its last line is the message.
        line = str(error).strip().splitlines()[-1].removeprefix(f"{InputError.__module__}.{InputError.__name__}: ")
        print(f"open_clip_ext: error: {line}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
