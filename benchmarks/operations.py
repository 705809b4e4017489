"""Number of device operations per step of each loss, forward and backward, and of OpenCLIP's ClipLoss.

    python benchmarks/operations.py --json operations.json

On a GPU each operation is at least one kernel, whose launch takes the host some microseconds. They are counted on
torch's meta device, which computes nothing, with a GPU's block sizes; views and allocations are left out. Tables are
looked up and updated, queues and networks are full, and `amorlip` does not train its networks in the counted step.
"""

from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import torch
from measuring import begin, finish, parser, reference_of, table
from open_clip.loss import ClipLoss
from torch.utils._python_dispatch import TorchDispatchMode

import open_clip_ext

WARM_UP = 20  # steps until ring buffers are full and all state is allocated


class OperationCounter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        allocates = "empty" in function.name()
        self.count += not (function.is_view or allocates)
        return function(*args, **(kwargs or {}))


def operations(loss: Callable, batch: int, dim: int) -> int:
    def step() -> None:
        image, text = (torch.empty(batch, dim, device="meta", requires_grad=True) for _ in range(2))
        scale = torch.empty((), device="meta", requires_grad=True)
        more = reference_of(loss, image, text)
        if isinstance(loss, open_clip_ext.losses.Loss):
            more["index"] = torch.empty(batch, dtype=torch.int64, device="meta")
        loss(image, text, scale, **more).backward()

    for _ in range(WARM_UP):
        step()
    with OperationCounter() as counter:
        step()
    return counter.count


def main(argv: list[str] | None = None) -> list[dict]:
    flags = parser(__doc__)
    flags.add_argument("--batch-size", type=int, default=512)
    flags.add_argument("--dim", type=int, default=512, help="dimension of the embeddings")
    flags.add_argument("-m", type=int, default=4096, help="prototypes of neuclip, length of the queue")
    flags.add_argument("--num-samples", type=int, default=1_000_000, help="rows of the tables")
    args = flags.parse_args(argv)
    begin(args)
    settings = {preset.name: {} for preset in open_clip_ext.list_losses() if not preset.is_open_clip}
    settings |= {"neuclip": {"npn_prototypes": args.m}, "queue": {"queue_size": args.m}}
    settings["neuclip, no updates"] = {"npn_prototypes": args.m, "npn_updates": 0}
    settings["queue, compositional"] = {"queue_size": args.m, "encoder_objective": "compositional"}
    losses = {"clip": ClipLoss()}
    for name, given in settings.items():
        common = dict(num_samples=args.num_samples, epochs=8, device="meta")
        losses[name] = open_clip_ext.create_loss(name.split(",")[0], **common, **given)
        losses[name].set_epoch(0)
        losses[name].steps = 1  # the first step checks values, which meta tensors do not have
    with patch.object(torch, "autocast", lambda *args, **kwargs: nullcontext()):  # meta has no autocast
        results = [
            {"loss": name, "operations": operations(loss, args.batch_size, args.dim)} for name, loss in losses.items()
        ]
    print(table(results))
    finish(args, torch.device("cpu"), results)
    return results


if __name__ == "__main__":
    main()
