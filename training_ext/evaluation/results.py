"""Results of a checkpoint: a file in DataComp's format, and the table for the terminal."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from open_clip_ext.errors import InputError
from open_clip_ext.files import whole_file
from training_ext.evaluation.aggregates import aggregates, average
from training_ext.evaluation.tasks import Task
from training_ext.loading import one_line


@dataclass(frozen=True)
class Row:
    """One task's result.

    Args:
        key, name: key and name of the task.
        metrics: by DataComp's names; `main_metric` is the score, None to keep it out of the averages.
        samples: number of samples.
        data: digest of the data set and of what the task measures.
        folder: absolute path of the data set, for the user's own classes.
    """

    key: str
    name: str
    metrics: dict[str, Any]
    samples: int
    data: str
    folder: str | None = None


class Results:
    """One checkpoint's results by task key, kept in a JSON Lines file as DataComp's evaluate.py writes it.

    Args:
        path: the file; existing results are read from it.
        about: checkpoint, model, precision and settings of the results.

    Raises:
        InputError: the file cannot be read, or has results of something else.
    """

    def __init__(self, path: str, about: dict[str, Any]):
        self.path = path
        self.about = about
        self.rows: dict[str, Row] = {}
        if not os.path.exists(path):
            return
        try:
            with open(path, encoding="utf-8") as file:
                lines = [json.loads(line) for line in file if line.strip()]
            for line in lines:
                self.rows[line["key"]] = Row(
                    line["key"], line["dataset"], dict(line["metrics"]), int(line["samples"]), line["data"],
                    line.get("folder"),
                )
            others = {name for line in lines for name, value in about.items() if line.get(name) != value}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"--out: {path!r} is not a file of results: {one_line(error)}") from None
        if others:
            names = ", ".join(sorted(others))
            raise InputError(f"--out: {path!r} has the results of another {names}; choose another file, or delete it")

    def add(self, row: Row) -> None:
        """Add a result and rewrite the file, which is complete at any time."""
        self.rows[row.key] = row
        with whole_file(self.path, text=True) as file:
            for row in self.rows.values():
                line = {"key": row.key, "dataset": row.name, "metrics": row.metrics, **self.about}
                line |= {"samples": row.samples, "data": row.data} | ({"folder": row.folder} if row.folder else {})
                file.write(json.dumps(line) + "\n")

    def scores(self) -> dict[str, float]:
        """Scores in [0, 1] by task key, without those that are kept out of the averages."""
        found = {key: row.metrics.get("main_metric") for key, row in self.rows.items()}
        return {key: value for key, value in found.items() if value is not None}


def table(
    name: str, tasks: Sequence[Task], labels: Sequence[str], results: Sequence[Results], missing: Sequence[Task]
) -> str:
    """The table for stdout: a column for each checkpoint, in percent.

    Args:
        name: name of the table of tasks.
        labels, results: name and results of each checkpoint.
        missing: tasks without a folder.
    """
    scores = [one.scores() for one in results]
    width = max(12, *(len(label) + 2 for label in labels))
    averages = [[average(one, own) for own in scores] for one in aggregates(name, tasks)]
    names = [min(own, key=lambda one: one.complete).name for own in averages]
    wide = 2 + max(len(first) for first in [*names, *(task.name for task in tasks)])

    def line(first: str, metric: str, samples: str, cells: Sequence[str]) -> str:
        return f"{first:{wide}}{metric:23}{samples:>9}" + "".join(f"{cell:>{width}}" for cell in cells)

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.2f}"

    lines = [line("task", "metric", "samples", labels)]
    odd = False
    for task in tasks:
        if not any(task.key in own for own in scores):
            continue
        samples = next(one.rows[task.key].samples for one in results if task.key in one.rows)
        mark = "" if task.size in (None, samples) else "*"
        odd = odd or bool(mark)
        cells = [percent(own.get(task.key)) for own in scores]
        lines.append(line(task.name, task.main_metric, f"{samples}{mark}", cells))
    if odd:
        lines.append("* not the task's number of samples: not comparable with published scores")
    lines += [f"missing: {task.name} ({task.folder_names()[0]})" for task in missing]
    for first, values in zip(names, averages, strict=True):
        if any(one.value is not None for one in values):
            lines.append(line(first, "mean", "", [percent(one.value) for one in values]))
    return "\n".join(lines)
