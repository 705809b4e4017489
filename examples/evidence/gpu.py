"""Run the grid of gpu.yaml on one GPU, many trainings at once (gpu_training.py).

    python examples/evidence/pack_glyphs.py --fonts fonts --out glyphs.xz
    python examples/evidence/gpu.py --data glyphs.xz --results gpu.jsonl --seconds 280

Each worker process makes one training after another, in the grid's order. A finished one adds its line to the results,
for report.py beside this file, and none is begun that the seconds left would cut.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import traceback
import warnings
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # of each worker

import open_clip
import torch
from gpu_training import Data, read_data, settings, train
from grid import HERE, Grid, Run, append_result, last_recall, read_results, told

import open_clip_ext


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="pack_glyphs.py's file")
    parser.add_argument("--grid", type=Path, default=HERE / "gpu.yaml", help="(default: beside this file)")
    parser.add_argument("--results", type=Path, default=HERE / "gpu.jsonl", help="(default: beside this file)")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="trainings at a time (default: 8)")
    parser.add_argument("--seconds", type=float, default=280, help="end after so many (default: 280)")
    parser.add_argument("--commit", help="of this code, for the results")
    parser.add_argument("--device", default="cuda", help="(default: cuda)")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    with told(parser):
        grid, data = Grid(args.grid), read_data(args.data)
    workers = [Worker(data, args.device) for _ in range(args.workers)]
    try:
        work(grid, workers, args, end)
    finally:
        for worker in workers:
            worker.process.terminate()


class Worker:
    """A process with the data on the device, which calls functions of them.

    It is forked before CUDA begins in this process, so that the imports, ten seconds, are made once.
    """

    def __init__(self, data: Data, device: str):
        self.pipe, other = connection.Pipe()
        self.process = get_context("fork").Process(target=serve, args=(other, data, device), daemon=True)
        self.process.start()
        other.close()  # so that the pipe ends with the process
        self.run: Run | None = None

    def call(self, *function: Any) -> None:
        """Begin `function[0](data, *function[1:])`; the pipe then has its result, or a str that tells its error."""
        self.pipe.send(function)


def serve(pipe: connection.Connection, data: Data, device: str) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # "No pretrained weights", once a run
    warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")  # of graphs; the numbers are the same
    torch.backends.cuda.matmul.allow_tf32 = True  # as OpenCLIP's command
    open_clip.add_model_config(open_clip_ext.MODEL_CONFIGS)
    data = {name: tensor.to(device, dtype_of(tensor)) for name, tensor in data.items()}
    while True:
        function, *arguments = pipe.recv()
        try:
            pipe.send(function(data, *arguments))
        except Exception:
            pipe.send(traceback.format_exc())


def dtype_of(tensor: torch.Tensor) -> torch.dtype:
    return torch.int64 if tensor.dtype == torch.uint16 else tensor.dtype  # tokens


def work(grid: Grid, workers: list[Worker], args: argparse.Namespace, end: float) -> None:
    """Keep the workers busy with the grid's runs in order, until none is left or fits."""
    begun: set[Run] = set()
    had: dict[Run, float] = {}  # seconds of the GPU that each running one has had, if they share it equally
    took, estimated = 0.0, 0.0  # such seconds of the finished ones
    now = time.monotonic()
    while True:
        results = read_results(args.results)
        pace = took / estimated if took else 1.0
        for worker in workers:
            still = sum(max(0.0, pace * seconds(grid, run) - some) for run, some in had.items())
            room = (end - now - still) / 3600 / pace
            if worker.run is None and (run := grid.next_run(results, begun, None, room)):
                worker.run = run
                begun.add(run)
                had[run] = 0.0
                worker.call(train, grid.flags(run, results), grid.cells[run.cell]["gallery"])
        busy = {worker.pipe: worker for worker in workers if worker.run}
        ready = connection.wait(list(busy), max(0.0, end - now)) if busy else []
        before, now = now, time.monotonic()
        had = {run: some + (now - before) / len(had) for run, some in had.items()}
        for pipe in ready:
            worker = busy[pipe]
            run, worker.run = worker.run, None
            took, estimated = took + had.pop(run), estimated + seconds(grid, run)
            left = f"{end - now:5.0f} s left  {run.name}"
            try:
                answer = pipe.recv()
            except EOFError:
                answer, workers = "its process ended", [other for other in workers if other is not worker]
            if isinstance(answer, str):
                print(left, answer, sep="\n", flush=True)
                continue
            append_result(args.results, {**about(grid, run, results), **answer, "commit": args.commit})
            outcome = answer["diverged"] or f"R@1 {last_recall(answer):.1f}"
            print(f"{left}: {outcome}, {answer['wall_seconds']} s", flush=True)
        if not ready:
            missing = sum(run.name not in results for run in grid.runs)
            return print(f"{missing} of {len(grid.runs)} runs have no result; {len(busy)} were cut")


def seconds(grid: Grid, run: Run) -> float:
    """The estimated time of a run that has the GPU alone."""
    return 3600 * grid.hours(run)


def about(grid: Grid, run: Run, results: dict[str, dict]) -> dict[str, Any]:
    """What is known of a run before it is made; names as run.py has them."""
    cell, flags = grid.cells[run.cell], grid.flags(run, results)
    return {
        "run": run.name,
        "cell": run.cell,
        "method": run.method,
        "candidate": grid.chosen(run, results),
        "flags": flags,
        "rows": cell["rows"],
        "batch": settings(flags).batch_size,
        "epochs": cell["epochs"],
        "seed": run.seed,
        "gallery": cell["gallery"],
        "compiled": False,
        "versions": {module.__name__: module.__version__ for module in (open_clip_ext, open_clip, torch)},
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


if __name__ == "__main__":
    main()
