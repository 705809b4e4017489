"""The evaluation's command where a training's command line is given, for helpers that put one together."""

from open_clip_ext.evaluate import main as evaluate


def main(argv: list[str]) -> int:
    """Without the flags before `--checkpoint`, and without `--logs FOLDER` at the end."""
    return evaluate(argv[argv.index("--checkpoint") : -2])
