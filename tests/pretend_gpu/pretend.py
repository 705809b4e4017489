"""A CUDA device without values: CUDA tensors have shapes, types and a device, CPU tensors are real.

Needs a CUDA build of PyTorch and `libcuda.c` in front of the driver (LD_PRELOAD), but no GPU. It tells

- where an operation mixes devices, as PyTorch does on a GPU;
- where the host waits for the device, or a copy between them does;
- what each collective gets.

It cannot tell what is in a tensor, what a kernel or NCCL does, or how long anything takes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result, or its shape, depends on values: the host must see them first.
READS = (
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::_unique", "aten::unique_", "aten::bincount", "aten::repeat_interleave.Tensor",
)
INDEXING = ("aten::index.Tensor", "aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index")
NCCL_TYPES = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool,
}


class Waits(AssertionError):
    """The host waits for the device where it must not."""


class Refused(AssertionError):
    """NCCL would not take this tensor, or make a communicator for it."""


@dataclass(frozen=True)
class Collective:
    """One call: its operation, and the shapes and types of its tensors; of a gather, those that are sent."""

    name: str
    tensors: tuple[tuple[tuple[int, ...], str], ...]


class PretendGPU(TorchDispatchMode):
    """Within it, `device="cuda"` is the pretended device.

    Attributes:
        may_wait: whether the host may wait for the device; if not, an operation that does raises `Waits`.
        waits: names of the operations for which it did.
        collectives: what torch.distributed was called with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.may_wait = True
        self.waits: list[str] = []
        self.collectives: list[Collective] = []
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> "PretendGPU":
        self._fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fake.__exit__(*error)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, op.name()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name.startswith("c10d::") and name != "c10d::barrier":
            self._note_collective(name, args, tensors)
        on_device = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        device = kwargs.get("device")
        to = None if device is None else torch.device(device).type
        if not on_device and to != "cuda":
            with unset_fake_temporarily():
                return op(*args, **kwargs)
        if name.startswith(READS):
            self._wait(name)
            if name.startswith("aten::_local_scalar_dense"):
                return _value_like(on_device[0])
            if name.startswith("aten::equal"):
                return True
        if name.startswith(INDEXING):
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype == torch.bool for index in indices):
                self._wait(f"{name} by a mask")
            if any(index.dim() > 0 and not isinstance(index, FakeTensor) for index in indices):
                self._wait(f"{name} by an index in host memory")
        if name.startswith("aten::_to_copy") and to is not None:
            return self._copy(op, args, kwargs, to, bool(on_device))
        if name.startswith("aten::copy_"):
            target, source = args[:2]
            asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            if isinstance(target, FakeTensor) != isinstance(source, FakeTensor) and source.dim() + target.dim() > 0:
                if not asynchronous or isinstance(source, FakeTensor):
                    self._wait(f"{name} between devices")
            if not isinstance(target, FakeTensor):
                return target  # its values are unknown
        return op(*args, **kwargs)

    def _copy(self, op: Any, args: Any, kwargs: Any, to: str, from_device: bool) -> Tensor:
        crosses = from_device != (to == "cuda")
        if crosses and not (kwargs.get("non_blocking") and to == "cuda"):
            self._wait(f"a copy to {to}")
        if to == "cuda":
            return op(*args, **kwargs)
        with unset_fake_temporarily():
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)

    def _wait(self, name: str) -> None:
        if not self.may_wait:
            raise Waits(f"the host waits for the device in {name}")
        self.waits.append(name)

    def _note_collective(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        if name in ("c10d::send", "c10d::recv_"):
            raise Refused(f"{name} makes a communicator for this pair of processes")
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor):
                raise Refused(f"{name} of a tensor in host memory, {tuple(tensor.shape)}")
            if not tensor.is_contiguous():
                raise Refused(f"{name} of a tensor that is not contiguous, {tuple(tensor.shape)}")
            if tensor.dtype not in NCCL_TYPES:
                raise Refused(f"{name} of {tensor.dtype}")
        if name == "c10d::gather_":  # only its root has tensors to receive in
            tensors = args[1]
        self.collectives.append(Collective(name, tuple((tuple(one.shape), str(one.dtype)) for one in tensors)))


def _value_like(tensor: Tensor) -> bool | int | float:
    """What a check reads that finds nothing wrong: False, no index, or a usual logit scale."""
    if tensor.dtype == torch.bool:
        return False
    return 20.0 if tensor.is_floating_point() else 0


def prepare() -> None:
    """Answer, for the rest of this process, what PyTorch would ask of the driver."""
    assert torch.version.cuda and torch._C._cuda_getDeviceCount() == 8, "LD_PRELOAD the library of libcuda.c"
    fake_tensor.init_gpu_context = lambda device: None
    FakeTensorMode.avoid_device_init = property(lambda self: True)
    torch.cuda.is_bf16_supported = lambda *args, **kwargs: True
    torch.cuda.get_device_capability = lambda *args, **kwargs: (8, 0)
    torch.cuda.mem_get_info = lambda device=None: (80 << 30, 80 << 30)
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None
    torch.autograd.set_multithreading_enabled(False)
