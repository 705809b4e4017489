"""Time and memory to save and to resume the state of a loss with n rows.

    python benchmarks/saving.py --json saving.json

A save is what the command does at a checkpoint: gather the state on process 0, write one file, rename it. To resume,
every process maps the file and copies its rows. Memory is the increase to a process's peak resident memory, pages of
the mapped file included, for process 0 and for the largest of the others. Linux only.
"""

import argparse
import json
import os
import resource
import socket
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import table

from open_clip_ext import create_loss
from training_ext.checkpoint import atomic_save
from training_ext.loading import load_mapped


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak(function) -> tuple[float, int]:
    """Seconds that `function` takes, and its peak resident memory in bytes beyond that before the call."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, start = resident(), time.perf_counter()
    function()
    if dist.is_initialized():
        dist.barrier()
    seconds = time.perf_counter() - start
    lines = Path("/proc/self/status").read_text().splitlines()
    most = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return seconds, max(0, most - before)


def measure(rank: int, world: int, port: int, args: argparse.Namespace, path: str) -> None:
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    results = []
    for name in args.losses:
        for rows in args.rows:
            loss = create_loss(name, num_samples=rows, epochs=2)
            file = os.path.join(os.path.dirname(path), "state.pt")

            def save(loss=loss, file=file) -> None:
                state = loss.full_state()
                if rank == 0:
                    atomic_save(torch.save, state, file)

            saved = peak(save)
            size = os.path.getsize(file)
            resumed = peak(lambda loss=loss, file=file: loss.load_full_state(load_mapped(file)))
            everyone = [None] * world
            if world > 1:
                dist.all_gather_object(everyone, (saved[1], resumed[1]))
            else:
                everyone = [(saved[1], resumed[1])]
            results.append({
                "loss": name, "rows": rows, "processes": world, "file_bytes": size,
                "save_seconds": saved[0], "resume_seconds": resumed[0],
                "save_memory": everyone[0][0], "resume_memory": everyone[0][1],
                "others_save_memory": max((other[0] for other in everyone[1:]), default=0),
                "others_resume_memory": max((other[1] for other in everyone[1:]), default=0),
            })
            del loss
    if rank == 0:
        Path(path).write_text(json.dumps(results))
    if world > 1:
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> list[dict]:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--rows", type=int, nargs="+", default=[10**7, 10**8])
    flags.add_argument("--processes", type=int, nargs="+", default=[1, 4])
    flags.add_argument("--losses", nargs="+", default=["fastclip-v3", "fastclip-v2"])
    flags.add_argument("--json", help="also write the results to this file")
    args = flags.parse_args(argv)
    results = []
    for world in args.processes:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            path = os.path.join(folder, "results.json")
            mp.spawn(measure, (world, port, args, path), nprocs=world)
            results += json.loads(Path(path).read_text())
    mib = {key: f"{key.replace('_', ' ')}, MiB" for key in results[0] if key.endswith(("memory", "bytes"))}
    print(table([
        {mib.get(key, key.replace("_", " ")): f"{value / 2**20:.0f}" if key in mib else
         f"{value:.2f}" if isinstance(value, float) else value for key, value in result.items()}
        for result in results
    ]))
    if args.json:
        Path(args.json).write_text(f"{json.dumps(results, indent=1)}\n")
    return results


if __name__ == "__main__":
    main()
