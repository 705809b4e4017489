"""Time and memory to save and to resume the state of a loss with n rows.

    python benchmarks/saving.py --json saving.json

What the command does at a checkpoint, in both forms: gather the state on process 0 and write one file; or every
process writes its own rows (`rows_in_files`). To resume, each process maps the file, or its parts, and takes its rows.
Memory is the most that a process held at a time (resident, pages of mapped files included) beyond what it held before,
for process 0 and for the largest of the others. Linux only.
"""

import argparse
import json
import os
import shutil
import socket
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import peak_resident, table

from open_clip_ext import create_loss, rows_in_files
from training_ext.core.files import atomic_save
from training_ext.openclip.loading import load_mapped

FORMS = ("one file", "files")


def measure(rank: int, world: int, port: int, args: argparse.Namespace, path: str) -> None:
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    file = os.path.join(os.path.dirname(path), "state.pt")
    folder = f"{file}.rows"
    results = []

    def wait() -> None:
        if world > 1:
            dist.barrier()

    for name in args.losses:
        for rows in args.rows:
            loss = create_loss(name, num_samples=rows, epochs=2)
            for form in args.forms:

                def where(form=form):
                    return rows_in_files(folder) if form == "files" else nullcontext()

                def save(loss=loss, where=where) -> None:
                    with where():
                        state = loss.full_state()
                    if rank == 0:
                        atomic_save(torch.save, state, file)
                    wait()

                def resume(loss=loss, where=where) -> None:
                    with where():
                        loss.load_full_state(load_mapped(file))
                    wait()

                wait()
                saved = peak_resident(save)
                size = os.path.getsize(file)
                size += sum(part.stat().st_size for part in Path(folder).glob("*"))
                wait()
                resumed = peak_resident(resume)
                everyone = [(saved[1], resumed[1])]
                if world > 1:
                    everyone *= world
                    dist.all_gather_object(everyone, (saved[1], resumed[1]))
                results.append({
                    "loss": name, "rows": rows, "processes": world, "form": form, "file_bytes": size,
                    "save_seconds": saved[0], "resume_seconds": resumed[0],
                    "save_memory": everyone[0][0], "resume_memory": everyone[0][1],
                    "others_save_memory": max((other[0] for other in everyone[1:]), default=0),
                    "others_resume_memory": max((other[1] for other in everyone[1:]), default=0),
                })
                if rank == 0:
                    os.remove(file)
                    shutil.rmtree(folder, ignore_errors=True)
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
    flags.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    flags.add_argument("--folder", help="on the disk to measure (default: the system's for temporary files)")
    flags.add_argument("--json", help="also write the results to this file")
    args = flags.parse_args(argv)
    results = []
    for world in args.processes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder, socket.socket() as free:
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
