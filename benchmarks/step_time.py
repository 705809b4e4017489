"""Time of a whole training step with each loss, as a ratio to OpenCLIP's, and the memory that its state takes.

    python benchmarks/step_time.py --json step_time.json

In one process and for each loss in turn, a step with it and a step with OpenCLIP's ClipLoss alternate on the same model
and batch: encoders, loss, backward, AdamW. The ratio is that of the medians. State is what goes into a checkpoint:
tables, networks and their optimisers.
"""

import argparse
import json
import statistics
import time

import open_clip
import torch
from open_clip.loss import ClipLoss
from torch import Tensor, nn
from tqdm import tqdm

import open_clip_ext
from training_ext.preflight import MODEL_CONFIGS


class Steps:
    """A model, its optimizer and a batch; `run` takes one step with a loss and returns its seconds."""

    def __init__(self, args: argparse.Namespace):
        open_clip.add_model_config(MODEL_CONFIGS)
        torch.manual_seed(0)
        self.model = open_clip.create_model(args.model, device=args.device, output_dict=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        size = self.model.visual.image_size
        size = size if isinstance(size, tuple) else (size, size)
        self.images = torch.randn(args.batch_size, 3, *size, device=args.device)
        shape = (args.batch_size, self.model.context_length)
        self.texts = torch.randint(1, self.model.vocab_size, shape, device=args.device)
        self.rows = args.num_samples
        self.device = args.device

    def run(self, loss: nn.Module) -> float:
        rows = torch.randint(self.rows, (len(self.images),), device=self.device)
        start = self._now()
        out = self.model(self.images, self.texts)
        out.pop("logit_bias", None)
        if isinstance(loss, open_clip_ext.losses.Loss):
            out["index"] = rows
        loss(**out).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._now() - start

    def _now(self) -> float:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()


def state_bytes(loss: nn.Module) -> int:
    tensors = [value for value in loss.full_state().values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-shapes-tiny")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-samples", type=int, default=20_000)
    parser.add_argument("--prototypes", type=int, default=1024, help="of neuclip, and length of the queue")
    parser.add_argument("--steps", type=int, default=60, help="timed with each loss, after 5 that are not")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="write the table here too")
    args = parser.parse_args(argv)
    settings = {"neuclip": {"npn_prototypes": args.prototypes}, "queue": {"queue_size": args.prototypes}}
    steps, baseline, results = Steps(args), ClipLoss(), []
    names = [preset.name for preset in open_clip_ext.list_losses() if not preset.is_open_clip]
    for name in tqdm(names):
        loss = open_clip_ext.create_loss(
            name, num_samples=args.num_samples, epochs=8, device=args.device, **settings.get(name, {})
        )
        loss.set_epoch(0)
        times: dict[str, list[float]] = {"ours": [], "clip": []}
        for step in range(args.steps + 5):
            seconds = {"ours": steps.run(loss), "clip": steps.run(baseline)}
            if step >= 5:
                for which, value in seconds.items():
                    times[which].append(value)
        ours, clip = (statistics.median(times[which]) for which in ("ours", "clip"))
        quartiles = statistics.quantiles([a / b for a, b in zip(times["ours"], times["clip"], strict=True)], n=4)
        results.append({
            "loss": name, "ratio": ours / clip, "ratio_quartiles": [quartiles[0], quartiles[2]],
            "seconds": ours, "clip_seconds": clip, "state_bytes": state_bytes(loss),
        })
    print(f"{args.model}, batch {args.batch_size}, {args.num_samples} rows, {args.device}, {args.steps} steps each")
    print(f"{'loss':12} {'time/clip':>9} {'quartiles':>13} {'ms':>8} {'state MiB':>10}")
    for r in results:
        low, high = r["ratio_quartiles"]
        span, size = f"{low:.2f} - {high:.2f}", r["state_bytes"] / 2**20
        print(f"{r['loss']:12} {r['ratio']:9.2f} {span:>13} {1e3 * r['seconds']:8.1f} {size:10.2f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)
    return results


if __name__ == "__main__":
    main()
