"""Run the grid of grid.yaml, one training after another in order.

    OMP_NUM_THREADS=1 nohup nice -n 19 python examples/evidence/run.py --data icons &

`--data` is the folder of `python examples/data/make_shards.py icons` (docs/icons.md). A finished run adds its line
to results.jsonl beside this file and is not repeated; an interrupted one resumes after its last whole epoch. Several of
these commands may share the logs. A diverged run is a result, too; any other failure ends the command.

A line names the commit that pip installed the package from. To run one commit while the package is worked on:

    pip install --no-deps --target pkg git+file://$PWD@COMMIT
    git archive COMMIT examples/evidence | tar -x -C pkg
    OMP_NUM_THREADS=1 PYTHONPATH=pkg python pkg/examples/evidence/run.py --data icons --results results.jsonl
"""

import argparse
import fcntl
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distribution, version
from pathlib import Path
from typing import IO

from grid import HERE, WAYS, Grid, Run, append_result, last_recall, read_results, told

METRICS = [f"{way}_{name}" for way in WAYS for name in ("R@1", "R@5", "R@10", "mean_rank")] + ["clip_val_loss"]
DIVERGED = re.compile(r"^open_clip_ext: error: (step .* is not finite.*)", re.MULTILINE)
# Each step frees and allocates 12 MiB several times, for the token embedding's gradient and in AdamW. Unless glibc
# keeps that memory, page faults are a sixth of the step's time. The numbers stay the same to the last bit.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_TOP_PAD_": str(2**26),
}
ZERO_SHOT = ("zeroshot-concepts", "zeroshot-emoji")


@dataclass
class Started:
    run: Run
    process: subprocess.Popen
    lock: IO
    since: float
    resumed: bool
    compiled: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the icons")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--only", metavar="METHOD", help="only this method's runs")
    parser.add_argument("--cells", nargs="+", metavar="CELL", help="only the runs of these (default: all)")
    parser.add_argument("--torchcompile", action="store_true",
                        help="compile the model, which computes the same up to rounding; needs a C++ compiler")
    parser.add_argument("--hours", type=float, default=float("inf"), help="start no run that would end later than this")
    parser.add_argument("--list", action="store_true", help="print the runs with their hours, and exit")
    parser.add_argument("--grid", type=Path, default=HERE / "grid.yaml", help="(default: beside this file)")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl", help="(default: beside this file)")
    logs = Path("evidence-logs")
    parser.add_argument("--logs", type=Path, default=logs, help=f"logs, checkpoints; 53 MB per run (default: {logs})")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs: {args.jobs} is out of range; it must be at least 1")
    with told(parser):
        grid, results = Grid(args.grid), read_results(args.results)
    if args.only and args.only not in grid.methods:
        parser.error(f"--only: {args.only!r} is not one of {', '.join(map(repr, grid.methods))}")
    if unknown := sorted(set(args.cells or ()) - set(grid.cells)):
        parser.error(f"--cells: {unknown[0]!r} is not one of {', '.join(grid.cells)}")
    if args.list:
        return show(grid, results)
    if not (args.data and (args.data / "sizes.json").exists()):
        parser.error(f"--data: {str(args.data)!r} has no sizes.json; give the folder that make_shards wrote")
    args.logs.mkdir(parents=True, exist_ok=True)
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, lambda number, _: sys.exit(f"ended by {signal.Signals(number).name}"))
    work(grid, args)


def show(grid: Grid, results: dict[str, dict]) -> None:
    for run in grid.runs:
        print(f"{grid.hours(run):6.2f} h  {run.name}{'  done' if run.name in results else ''}")
    print(f"{sum(map(grid.hours, grid.runs)):6.2f} h  {len(grid.runs)} runs; {remaining(grid, results):.1f} h left")


