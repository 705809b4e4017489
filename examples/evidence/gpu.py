"""Run the grid of gpu.yaml on one GPU, many trainings at once, with the data as bytes in its memory.

    python examples/evidence/gpu.py --data glyphs.xz --results gpu.jsonl --seconds 330

`--data` is pack_glyphs.py's file. Each worker process makes one training after another; a finished one adds its line to
the results, for report.py beside this file, and none is begun that the seconds left would cut. The towers' forward and
backward pass are CUDA graphs, as such a small model's steps take the time of their launches; the loss is as in
docs/custom-loop.md.
`--probe` prints milliseconds per step in place of that, on random pictures without `--data`.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import math
import os
import shlex
import time
import traceback
from collections import deque
from collections.abc import Iterator
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # of each worker

import numpy as np
import open_clip
import torch
from grid import HERE, Grid, Run, append_result, last_recall, read_results, told
from run import pace
from torch import Tensor, nn

import open_clip_ext
from open_clip_ext.factory import all_options, setting_names
from open_clip_ext.retrieval import validation_metrics

Data = dict[str, Tensor]
ZERO_SHOT = "zeroshot-characters"
# Losses and flags whose steps `--probe` times.
PROBED = ("clip-chunked", "queue --queue-size 16384 --rho 6.5", "neuclip --npn-prototypes 4096 --mixing 0.6 --rho 8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="pack_glyphs.py's file")
    parser.add_argument("--grid", type=Path, default=HERE / "gpu.yaml", help="(default: beside this file)")
    parser.add_argument("--results", type=Path, default=HERE / "gpu.jsonl", help="(default: beside this file)")
    parser.add_argument("--workers", type=int, default=14, metavar="N", help="trainings at a time (default: 14)")
    parser.add_argument("--seconds", type=float, default=330, help="end after so many (default: 330)")
    parser.add_argument("--commit", help="of this code, for the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--probe", choices=("alone", "together"), help="print times of one worker, or of many")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    open_clip.add_model_config(Path(open_clip_ext.__file__).parent / "model_configs")
    if not (args.data or args.probe):
        parser.error("--data: give pack_glyphs.py's file")
    with told(parser):
        grid = None if args.probe else Grid(args.grid)
        data = read_data(args.data) if args.data else random_data()
    workers = [Worker(data, args) for _ in range(args.workers)]
    try:
        if grid is None:
            probe(workers if args.probe == "together" else workers[:1], args.probe, end)
        else:
            work(grid, workers, args, end)
    finally:
        for worker in workers:
            worker.process.terminate()


def read_data(path: Path) -> Data:
    arrays = np.load(io.BytesIO(lzma.decompress(path.read_bytes())))
    return {name: torch.from_numpy(arrays[name]) for name in arrays}


def random_data(n: int = 116_680) -> Data:
    """As many random pictures and captions as there are glyphs."""
    generator = torch.Generator().manual_seed(0)
    return {
        "train_images": torch.randint(256, (n, 32, 32), generator=generator).byte(),
        "train_tokens": torch.randint(1, 49407, (n, 24), generator=generator).to(torch.uint16),
    }


class Worker:
    """A process that runs one training after another."""

    def __init__(self, data: Data, args: argparse.Namespace):
        self.pipe, other = connection.Pipe()
        # Forked before CUDA begins: the imports are made once.
        self.process = get_context("fork").Process(target=serve, args=(other, data, args.device), daemon=True)
        self.process.start()
        self.run: Run | None = None


def serve(pipe: connection.Connection, data: Data, device: str) -> None:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True  # as OpenCLIP's command
    data = {
        name: tensor.to(device, torch.int64 if tensor.dtype == torch.uint16 else None) for name, tensor in data.items()
    }
    steps: Iterator[Tensor] = iter(())
    while True:
        task, *arguments = pipe.recv()
        try:
            if task == "train":
                pipe.send(train(data, *arguments))
            elif task == "build":
                steps = iter(())  # frees the last one's memory
                steps = Training(data, settings(arguments[0]), graphs=arguments[1]).run()
                pipe.send(timed(steps, number=12))
            elif task == "compare":
                pipe.send(compare(data, settings(arguments[0])))
            else:
                pipe.send(timed(steps, seconds=arguments[0]))
        except Exception:
            pipe.send(traceback.format_exc())


def timed(steps: Iterator[Tensor], number: float = math.inf, seconds: float = math.inf) -> float:
    """Milliseconds per step, over a number of steps or of seconds."""
    begin, done = time.perf_counter(), 0
    while done < number and time.perf_counter() - begin < seconds:
        scale = next(steps)
        done += 1
        if done % 8 == 0:
            scale.item()  # waits for the device
    scale.item()
    return 1000 * (time.perf_counter() - begin) / done


def compare(data: Data, flags: argparse.Namespace) -> str:
    """How far weights are apart after ten steps, without graphs twice (which rounding explains) and with them."""
    ends = []
    for graphs in (False, False, True):
        training = Training(data, flags, graphs)
        begin = nn.utils.parameters_to_vector(training.towers.parameters()).detach().clone()
        steps = training.run()
        for _ in range(10):
            next(steps)
        ends.append(nn.utils.parameters_to_vector(training.towers.parameters()).detach().clone())
    change = (ends[0] - begin).std()
    again, graph = (float((end - ends[0]).std() / change) for end in ends[1:])
    return f"without graphs twice {again:.1e}, with graphs {graph:.1e}"


def settings(flags: str) -> argparse.Namespace:
    """What a training reads of a command's flags; `loss_options` has those of the loss."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model", "--loss", "--precision"):
        parser.add_argument(name, required=True)
    for name in ("--batch-size", "--epochs", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--warmup", type=int, default=0)
    for name in ("--lr", "--wd"):
        parser.add_argument(name, type=float, required=True)
    for option in all_options():
        if option.type is bool:
            parser.add_argument(option.flag, action="store_true", default=None)
        else:
            parser.add_argument(option.flag, type=option.type)
    known, _ = parser.parse_known_args(shlex.split(flags))
    of_loss = set(setting_names()) - {"lr_tau"}
    known.loss_options = {name: value for name, value in vars(known).items() if name in of_loss and value is not None}
    return known


class Towers(nn.Module):
    """From rows of the data to embeddings and 1 / tau, without anything that waits for the device."""

    def __init__(self, model: nn.Module, data: Data, low: bool):
        super().__init__()
        self.model, self.low = model, low
        self.images, self.tokens = data["train_images"], data["train_tokens"]
        device = self.images.device
        constants = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
        self.mean, self.std = (torch.tensor(some, device=device).view(3, 1, 1) for some in constants)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=self.low, cache_enabled=False):
            return self.model(self.pixels(self.images[rows]), self.tokens[rows])

    def pixels(self, shades: Tensor) -> Tensor:
        """Normalized pictures, (n, 3, 32, 32), of grey bytes, (n, 32, 32)."""
        return (shades[:, None] / 255 - self.mean) / self.std

    @torch.no_grad()
    def encode(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of pictures, and of captions, in float32."""
        model = self.model.eval()
        return model.encode_image(self.pixels(images), normalize=True), model.encode_text(tokens, normalize=True)


class Training:
    """A training of the docs' own loop (docs/custom-loop.md): OpenCLIP's optimizer and schedule, an order by seed."""

    def __init__(self, data: Data, flags: argparse.Namespace, graphs: bool = True):
        self.flags = flags
        self.num, self.device = len(data["train_images"]), data["train_images"].device
        self.steps_per_epoch = self.num // flags.batch_size
        self.steps = flags.epochs * self.steps_per_epoch
        torch.manual_seed(flags.seed)
        model = open_clip.create_model(flags.model, device=self.device)
        self.towers = Towers(model, data, low=flags.precision == "amp_bf16")
        self.loss = open_clip_ext.create_loss(
            flags.loss, num_samples=self.num, epochs=flags.epochs, steps_per_epoch=self.steps_per_epoch,
            device=self.device, **flags.loss_options,
        )
        self.logit_scale = model.logit_scale
        named = [(name, weight) for name, weight in model.named_parameters() if weight is not model.logit_scale]
        plain = [weight for name, weight in named if weight.ndim < 2 or "bias" in name or "ln" in name]
        decayed = [weight for name, weight in named if not any(weight is other for other in plain)]
        groups: list[dict[str, Any]] = [
            {"params": plain, "peak": flags.lr, "weight_decay": 0.0},
            {"params": decayed, "peak": flags.lr, "weight_decay": flags.wd},
            {"params": [model.logit_scale], "peak": flags.lr_tau or flags.lr, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=flags.lr, betas=(0.9, 0.98), eps=1e-6, fused=True)
        self.forward = self.towers
        if graphs:
            rows = torch.arange(flags.batch_size, device=self.device)
            self.forward = torch.cuda.make_graphed_callables(self.towers, (rows,))

    def run(self) -> Iterator[Tensor]:
        """Make the steps; yields 1 / tau after each."""
        generator, done = torch.Generator().manual_seed(self.flags.seed), 0
        for epoch in range(self.flags.epochs):
            self.loss.set_epoch(epoch)
            order = torch.randperm(self.num, generator=generator).to(self.device)
            for rows in order.split(self.flags.batch_size)[: self.steps_per_epoch]:
                for group in self.optimizer.param_groups:
                    group["lr"] = group["peak"] * self.schedule(done)
                # The graph's next call overwrites its own.
                image, text, scale = (tensor.clone() for tensor in self.forward(rows))
                value = self.loss(image, text, scale, index=rows if self.loss.needs_index else None)
                self.optimizer.zero_grad()
                value.backward()
                self.optimizer.step()
                with torch.no_grad():
                    self.logit_scale.clamp_(0, math.log(100))
                done += 1
                yield scale.detach()
            self.loss.raise_if_not_finite()

    def schedule(self, done: int) -> float:
        """OpenCLIP's cosine after a warm-up, as a factor of the peak."""
        if done < self.flags.warmup:
            return (done + 1) / self.flags.warmup
        return 0.5 * (1 + math.cos(math.pi * (done - self.flags.warmup) / (self.steps - self.flags.warmup)))


def train(data: Data, flags: str, gallery: str) -> dict[str, Any]:
    """Make a run and score it: what its line in the results has of it."""
    begin, cpu_begin = time.monotonic(), time.process_time()
    training = Training(data, settings(flags), graphs=data["train_images"].is_cuda)
    scales, diverged = deque[Tensor](), None
    try:
        scales = deque(training.run(), training.steps_per_epoch)
    except open_clip_ext.NonFiniteError as error:
        diverged = str(error)
    metrics, zero_shot = {}, {}
    if diverged is None:
        encode = training.towers.encode
        metrics = validation_metrics(*encode(data[f"{gallery}_images"], data[f"{gallery}_tokens"]))
        zero_shot = {ZERO_SHOT: accuracy(training.towers, data)}
    return {
        "by_epoch": [{"epoch": training.flags.epochs, **metrics}],
        "tau": float(torch.stack([*scales]).reciprocal().mean()) if scales else None,
        "zero_shot": zero_shot,
        "diverged": diverged,
        "wall_seconds": round(time.monotonic() - begin, 1),
        "cpu_seconds": round(time.process_time() - cpu_begin, 1),
    }


def accuracy(towers: Towers, data: Data) -> float:
    """Fraction of the pictures whose own class has the nearest mean caption embedding, as zero_shot.py has it."""
    classes = data["zeroshot_tokens"]  # (classes, templates, 24)
    images, texts = towers.encode(data["zeroshot_images"], classes.flatten(0, 1))
    means = texts.view(*classes.shape[:2], -1).mean(dim=1)
    nearest = (images @ nn.functional.normalize(means, dim=1).T).argmax(dim=1)
    return float((nearest == data["zeroshot_labels"]).float().mean())


def work(grid: Grid, workers: list[Worker], args: argparse.Namespace, end: float) -> None:
    """Keep the workers busy with the grid's runs in order, until none is left or fits."""
    begun: set[Run] = set()
    while True:
        results = read_results(args.results)
        hours = (end - time.monotonic()) / 3600 / pace(grid, results)
        for worker in workers:
            if worker.run is None and (run := grid.next_run(results, begun, None, hours)):
                worker.run = run
                begun.add(run)
                worker.pipe.send(("train", grid.flags(run, results), grid.cells[run.cell]["gallery"]))
        busy = {worker.pipe: worker for worker in workers if worker.run}
        ready = connection.wait(list(busy), max(0, end - time.monotonic()))
        if not ready:
            left = sum(run.name not in results for run in grid.runs)
            return print(f"{len(busy)} runs cut, {left - len(busy)} not begun")
        for pipe in ready:
            worker = busy[pipe]
            run, answer = worker.run, pipe.recv()
            worker.run = None
            if isinstance(answer, str):
                print(run.name, answer, sep="\n", flush=True)
                continue
            append_result(args.results, row(grid, run, results, answer, args.commit))
            outcome = answer["diverged"] or f"R@1 {last_recall(answer):.1f}"
            left, took = end - time.monotonic(), answer["wall_seconds"]
            print(f"{left:5.0f} s left  {run.name}: {outcome}, {took} s", flush=True)


def row(grid: Grid, run: Run, results: dict, answer: dict, commit: str | None) -> dict:
    """A run's line, as run.py has it."""
    flags = grid.flags(run, results)
    return {
        "run": run.name,
        "cell": run.cell,
        "method": run.method,
        "candidate": grid.chosen(run, results),
        "flags": flags,
        "rows": grid.cells[run.cell]["rows"],
        "batch": settings(flags).batch_size,
        "epochs": grid.cells[run.cell]["epochs"],
        "seed": run.seed,
        "gallery": grid.cells[run.cell]["gallery"],
        **answer,
        "compiled": False,
        "versions": {module.__name__: module.__version__ for module in (open_clip_ext, open_clip, torch)},
        "commit": commit,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def probe(workers: list[Worker], how: str, end: float) -> None:
    """Print milliseconds per step, with CUDA graphs of the towers and without, and of many workers at once."""
    flags = "--model ViT-icons-tiny --epochs 8 --seed 0 --wd 0.1 --lr 1e-3 --lr-tau 1e-3 --warmup 5"
    if how == "alone":
        told = ask(workers, ("compare", f"{flags} --loss {PROBED[2]} --batch-size 1024 --precision fp32"))
        print("difference of weights after 10 steps, in standard deviations of their change: ", *told, flush=True)
        kinds = [(loss, batch, "amp_bf16", True) for batch in (256, 1024, 4096) for loss in PROBED]
        kinds += [(loss, 256, "amp_bf16", False) for loss in (*PROBED, f"{PROBED[2]} --npn-graph")]
        kinds += [(PROBED[1], batch, "fp32", True) for batch in (256, 1024, 4096)]
    else:
        kinds = [(loss, 256, "amp_bf16", True) for loss in PROBED]
        kinds += [(PROBED[1], 1024, "amp_bf16", True), (PROBED[1], 4096, "amp_bf16", True)]
    for loss, batch, precision, graphs in kinds:
        begin = time.monotonic()
        task = f"{flags} --loss {loss} --batch-size {batch} --precision {precision}"
        answers: list[Any] = ask(workers, ("build", task, graphs))
        line: dict[str, Any] = {"loss": loss, "batch": batch, "precision": precision, "graphs": graphs}
        line["build_s"] = round(time.monotonic() - begin, 1)
        if errors := [answer for answer in answers if isinstance(answer, str)]:
            line["error"] = errors[0]
        else:
            for number in dict.fromkeys((len(workers), min(8, len(workers)))):
                each = ask(workers[:number], ("time", 0.6 if how == "alone" else 1.0))
                line[f"ms, {number} at once"] = round(sum(each) / number, 2)
                line[f"steps/s, {number} at once"] = round(sum(1000 / one for one in each))
        print(json.dumps(line), f"{end - time.monotonic():.1f} s left", flush=True)
        if time.monotonic() > end:
            break


def ask(workers: list[Worker], task: tuple) -> list[Any]:
    for worker in workers:
        worker.pipe.send(task)
    return [worker.pipe.recv() for worker in workers]


if __name__ == "__main__":
    main()
