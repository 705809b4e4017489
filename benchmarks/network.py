"""Time of the ten updates of NeuCLIP's network per step, against plain autograd and against bare matrix products.

    python benchmarks/network.py --json network.json

`autograd` is Algorithm 1, lines 6 to 8, as in `open_clip_ext.equations`: the graph of the cosines with 2 x m
prototypes, `backward`, AdaGrad. `products` are the two matrix products per direction that an update needs at least:
anchors with prototypes, and weights with anchors. `ours` is a step's whole `update`, which also pushes the batch into
the ring buffer. All alternate; ratios are those of the medians.

`--also compile` adds the update under torch.compile, `graph` (CUDA) the update as one CUDA graph, and `bfloat16` the
bare products in bfloat16. They show what fewer launches and lower precision could gain. A variant that fails prints the
reason and is left out.
"""

import sys
from collections.abc import Callable

import torch
from measuring import BareProducts, alternate, begin, finish, parser, peak_memory, shown, summary, table
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

from open_clip_ext import equations
from open_clip_ext.batch import Batch
from open_clip_ext.normalizers import Prototypes


class PlainAutograd:
    """NeuCLIP's network updates with autograd."""

    EPS = 1e-14

    def __init__(self, start: Tensor, batch: Batch, updates: int):
        self.w1, self.w2 = (side.clone().requires_grad_() for side in start)
        self.optimizer = torch.optim.Adagrad([self.w1, self.w2], lr=0.01)
        self.batch = batch
        self.updates = updates
        self.g = batch.log_batch.exp()

    def __call__(self) -> None:
        batch, tau = self.batch, self.batch.tau[0, 0]
        for _ in range(self.updates):
            alpha = equations.neuclip_alpha(self.w1, self.w2, batch.image, batch.text, tau, self.EPS)
            self.optimizer.zero_grad()
            equations.neuclip(self.g, tau, alpha, rho=0.0, eps=self.EPS).backward()
            self.optimizer.step()


def captured(normalizer: Prototypes, batch: Batch) -> Callable[[], None]:
    """An update as a CUDA graph, for timing only: it always writes to the ring buffer where the capture did."""
    for group in normalizer.network.optimizer.param_groups:
        group["capturable"] = True  # without learning rate decay, AdaGrad reads no value from the device
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            normalizer.update(batch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        normalizer.update(batch)
    return graph.replay


def variant(kind: str, make: Callable[[], Prototypes], batch: Batch, args) -> Callable[[], object] | None:
    """The variant `kind` of `--also`; None if it fails here."""
    try:
        if kind == "bfloat16":
            products = BareProducts(len(batch.image), args.dim, args.m, "others", batch.image.device, torch.bfloat16)
            return lambda: [products() for _ in range(args.updates)]
        normalizer = make()
        if kind == "graph":
            return captured(normalizer, batch)
        compiled = torch.compile(normalizer.update)
        compiled(batch)
        return lambda: compiled(batch)
    except Exception as error:
        print(f"{kind}: {type(error).__name__}: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return None


def compare(batch_size: int, m: int, dim: int, device: torch.device, args) -> dict:
    generator = torch.Generator().manual_seed(0)
    image = normalize(torch.randn(max(batch_size, m), dim, generator=generator), dim=1).to(device)
    text = normalize(image + torch.randn(len(image), dim, generator=generator).to(device) / dim**0.5, dim=1)

    def batch_of(rows: slice) -> Batch:
        log_batch = torch.full((2, len(image[rows])), -9.0, device=device)
        return Batch.of_process(image[rows], text[rows], torch.tensor(0.03, device=device), log_batch=log_batch)

    def make() -> Prototypes:
        normalizer = Prototypes(npn_prototypes=m, npn_updates=args.updates, npn_restart_every=0, npn_lr=0.01)
        normalizer.materialize(dim, device, image.dtype)
        for start in range(0, m, batch_size):
            normalizer.update(batch_of(slice(start, start + batch_size)))
        return normalizer

    normalizer = make()
    batch = batch_of(slice(0, batch_size))
    products = BareProducts(batch_size, dim, m, "others", device)
    functions = {
        "ours": lambda: normalizer.update(batch),
        "autograd": PlainAutograd(normalizer.weight, batch, args.updates),
        "products": lambda: [products() for _ in range(args.updates)],
    }
    variants = {kind: variant(kind, make, batch, args) for kind in args.also}
    functions |= {kind: function for kind, function in variants.items() if function is not None}
    times = alternate(functions, device, seconds=args.seconds)
    return {
        "batch": batch_size, "m": m, "dim": dim, "updates": args.updates,
        "to_products": summary(times, "ours", "products"), "to_autograd": summary(times, "ours", "autograd"),
        "also": {kind: summary(times, kind, "products") for kind in args.also if kind in times},
        "bytes": peak_memory(functions["ours"], device), "autograd_bytes": peak_memory(functions["autograd"], device),
    }


def main(argv: list[str] | None = None) -> list[dict]:
    flags = parser(__doc__)
    flags.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 1024, 4096])
    flags.add_argument("-m", type=int, default=4096, help="prototypes per direction")
    flags.add_argument("--dim", type=int, default=512, help="dimension of the embeddings")
    flags.add_argument("--updates", type=int, default=10, help="T_u")
    flags.add_argument("--also", nargs="*", default=[], choices=("compile", "graph", "bfloat16"), help="more variants")
    args = flags.parse_args(argv)
    device = begin(args)
    results = [compare(batch, args.m, args.dim, device, args) for batch in tqdm(args.batch_sizes, desc="batches")]
    rows = [
        {
            "B": result["batch"], "m": result["m"], "d": result["dim"], "updates": result["updates"],
            **{f"{key} / {base}": value for base in ("products", "autograd")
               for key, value in shown(result[f"to_{base}"]).items() if key != "ms"},
            **{f"{kind} / products": shown(result["also"][kind])["time"] if kind in result["also"] else "failed"
               for kind in args.also},
            "ms": f"{1e3 * result['to_products']['seconds']:.0f}",
            "MiB": f"{result['bytes'] / 2**20:.0f}", "autograd MiB": f"{result['autograd_bytes'] / 2**20:.0f}",
        }
        for result in results
    ]
    print(table(rows))
    finish(args, device, results)
    return results


if __name__ == "__main__":
    main()
