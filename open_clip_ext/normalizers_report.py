"""The command: `python -m open_clip_ext.normalizers_report --checkpoint PATH <the training's flags>`."""

import sys

from open_clip_ext.errors import InputError
from open_clip_ext.main import exit_code, leave


def main(argv: list[str] | None = None) -> int:
    """Report how far a checkpoint's estimated normalizers are from the true ones (`training_ext.report`).

    Args:
        argv: the command line without the program's name.

    Returns:
        The exit code, see `open_clip_ext.main.exit_code`.
    """

    def write_report() -> None:
        from training_ext import hosts, versions

        hosts.installed()
        try:
            from training_ext import report
        except ImportError as error:
            raise InputError(versions.cannot_import(error)) from None
        report.run(sys.argv[1:] if argv is None else argv)

    return exit_code(write_report)


if __name__ == "__main__":
    leave(main())
