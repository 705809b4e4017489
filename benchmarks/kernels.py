"""The fused kernels on a GPU: their errors beside those of single operations, and their times by the size of a tile.

    python benchmarks/kernels.py --json kernels.json

Errors are relative to float64. One of `--kernels auto` that is more than three times that of `--kernels eager`, or
another bit in a second run, makes the exit code 1. Times are of one tile of weights, without the products with it,
which stand beside them. Several processes compile the kernels first. On a CPU, under TRITON_INTERPRET=1, a trial.
"""

import multiprocessing
import os
import statistics
import sys
import time
from contextlib import ExitStack
from unittest.mock import patch

import torch
from measuring import alone, begin, finish, parser, table
from torch import Tensor
from torch.nn.functional import normalize

from open_clip_ext.batch import Batch
from open_clip_ext.kernels import choice, fused
from open_clip_ext.kernels.chunked import clip_loss, siglip_loss
from open_clip_ext.kernels.similarities import make_blocks
from open_clip_ext.surrogates import Identity

# Rows, columns and depth of a tile, warps, stages: as in `fused.SIZES`, whose own come first.
VARIANTS = {
    "sums": [(128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 64, 64, 4, 3), (128, 64, 64, 4, 4),
             (256, 128, 64, 8, 3), (128, 128, 32, 4, 5)],
    "weights": [(128, 128, 64, 4, 3), (128, 64, 64, 4, 3), (128, 64, 64, 4, 4), (64, 128, 64, 4, 3),
                (128, 128, 64, 8, 3), (128, 128, 32, 4, 5)],
    "sigmoids": [(128, 128, 64, 4, 3), (128, 64, 64, 4, 3), (128, 64, 64, 4, 4), (64, 128, 64, 4, 3),
                 (128, 128, 64, 8, 3)],
}  # fmt: skip
TINY = (32, 32, 16, 4, 1)  # in the interpreter

NO_LEAST = dict.fromkeys(choice.LEAST_PAIRS, 0)
PARITY = ("clip", "clip in bfloat16", "siglip", "global", "global, keys", "global, one process of two")


class WithoutProducts(fused.FusedPairs):
    def _add_product(self, gradient: Tensor, weights: Tensor, vectors: Tensor, is_first: bool) -> None:
        pass


