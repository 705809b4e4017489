"""The command: `python -m open_clip_ext.normalizers_report --checkpoint PATH <the training's flags>`."""

from open_clip_ext.main import leave, run_module


def main(argv: list[str] | None = None) -> int:
    """Compare a checkpoint's normalizers with the exact ones; return the exit code, see `main.exit_code`."""
    return run_module("training_ext.tools.report.command", argv)


if __name__ == "__main__":
    leave(main())
