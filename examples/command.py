"""Run training commands, follow their progress, and read their evaluations."""

import argparse
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, as_completed
from pathlib import Path
from threading import Lock
from typing import IO, Any

from tqdm import tqdm

from open_clip_ext.metrics_file import read_metrics

SECONDS = 0.5  # between two reads of a run's progress
running: set[subprocess.Popen] = set()


def image_file(text: str) -> Path:
    """Type of a flag that names a picture to write."""
    path = Path(text)
    if path.suffix.lower() not in (".png", ".pdf", ".svg", ".jpg"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png, .pdf, .svg or .jpg")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    return path


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def end_with_trainings() -> None:
    """On SIGTERM and SIGINT, end the trainings first: they save their state."""

    def end(number: int, _: Any) -> None:
        for process in tuple(running):
            process.terminate()
        sys.exit(f"ended by {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def run(command: list[str], experiment: Path, show: Callable[[dict], None], lock: IO | None = None) -> None:
    """Run `command` with one thread per process; if it fails, end this program with its last lines.

    Args:
        experiment: the run's folder.
        show: called from time to time with the latest line of the run's metrics.jsonl.
        lock: a locked file that the training inherits, so that it is locked while the training lives.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    inherited = () if lock is None else (lock.fileno(),)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        with subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, pass_fds=inherited
        ) as process:
            running.add(process)
            while process.poll() is None:
                time.sleep(SECONDS)
                if steps := [line for line in read_metrics(experiment) if line["stage"] != "eval"]:
                    show(steps[-1])
            running.discard(process)
        output.seek(0)
        lines = output.readlines()
    if process.returncode:
        # torchrun prints a summary of its own after the error line.
        errors = [line for line in lines if line.startswith("open_clip_ext: error: ")]
        sys.exit("".join(errors[-1:] or lines[-40:]) + f"{experiment.name} ended with code {process.returncode}")


def evaluations(experiment: Path) -> list[dict]:
    """The metrics of every evaluation of a run; if a resumed run repeated an epoch, its last one."""
    lines = (experiment / "checkpoints" / "results.jsonl").read_text().splitlines()
    by_epoch = {metrics["epoch"]: metrics for metrics in map(json.loads, lines)}
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def results_of(jobs: dict[Any, Future]) -> dict[Any, Any]:
    """The jobs' results; when one fails, the pending ones are cancelled."""
    try:
        for job in as_completed(jobs.values()):
            job.result()
    except BaseException:
        for job in jobs.values():
            job.cancel()
        raise
    return {name: job.result() for name, job in jobs.items()}


class Runs:
    """Runs of the command in one process each, several at a time; a finished run is not repeated.

    Args:
        logs: folder of the runs.
        bar: progress in pairs.
    """

    def __init__(self, logs: Path, bar: tqdm):
        self.logs = logs
        self.bar = bar
        self._lock = Lock()

    def train(
        self, name: str, flags: str, epochs: int, size: int, recovered: float = 0, script: str | None = None
    ) -> Path:
        """Train the run `name`, or resume it, and return its folder.

        Args:
            flags: of the command, without --epochs.
            size: pairs per epoch, for the bar.
            recovered: epochs of a recovery of statistics before the training.
            script: a Python file that adds a loss to the command, in place of the command itself.
        """
        experiment = self.logs / name
        shown = 0

        def show(line: dict) -> None:
            nonlocal shown
            before = line["epoch"] + (recovered if line["stage"] == "train" else 0)
            now = round(min(before + line["step"] / line["steps"], recovered + epochs) * size)
            with self._lock:
                self.bar.update(now - shown)
            shown = now

        with self._lock_of(name) as lock:
            self._note_flags(name, f"{flags} --epochs {epochs}")
            if not (experiment / "checkpoints" / f"epoch_{epochs}.pt").exists():
                program = ["-m", "open_clip_ext.main"] if script is None else [script]
                command = [sys.executable, *program, *shlex.split(flags)]
                command += ["--epochs", str(epochs), "--logs", str(self.logs), "--name", name]
                if experiment.exists():
                    command += ["--resume", "latest"]
                run(command, experiment, show, lock)
        with self._lock:
            self.bar.update(round((recovered + epochs) * size) - shown)
        return experiment

    def _lock_of(self, name: str) -> IO:
        """Lock a run; ends this program if another one, or a training that outlived it, has the lock."""
        self.logs.mkdir(parents=True, exist_ok=True)
        lock = open(self.logs / f"{name}.lock", "a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            sys.exit(f"{name} is still being trained in {self.logs}; wait for its end, or give another --folder")
        return lock

    def _note_flags(self, name: str, flags: str) -> None:
        """Store a run's flags, so that results of other flags are not taken for this run's."""
        path = self.logs / f"{name}.flags"
        if path.exists() and path.read_text() != flags:
            sys.exit(f"{name} was run with other flags in {self.logs}; give another --folder, or remove it")
        path.write_text(flags)
