"""Whether a loss's passes over the similarities are the kernels of `fused`: on a GPU, in large batches, where factors
of matrix products may have the 10 binary digits of TF32, or bfloat16's; triton, which compiles them, comes with
PyTorch."""

import logging
import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from open_clip_ext.batch import Batch
from open_clip_ext.distributed import all_gather
from open_clip_ext.options import option

KERNELS = option("auto", "auto: fused kernels on a GPU in large batches; eager: none", choices=("auto", "eager"))
# Pairs of a batch from which they are faster, by pass: measured on one H100 (docs/performance.md).
LEAST_PAIRS = {"clip": 8192, "siglip": 8192, "global": 8192}
HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype")  # products of 16 bits with float32 sums, on CUDA
LEAST_CAPABILITY = 8, 0  # the first with TF32 and bfloat16
_usable: dict[tuple[Any, ...], bool] = {}  # by what a kernel is compiled for


def has_tf32() -> bool:
    """Whether PyTorch's own product of float32 matrices is in TF32."""
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


def is_large(batch: Batch, name: str) -> bool:
    """Whether the kernels are likely to be faster; equal on all processes."""
    return batch.image.device.type == "cuda" and batch.size >= LEAST_PAIRS[name]


def is_possible(batch: Batch) -> bool:
    """Whether this process has the kernels."""
    return (
        batch.image.dtype == torch.float32
        and batch.image.shape[1] % 16 == 0
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(batch.image.device) >= LEAST_CAPABILITY
        and HAS_OUT_DTYPE
        and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"
        and find_spec("triton") is not None
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
    if kind not in _usable:
        here = torch.tensor([works(batch, name, low)], device=image.device)
        _usable[kind] = bool(all_gather(here.float()).all())
    if not _usable[kind]:
        return None
    return import_module("open_clip_ext.kernels.fused")


def works(batch: Batch, name: str, low: bool) -> bool:
    """Whether this process has the kernels, and their results are those of the single operations."""
    if not is_possible(batch):
        return False
    try:
        fused = import_module("open_clip_ext.kernels.fused")  # imports triton
        deviation = fused.deviation(batch, name, low)
        reason = f"their results differ by {deviation:.1g}, more than TF32's {fused.BOUND:.1g}"
        if deviation <= fused.BOUND:
            return True
    except Exception as error:  # whatever a compiler raises; its reason is in the last line
        last_line = str(error).strip().rpartition("\n")[2]
        reason = f"{type(error).__name__}: {last_line}"
    logging.warning(f"kernels: the fused ones are not used ({reason})")
    return False
