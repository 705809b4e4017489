"""Kill a training at random moments, resume it each time, and compare the result with an uninterrupted run's.

    python benchmarks/kills.py --kills 100 --seed 0

Each case is a tiny training on the CPU with `--save-every-steps`. Kills are SIGKILL and SIGTERM in turn, at a random
moment of the whole run, start-up included. With two processes one is killed, and the other must end by itself. A run is
equal if all weights and all state of the optimizer and the loss are, bit for bit. The exit code is 1 if a run is not
equal. Needs fork, so not Windows.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import torch
from measuring import table

from open_clip_ext.data import Scenes
from open_clip_ext.main import main as train
from open_clip_ext.metrics_file import FILE
from training_ext import launch  # noqa: F401  # imported once, before every fork
from training_ext.flags import params, preflight  # noqa: F401

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 48, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1},
}
COMMON = "--model kills-tiny --precision fp32 --device cpu --dist-backend gloo --batch-size 8 --warmup 2 --lr 1e-3"
COMMON += " --epochs 2 --log-every-n-steps 1 --force-patch-dropout 0.25 --save-every-steps 5 --resume latest"
MAKE_SHARDS = Path(__file__).parents[1] / "examples/data/make_shards.py"
SAMPLES, DEADLINE = 160, 300  # seconds after which a process that should have ended counts as hanging
PHASES = {"recovery": "recovery", "train": "training", "eval": "evaluation"}


@dataclass
class Case:
    """One command line, and its results.

    Args:
        name: in the table.
        flags: besides COMMON; {data} is the folder of the data.
        processes: 1 or 2.
    """

    name: str
    flags: str
    processes: int = 1
    seconds: float = 0.0  # of the whole run
    kills: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    equal: int = 0


SHARDS = "--train-data {data}/shards/train-{{000000..000007}}.tar --dataset-type webdataset"
SHAPES = f"--dataset-type shapes --train-num-samples {SAMPLES}"
CASES = (
    Case("csv, 2 workers", "--train-data {data}/train.csv --loss fastclip-v3 --rho 5 --workers 2"),
    Case("shards, 2 workers", f"{SHARDS} --loss isogclr --workers 2"),
    Case("resampled, accumulation", f"{SHARDS} --dataset-resampled --loss neuclip --npn-prototypes 20 --workers 1 "
         f"--train-num-samples {SAMPLES} --accum-freq 2"),
    Case("shapes, evaluation", f"{SHAPES} --val-num-samples 32 --loss amorlip --workers 0"),
    Case("shapes, recovery", f"{SHAPES} --loss tuneclip --osr-epochs 1.5 --tau-init 0.05 --workers 0"),
    Case("shards, 2 processes", f"{SHARDS} --loss fastclip-v2 --workers 1", processes=2),
)


def make_data(folder: Path) -> None:
    size = f"--num-samples {SAMPLES} --val-samples 8 --samples-per-shard 20 --image-size 48"
    command = [sys.executable, str(MAKE_SHARDS), "shapes", "--out", f"{folder}/shards", *size.split()]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "images").mkdir()
    lines = ["filepath\ttitle"]
    for row, (image, caption) in enumerate(Scenes(SAMPLES, image_size=48)):
        image.save(folder / f"images/{row}.png")
        lines.append(f"{folder}/images/{row}.png\t{caption}")
    (folder / "train.csv").write_text("\n".join(lines))


class Run:
    """The forked processes of a run, each the leader of its own process group."""

    def __init__(self, case: Case, folder: Path, name: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = f"{COMMON} {case.flags.format(data=folder)} --logs {folder}/logs --name {name}".split()
        self.codes: dict[int, int | None] = {}
        self.began = time.monotonic()
        for rank in range(case.processes):
            child = os.fork()
            if child:
                self.codes[child] = None
                continue
            os.setsid()
            output = os.open(folder / f"{name}.{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if case.processes > 1:
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK="0")
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(case.processes))
            code = 99
            try:
                code = train(flags)
            finally:
                os._exit(code)

    def ended(self) -> bool:
        for process, code in self.codes.items():
            if code is None:
                found, status = os.waitpid(process, os.WNOHANG)
                self.codes[process] = os.waitstatus_to_exitcode(status) if found else None
        return None not in self.codes.values()

    def wait(self, until: float | None = None) -> bool:
        """Wait until all processes have ended, or until the time `until`; return whether all have."""
        deadline = time.monotonic() + DEADLINE
        while not self.ended():
            if until is not None and time.monotonic() >= until:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {[p for p, code in self.codes.items() if code is None]} do not end")
            time.sleep(0.005)
        return True

    def clean(self) -> None:
        """Kill the loaders' workers, which notice only after a while that their process has ended."""
        for process in self.codes:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)


