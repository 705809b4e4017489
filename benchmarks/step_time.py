"""Time and peak memory of a whole training step with each loss, as ratios to the same step with OpenCLIP's ClipLoss.

    python benchmarks/step_time.py --json step_time.json
    python benchmarks/step_time.py --model ViT-B-32 --batch-size 512 --precision amp_bf16 --consecutive 10

A step is encoders, loss, backward and AdamW on one model and batch; the two losses alternate. State is what the loss
adds to a checkpoint: tables, networks and their optimizers. A training waits for a GPU at logged steps only, so that
`--consecutive` steps are timed together.
"""

from functools import partial

import open_clip
import torch
from measuring import (
    Repeated,
    alternate,
    begin,
    fill,
    finish,
    note,
    parser,
    peak_memory,
    reference_of,
    shown,
    summary,
    table,
)
from open_clip.loss import ClipLoss
from open_clip_train.precision import get_autocast
from torch import Tensor, nn
from tqdm import tqdm

import open_clip_ext
from open_clip_ext import MODEL_CONFIGS


class Steps:
    """A model, its optimizer and a batch; `with_loss(loss)` takes one step."""

    def __init__(self, args, device: torch.device):
        open_clip.add_model_config(MODEL_CONFIGS)
        self.model = open_clip.create_model(args.model, device=args.device, output_dict=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.autocast = get_autocast(args.precision, device_type=device.type)
        size = self.model.visual.image_size
        size = size if isinstance(size, tuple) else (size, size)
        self.images = torch.randn(args.batch_size, 3, *size, device=device)
        shape = (args.batch_size, self.model.context_length)
        self.texts = torch.randint(1, self.model.vocab_size, shape, device=device)
        self.rows = torch.randint(args.num_samples, (args.batch_size,), device=device)

    def with_loss(self, loss: nn.Module) -> None:
        with self.autocast():
            out = self.model(self.images, self.texts)
            out.pop("logit_bias", None)
            if isinstance(loss, open_clip_ext.losses.Loss):
                out["index"] = self.rows
                out |= reference_of(loss, out["image_features"], out["text_features"])
            value = loss(**out)
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def state_bytes(loss: nn.Module) -> int:
    tensors = [value for value in loss.full_state().values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main(argv: list[str] | None = None) -> list[dict]:
    flags = parser(__doc__)
    flags.add_argument(
        "--losses", nargs="+",
        help="default: all; 'neuclip, no graph' is with --no-npn-graph, 'neuclip, eager' with --kernels eager, "
        "'NAME, loss graph' with --loss-graph",
    )
    flags.add_argument("--model", default="ViT-shapes-tiny")
    flags.add_argument("--batch-size", type=int, default=64)
    flags.add_argument("--num-samples", type=int, default=20_000, help="rows of the tables")
    flags.add_argument("--prototypes", type=int, default=1024, help="prototypes of neuclip, length of the queue")
    flags.add_argument("--precision", default="fp32", help="as OpenCLIP's flag")
    flags.add_argument("--consecutive", type=int, default=1, help="steps that are timed together (default: 1)")
    args = flags.parse_args(argv)
    device = begin(args)
    settings: dict[str, dict] = {"neuclip": {"npn_prototypes": args.prototypes}}
    settings["neuclip, no graph"] = settings["neuclip"] | {"npn_graph": False}
    settings["neuclip, eager"] = settings["neuclip"] | {"kernels": "eager"}
    settings["queue"] = {"queue_size": args.prototypes}
    steps, baseline, results = Steps(args, device), ClipLoss(), []
    names = args.losses or [preset.name for preset in open_clip_ext.list_losses() if not preset.is_open_clip]
    for name in tqdm(names, desc="losses"):
        of_name = settings.get(name.removesuffix(", loss graph"), {})
        if name.endswith(", loss graph"):
            of_name = of_name | {"loss_graph": True}
        loss = open_clip_ext.create_loss(
            name.split(",")[0], num_samples=args.num_samples, epochs=8, device=args.device, **of_name
        )
        loss.set_epoch(0)
        fill(loss, partial(steps.with_loss, loss), args.batch_size)
        functions = {
            whose: Repeated(partial(steps.with_loss, used), args.consecutive)
            for whose, used in (("ours", loss), ("clip", baseline))
        }
        times = alternate(functions, device, max(5, 20 // args.consecutive), args.seconds)
        times = {whose: [seconds / args.consecutive for seconds in each] for whose, each in times.items()}
        result = {"loss": name, **summary(times, "ours", "clip"), "state_bytes": state_bytes(loss)}
        result["bytes"], result["base_bytes"] = (peak_memory(function, device) for function in functions.values())
        results.append(note(result))
    print(f"{args.model}, batch {args.batch_size}, {args.num_samples} rows, {args.precision}")
    print(table([
        {
            "loss": result["loss"], **shown(result), "memory": f"{result['bytes'] / result['base_bytes']:.3f}",
            "state MiB": f"{result['state_bytes'] / 2**20:.2f}",
        }
        for result in results
    ]))
    finish(args, device, results)
    return results


if __name__ == "__main__":
    main()
