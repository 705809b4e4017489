"""What a step of each loss asks of a GPU, forward and backward, and what OpenCLIP's ClipLoss does; no GPU is needed.

    python benchmarks/operations.py --json operations.json

- operations: each is at least one kernel, whose launch takes the host some microseconds. Views and allocations are left
  out;
- GB: of the tensors that the operations read and write, which bounds the time of those that compute little;
- MB: the most memory at a time for what lasts no longer than the step.

They are counted on torch's meta device, which computes nothing, with a GPU's block sizes and a process group that
sends nothing. Tables are looked up and updated, queues and networks are full, and `amorlip` does not train its networks
in the counted step.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from measuring import begin, finish, parser, reference_of, table
from open_clip.loss import ClipLoss
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import open_clip_ext
from open_clip_ext.distributed import world_size
from training_ext.tools.step_memory import HeldBytes

# Operations that do not read the tensor they write into; of others an operand that is overwritten counts twice.
ONLY_WRITE = ("copy_", "fill_", "zero_", "_allgather", "_reduce_scatter")
WARM_UP = 20  # steps at most, until ring buffers are full and all state is allocated


class OperationCounter(HeldBytes):
    """Counts operations on the device; host memory is left out.

    Attributes, besides those of `HeldBytes`:
        count: operations.
        bytes: of the tensors that they read and write.
    """

    def __init__(self) -> None:
        super().__init__("meta")
        self.count = self.bytes = 0

    def note(self, function: Any, given: list[Tensor], made: list[Tensor]) -> None:
        if (given or made) and not function.is_view and "empty" not in function.name():
            self.count += 1
            read, written = ({id(tensor): tensor for tensor in tensors} for tensors in (given, made))
            name = function.name().partition("::")[2]
            if name.startswith(ONLY_WRITE) or name.endswith("out"):
                read = {place: tensor for place, tensor in read.items() if place not in written}
            self.bytes += sum(tensor.numel() * tensor.itemsize for tensor in [*read.values(), *written.values()])


def counted(loss: Callable, batch: int, dim: int, m: int) -> dict[str, float]:
    """Operations, GB and MB of a step with `batch` pairs on this process."""

    def step() -> None:
        image, text = (torch.empty(batch, dim, device="meta", requires_grad=True) for _ in range(2))
        scale = torch.empty((), device="meta", requires_grad=True)
        more = reference_of(loss, image, text)
        if isinstance(loss, open_clip_ext.losses.Loss):
            more["index"] = torch.empty(batch, dtype=torch.int64, device="meta")
        loss(image, text, scale, **more).backward()

    with OperationCounter():
        for _ in range(min(WARM_UP, 2 + m // (batch * world_size()))):
            step()
    with OperationCounter() as counter:
        step()
    return {"operations": counter.count, "GB": round(counter.bytes / 1e9, 2), "MB": round(counter.peak / 1e6)}


def make_losses(batch: int, m: int, num_samples: int, names: list[str] | None = None) -> dict[str, Callable]:
    """OpenCLIP's loss and ours by name, those in `names` or all."""
    settings: dict[str, dict[str, Any]] = {
        preset.name: {} for preset in open_clip_ext.list_losses() if not preset.is_open_clip
    }
    queue_size = max(m, 2 * batch * world_size())  # more than the global batch
    settings |= {"neuclip": {"npn_prototypes": m}, "queue": {"queue_size": queue_size}}
    settings["neuclip, no updates"] = {"npn_prototypes": m, "npn_updates": 0}
    settings["neuclip, not split"] = {"npn_prototypes": m, "npn_split": False}
    settings["queue, compositional"] = {"queue_size": queue_size, "encoder_objective": "compositional"}
    clip = ClipLoss(local_loss=True, gather_with_grad=True, rank=0, world_size=world_size())
    losses: dict[str, Callable] = {"clip": clip} if names is None or "clip" in names else {}
    for name in names or settings:
        if name not in settings:
            continue
        common = dict(num_samples=num_samples, epochs=8, device="meta")
        loss = losses[name] = open_clip_ext.create_loss(name.split(",")[0], **common, **settings[name])
        loss.set_epoch(0)
        loss.steps = 1  # the first step checks values, which meta tensors do not have
    return losses


def at(processes: int, batch: int, dim: int, m: int, num_samples: int, names: list[str] | None = None) -> list[dict]:
    """The counts of each loss on so many processes of `batch` pairs."""
    if processes > 1:
        dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        with patch.object(torch, "autocast", lambda *args, **kwargs: nullcontext()):  # meta has no autocast
            return [
                {"loss": name, "processes": processes, "batch_size": batch, **counted(loss, batch, dim, m)}
                for name, loss in make_losses(batch, m, num_samples, names).items()
            ]
    finally:
        if processes > 1:
            dist.destroy_process_group()


def main(argv: list[str] | None = None) -> list[dict]:
    flags = parser(__doc__)
    flags.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 4096], help="pairs per process")
    flags.add_argument("--processes", type=int, nargs="+", default=[1, 8])
    flags.add_argument("--dim", type=int, default=512, help="dimension of the embeddings")
    flags.add_argument("-m", type=int, default=4096, help="prototypes of neuclip; least length of the queue")
    flags.add_argument("--num-samples", type=int, default=1_000_000, help="rows of the tables")
    flags.add_argument("--losses", nargs="+", help="these alone")
    args = flags.parse_args(argv)
    begin(args)
    results = [
        result
        for processes in args.processes
        for batch in args.batch_sizes
        for result in at(processes, batch, args.dim, args.m, args.num_samples, args.losses)
    ]
    print(table(results))
    finish(args, torch.device("cpu"), results)
    return results


if __name__ == "__main__":
    main()
