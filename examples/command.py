"""Run a training command, follow its log, and read what it evaluated."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
        sys.exit("".join(output[-40:]) + f"\n{name} ended with code {process.returncode}")


def evaluations(experiment: Path) -> list[dict]:
    """The metrics of every evaluation of a run."""
    return [json.loads(line) for line in (experiment / "checkpoints" / "results.jsonl").read_text().splitlines()]
