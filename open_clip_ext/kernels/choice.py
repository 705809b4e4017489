"""Whether a loss's passes over the similarities are the kernels of `fused`: on a GPU, in large batches, where factors
of matrix products may have the 10 binary digits of TF32, or bfloat16's; triton, which compiles them, comes with
PyTorch."""

import logging
import os
from importlib.util import find_spec
from types import ModuleType

import torch

from open_clip_ext.batch import Batch
from open_clip_ext.options import option

KERNELS = option(
    "auto", "passes over the similarities: on a GPU with large batches one kernel each, or always single operations",
    choices=("auto", "eager"),
)
# Pairs of all processes from which they are faster, by pass: measured on one H100 (docs/performance.md).
LEAST_PAIRS = {"clip": 8192, "siglip": 8192, "global": 8192}
HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype")  # products of 16 bits with float32 sums, on CUDA
LEAST_CAPABILITY = 8, 0  # the first with TF32 and bfloat16
_eager = False  # in this process, since a kernel failed


def has_tf32() -> bool:
    """Whether PyTorch's own product of float32 matrices is in TF32."""
    matmul = torch.backends.cuda.matmul
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return allowed and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


def is_possible(batch: Batch, name: str, low: bool) -> bool:
    """Whether the kernels can compute this batch, and are likely to be faster."""
    image = batch.image
    return (
        image.device.type == "cuda"
        and batch.size >= LEAST_PAIRS[name]
        and image.dtype == torch.float32
        and image.shape[1] % 16 == 0
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(image.device) >= LEAST_CAPABILITY
        and HAS_OUT_DTYPE
        and (low or has_tf32())
        and find_spec("triton") is not None
    )


def fused_kernels(batch: Batch, kernels: str, name: str, low: bool = False) -> ModuleType | None:
    """The module `fused`, or None: then the passes are single operations.

    Args:
        kernels: value of the option.
        name: of `LEAST_PAIRS`.
        low: as in `Pairs`.
    """
    global _eager
    if kernels == "eager" or _eager or not is_possible(batch, name, low):
        return None
    try:
        from open_clip_ext.kernels import fused  # imports triton

        deviation = fused.deviation(batch, name, low)
    except Exception as error:  # whatever a compiler raises; its reason is in the last line
        last_line = str(error).strip().rpartition("\n")[2]
        deviation, reason = None, f"{type(error).__name__}: {last_line}"
    if deviation is not None and deviation <= fused.BOUND:
        return fused
    _eager = True
    if deviation is not None:
        reason = f"their results differ by {deviation:.1g}, more than TF32's {fused.BOUND:.1g}"
    logging.warning(f"kernels: the fused ones are not used ({reason})")
    return None
