"""Whether a loss's passes over the similarities are the kernels of `fused`: on a GPU, in large batches, where factors
of matrix products may have the 10 binary digits of TF32, or bfloat16's; and whether the updates of a network of
prototypes are those of `fused_prototypes`, on a GPU. Triton, which compiles them, comes with PyTorch."""

import logging
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import all_gather, world_size
from open_clip_ext.objectives import Objective
from open_clip_ext.options import option

KERNELS = option("auto", "auto: fused kernels on a GPU where faster; eager: none", choices=("auto", "eager"))
# Pairs of a batch from which they are faster, by pass: measured on one H100 (docs/performance.md).
LEAST_PAIRS = {"clip": 8192, "siglip": 8192, "global": 8192}
HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype")  # products of 16 bits with float32 sums, on CUDA
MOST_PROTOTYPES = 16384  # whose exponents a kernel holds at a time
LEAST_CAPABILITY = 8, 0  # the first with TF32 and bfloat16
_usable: dict[tuple[Any, ...], bool] = {}  # by what a kernel is compiled for


def has_tf32() -> bool:
    """Whether PyTorch's own product of float32 matrices is in TF32."""
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


def is_large(batch: Batch, name: str) -> bool:
    """Whether the kernels are likely to be faster; equal on all processes."""
    return batch.image.device.type == "cuda" and batch.size >= LEAST_PAIRS[name]


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this process can compile kernels for such tensors."""
    return (
        device.type == "cuda"
        and dtype == torch.float32
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
        and find_spec("triton") is not None
    )


def is_possible(batch: Batch) -> bool:
    """Whether this process has the kernels of `fused`."""
    return (
        has_kernels(batch.image.device, batch.image.dtype)
        and batch.image.shape[1] % 16 == 0
        and HAS_OUT_DTYPE
        and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"
    )


def fused_kernels(batch: Batch, kernels: str, name: str, low: bool = False) -> ModuleType | None:
    """The module `fused`, or None: then the passes are single operations. The same on all processes, which exchange
    exponents in the units of either.

    Args:
        kernels: value of the option.
        name: of `LEAST_PAIRS`.
        low: as in `Pairs`.
    """
    if kernels == "eager" or not is_large(batch, name) or not (low or has_tf32()):
        return None
    image = batch.image
    kind = name, low, image.shape[1], image.dtype, image.device, len(image) == batch.size, batch.keys is not None
    return checked("fused", kind, image, lambda: is_possible(batch), batch, name, low)


def fused_prototypes(prototypes: Tensor, kernels: str, objective: type[Objective]) -> ModuleType | None:
    """The module `fused_prototypes`, or None: then an update is single operations. The same on all processes. Waits for
    the device the first time.

    Args:
        prototypes: at most `MOST_PROTOTYPES` per direction.
    """
    if kernels == "eager" or prototypes.device.type != "cuda":  # before what processes ask one another
        return None
    kind = objective, prototypes.shape, prototypes.dtype, prototypes.device
    is_possible = partial(has_kernels, prototypes.device, prototypes.dtype)
    return checked("fused_prototypes", kind, prototypes, is_possible, objective, prototypes)


def checked(
    name: str, kind: tuple[Any, ...], tensor: Tensor, is_possible: Callable[[], bool], *arguments: Any
) -> ModuleType | None:
    """The module `name` of kernels; None where a process does not have them or their results are others. Tried once per
    `kind`, with the `arguments` of the module's `deviation`."""
    key = name, world_size(), *kind
    if key not in _usable:
        here = torch.tensor([is_possible() and works(name, *arguments)], device=tensor.device)
        _usable[key] = bool(all_gather(here.float()).all())
    return import_module(f"open_clip_ext.kernels.{name}") if _usable[key] else None


def works(name: str, *arguments: Any) -> bool:
    """Whether the results of the module's kernels are those of the single operations."""
    try:
        module = import_module(f"open_clip_ext.kernels.{name}")  # imports triton
        deviation = module.deviation(*arguments)
        reason = f"their results differ by {deviation:.1g}, more than TF32's {module.BOUND:.1g}"
        if deviation <= module.BOUND:
            return True
    except Exception as error:  # whatever a compiler raises; its reason is in the last line
        last_line = str(error).strip().rpartition("\n")[2]
        reason = f"{type(error).__name__}: {last_line}"
    logging.warning(f"kernels: the fused ones are not used ({reason})")
    return False