def batch_of(size: int, dim: int, device: torch.device, processes: int = 1, keys: bool = False) -> Batch:
    """A batch of the first of so many processes."""
    generator = torch.Generator().manual_seed(size)
    image = normalize(torch.randn(size, dim, generator=generator), dim=1)
    text = normalize(0.5 * image + torch.randn(size, dim, generator=generator) / dim**0.5, dim=1)
    tau = 0.01 + 0.02 * torch.rand(2, size, generator=generator)
    image, text, tau = (one.to(device) for one in (image, text, tau))
    local = slice(0, size // processes)
    batch = Batch._of(image[local], text[local], image, text, tau, 0, None)
    batch.keys = torch.arange(size, device=device) // 2 if keys else None
    return batch


def is_single(batch: Batch | None) -> bool:
    """In place of what the choice asks of a GPU."""
    return batch is None or batch.image.dtype == torch.float32


def in_float64(batch: Batch) -> Batch:
    local, (image, text, tau) = batch.local, (one.double() for one in (batch.all_image, batch.all_text, batch.all_tau))
    other = Batch._of(image[local], text[local], image, text, tau, 0, None)
    other.keys = batch.keys
    return other


def results_of(what: str, batch: Batch, kernels: str, alpha: Tensor) -> list[Tensor]:
    """Values and gradients of a loss's passes."""
    scale = torch.full((), 50.0, device=batch.image.device, dtype=batch.image.dtype)
    if what in ("clip", "clip in bfloat16"):
        value, gradients = clip_loss(batch, scale, what != "clip" and batch.image.dtype != torch.float64, kernels)
    elif what == "siglip":
        value, gradients = siglip_loss(batch, scale, -scale / 5, kernels=kernels)
    else:
        blocks = make_blocks(batch, Identity(), kernels)
        log_batch, alpha = blocks.log_batch_normalizers(), alpha.to(batch.image.dtype)
        batch.all_log_batch = log_batch if len(batch.image) == batch.size else alpha + 1
        gradients = torch.zeros_like(batch.image), torch.zeros_like(batch.text)
        value = torch.cat([log_batch, *blocks.add_gradients(gradients, alpha)])
    return [value, *gradients]


def errors_of(what: str, size: int, dim: int, device: torch.device) -> dict:
    """The largest error of either kind of kernels."""
    batch = batch_of(size, dim, device, 2 if "process" in what else 1, "keys" in what)
    exact = in_float64(batch)
    whole = in_float64(batch_of(size, dim, device, keys="keys" in what)) if "process" in what else exact
    alpha = make_blocks(whole, Identity(), "eager").log_batch_normalizers() if "global" in what else whole.all_tau
    expected = results_of(what, exact, "eager", alpha)
    result: dict = {"passes": what, "B": size}
    for kernels in ("eager", "auto"):
        actual, again = (results_of(what, batch, kernels, alpha) for _ in range(2))
        pairs = list(zip(actual, expected, strict=True))
        errors = [((one.double() - other).norm() / other.norm()).item() for one, other in pairs]
        result |= {f"{kernels} value": errors[0], f"{kernels} gradients": max(errors[1:3])}
        equal = all(map(torch.equal, actual, again))
    if not all(choice._usable.values()):
        raise RuntimeError("the fused kernels were not used; the log says why")
    least = 1e-6 if device.type == "cuda" else 1e-2  # a CPU's eager ones are float32
    within = all(result[f"auto {name}"] <= 3 * result[f"eager {name}"] + least for name in ("value", "gradients"))
    return result | {"ok": within and equal}


def cases_of(batch: Batch) -> dict[str, tuple[str, object]]:
    """Passes without their products: the kernel and a function."""
    scale, zeros = torch.full((), 50.0, device=batch.image.device), torch.zeros_like(batch.all_tau)
    pairs, blocks = WithoutProducts(batch, scale), fused.FusedBlocks(batch, Identity())
    sigmoid_pairs = WithoutProducts(batch, scale, -scale / 5)
    blocks.log_batch_normalizers()
    sums = batch.image.new_zeros(2, 2, batch.size)
    softmax = zeros + 80, zeros, zeros + 80, zeros, zeros[0], scale
    return {
        "sums, clip": ("sums", pairs.sums), "sums, global": ("sums", blocks._log_sums),
        "weights, clip": ("weights", lambda: pairs.add_softmax(*softmax)),
        "weights, global": ("weights", lambda: list(blocks._weights(zeros - 10, zeros - 10, sums))),
        "sigmoids": ("sigmoids", sigmoid_pairs.add_sigmoid),
    }  # fmt: skip


def milliseconds(function, device: torch.device, times: int = 15) -> float:
    """Median of runs that wait for the GPU; there may be a few launches in each."""
    function()
    return 1e3 * statistics.median(alone(function, device) for _ in range(times))


def compile_some(given: tuple[str, int, list[tuple[str, tuple]]]) -> None:
    """In another process: run each case once on a few pairs, so that its kernel is in Triton's cache."""
    device, dim, cases = given
    torch.backends.cuda.matmul.allow_tf32 = True
    choice.LEAST_PAIRS.update(NO_LEAST)
    for name, size in cases:
        with patch.dict(fused.SIZES, {name.partition(",")[0]: size}):
            try:
                if name.startswith("parity"):
                    errors_of(name.partition(" ")[2], int(size[0]), dim, torch.device(device))
                else:
                    cases_of(batch_of(256, dim, torch.device(device)))[name][1]()
            except Exception as error:  # shown where it is measured
                print(f"{name} {size}: {type(error).__name__}", flush=True)


def main(argv: list[str] | None = None) -> list[dict]:
    flags = parser(__doc__)
    flags.add_argument("--batch-sizes", type=int, nargs="+", default=[1001, 4096, 8192, 65536], help="of the errors")
    flags.add_argument("--size", type=int, default=8192, help="pairs of the tile whose times are measured")
    flags.add_argument("--dim", type=int, default=512, help="dimension of the embeddings")
    flags.add_argument("--processes", type=int, default=12, help="that compile; 0: none")
    args = flags.parse_args(argv)
    device = begin(args)
    variants = [(case, size) for case in ("sums, clip", "sums, global", "weights, clip", "weights, global", "sigmoids")
                for size in VARIANTS[case.partition(",")[0]]]  # fmt: skip
    with ExitStack() as patched:
        # No least batch; on a CPU also no GPU.
        patched.enter_context(patch.dict(choice.LEAST_PAIRS, NO_LEAST))
        if device.type == "cpu":
            assert os.environ.get("TRITON_INTERPRET") == "1", "on a CPU set TRITON_INTERPRET=1"
            for name in ("is_large", "is_possible", "has_tf32"):
                patched.enter_context(patch.object(choice, name, lambda batch=None, *_: is_single(batch)))
            patched.enter_context(patch.dict(fused.SIZES, dict.fromkeys(fused.SIZES, TINY)))
            variants = [(case, TINY) for case, _ in dict(variants).items()]
        start = time.time()
        if args.processes:
            cases = [*variants, *((f"parity {what}", (size,)) for what in PARITY for size in (1001, 1024))]
            shares = [(args.device, args.dim, cases[at :: args.processes]) for at in range(args.processes)]
            with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
                pool.map(compile_some, shares, chunksize=1)
            print(f"compiled in {time.time() - start:.0f} s", flush=True)
        results = []
        for size in args.batch_sizes:
            for what in PARITY if size <= 8192 else ("clip", "siglip", "global"):
                results.append(errors_of(what, size, args.dim, device))
        shown = [{key: f"{value:.1e}" if isinstance(value, float) else value for key, value in result.items()}
                 for result in results]  # fmt: skip
        print(table(shown), flush=True)
        batch, times = batch_of(args.size, args.dim, device), []
        weights, vectors = torch.randn(args.size, args.size, device=device), fused.half(batch.image)
        weights, gradient, one = fused.half(weights / 256), torch.zeros_like(batch.image), torch.ones((), device=device)
        functions = {
            "weights @ columns": lambda: fused.add_product(gradient, weights, vectors, one, 1.0, False),
            "weights.T @ rows": lambda: fused.add_product(gradient, weights.T, vectors, one, 1.0, False),
            "similarities, TF32": lambda: batch.image @ batch.text.T,
        }
        for name, function in functions.items():
            times.append({"pass": name, "tile": "cuBLAS", "ms": milliseconds(function, device)})
        for name, size in variants:
            with patch.dict(fused.SIZES, {name.partition(",")[0]: size}):
                try:
                    times.append({"pass": name, "tile": size, "ms": milliseconds(cases_of(batch)[name][1], device)})
                except Exception as error:  # too many registers, or too much shared memory
                    print(f"{name} {size}: {type(error).__name__}: {str(error)[:100]}", flush=True)
    for row in times:
        row["TFLOP/s"] = 2 * args.size**2 * args.dim / row["ms"] / 1e9
    print(table([{**row, "ms": f"{row['ms']:.3f}", "TFLOP/s": f"{row['TFLOP/s']:.0f}"} for row in times]), flush=True)
    finish(args, device, results + times)
    return results


if __name__ == "__main__":
    if not all(result["ok"] for result in main()):
        sys.exit(1)
