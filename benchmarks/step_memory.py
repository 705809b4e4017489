"""Memory of a training step: what `--dry-run` predicts, and the most that is allocated.

    python benchmarks/step_memory.py "ViT-B-32 512 clip" "ViT-B-32 12992 clip-chunked --grad-checkpointing"

A case is a model, a batch size, a loss and other flags of the command. Both figures have weights, moments, the loss's
state and gradients; `reserved` is what PyTorch's allocator takes from the GPU for it. A step is as in `step_time.py`.
"""

import sys
from typing import Any

import open_clip
import torch
from measuring import begin, finish, parser, peak_memory, table
from open_clip.loss import ClipLoss
from step_time import Steps, state_bytes
from tqdm import tqdm

from open_clip_ext import MODEL_CONFIGS, create_loss
from training_ext.flags import params
from training_ext.tools import dry_run

MIB = 2**20
LINE = "at most in a step on a GPU, predicted"


def predicted(flags: list[str]) -> float:
    """MiB, of `--dry-run`."""
    lines = dry_run.lines(params.parse_args(flags))
    return next(float(line.split()[-2].replace(",", "")) for line in lines if line.strip().startswith(LINE))


def compare(case: str, device: torch.device, args: Any) -> dict[str, Any]:
    model, batch, name, *more = case.split()
    flags = ["--model", model, "--batch-size", batch, "--loss", name, "--precision", args.precision, *more]
    flags += ["--dataset-type", "synthetic", "--train-num-samples", str(args.num_samples), "--epochs", "8"]
    result = {"model": model, "batch": int(batch), "loss": " ".join([name, *more]), "predicted": predicted(flags)}
    args.model, args.batch_size = model, int(batch)
    steps = Steps(args, device)
    if "--grad-checkpointing" in more:
        steps.model.set_grad_checkpointing()
    loss: torch.nn.Module = ClipLoss()
    if name != "clip":
        loss = create_loss(name, num_samples=args.num_samples, epochs=8, device=args.device)
        loss.set_epoch(0)
    steps.with_loss(loss)  # makes the moments
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(3):
            steps.with_loss(loss)
        measured, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    else:
        kept = 3 * sum(each.nbytes for each in steps.model.parameters()) + steps.images.nbytes
        kept += 0 if name == "clip" else state_bytes(loss)
        measured = reserved = kept + peak_memory(lambda: steps.with_loss(loss), device)
    result |= {"measured": measured / MIB, "reserved": reserved / MIB}
    return {**result, "ratio": result["predicted"] / result["measured"]}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    flags = parser(__doc__)
    flags.add_argument("cases", nargs="+", help="'MODEL BATCH LOSS [FLAG...]'")
    flags.add_argument("--num-samples", type=int, default=12_000_000, help="rows of the tables")
    flags.add_argument("--precision", default="amp_bf16", help="as OpenCLIP's flag")
    args = flags.parse_args(argv)
    device = begin(args)
    open_clip.add_model_config(MODEL_CONFIGS)
    results = []
    for case in tqdm(args.cases, desc="cases"):
        try:
            results.append(compare(case, device, args))
        except torch.OutOfMemoryError as error:
            print(f"{case}: {str(error).splitlines()[0]}", file=sys.stderr)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    shown = [{key: f"{value:,.2f}" if key == "ratio" else f"{value:,.0f}" if isinstance(value, float) else value
              for key, value in result.items()} for result in results]
    print(table(shown))
    finish(args, device, results)
    return results


if __name__ == "__main__":
    main()
