"""The command: `python -m open_clip_ext.make_shards SOURCE... --out SHARDS`."""

from open_clip_ext.main import leave, run_module


def main(argv: list[str] | None = None) -> int:
    """Write one's own images and captions as shards; return the exit code, see `main.exit_code`."""
    return run_module("training_ext.tools.pairs.command", argv)


if __name__ == "__main__":
    leave(main())