def checkpoint(folder: Path, name: str) -> Any:
    return torch.load(folder / f"logs/{name}/checkpoints/epoch_2.pt", weights_only=True)


def equal(one: Any, other: Any) -> bool:
    """Whether two checkpoints are equal to the last bit, except for the experiment's name."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one if key != "name")
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def phase(folder: Path, name: str, size: int) -> str:
    """The phase in which the run ended, from the metrics file, whose first `size` bytes are earlier runs'."""
    path = folder / f"logs/{name}" / FILE
    lines = path.read_bytes()[size:].splitlines() if path.exists() else []
    return PHASES[json.loads(lines[-1])["stage"]] if lines else "start-up"


def kill(run: Run, draw: random.Random, kind: signal.Signals, phase_now: Callable[[], str]) -> None:
    """Kill one process; check that all end, with the exit codes of docs/resume.md."""
    victim = draw.choice(list(run.codes))
    if run.codes[victim] is None:
        os.kill(victim, kind)
    expected = {-9, 1, 0} if kind == signal.SIGKILL else {-15, 143, 1, 0}
    if not run.wait(time.monotonic() + 20) and phase_now() == "start-up":
        run.clean()  # the other process waits for this one to join; torchrun would kill it, too
        expected.add(-9)
    run.wait()
    if not set(run.codes.values()) <= expected:
        raise AssertionError(f"exit codes {list(run.codes.values())} after {kind.name}")


def go_through(case: Case, folder: Path, kills: int, draw: random.Random) -> None:
    """Train once without a kill; then start, kill and resume runs until there were `kills` kills and all runs ended."""
    whole = Run(case, folder, "whole")
    whole.wait()
    whole.clean()
    if any(whole.codes.values()):
        raise AssertionError(f"{case.name}: the run without a kill failed, see {folder}")
    case.seconds = time.monotonic() - whole.began
    expected = checkpoint(folder, "whole")
    while sum(case.kills.values()) < kills:
        name = f"killed-{case.runs}"
        log = folder / f"logs/{name}" / FILE
        while True:
            size = log.stat().st_size if log.exists() else 0
            run = Run(case, folder, name)
            over = sum(case.kills.values()) >= kills
            if run.wait(None if over else run.began + draw.uniform(0, case.seconds)):
                break
            kind = signal.SIGTERM if sum(case.kills.values()) % 2 else signal.SIGKILL
            kill(run, draw, kind, partial(phase, folder, name, size))
            run.clean()
            at = phase(folder, name, size)
            case.kills[at] = case.kills.get(at, 0) + 1
        run.clean()
        if any(run.codes.values()):
            end = (folder / f"{name}.0.txt").read_text()[-1000:]
            raise AssertionError(f"{case.name}: a resumed run failed, exit codes {list(run.codes.values())}; ... {end}")
        case.runs += 1
        case.equal += equal(checkpoint(folder, name), expected)


def row(case: Case) -> dict[str, Any]:
    phases = {at: case.kills.get(at, 0) for at in ("start-up", "recovery", "training", "evaluation")}
    return {"case": case.name, **phases, "kills": sum(phases.values()), "runs": case.runs, "equal": case.equal}


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--kills", type=int, default=100, help="kills in all cases together (default: 100)")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--cases", type=int, nargs="+", default=[*range(len(CASES))], help="numbers of cases, from 0")
    flags.add_argument("--folder", help="new folder for data and logs (default: a temporary one)")
    args = flags.parse_args(argv)
    torch.set_num_threads(1)
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(args.folder or temporary)
        os.environ["XDG_CACHE_HOME"] = str(base / "cache")
        (base / "models").mkdir(parents=True)
        (base / "models/kills-tiny.json").write_text(json.dumps(MODEL))
        open_clip.add_model_config(base / "models")
        cases = [CASES[number] for number in args.cases]
        for number, case in enumerate(cases):
            folder = base / str(number)
            folder.mkdir()
            make_data(folder)
            go_through(case, folder, (args.kills + number) // len(cases), draw)
            print(json.dumps(row(case)), file=sys.stderr, flush=True)
    print(table([row(case) for case in cases]))
    return int(any(case.equal < case.runs for case in cases))


if __name__ == "__main__":
    sys.exit(main())
