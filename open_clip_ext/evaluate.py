"""The command: `python -m open_clip_ext.evaluate --checkpoint PATH --data FOLDER --out results.jsonl`."""

from open_clip_ext.main import leave, run_module


def main(argv: list[str] | None = None) -> int:
    """Score checkpoints on the DataComp tasks and on your own classes; return the exit code, see `main.exit_code`."""
    return run_module("training_ext.tools.evaluation.command", argv)


if __name__ == "__main__":
    leave(main())
