"""Print milliseconds per training step on the GPU, with CUDA graphs of the towers and without, on random data.

    python examples/evidence/gpu_probe.py --workers 1
    python examples/evidence/gpu_probe.py --workers 14
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from gpu import Worker
from gpu_training import Data, Training, settings
from torch import Tensor, nn

# Losses whose steps are timed.
PROBED = ("clip-chunked", "queue --queue-size 16384 --rho 6.5", "neuclip --npn-prototypes 4096 --mixing 0.6 --rho 8")
FLAGS = "--model ViT-icons-tiny --epochs 8 --seed 0 --wd 0.1 --lr 1e-3 --lr-tau 1e-3 --warmup 5"
STEPS: list[Iterator[Tensor]] = []  # of the worker's training


def random_data(n: int = 116_680) -> Data:
    """As many random pictures and captions as there are glyphs."""
    generator = torch.Generator().manual_seed(0)
    return {
        "train_images": torch.randint(256, (n, 32, 32), generator=generator).byte(),
        "train_tokens": torch.randint(1, 49407, (n, 24), generator=generator).to(torch.uint16),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=14, metavar="N", help="trainings at once (default: 14)")
    parser.add_argument("--seconds", type=float, default=40, help="begin nothing after so many (default: 40)")
    parser.add_argument("--device", default="cuda", help="(default: cuda)")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    data = random_data()
    workers = [Worker(data, args.device) for _ in range(args.workers)]
    if args.workers == 1:
        (told,) = ask(workers, compare, f"{FLAGS} --loss {PROBED[2]} --batch-size 1024 --precision fp32")
        print("difference of weights after 10 steps, in standard deviations of their change:", told, flush=True)
        kinds = [(loss, batch, "amp_bf16", True) for batch in (256, 1024, 4096) for loss in PROBED]
        kinds += [(loss, 256, "amp_bf16", False) for loss in PROBED]
        kinds += [(PROBED[1], batch, "fp32", True) for batch in (256, 1024, 4096)]
    else:
        kinds = [(loss, 256, "amp_bf16", True) for loss in PROBED]
        kinds += [(PROBED[1], 1024, "amp_bf16", True), (PROBED[1], 4096, "amp_bf16", True)]
    for loss, batch, precision, graphs in kinds:
        begin = time.monotonic()
        flags = f"{FLAGS} --loss {loss} --batch-size {batch} --precision {precision}"
        answers = ask(workers, build, flags, graphs)
        line: dict[str, Any] = {"loss": loss, "batch": batch, "precision": precision, "graphs": graphs}
        line["build_s"] = round(time.monotonic() - begin, 1)
        if errors := [answer for answer in answers if isinstance(answer, str)]:
            line["error"] = errors[0]
        else:
            for number in dict.fromkeys((args.workers, min(8, args.workers))):
                each = ask(workers[:number], timed, math.inf, 0.6 if number == 1 else 1.0)
                line[f"ms, {number} at once"] = round(sum(each) / number, 2)
                line[f"steps/s, {number} at once"] = round(sum(1000 / one for one in each))
        print(json.dumps(line), f"{end - time.monotonic():.1f} s left", flush=True)
        if time.monotonic() > end:
            break
    for worker in workers:
        worker.process.terminate()


def ask(workers: list[Worker], *function: Any) -> list[Any]:
    for worker in workers:
        worker.call(*function)
    return [worker.pipe.recv() for worker in workers]


def build(data: Data, flags: str, graphs: bool) -> float:
    """Make the training that `timed` goes on with, and its first steps."""
    STEPS.clear()  # frees the last one's memory
    STEPS.append(Training(data, settings(flags), graphs).run())
    return timed(data, 12)


def timed(data: Data, number: float, seconds: float = math.inf) -> float:
    """Milliseconds per step, over a number of steps or of seconds."""
    begin, done = time.perf_counter(), 0
    while done < number and time.perf_counter() - begin < seconds:
        scale = next(STEPS[0])
        done += 1
        if done % 8 == 0:
            scale.item()  # waits for the device
    scale.item()
    return 1000 * (time.perf_counter() - begin) / done


def compare(data: Data, flags: str) -> str:
    """How far weights are apart after ten steps, without graphs twice (which rounding explains) and with them."""
    ends = []
    for graphs in (False, False, True):
        training = Training(data, settings(flags), graphs)
        begin = nn.utils.parameters_to_vector(training.towers.parameters()).detach().clone()
        steps = training.run()
        for _ in range(10):
            next(steps)
        ends.append(nn.utils.parameters_to_vector(training.towers.parameters()).detach().clone())
    change = (ends[0] - begin).std()
    again, graph = (float((end - ends[0]).std() / change) for end in ends[1:])
    return f"without graphs twice {again:.1e}, with graphs {graph:.1e}"


if __name__ == "__main__":
    main()
