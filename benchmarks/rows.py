"""Time to allocate a table of n rows, and to look up and update a batch of them.

    python benchmarks/rows.py --json rows.json

A step of a table loss looks up its rows, computes new values and writes them back (`update`). Rows are drawn at random
from all n, so that they are not cached. Sizes that do not fit in memory are left out.
"""

import torch
from measuring import alternate, begin, finish, now, parser, table
from torch import Tensor
from tqdm import tqdm

from open_clip_ext.batch import Batch
from open_clip_ext.memory import total_memory
from open_clip_ext.normalizers import MovingAverageTable
from open_clip_ext.row_state import ShardedRows


def compare(num_rows: int, batch: int, device: torch.device, args) -> dict:
    start = now(device)
    where = "cpu" if args.rows_on == "host" else device
    normalizer = MovingAverageTable(num_rows, gamma_schedule="constant", device=where)
    seconds = {"start": now(device) - start}
    generator = torch.Generator().manual_seed(0)
    rows: ShardedRows = normalizer.rows
    empty, tau = torch.zeros(batch, 1, device=device), torch.tensor(0.1, device=device)
    log_batch = torch.randn(2, batch, device=device)
    indices: list[Tensor] = [torch.randint(num_rows, (batch,), generator=generator).to(device) for _ in range(64)]
    turn = {"lookup": 0, "update": 0}

    def next_index(name: str) -> Tensor:
        turn[name] += 1
        return indices[turn[name] % len(indices)]

    def update() -> None:
        index = next_index("update")
        normalizer.update(Batch.of_process(empty, empty, tau, index, log_batch))

    times = alternate({"lookup": lambda: rows.lookup(next_index("lookup")), "update": update}, device, 30, args.seconds)
    seconds |= {name: torch.tensor(values).median().item() for name, values in times.items()}
    return {"rows": num_rows, "batch": batch, "bytes": rows.rows.numel() * 4, "seconds": seconds}


def main(argv: list[str] | None = None) -> list[dict]:
    flags = parser(__doc__)
    flags.add_argument("--rows", type=int, nargs="+", default=[10**k for k in (5, 6, 7, 8)])
    flags.add_argument("--rows-on", choices=("device", "host"), default="device", help="as the command's flag")
    flags.add_argument("--batch-size", type=int, default=4096)
    args = flags.parse_args(argv)
    device = begin(args)
    memory = total_memory(torch.device("cpu") if args.rows_on == "host" else device)
    sizes = [rows for rows in args.rows if 8 * rows < 0.8 * memory]
    results = [compare(rows, args.batch_size, device, args) for rows in tqdm(sizes, desc="tables")]
    print(table([
        {
            "rows": f"{result['rows']:,}", "MiB": f"{result['bytes'] / 2**20:.0f}",
            "made in s": f"{result['seconds']['start']:.2f}",
            f"lookup of {args.batch_size}, ms": f"{1e3 * result['seconds']['lookup']:.2f}",
            "update, ms": f"{1e3 * result['seconds']['update']:.2f}",
        }
        for result in results
    ]))
    finish(args, device, results)
    return results


if __name__ == "__main__":
    main()
