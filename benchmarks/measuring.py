"""Measure time and memory of functions in turn, so that other load on the machine affects all of them alike."""

import argparse
import gc
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from open_clip_ext.normalizers.ring import RingNormalizer

CYCLES = 2e9  # of a GPU in a second, about


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Repeated:
    """Calls a function several times."""

    def __init__(self, function: Callable[[], None], times: int):
        self.function = function
        self.times = times

    def __call__(self) -> None:
        for _ in range(self.times):
            self.function()


def alone(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call that waits for the device."""
    start = now(device)
    function()
    return now(device) - start


def ahead(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call on a GPU that has other work while the host launches it, as in a training: between events
    behind a kernel that sleeps until a few calls are launched. The driver's queue holds about a thousand launches."""
    for calls, asleep in ((3, 0.02), (3, 0.1), (1, 0.1), (1, 0.5)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(asleep * CYCLES))
        start.record()
        for _ in range(calls):
            function()
        end.record()
        is_asleep = not start.query()
        end.synchronize()
        if is_asleep:
            return start.elapsed_time(end) / 1e3 / calls
    raise RuntimeError("a call waits for the GPU, or its launches take more than half a second")


def alternate(
    functions: dict[str, Callable[[], Any]], device: torch.device, least: int = 5, seconds: float = 4.0,
    is_ahead: bool = False,
) -> dict[str, list[float]]:
    """Call all functions in turn, repeatedly; return the seconds of each call by function.

    Args:
        least: minimum number of rounds, after one for warm-up.
        seconds: minimum total time.
        is_ahead: on a GPU, whether the host is `ahead`.
    """
    measure = ahead if is_ahead and device.type == "cuda" else alone
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    started = now(device)
    while len(next(iter(times.values()))) < least or now(device) - started < seconds:
        for name, function in functions.items():
            times[name].append(measure(function, device))
    return times


def fill(loss: Any, function: Callable[[], Any], batch: int) -> None:
    """Call `function`, a step of `batch` pairs, until the ring buffer of the loss's network or queue is full."""
    normalizer = getattr(loss, "normalizer", None)
    for _ in range(-(-normalizer.capacity // batch) if isinstance(normalizer, RingNormalizer) else 0):
        function()


def summary(times: dict[str, list[float]], name: str, base: str | list[str]) -> dict[str, Any]:
    """The median of `name` divided by that of `base` (of the sum, if several), and quartiles of the rounds' ratios."""
    bases = [base] if isinstance(base, str) else base
    together = [sum(values) for values in zip(*(times[b] for b in bases), strict=True)]
    rounds = [ours / theirs for ours, theirs in zip(times[name], together, strict=True)]
    low, _, high = statistics.quantiles(rounds, n=4)
    ours, theirs = statistics.median(times[name]), statistics.median(together)
    return {"ratio": ours / theirs, "quartiles": [low, high], "seconds": ours, "base_seconds": theirs}


def peak_memory(function: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that `function` holds at a time, beyond those allocated before."""
    function()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The allocator's record includes temporary memory inside operations.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = record.profiler.kineto_results.events()
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def resident() -> int:
    """Bytes of this process in memory, now. Linux only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_resident(function: Callable[[], Any]) -> tuple[float, int]:
    """Seconds, and the most bytes in memory at a time beyond those before, mapped files included. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, start = resident(), time.perf_counter()
    function()
    seconds = time.perf_counter() - start
    lines = Path("/proc/self/status").read_text().splitlines()
    most = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return seconds, max(0, most - before)


def reference_of(loss: Any, image: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments for a loss that takes a reference model's features: the same features, detached; else none."""
    if not getattr(loss, "takes_reference", False):
        return {}
    return {"dist_image_features": image.detach(), "dist_text_features": text.detach()}


class BareProducts:
    """Matrix products of both directions' anchors with m vectors, and backward in the anchors, the vectors, or neither.

    On a CPU 512 anchors at a time, in preallocated memory, in the layout that the backward product needs: the fastest
    way that was found. On other devices all at once.
    """

    CPU_ROWS = 512

    def __init__(
        self, batch: int, dim: int, m: int, back: str | None, device: torch.device, dtype: torch.dtype = torch.float32
    ):
        self.anchors, self.others = (torch.randn(2, rows, dim, device=device, dtype=dtype) for rows in (batch, m))
        self.back = back
        self.rows = min(self.CPU_ROWS, batch) if device.type == "cpu" else batch
        numbers = self.rows * m if device.type == "cpu" else 2 * batch * m
        self.products = torch.empty(numbers, device=device, dtype=dtype)
        self.sums = torch.zeros_like(self.anchors if back == "anchors" else self.others)

    def __call__(self) -> None:
        if self.anchors.device.type != "cpu":
            return self.all_at_once()
        for anchors, others, sums in zip(self.anchors, self.others, self.sums, strict=True):
            for start in range(0, len(anchors), self.rows):
                some = anchors[start : start + self.rows]
                products = self.products[: len(some) * len(others)]
                if self.back == "others":
                    sums.addmm_(torch.mm(others, some.T, out=products.view(len(others), -1)), some)
                    continue
                products = torch.mm(some, others.T, out=products.view(len(some), -1))
                if self.back == "anchors":
                    torch.mm(products, others, out=sums[start : start + self.rows])

    def all_at_once(self) -> None:
        """All anchors of both directions in one product."""
        if self.back == "others":
            products = self.products.view(2, -1, self.anchors.shape[1])
            torch.bmm(self.others, self.anchors.mT, out=products)
            torch.bmm(products, self.anchors, out=self.sums)
            return
        products = torch.bmm(self.anchors, self.others.mT, out=self.products.view(2, self.anchors.shape[1], -1))
        if self.back == "anchors":
            torch.bmm(products, self.others, out=self.sums)


class BatchProducts:
    """The matrix products that a loss needs in a batch: three of B x B x d, and one more for a second pass.

    These are the similarities, twice if the first pass is for the normalizers, and the gradients of images and texts.
    On a CPU in blocks of 512 rows, in memory that is allocated once.
    """

    def __init__(self, batch: int, dim: int, device: torch.device, passes: int = 2):
        self.passes = passes
        self.image, self.text, self.grad_text = (torch.randn(batch, dim, device=device) for _ in range(3))
        self.rows = min(BareProducts.CPU_ROWS, batch) if device.type == "cpu" else batch
        self.block = torch.empty(self.rows, batch, device=device)
        self.grad_image = torch.empty_like(self.image)

    def __call__(self) -> None:
        for start in range(0, len(self.image), self.rows):
            some = self.image[start : start + self.rows]
            block = self.block[: len(some)]
            for _ in range(self.passes):
                torch.mm(some, self.text.T, out=block)
            torch.mm(block, self.text, out=self.grad_image[start : start + self.rows])
            torch.addmm(self.grad_text, block.T, some, out=self.grad_text)


def machine(device: torch.device) -> dict[str, Any]:
    """The hardware and software of the measurement."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif cpuinfo.exists():
        keys = ("model name", "flags")
        lines = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if line.startswith(keys))
        lines = {key.strip(): value.strip() for key, value in lines.items()}
        name = lines.get("model name", name) + (" with AVX-512" if "avx512f" in lines.get("flags", "") else "")
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__, "tf32": tf32}


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the flags that all benchmarks share."""
    result = argparse.ArgumentParser(description=doc.splitlines()[0])
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    result.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    result.add_argument("--seconds", type=float, default=4.0, help="minimum time of each comparison (default: 4)")
    result.add_argument("--json", help="also write the results to this file; - for the standard output")
    return result


def begin(args: argparse.Namespace, tf32: bool = True) -> torch.device:
    """Set threads, seed and TF32; return the device.

    Args:
        tf32: whether a GPU may use TF32 in matrix products, as in OpenCLIP's training.
    """
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    return torch.device(args.device)


def note(result: dict) -> dict:
    """Print a result as it comes, since a run may be ended before its table."""
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


def finish(args: argparse.Namespace, device: torch.device, results: list[dict]) -> None:
    content = json.dumps({"machine": machine(device), "results": results}, indent=1)
    if args.json == "-":
        print(content)
    elif args.json:
        Path(args.json).write_text(f"{content}\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows with the same keys as an aligned text table."""
    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def shown(result: dict[str, Any]) -> dict[str, str]:
    """A `summary` as table cells."""
    low, high = result["quartiles"]
    ms = f"{1e3 * result['seconds']:.1f}"
    return {"time": f"{result['ratio']:.2f}", "quartiles": f"{low:.2f}-{high:.2f}", "ms": ms}
