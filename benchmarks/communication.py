"""Communication of each loss in a step, against OpenCLIP's ClipLoss, and the memory of a table on each process.

    python benchmarks/communication.py --json communication.json

Counts the calls of one process and the bytes it sends in a step, forward and backward, without the model's gradients.
ClipLoss has `local_loss` and `gather_with_grad`, its exact form. The counts do not depend on the device, so a CPU will
do.
"""

import argparse
import json
import os
import socket
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from collectives import CollectiveCounter
from measuring import reference_of
from open_clip.loss import ClipLoss
from torch.nn.functional import normalize

from open_clip_ext import create_loss, list_losses
from open_clip_ext.row_state import ShardedRows


def measure(rank: int, world: int, port: int, args: argparse.Namespace, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    losses = {"clip": ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world)}
    queued = max(args.prototypes, 2 * args.batch_size * dist.get_world_size())  # more than the batch
    small = {"neuclip": {"npn_prototypes": args.prototypes}, "queue": {"queue_size": queued}}
    for preset in list_losses():
        if not preset.is_open_clip:
            losses[preset.name] = create_loss(preset.name, num_samples=10_000, epochs=2, **small.get(preset.name, {}))
    losses["neuclip, split"] = create_loss("neuclip", npn_split=True, **small["neuclip"])
    results = []
    for name, loss in losses.items():
        for step in range(2):  # the first includes what is sent once in hundreds of steps; the second is counted
            features = [normalize(torch.randn(args.batch_size, args.dim), dim=1).requires_grad_() for _ in range(2)]
            more = {} if name == "clip" else {"index": torch.arange(args.batch_size) + rank * args.batch_size}
            more |= reference_of(loss, *features)
            if step == 0 and name != "clip":
                loss.set_epoch(0)
            with CollectiveCounter() as counter:
                loss(*features, torch.tensor(10.0, requires_grad=True), **more).backward()
        results.append({"loss": name, "processes": world, "calls": sum(counter.calls.values()), "bytes": counter.sent})
    table = ShardedRows(args.rows, 2, fill=0.0)
    results.append({"rows": args.rows, "processes": world, "table_bytes": table.rows.numel() * 4})
    if rank == 0:
        with open(path, "w") as file:
            json.dump(results, file)
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=256, help="pairs per process")
    parser.add_argument("--dim", type=int, default=512, help="dimension of the embeddings")
    parser.add_argument("--prototypes", type=int, default=4096, help="prototypes of neuclip, length of the queue")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the table")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args(argv)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for world in args.processes:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            path = os.path.join(folder, "results.json")
            mp.start_processes(measure, (world, port, args, path), nprocs=world, start_method="spawn")
            with open(path) as file:
                results += json.load(file)
    print(f"{args.batch_size} pairs of dimension {args.dim} per process; calls and KiB that one process sends per step")
    names = dict.fromkeys(r["loss"] for r in results if "loss" in r)
    print(f"{'loss':14}" + "".join(f"{f'W = {world}':>24}" for world in args.processes))
    by_key = {(r["loss"], r["processes"]): r for r in results if "loss" in r}
    for name in names:
        cells = []
        for world in args.processes:
            r, clip = by_key[name, world], by_key["clip", world]
            ratio = f"({r['bytes'] / clip['bytes']:.2f})" if clip["bytes"] else ""
            cells.append(f"{r['calls']:>5} {r['bytes'] / 1024:>10.1f} {ratio:>6}")
        print(f"{name:14}" + "".join(f"{cell:>24}" for cell in cells))
    for world in args.processes:
        network = 2 * args.prototypes * args.dim * 4 * 2 * (world - 1) / world / 1024
        print(f"W = {world}: all-reducing the prototypes' gradient would send {network:.1f} KiB in each of 10 updates")
    for r in results:
        if "rows" in r:
            print(f"table of {r['rows']:,} rows, W = {r['processes']}: {r['table_bytes'] / 2**20:.1f} MiB per process")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)
    return results


if __name__ == "__main__":
    main()
