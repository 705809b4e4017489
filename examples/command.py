"""Run training commands, follow their logs, and read what they evaluated."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, as_completed
from pathlib import Path
from threading import Lock
from typing import Any

from tqdm import tqdm

PROGRESS = re.compile(r"(Train|Recovery) Epoch: (\d+)(?:/\d+)? \[ *(\d+)/(\d+) .*? Loss: (\S+)")


def run(command: list[str], name: str, show: Callable[[str, int, float, str], None]) -> None:
    """Run `command` on one thread a process; end this program with the command's last lines if it fails.

    Args:
        name: for the message.
        show: called for each logged step with Train or Recovery, the epoch as logged, the part of it that is done and
            the loss.
    """
    output: list[str] = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        for line in process.stdout:
            output.append(line)
            if found := PROGRESS.search(line):
                stage, epoch, done, of, loss = found.groups()
                show(stage, int(epoch), int(done) / int(of), loss)
    if process.returncode:
        # torchrun's own summary comes after the line that says what is wrong.
        errors = [line for line in output if line.startswith("open_clip_ext: error: ")]
        sys.exit("".join(errors[-1:] or output[-40:]) + f"{name} ended with code {process.returncode}")


def evaluations(experiment: Path) -> list[dict]:
    """The metrics of every evaluation of a run, the last one of each epoch where a run was resumed."""
    lines = (experiment / "checkpoints" / "results.jsonl").read_text().splitlines()
    by_epoch = {metrics["epoch"]: metrics for metrics in map(json.loads, lines)}
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def results_of(jobs: dict[Any, Future]) -> dict[Any, Any]:
    """The jobs' results; after one has failed no other begins."""
    try:
        for job in as_completed(jobs.values()):
            job.result()
    except BaseException:
        for job in jobs.values():
            job.cancel()
        raise
    return {name: job.result() for name, job in jobs.items()}


class Runs:
    """Runs of the command in one process each, several at a time; one that has ended before is not run again.

    Args:
        logs: folder of the runs.
        bar: counts pairs.
    """

    def __init__(self, logs: Path, bar: tqdm):
        self.logs = logs
        self.bar = bar
        self._lock = Lock()

    def train(self, name: str, flags: str, epochs: int, size: int, recovered: float = 0) -> Path:
        """The folder of the run `name`, which shows `size` pairs an epoch on the bar.

        Args:
            flags: of the command, without --epochs.
            recovered: epochs of a recovery of statistics before the training.
        """
        experiment = self.logs / name
        shown = 0

        def show(stage: str, epoch: int, part: float, loss: str) -> None:
            nonlocal shown
            before = epoch - 1 if stage == "Recovery" else recovered + epoch
            now = round(min(before + part, recovered + epochs) * size)
            with self._lock:
                self.bar.update(now - shown)
            shown = now

        self._note_flags(name, f"{flags} --epochs {epochs}")
        if not (experiment / "checkpoints" / f"epoch_{epochs}.pt").exists():
            command = [sys.executable, "-m", "open_clip_ext.main", *shlex.split(flags)]
            command += ["--epochs", str(epochs), "--logs", str(self.logs), "--name", name]
            if experiment.exists():
                command += ["--resume", "latest"]
            run(command, name, show)
        with self._lock:
            self.bar.update(round((recovered + epochs) * size) - shown)
        return experiment

    def _note_flags(self, name: str, flags: str) -> None:
        """What a run was asked for, so that its results are not taken for those of another."""
        path = self.logs / f"{name}.flags"
        self.logs.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_text() != flags:
            sys.exit(f"{name} was run with other flags in {self.logs}; give another --folder, or remove it")
        path.write_text(flags)
