"""Count the bytes that a block of code sends between processes."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from open_clip_ext.distributed import GATHER, SCATTER

# The argument with this process's own data, by position and name; and the bytes that a process with N bytes of data
# sends in a ring of W processes.
COLLECTIVES: dict[str, tuple[int, str, Callable[[int, int], float]]] = {
    "all_gather": (1, "tensor", lambda size, world: (world - 1) * size),
    GATHER: (1, "input_tensor", lambda size, world: (world - 1) * size),
    "reduce_scatter": (1, "input_list", lambda size, world: (world - 1) * size / world),
    SCATTER: (1, "input", lambda size, world: (world - 1) * size / world),
    "all_to_all": (1, "input_tensor_list", lambda size, world: (world - 1) * size / world),
    "scatter": (1, "scatter_list", lambda size, world: (world - 1) * size / world),
    "all_reduce": (0, "tensor", lambda size, world: 2 * (world - 1) * size / world),
    "broadcast": (0, "tensor", lambda size, world: size),
}


class CollectiveCounter:
    """A context manager that counts calls and bytes of torch.distributed's collectives, forward and backward.

        with CollectiveCounter() as counter:
            loss(...).backward()
        counter.calls["all_gather"], counter.sent

    DistributedDataParallel's own communication, for the model's gradients, is not counted.

    Attributes:
        calls: number of calls by collective.
        bytes: bytes that this process sends, by collective.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, float] = defaultdict(float)
        self._patches = ExitStack()

    def __enter__(self) -> "CollectiveCounter":
        for name in COLLECTIVES:
            self._patches.enter_context(patch.object(dist, name, self._counted(name)))
        # OpenCLIP 4 gathers past these functions if it can, with the same bytes.
        self._patches.enter_context(patch("open_clip.loss.dist_fcol", None, create=True))
        return self

    def __exit__(self, *error: Any) -> None:
        self._patches.close()

    def _counted(self, name: str) -> Callable:
        original = getattr(dist, name)
        position, keyword, sent = COLLECTIVES[name]

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            own = args[position] if len(args) > position else kwargs.get(keyword)
            self.calls[name] += 1
            self.bytes[name] += sent(_size(own), dist.get_world_size())
            return original(*args, **kwargs)

        return call

    @property
    def sent(self) -> float:
        """Bytes sent by all collectives."""
        return sum(self.bytes.values())


def _size(tensors: Tensor | list[Tensor] | None) -> int:
    if tensors is None:  # a process that only receives in a scatter
        return 0
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_size(tensor) for tensor in tensors)
