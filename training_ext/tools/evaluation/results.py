"""Results of a checkpoint: a file in DataComp's format, and the table for the terminal."""

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from open_clip_ext.errors import InputError
from open_clip_ext.files import locked_folder, whole_file
from training_ext.openclip.loading import one_line
from training_ext.scoring.tasks import Task, averages


@dataclass(frozen=True)
class Row:
    """One task's result.

    Args:
        key, name: key and name of the task.
        metrics: by DataComp's names; `main_metric` is the score, None to keep it out of the averages.
        samples: number of samples.
        data: digest of the data set and of what the task measures.
    """

    key: str
    name: str
    metrics: dict[str, Any]
    samples: int
    data: str


class Results:
    """One checkpoint's results by task key, kept in a JSON Lines file as DataComp's evaluate.py writes it.

    Several evaluations may add to one file at the same time.

    Args:
        path: the file; existing results are read from it.
        about: checkpoint, model, precision and settings of the results.

    Raises:
        InputError: the file cannot be read, or has results of something else.
    """

    def __init__(self, path: str, about: dict[str, Any]):
        self.path = path
        self.about = about
        self.rows = self._read()

    def _read(self) -> dict[str, Row]:
        if not os.path.exists(self.path):
            return {}
        try:
            with open(self.path, encoding="utf-8") as file:
                lines = [json.loads(line) for line in file if line.strip()]
            rows = [
                Row(line["key"], line["dataset"], dict(line["metrics"]), int(line["samples"]), line["data"])
                for line in lines
            ]
            differing_fields = {name for line in lines for name, value in self.about.items() if line.get(name) != value}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{self.path!r} is not a file of results: {one_line(error)}", "--out") from None
        if differing_fields:
            other = f"{self.path!r} has the results of another {', '.join(sorted(differing_fields))}"
            raise InputError(f"{other}; choose another file, or delete it", "--out")
        return {row.key: row for row in rows}

    def add(self, row: Row) -> None:
        """Add a result to what the file has now, and rewrite it; the file is complete at any time.

        Raises:
            InputError: as the constructor; another evaluation may have written the file meanwhile.
        """
        with locked_folder(self.path):
            self.rows |= {**self._read(), row.key: row}
            with whole_file(self.path, text=True) as file:
                for row in self.rows.values():
                    line = {"key": row.key, "dataset": row.name, "metrics": row.metrics, **self.about}
                    file.write(json.dumps(line | {"samples": row.samples, "data": row.data}) + "\n")

    def scores(self) -> dict[str, float]:
        """Scores in [0, 1] by task key, without those that are kept out of the averages."""
        main_metrics = {key: row.metrics.get("main_metric") for key, row in self.rows.items()}
        return {key: value for key, value in main_metrics.items() if value is not None}


def table(
    name: str, tasks: Sequence[Task], labels: Sequence[str], results: Sequence[Results], folders: Collection[str]
) -> str:
    """The table for stdout: a column for each checkpoint, in percent.

    Args:
        name: name of the table of tasks.
        labels, results: name and results of each checkpoint.
        folders: keys of the tasks that have a folder; those without folder or result are listed.
    """
    scores = [one.scores() for one in results]
    rows: list[tuple[str, str, str, Sequence[float | None]]] = []
    missing = []
    for task in tasks:
        if any(task.key in task_scores for task_scores in scores):
            samples = next(one.rows[task.key].samples for one in results if task.key in one.rows)
            mark = "" if task.size in (None, samples) else "*"
            cells = [task_scores.get(task.key) for task_scores in scores]
            rows.append((task.name, task.main_metric, f"{samples}{mark}", cells))
        elif task.key not in folders:
            missing.append(f"missing: {task.name} ({task.folder_names()[0]})")
    means = [(title, "mean", "", values) for title, values in averages(name, tasks, scores)]
    wide = 2 + max(len(title) for title in [*(title for title, *_ in means), *(task.name for task in tasks)])
    width = max(12, *(len(label) + 2 for label in labels))

    def line(title: str, metric: str, samples: str, cells: Sequence[Any]) -> str:
        texts = ("-" if cell is None else cell if isinstance(cell, str) else f"{100 * cell:.2f}" for cell in cells)
        return f"{title:{wide}}{metric:23}{samples:>9}" + "".join(f"{text:>{width}}" for text in texts)

    lines = [line("task", "metric", "samples", labels), *(line(*row) for row in rows)]
    if any(samples.endswith("*") for _, _, samples, _ in rows):
        lines.append("* not the task's number of samples: not comparable with published scores")
    return "\n".join([*lines, *missing, *(line(*row) for row in means)])
