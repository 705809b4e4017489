"""The declared grid: its runs in order, their flags, and the results file."""

import argparse
import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import yaml

HERE = Path(__file__).parent
WAYS = ("image_to_text", "text_to_image")


@dataclass(frozen=True)
class Run:
    """One training. A run without a candidate of its own uses the best one of its method's tuning."""

    cell: str
    method: str
    seed: int
    candidate: str | None = None

    @property
    def name(self) -> str:
        return re.sub(r"[^a-z0-9.]+", "-", f"{self.cell} {self.method} {self.candidate or ''} s{self.seed}")


class Grid:
    """A grid, declared in a file like grid.yaml; `runs` has its runs in order."""

    def __init__(self, path: Path):
        try:
            self._read(yaml.safe_load(path.read_text()))
        except KeyError as error:
            raise ValueError(f"{path}: there is no {error}") from None
        except (yaml.YAMLError, TypeError) as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from None

    def _read(self, declared: dict) -> None:
        self.recipe, self.batch, self.warmup = declared["recipe"], declared["batch"], declared["warmup"]
        self.cells, self.methods = declared["cells"], declared["methods"]
        self.comparisons, self.unpaired = declared.get("comparisons", {}), set(declared.get("unpaired", ()))
        self.runs = [
            Run(group["cell"], method, seed, candidate)
            for group in declared["order"]
            for seed in group["seeds"]
            for method in group["methods"]
            for candidate in self._candidates(group["cell"], method)
        ]

    def _candidates(self, cell: str, method: str) -> list[str | None]:
        about = self.methods[method]
        if cell == "tune":
            return about["candidates"]
        return [about["untuned"] if self.cells[cell].get("untuned") else about.get("chosen")]

    @property
    def model(self) -> str:
        return re.search(r"--model (\S+)", self.recipe)[1]

    def label(self, method: str) -> str:
        """A method's name in tables and plots."""
        return self.methods[method].get("label", method)

    def hours(self, run: Run) -> float:
        """The estimated hours of a run on one core."""
        cell = self.cells[run.cell]
        return cell["rows"] * cell["epochs"] / 32 * self.methods[run.method]["step_ms"] / 3.6e6

    def flags(self, run: Run, results: dict[str, dict]) -> str:
        """The run's command line, with `{data}` for the folder of the data and `{logs}` for that of the runs."""
        cell, about = self.cells[run.cell], self.methods[run.method]
        folder = "/".join(["{data}", *filter(None, [cell.get("folder")])])
        of_cell = f"{cell['flags']} ".replace("{seed}", str(run.seed)) if "flags" in cell else ""
        return (
            f"{self.recipe} --dataset-type webdataset --train-num-samples {cell['rows']} --epochs {cell['epochs']} "
            f"--train-data {folder}/train-{{000000..{cell['shards'] - 1:06}}}.tar "
            f"--val-data {folder}/{cell['gallery']}-000000.tar "
            f"--warmup {self.warmup // about.get('batches', 1)} --seed {run.seed} "
            f"{of_cell}{about['flags']} {self.chosen(run, results)}"
        )

    def chosen(self, run: Run, results: dict[str, dict]) -> str:
        """The flags of the run's candidate, or of the best one of the method."""
        return run.candidate or self.best(run.method, results)

    def tuning(self, method: str) -> list[Run]:
        return [run for run in self.runs if run.cell == "tune" and run.method == method]

    def best(self, method: str, results: dict[str, dict]) -> str:
        """The candidate with the highest `tuning_value`."""
        values: dict[str, float] = {}
        for run in self.tuning(method):
            values[run.candidate] = values.get(run.candidate, 0) + tuning_value(results[run.name])
        return max(values, key=values.get)

    def next_run(
        self, results: dict[str, dict], begun: set[Run], only: str | None, hours: float, cells: list[str] | None = None
    ) -> Run | None:
        """The first run that has neither a result nor begun, whose method is tuned, and that fits in `hours`."""
        for run in self.runs:
            if cells and run.cell not in cells:
                continue
            waits = run.candidate is None and any(tuning.name not in results for tuning in self.tuning(run.method))
            if run.name in results or run in begun or waits or (only and run.method != only):
                continue
            if self.hours(run) <= hours:
                return run
        return None


@contextmanager
def told(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Tell in one line what is wrong with the grid's file or the results."""
    try:
        yield
    except (OSError, ValueError) as error:
        parser.error(str(error))


def recall(metrics: dict, ways: tuple[str, ...] = WAYS, k: int = 1) -> float:
    """R@k in percent, mean of both directions or in one of them."""
    return 100 * mean(metrics[f"{way}_R@{k}"] for way in ways)


def last_recall(result: dict, ways: tuple[str, ...] = WAYS, k: int = 1) -> float:
    """R@k at the end; 0 for a run that diverged."""
    return 0.0 if result["diverged"] else recall(result["by_epoch"][-1], ways, k)


def tuning_value(result: dict) -> float:
    """Mean of R@1 and R@5 in both directions at the end, in percent; 0 for a run that diverged.

    The standard error of R@1 alone, in a gallery of 2,000, is as large as the differences between candidates.
    """
    if result["diverged"]:
        return 0.0
    return 100 * mean(result["by_epoch"][-1][f"{way}_R@{k}"] for way in WAYS for k in (1, 5))


def read_results(path: Path) -> dict[str, dict]:
    """The results by run, without a last line that a kill cut short."""
    text = path.read_text() if path.exists() else ""
    results = {}
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            result = json.loads(line)
            results[result["run"]] = result
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is not a result: {error}") from None
    return results


def append_result(path: Path, result: dict) -> None:
    """Append one line; replaces an incomplete last line."""
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(result).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
