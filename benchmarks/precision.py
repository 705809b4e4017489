"""Error that TF32 and bfloat16 products would cause in the normalizers predicted by prototypes and queues.

    python benchmarks/precision.py

Synthetic embeddings of `--batch-size` anchors and m others share 64 directions, so that some are close to each other.
The error is the root mean square over anchors of the difference to alpha in float64. The products' inputs are rounded
and the products summed in float32, as matrix units do. The last column also rounds similarities to bfloat16, as
autocast would. Gradients are not compared.
"""

import math

import torch
from measuring import begin, finish, parser, table
from torch import Tensor
from torch.nn.functional import normalize

from open_clip_ext.kernels.log_sum import log_sums
from open_clip_ext.surrogates import Identity


def tf32(values: Tensor) -> Tensor:
    """Round float32 values to TF32's 10 bits of fraction."""
    return ((values.view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


def log_means(similarities: Tensor, positives: Tensor, tau: float) -> Tensor:
    return ((similarities - positives[:, None]) / tau).double().logsumexp(dim=1) - math.log(similarities.shape[1])


def compare(batch: int, m: int, dim: int, tau: float, device: torch.device) -> dict:
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(64, dim, generator=generator)
    image, others = (
        normalize(directions[torch.randint(64, (size,), generator=generator)]
                  + torch.randn(size, dim, generator=generator), dim=1).to(device)
        for size in (batch, m)
    )
    text = normalize(image + torch.randn(batch, dim, generator=generator).to(device) / dim**0.5, dim=1)
    positives = (image * text).sum(dim=1)
    truth = log_means(image.double() @ others.double().T, positives.double(), tau)
    both = others.expand(2, m, dim)
    taus = torch.full((2, batch), tau, device=device)
    values = log_sums(image, image, positives, taus, both, Identity(), needs_grad=False)[0][0]
    summed = image.bfloat16().float() @ others.bfloat16().float().T
    estimates = {
        "float32": values.double() - math.log(m),
        "TF32": log_means(tf32(image) @ tf32(others).T, positives, tau),
        "bfloat16": log_means(summed, positives, tau),
        "similarities, too": log_means(summed.bfloat16().float(), positives.bfloat16().float(), tau),
    }
    errors = {name: (estimate - truth).square().mean().sqrt().item() for name, estimate in estimates.items()}
    return {"tau": tau, "batch": batch, "m": m, "dim": dim, "errors": errors}


def main(argv: list[str] | None = None) -> list[dict]:
    flags = parser(__doc__)
    flags.add_argument("--batch-size", type=int, default=1024)
    flags.add_argument("-m", type=int, default=4096, help="prototypes, or queued embeddings")
    flags.add_argument("--dim", type=int, default=512, help="dimension of the embeddings")
    flags.add_argument("--taus", type=float, nargs="+", default=[0.07, 0.03, 0.01, 0.005])
    args = flags.parse_args(argv)
    device = begin(args, tf32=False)
    results = [compare(args.batch_size, args.m, args.dim, tau, device) for tau in args.taus]
    print(table([{"tau": r["tau"], **{name: f"{error:.1e}" for name, error in r["errors"].items()}} for r in results]))
    finish(args, device, results)
    return results


if __name__ == "__main__":
    main()