def work(grid: Grid, args: argparse.Namespace) -> None:
    """Keep `args.jobs` runs going until no more may start."""
    end = time.monotonic() + 3600 * args.hours
    running: dict[int, Started] = {}
    elsewhere: set[Run] = set()  # in another of these commands
    try:
        while True:
            results = read_results(args.results)
            hours = (end - time.monotonic()) / 3600 / pace(grid, results)
            begun = elsewhere | {started.run for started in running.values()}
            run = None
            if len(running) < args.jobs:
                run = grid.next_run(results, begun, args.only, hours, args.cells)
            if run:
                flags, compiled = grid.flags(run, results), grid.cells[run.cell].get("compiled", args.torchcompile)
                alike = (one for one in results.values() if one["flags"] == flags)
                # Tuning has chosen what ran untuned.
                if same := next((one for one in alike if one.get("compiled", False) == compiled), None):
                    append_result(args.results, {**same, "run": run.name, "cell": run.cell, "same_as": same["run"]})
                    continue
                started = start(run, flags, args, compiled)
                if started:
                    running[started.process.pid] = started
                    print(f"begins {run.name}; {remaining(grid, results):.1f} h left in all", flush=True)
                else:
                    print(f"{run.name} still goes on elsewhere, or what is left of it", flush=True)
                    elsewhere.add(run)
                continue
            if not running:
                break
            started, cpu_seconds, peak = wait(running)
            elsewhere.clear()
            with started.lock:
                result = collect(started, grid, results, args, cpu_seconds, peak)
                append_result(args.results, result)
            outcome = result["diverged"] or f"R@1 {last_recall(result):.1f}"
            print(f"{time.strftime('%d %b %H:%M')}  {result['run']}: {outcome}", flush=True)
        print(f"no more runs may begin; {remaining(grid, results):.1f} h left in all")
    finally:
        for started in running.values():
            started.process.terminate()


def wait(running: dict[int, Started]) -> tuple[Started, float, float]:
    """Wait for a run to end and remove it from `running`; return it with its CPU seconds, its workers' included, and
    the most memory (MiB) that it held."""
    peaks = dict.fromkeys(running, 0.0)
    while True:
        for pid in running:
            # Not ru_maxrss, which begins with this process's.
            with suppress(OSError, StopIteration):
                status = Path(f"/proc/{pid}/status").read_text().splitlines()
                peaks[pid] = int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                started = running.pop(pid)
                started.process.returncode = os.waitstatus_to_exitcode(status)
                return started, usage.ru_utime + usage.ru_stime, peaks[pid]
        time.sleep(0.1)


def pace(grid: Grid, results: dict[str, dict]) -> float:
    """Hours that the finished runs took per estimated hour."""
    timed = [(results[run.name]["wall_seconds"], grid.hours(run)) for run in grid.runs if run.name in results]
    timed = [(seconds / 3600, hours) for seconds, hours in timed if seconds]
    return sum(took for took, _ in timed) / sum(hours for _, hours in timed) if timed else 1.0


def remaining(grid: Grid, results: dict[str, dict]) -> float:
    """Hours that the runs without a result will take, one at a time."""
    return pace(grid, results) * sum(grid.hours(run) for run in grid.runs if run.name not in results)


def start(run: Run, flags: str, args: argparse.Namespace, compiled: bool) -> Started | None:
    """Start or resume a run; None if another command is running it.

    The training inherits the lock, so that it is held while the training lives, even after this command ends.
    """
    lock = open(args.logs / f"{run.name}.lock", "a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    lock.seek(0)
    if lock.read() not in ("", flags):
        sys.exit(f"{run.name} has begun with other flags in {args.logs}; give another --logs, or remove what is there")
    lock.truncate(0)
    lock.write(flags)
    lock.flush()
    resumed = (args.logs / run.name).exists()
    with open(args.logs / f"{run.name}.output", "wb") as output:
        process = subprocess.Popen(
            command(run, flags, args, resumed, compiled),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **KEEP_MEMORY},
            pass_fds=[lock.fileno()],
        )
    return Started(run, process, lock, time.monotonic(), resumed, compiled)


def command(run: Run, flags: str, args: argparse.Namespace, resumed: bool, compiled: bool) -> list[str]:
    words = [
        word.replace("{data}", str(args.data)).replace("{logs}", str(args.logs)) for word in shlex.split(flags)
    ]
    words += ["--logs", str(args.logs), "--name", run.name, *(["--resume", "latest"] if resumed else [])]
    words += ["--torchcompile"] * compiled
    return ["nice", "-n", "19", sys.executable, str(HERE / "train.py"), *words]


