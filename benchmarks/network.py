"""Time of the ten updates of NeuCLIP's network per step, against plain autograd and against bare matrix products.

    python benchmarks/network.py --json network.json

`autograd` is Algorithm 1, lines 6 to 8, as in `open_clip_ext.equations`: the graph of the cosines with 2 x m
prototypes, `backward`, AdaGrad. `products` are the two matrix products per direction that an update needs at least:
anchors with prototypes, and weights with anchors. `ours` is a step's whole `update`, which also pushes the batch into
the ring buffer. All alternate; ratios are those of the medians.

`ours` launches each operation or kernel. `--also graph` adds the update as one CUDA graph, the default on a GPU,
`eager` that without kernels (`--kernels eager`), and `bfloat16` the bare products in bfloat16. They show what fewer
launches, fewer passes and lower precision gain. A variant that fails prints the reason and is left out. `graph` also
trains networks with and without it; the exit code is 1 if they differ in a bit.
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


def first_difference(batches: Callable[[int], Batch], start: Tensor, args) -> int | None:
    """The first step after which a network that is updated by a CUDA graph is not, to the last bit, the one without.

    At a rate that lets prototypes settle, and at one whose updates are undone; with restarts, and a batch that is not
    finite.
    """
    for rate in (0.01, 100.0):
        options = dict(npn_prototypes=args.m, npn_updates=max(2, args.updates), npn_restart_every=7, npn_lr=rate)
        networks = [Prototypes(npn_graph=graph, npn_max_rise=0.0, **options) for graph in (False, True)]
        for network in networks:
            network.materialize(args.dim, start.device, start.dtype)
        filled = -(-args.m // len(batches(0).image))
        for step in range(filled + 20):
            batch = batches(step)
            batch.finite = torch.tensor(step != filled + 10, device=start.device)
            for network in networks:
                network.update(batch)
            states = [network.network.state() for network in networks]
            if not all(torch.equal(states[0][name], states[1][name]) for name in states[0]):
                return step
    return None


def variant(kind: str, make: Callable[..., Prototypes], batch: Batch, args) -> Callable[[], object] | None:
    """The variant `kind` of `--also`; None if it fails here."""
    try:
        if kind == "bfloat16":
            products = BareProducts(len(batch.image), args.dim, args.m, "others", batch.image.device, torch.bfloat16)
            return lambda: [products() for _ in range(args.updates)]
        normalizer = make(npn_graph=True, kernels="eager" if kind == "eager" else "auto")
        normalizer.update(batch)
        normalizer.update(batch)
        if normalizer.update_graph.failed:
            raise RuntimeError("none was captured")
        return lambda: normalizer.update(batch)
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

    def make(npn_graph: bool = False, kernels: str = "auto") -> Prototypes:
        options = dict(npn_prototypes=m, npn_updates=args.updates, npn_restart_every=0, npn_lr=0.01)
        normalizer = Prototypes(**options, npn_graph=npn_graph, kernels=kernels)
        normalizer.materialize(dim, device, image.dtype)
        for start in range(0, m, batch_size):
            normalizer.update(batch_of(slice(start, start + batch_size)))
        return normalizer

    def some(step: int) -> Batch:
        first = step * batch_size % (len(image) - batch_size + 1)
        return batch_of(slice(first, first + batch_size))

    difference = first_difference(some, image, args) if "graph" in args.also else None
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
        **({} if difference is None else {"graph_differs_from_step": difference}),
        "bytes": peak_memory(functions["ours"], device), "autograd_bytes": peak_memory(functions["autograd"], device),
    }


def main(argv: list[str] | None = None) -> list[dict]:
    flags = parser(__doc__)
    flags.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 1024, 4096])
    flags.add_argument("-m", type=int, default=4096, help="prototypes per direction")
    flags.add_argument("--dim", type=int, default=512, help="dimension of the embeddings")
    flags.add_argument("--updates", type=int, default=10, help="T_u")
    flags.add_argument("--also", nargs="*", default=[], choices=("graph", "eager", "bfloat16"), help="more variants")
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
            **({"bits": "differ" if "graph_differs_from_step" in result else "equal"} if "graph" in args.also else {}),
            "ms": f"{1e3 * result['to_products']['seconds']:.0f}",
            "MiB": f"{result['bytes'] / 2**20:.0f}", "autograd MiB": f"{result['autograd_bytes'] / 2**20:.0f}",
        }
        for result in results
    ]
    print(table(rows))
    finish(args, device, results)
    return results


if __name__ == "__main__":
    if any("graph_differs_from_step" in result for result in main()):
        sys.exit(1)
