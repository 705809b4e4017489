"""A trial: NeuCLIP's ten updates of a step with a pass over the similarities and one over the prototypes per update.

    python benchmarks/npn_kernels.py --json npn_kernels.json

Today an update is 37 operations. Here it is two matrix products and two passes, `weigh` and `descend`: as Triton
kernels (`triton`), and as the same formulas under torch.compile (`compiled`). Times are of a step's whole update as one
CUDA graph, beside today's graph (`today`). `error` is that of the prototypes' change in a step, relative to float64's,
with accumulators as large as the gradient's squares, so that no digit is lost in AdaGrad's division.

Where a trial's graph at the first batch size takes less than 0.6 of today's, it is worth a place in the library; the
last line says so. The exit code is 1 where an error is more than three times today's, or no trial ran. On a CPU, under
TRITON_INTERPRET=1, an attempt.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from measuring import alternate, begin, finish, note, parser, shown, summary, table
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

from open_clip_ext.batch import Batch
from open_clip_ext.normalizers import Prototypes
from open_clip_ext.objectives import MAX_LOG_WEIGHT, Unified

WORTH = 0.6
ADAGRAD_EPS = 1e-10  # of torch.optim.Adagrad
ROWS = 4  # prototypes of a program of `descend_rows`
MAX = tl.constexpr(MAX_LOG_WEIGHT)
EPS = tl.constexpr(ADAGRAD_EPS)


def weigh(
    products: Tensor, inverse: Tensor, shift: Tensor, log_batch: Tensor, weight: Tensor, log_eps: Tensor
) -> Tensor:
    """Overwrite `products`, of anchors over tau with prototypes, (2, B, m), with each pair's weight in the gradient in
    the prototypes' directions; return alpha, (2, B).

    Args:
        inverse: 1 / |W_j|, (2, m).
        shift: what an exponent lacks, (2, B); `log_batch`: L; `weight`: the anchor's in the objective.
        log_eps: 0-d.
    """
    exponents = products * inverse[:, None]
    peak = exponents.amax(2)
    probs = (exponents - peak[:, :, None]).exp()
    alpha = torch.logaddexp(probs.sum(2).log() + peak + shift, log_eps)
    factor = (peak + shift - alpha).exp() * Unified.slope(log_batch, alpha) * weight
    products.copy_(probs * factor[:, :, None])
    return alpha


def descend(gradient: Tensor, vectors: Tensor, sums: Tensor, inverse: Tensor, lr: float) -> None:
    """AdaGrad's step in `vectors` and its `sums`, (2, m, d) each, for the gradient in their directions; overwrite
    `inverse`, (2, m), with 1 / |W_j| after it."""
    scale = inverse[:, :, None]
    radial = (gradient * vectors).sum(2, keepdim=True)
    slopes = gradient * scale - vectors * (radial * scale**3)
    sums.addcmul_(slopes, slopes)
    vectors.sub_(lr * slopes / (sums.sqrt() + ADAGRAD_EPS))
    lengths = vectors.norm(dim=2)
    inverse.copy_((lengths + (lengths == 0)).reciprocal())


@triton.jit
def weigh_row(products, inverse, shift, log_batch, weight, log_eps, alphas, size, m, BM: tl.constexpr):
    """`weigh` of one anchor."""
    at = tl.program_id(0)
    j = tl.arange(0, BM)
    here = products + at.to(tl.int64) * m + j
    exponents = tl.load(here, j < m, 0.0) * tl.load(inverse + at // size * m + j, j < m, 0.0)
    exponents = tl.where(j < m, exponents, -1e30)
    peak = tl.max(exponents, 0)
    probs = tl.exp(exponents - peak)
    least, given = tl.load(log_eps), tl.load(shift + at)
    log_mean = tl.log(tl.sum(probs, 0)) + peak + given
    highest = tl.maximum(log_mean, least)
    alpha = highest + tl.log(tl.exp(log_mean - highest) + tl.exp(least - highest))
    slope = 1 - tl.exp(tl.minimum(tl.load(log_batch + at) - alpha, MAX))
    factor = tl.exp(peak + given - alpha) * slope * tl.load(weight + at)
    tl.store(here, probs * factor, j < m)
    tl.store(alphas + at, alpha)


@triton.jit
def descend_rows(gradient, vectors, sums, inverse, count, lr, d, BM: tl.constexpr, BD: tl.constexpr):
    """`descend` of BM prototypes."""
    row, column = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BD)
    is_here = (row < count)[:, None] & (column < d)[None, :]
    at = row.to(tl.int64)[:, None] * d + column[None, :]
    scale = tl.load(inverse + row, row < count, 0.0)
    slopes, vector = tl.load(gradient + at, is_here, 0.0), tl.load(vectors + at, is_here, 0.0)
    radial = tl.sum(slopes * vector, 1)
    slopes = slopes * scale[:, None] - vector * (radial * scale * scale * scale)[:, None]
    total = tl.load(sums + at, is_here, 0.0) + slopes * slopes
    vector = vector - lr * slopes / (tl.sqrt(total) + EPS)
    tl.store(sums + at, total, is_here)
    tl.store(vectors + at, vector, is_here)
    length = tl.sqrt(tl.sum(vector * vector, 1))
    tl.store(inverse + row, 1 / tl.where(length == 0, 1.0, length), row < count)


def weigh_by_triton(
    products: Tensor, inverse: Tensor, shift: Tensor, log_batch: Tensor, weight: Tensor, log_eps: Tensor
) -> Tensor:
    alpha = torch.empty_like(shift)
    given = (one.contiguous() for one in (inverse, shift, log_batch, weight))
    size, m = products.shape[1:]
    weigh_row[(2 * size,)](products, *given, log_eps, alpha, size, m, BM=triton.next_power_of_2(m), num_warps=8)
    return alpha


def descend_by_triton(gradient: Tensor, vectors: Tensor, sums: Tensor, inverse: Tensor, lr: float) -> None:
    count, d = inverse.numel(), vectors.shape[2]
    grid = (triton.cdiv(count, ROWS),)
    descend_rows[grid](gradient, vectors, sums, inverse, count, lr, d, BM=ROWS, BD=triton.next_power_of_2(d))


KINDS: dict[str, Callable[[], tuple[Callable, Callable]]] = {
    "triton": lambda: (weigh_by_triton, descend_by_triton),
    "compiled": lambda: tuple(torch.compile(one, fullgraph=True, dynamic=False) for one in (weigh, descend)),
}


class FewPasses(Prototypes):
    """The NPN with AdaGrad, the unified objective and the identity as surrogate, without keys, on one process."""

    def __init__(self, kind: str, **options: Any):
        super().__init__(**options)
        self.weigh, self.descend = KINDS[kind]()

    def materialize(self, *given: Any) -> None:
        super().materialize(*given)
        network, weight = self.network, self.weight
        sums, lr = network.optimizer.state[weight]["sum"], self._settings["lr"]
        network.step = lambda: self.descend(network.gradients["weight"], weight, sums, self.inverse, lr)  # type: ignore

    def _gradient_setter(self, batch: Batch) -> Callable[[], Tensor]:
        anchors = torch.stack([batch.all_image, batch.all_text]).masked_fill_(~batch.finite, 0.0)
        anchors.div_(batch.all_tau[:, :, None])
        counts = batch.all_positives.new_full((), float(self.active))
        shift = -counts.log() - batch.all_positives / batch.all_tau
        weight = batch.all_tau * batch.finite / batch.size
        log_eps = batch.all_positives.new_full((), self.eps).log()
        self.inverse = self._active_prototypes()[1].reciprocal()
        products = anchors.new_empty(2, batch.size, self.active)

        def write() -> Tensor:
            torch.bmm(anchors, self.weight.mT, out=products)
            alpha = self.weigh(products, self.inverse, shift, batch.all_log_batch, weight, log_eps)
            torch.bmm(products.mT, anchors, out=self.network.gradients["weight"])
            return alpha

        return write


def batches(size: int, m: int, dim: int, device: torch.device, dtype: torch.dtype) -> list[Batch]:
    """Batches that fill m prototypes, and one more."""
    generator = torch.Generator().manual_seed(0)
    count = -(-m // size) + 1
    image = normalize(torch.randn(count * size, dim, generator=generator), dim=1)
    text = normalize(image + torch.randn(count * size, dim, generator=generator) / dim**0.5, dim=1)
    log_batch = -9 + torch.rand(2, size, generator=generator)
    tau = torch.tensor(0.03, device=device, dtype=dtype)
    return [
        Batch.of_process(*(side.to(device, dtype) for side in sides), tau, log_batch=log_batch.to(device, dtype))
        for sides in zip(image.split(size), text.split(size), strict=True)
    ]


def make(
    kind: str, m: int, dim: int, some: list[Batch], updates: int, graph: bool, accumulator: float = 0.0
) -> Prototypes:
    """A network whose prototypes are full, but not trained."""
    options = dict(npn_prototypes=m, npn_updates=0, npn_restart_every=0, npn_lr=0.01, npn_graph=graph)
    options |= dict(npn_initial_accumulator=accumulator, npn_max_rise=1e30)
    network = FewPasses(kind, **options) if kind in KINDS else Prototypes(**options)
    network.materialize(dim, some[0].image.device, some[0].image.dtype)
    for batch in some[:-1]:
        network.update(batch)
    network.updates = updates
    return network


def change(kind: str, some: list[Batch], args, accumulator: float) -> Tensor:
    """Of the prototypes in a step, in float64."""
    network = make(kind, args.m, args.dim, some, args.updates, False, accumulator)
    before = network.weight.clone()
    network.update(some[-1])
    return network.weight.double() - before


def compare(size: int, device: torch.device, args) -> dict:
    exact, some = (batches(size, args.m, args.dim, device, dtype) for dtype in (torch.float64, torch.float32))
    probe = make("today", args.m, args.dim, exact, 1, False)
    probe.update(exact[-1])
    accumulator = probe.network.gradients["weight"].square().mean().item()
    expected, errors, functions = change("today", exact, args, accumulator), {}, {}
    for kind in ("today", *args.kinds):
        try:
            difference = change(kind, some, args, accumulator) - expected
            network = make(kind, args.m, args.dim, some, args.updates, device.type == "cuda")
            for _ in range(2):
                network.update(some[-1])
            if network.update_graph is not None and network.update_graph.failed:
                raise RuntimeError("no graph was captured")
        except Exception as error:  # a compiler's
            print(f"{kind}: {type(error).__name__}: {str(error).strip().splitlines()[0]}", file=sys.stderr)
            continue
        errors[kind] = (difference.norm() / expected.norm()).item()
        functions[kind] = lambda network=network: network.update(some[-1])
    times = alternate(functions, device, seconds=args.seconds)
    return {"batch": size, "errors": errors, "kinds": {kind: summary(times, kind, "today") for kind in functions}}


def main(argv: list[str] | None = None) -> list[dict]:
    flags = parser(__doc__)
    flags.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 4096])
    flags.add_argument("-m", type=int, default=4096, help="prototypes per direction")
    flags.add_argument("--dim", type=int, default=512, help="dimension of the embeddings")
    flags.add_argument("--updates", type=int, default=10, help="T_u")
    flags.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    args = flags.parse_args(argv)
    device = begin(args)
    results = [note(compare(size, device, args)) for size in tqdm(args.batch_sizes, desc="batches")]
    rows = [
        {"B": result["batch"], "kind": kind, **shown(one), "error": f"{result['errors'][kind]:.1e}"}
        for result in results for kind, one in result["kinds"].items()
    ]
    print(table(rows))
    first, size = results[0]["kinds"], results[0]["batch"]
    best = min((kind for kind in first if kind != "today"), key=lambda kind: first[kind]["ratio"], default="today")
    verdict = "land it" if first[best]["ratio"] < WORTH else "not worth its lines"
    print(f"{best}: {first[best]['ratio']:.2f} of today's graph at {size} pairs, {WORTH} is asked: {verdict}")
    finish(args, device, results)
    return results


def is_off(result: dict) -> bool:
    errors = result["errors"]
    return len(errors) == 1 or any(error > 3 * errors["today"] + 1e-6 for error in errors.values())


if __name__ == "__main__":
    if any(map(is_off, main())):
        sys.exit(1)
