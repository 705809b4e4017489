"""metrics.jsonl: every number that a training logs, one JSON object per line (docs/logs.md has the names)."""

import errno
import json
import math
import os
from collections.abc import Mapping
from typing import Any

FILE = "metrics.jsonl"  # in the experiment's folder, beside out.log
TRAIN, RECOVERY, EVAL = "train", "recovery", "eval"  # values of "stage"


class MetricsFile:
    """Appends lines to a run's metrics.jsonl; a line that a kill cut short is ended before the next one.

    Args:
        folder: of the experiment; must exist.
    """

    def __init__(self, folder: str | os.PathLike):
        path = os.path.join(folder, FILE)
        self._file = open(path, "ab", buffering=0)
        if self._file.tell():
            with open(path, "rb") as written:
                written.seek(-1, os.SEEK_END)
                if written.read() != b"\n":
                    self._file.write(b"\n")

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a line with one system call, so that a kill cannot split it; NaN and infinity become null.

        Raises:
            OSError: the disk is full.
        """
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        text = json.dumps(finite, allow_nan=False).encode() + b"\n"
        if self._file.write(text) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()


def read_metrics(folder: str | os.PathLike, stage: str | None = None) -> list[dict[str, Any]]:
    """Read the lines of a run in order; where a resumed run repeated steps or evaluations, the later ones.

    A step of epoch 2 after an evaluation of epoch 5 shows that the run was resumed from before this evaluation. It is
    then left out.

    Args:
        folder: of the experiment; if it has no `metrics.jsonl`, the result is empty.
        stage: only lines of this stage, "train", "recovery" or "eval"; None: all.
    """
    try:
        with open(os.path.join(folder, FILE), encoding="utf-8", errors="replace") as file:
            lines = [line for text in file if (line := _parsed(text)) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    history: list[dict[str, Any]] = []
    latest: dict[str, tuple[int, int]] = {}
    for line in lines:
        name, epoch_step = line["stage"], (line["epoch"], line["step"])
        if epoch_step <= latest.get(name, (-1, -1)):  # a resumed run repeats it
            history = [past for past in history if past["stage"] != name or (past["epoch"], past["step"]) < epoch_step]
        if name == TRAIN and epoch_step < latest.get(EVAL, (-1, -1)):
            history = [past for past in history if past["stage"] != EVAL or past["epoch"] <= line["epoch"]]
            latest[EVAL] = epoch_step
        latest[name] = epoch_step
        history.append(line)
    return [line for line in history if stage in (None, line["stage"])]


def _parsed(text: str) -> dict[str, Any] | None:
    """The object of a line; None if the line is incomplete."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and {"stage", "epoch", "step"} <= line.keys() else None
