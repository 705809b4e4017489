"""Compare each loss on a device with the CPU: value and gradients after some steps, with and without TF32.

    python benchmarks/parity.py --device cuda

Both get the same features. The CPU makes the first step; its state is loaded on the device, and both continue from it.
A deviation is the largest absolute difference divided by the CPU's largest absolute value, in float32. The exit code is
1 if a value is not finite, or without TF32 deviates by more than `BOUND`.
"""

import math
import sys

import torch
from measuring import begin, finish, note, parser, reference_of, table
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

import open_clip_ext

TAU = 0.05
# Similarities have errors of about 1e-7, divided by TAU 1e-5; updates of networks and temperatures amplify them.
BOUND = 1e-3


def features(step: int, batch: int, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    image = normalize(torch.randn(batch, dim, generator=generator), dim=1)
    # So far apart that the loss is about 1: what it is less than that, both sides lose in digits.
    return [image, normalize(image + 4 * torch.randn(batch, dim, generator=generator) / dim**0.5, dim=1)]


def call(loss: open_clip_ext.losses.Loss, step: int, args, device: torch.device) -> list[Tensor]:
    """The value, and the gradients in image, text and the logit scale, on the CPU."""
    inputs = [side.to(device).requires_grad_() for side in features(step, args.batch_size, args.dim)]
    inputs.append(torch.tensor(1 / TAU, device=device, requires_grad=True))
    index = torch.arange(args.batch_size) + step * args.batch_size // 2 % (args.num_samples - args.batch_size)
    value = loss(*inputs, index=index.to(device), **reference_of(loss, *inputs[:2]))
    value.backward()
    zeros = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs]
    return [tensor.detach().cpu() for tensor in (value, *zeros)]


def compare(name: str, tf32: bool, device: torch.device, args) -> dict:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    more = {
        "neuclip": {"npn_prototypes": args.m}, "queue": {"queue_size": args.m},
        "tempnet": {"tau_net_dropout": 0.0},  # since devices draw other random numbers
    }.get(name, {})
    torch.manual_seed(0)
    losses = [
        open_clip_ext.create_loss(name, num_samples=args.num_samples, epochs=2, device=where, **more)
        for where in ("cpu", args.device)
    ]
    for loss in losses:
        loss.set_epoch(1)
    call(losses[0], 0, args, torch.device("cpu"))
    losses[1].load_full_state(losses[0].full_state())
    for step in range(1, args.steps + 1):
        expected, actual = (
            call(loss, step, args, where) for loss, where in zip(losses, (torch.device("cpu"), device), strict=True)
        )
    deviations = {}
    for what, one, other in zip(("value", "image", "text", "scale"), expected, actual, strict=True):
        largest = one.abs().max().item()
        deviations[what] = (one - other).abs().max().item() / largest if largest else other.abs().max().item()
    return {"loss": name, "tf32": tf32, **deviations}


def main(argv: list[str] | None = None) -> list[dict]:
    flags = parser(__doc__)
    flags.add_argument("--losses", nargs="+", help="default: all")
    flags.add_argument("--batch-size", type=int, default=256)
    flags.add_argument("--dim", type=int, default=512, help="dimension of the embeddings")
    flags.add_argument("-m", type=int, default=1024, help="prototypes of neuclip, length of the queue")
    flags.add_argument("--num-samples", type=int, default=10_000, help="rows of the tables")
    flags.add_argument("--steps", type=int, default=10)
    args = flags.parse_args(argv)
    device = begin(args)
    names = args.losses or [preset.name for preset in open_clip_ext.list_losses() if not preset.is_open_clip]
    cases = [(name, tf32) for name in names for tf32 in (False, True)]
    results = [note(compare(*case, device, args)) for case in tqdm(cases, desc="losses")]
    shown = [{**result, **{key: f"{value:.1e}" for key, value in result.items() if isinstance(value, float)}}
             for result in results]
    print(table(shown))
    finish(args, device, results)
    return results


def is_off(result: dict) -> bool:
    numbers = [value for value in result.values() if isinstance(value, float)]
    return not all(map(math.isfinite, numbers)) or (not result["tf32"] and max(numbers) > BOUND)


if __name__ == "__main__":
    if any(map(is_off, main())):
        sys.exit(1)
