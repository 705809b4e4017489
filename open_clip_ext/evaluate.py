"""The command: `python -m open_clip_ext.evaluate --checkpoint PATH --data FOLDER --out results.jsonl`."""

import sys

from open_clip_ext.errors import InputError
from open_clip_ext.main import exit_code, leave


def main(argv: list[str] | None = None) -> int:
    """Score checkpoints on the DataComp tasks and on one's own classes (`training_ext.evaluation`).

    Args:
        argv: the command line without the program's name.

    Returns:
        The exit code, see `open_clip_ext.main.exit_code`.
    """

    def evaluate() -> None:
        from training_ext import hosts, versions

        hosts.installed()
        try:
            from training_ext.evaluation import command
        except ImportError as error:
            raise InputError(versions.cannot_import(error)) from None
        command.run(sys.argv[1:] if argv is None else argv)

    return exit_code(evaluate)


if __name__ == "__main__":
    leave(main())
