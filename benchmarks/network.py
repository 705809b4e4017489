"""The ten updates of NeuCLIP's network in a step, against plain autograd and against their bare matrix products.

    python benchmarks/network.py --json network.json

`autograd` is Algorithm 1, lines 6 to 8, as `open_clip_ext.equations` prints it: the graph of the cosines with 2 x m
prototypes, `backward`, AdaGrad. `products` are the two matrix products a side that an update cannot do without:
anchors with prototypes, and weights with anchors. Ours is a step's whole `update`, which also takes the batch into the
ring. Ratios of the medians of rounds in which all three alternate.
"""

import torch
from measuring import BareProducts, alternate, begin, finish, parser, peak_memory, shown, summary, table
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

from open_clip_ext import equations
from open_clip_ext.batch import Batch
from open_clip_ext.normalizers import Prototypes


class PlainAutograd:
    """NeuCLIP's network updates by autograd."""

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


def compare(batch_size: int, m: int, dim: int, device: torch.device, args) -> dict:
    generator = torch.Generator().manual_seed(0)
    image = normalize(torch.randn(max(batch_size, m), dim, generator=generator), dim=1).to(device)
    text = normalize(image + torch.randn(len(image), dim, generator=generator).to(device) / dim**0.5, dim=1)

    def batch_of(rows: slice) -> Batch:
        log_batch = torch.full((2, len(image[rows])), -9.0, device=device)
        return Batch.of_process(image[rows], text[rows], torch.tensor(0.03, device=device), log_batch=log_batch)

    normalizer = Prototypes(npn_prototypes=m, npn_updates=args.updates, npn_restart_every=0, npn_lr=0.01)
    normalizer.materialize(dim, device, image.dtype)
    for start in range(0, m, batch_size):
        normalizer.update(batch_of(slice(start, start + batch_size)))
    batch = batch_of(slice(0, batch_size))
    products = BareProducts(batch_size, dim, m, "others", device)
    functions = {
        "ours": lambda: normalizer.update(batch),
        "autograd": PlainAutograd(normalizer.weight, batch, args.updates),
        "products": lambda: [products() for _ in range(args.updates)],
    }
    times = alternate(functions, device, seconds=args.seconds)
    return {
        "batch": batch_size, "m": m, "dim": dim, "updates": args.updates,
        "to_products": summary(times, "ours", "products"), "to_autograd": summary(times, "ours", "autograd"),
        "bytes": peak_memory(functions["ours"], device), "autograd_bytes": peak_memory(functions["autograd"], device),
    }


def main(argv: list[str] | None = None) -> list[dict]:
    flags = parser(__doc__)
    flags.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 1024, 4096])
    flags.add_argument("-m", type=int, default=4096, help="prototypes a side")
    flags.add_argument("--dim", type=int, default=512, help="of the embeddings")
    flags.add_argument("--updates", type=int, default=10, help="T_u")
    args = flags.parse_args(argv)
    device = begin(args)
    results = [compare(batch, args.m, args.dim, device, args) for batch in tqdm(args.batch_sizes, desc="batches")]
    rows = [
        {
            "B": result["batch"], "m": result["m"], "d": result["dim"], "updates": result["updates"],
            **{f"{key} / {base}": value for base in ("products", "autograd")
               for key, value in shown(result[f"to_{base}"]).items() if key != "ms"},
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
