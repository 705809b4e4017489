"""The command: `python -m open_clip_ext.normalizers_report --checkpoint PATH <the training's flags>`."""

import sys

from open_clip_ext.errors import InputError
from open_clip_ext.main import lost_another_process


def main(argv: list[str] | None = None) -> int:
    """Report how far a checkpoint's estimated normalizers are from the true ones (`training_ext.report`).

    Args:
        argv: the command line without the program's name.

    Returns:
        The exit code: 0; 2 after one line on stderr that says what to change; 1 after one line if another process of
        the run has ended.
    """
    try:
        from training_ext import versions

        versions.check_version()
        try:
            from training_ext import report
        except ImportError as error:
            raise InputError(versions.cannot_import(error)) from None
        report.run(sys.argv[1:] if argv is None else argv)
        return 0
    except InputError as error:
        # An error of a loader's worker comes with the worker's traceback; its last line is the message.
        line = str(error).strip().splitlines()[-1].removeprefix(f"{InputError.__module__}.{InputError.__name__}: ")
        print(f"open_clip_ext: error: {line}", file=sys.stderr, flush=True)
        return 2
    except RuntimeError as error:
        if not lost_another_process(error):
            raise
        line = str(error).strip().splitlines()[0][:300]
        print(f"open_clip_ext: error: lost another process, whose output says why: {line}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
