"""A stand-in for torch.cuda.CUDAGraph that captures on a CPU, where all tensors but those of `host` lie on its device.

As on a GPU a capture computes nothing on the device and refuses a look at a value there, and a replay repeats each
operation on the tensors of the capture, with the numbers that the host had then. Memory that was taken and not written
holds NaN.
"""

import gc
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_of(tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class RecordedGraph(TorchDispatchMode):
    host: Callable[[], list[Tensor]] = list  # tensors in host memory
    replays = 0  # of all graphs

    def __init__(self):
        super().__init__()
        self.calls, self.contents = [], {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs, given = kwargs or {}, tensors_of((args, kwargs))
        if {id(tensor) for tensor in given} & {id(tensor) for tensor in type(self).host()}:
            return op(*args, **kwargs)
        if op.name() == "aten::_local_scalar_dense":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        for tensor in given:
            memory = tensor.untyped_storage()
            self.contents.setdefault(memory.data_ptr(), (memory, memory.clone()))
        made = op(*args, **kwargs)
        for tensor in tensors_of(made):
            self.contents.setdefault(tensor.untyped_storage().data_ptr(), None)
        self.calls.append((op, args, kwargs, tensors_of(made)))
        return made

    def reset(self):
        self.calls, self.contents = [], {}

    def end(self):
        for memory, before in filter(None, self.contents.values()):
            memory.copy_(before)

    @torch.no_grad()
    def replay(self):
        type(self).replays += 1
        for op, args, kwargs, made in self.calls:
            for target, tensor in zip(made, tensors_of(op(*args, **kwargs)), strict=True):
                if "empty" in op.name():
                    target.fill_(torch.nan)
                elif target.data_ptr() != tensor.data_ptr():
                    target.copy_(tensor)


class Generator:
    """A stand-in for a CUDA device's, of torch before 2.13: a capture that fails leaves it in one."""

    def __init__(self, capturing: bool = False):
        self.capturing = capturing

    def clone_state(self) -> "Generator":
        return Generator()

    def graphsafe_set_state(self, other: "Generator") -> None:
        self.capturing = other.capturing


class Streams:
    """A stand-in for torch.cuda's streams, numbered; 0 is the default."""

    def __init__(self):
        self.current, self.made, self.generator = 0, 0, Generator()

    def new(self, device) -> int:
        self.made += 1
        return self.made

    @contextmanager
    def use(self, stream: int):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capture(self, graph: RecordedGraph, stream: int, capture_error_mode: str):
        """In place of torch.cuda.graph; as there, after a failure the end fails, too, and the stream stays."""
        assert capture_error_mode == "thread_local" and not gc.isenabled()
        before, self.current, self.generator.capturing = self.current, stream, True
        try:
            with graph:
                yield
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        finally:
            graph.end()
        self.current, self.generator.capturing = before, False