def collect(
    started: Started, grid: Grid, results: dict, args: argparse.Namespace, cpu_seconds: float, peak: float
) -> dict:
    """The result line of an ended run; ends this command if the run failed without diverging."""
    run, resumed = started.run, started.resumed
    wall_seconds = time.monotonic() - started.since
    output = (args.logs / f"{run.name}.output").read_text(errors="replace")
    diverged = DIVERGED.search(output)
    if started.process.returncode and not diverged:
        sys.exit(output[-3000:] + f"\n{run.name} ended with code {started.process.returncode}")
    cell, about = grid.cells[run.cell], grid.methods[run.method]
    folder = args.logs / run.name
    checkpoint = folder / "checkpoints" / f"epoch_{cell['epochs']}.pt"
    means = last_means(folder)
    return {
        "run": run.name,
        "cell": run.cell,
        "method": run.method,
        "candidate": grid.chosen(run, results),
        "flags": grid.flags(run, results),
        "rows": cell["rows"],
        "batch": grid.batch * about.get("batches", 1),
        "epochs": cell["epochs"],
        "seed": run.seed,
        "gallery": cell["gallery"],
        "by_epoch": evaluations(folder),
        "tau": means.get("tau"),
        "logged_last": means,
        "zero_shot": {} if diverged or run.cell == "tune" else zero_shot(grid, checkpoint, args.data),
        **({"old_R@10": 0.0 if diverged else old_recall(grid, checkpoint, args.data)} if "folder" in cell else {}),
        "diverged": diverged[1] if diverged else None,
        "compiled": started.compiled,
        # Unknown for a resumed run, whose earlier part was not timed.
        "wall_seconds": None if resumed else round(wall_seconds, 1),
        "cpu_seconds": None if resumed else round(cpu_seconds, 1),
        "peak_mib": round(peak, 1),
        "versions": {name: version(name) for name in ("open-clip-ext", "open_clip_torch", "torch")},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def commit() -> str | None:
    """The commit that pip installed the package from; None for an installation from a folder, which may change."""
    origin = json.loads(distribution("open-clip-ext").read_text("direct_url.json") or "{}")
    return origin.get("vcs_info", {}).get("commit_id")


def evaluations(folder: Path) -> list[dict]:
    """The metrics of every epoch; the last ones if an epoch was evaluated again after an interruption."""
    path = folder / "checkpoints" / "results.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    by_epoch = {line["epoch"]: {name: finite(line[name]) for name in ("epoch", *METRICS)} for line in lines}
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def last_means(folder: Path) -> dict[str, float | None]:
    """The mean of every value over the logged steps of the last epoch; None if one was not finite."""
    from open_clip_ext.metrics_file import read_metrics  # imports torch, which waiting does not need

    lines = read_metrics(folder, "train")
    lines = [line for line in lines if line["epoch"] == lines[-1]["epoch"]]
    values: dict[str, list] = {}
    for line in lines:
        for name in line.keys() - {"stage", "epoch", "step", "steps", "time"}:
            values.setdefault(name, []).append(line[name])
    return {name: None if None in some else sum(some) / len(some) for name, some in sorted(values.items())}


def finite(value: float) -> float | None:
    """None in place of NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def zero_shot(grid: Grid, checkpoint: Path, data: Path) -> dict[str, float]:
    """Accuracy on the zero-shot folders of the data."""
    from zero_shot import accuracy

    return {name: accuracy(grid.model, checkpoint, data / name) for name in ZERO_SHOT if (data / name).exists()}


def old_recall(grid: Grid, checkpoint: Path, data: Path) -> float:
    """R@10 in percent on the data's own test gallery, of a run on other data, which a folder in it has."""
    from zero_shot import recall

    return 100 * recall(grid.model, checkpoint, str(data / "test-000000.tar"), 10)


if __name__ == "__main__":
    main()
