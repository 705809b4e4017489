"""Check that a tensor fits in memory before it is allocated."""

import os

import torch

from open_clip_ext.errors import InputError


def total_memory(device: torch.device | str) -> int:
    """Memory of a CUDA device in bytes; for any other device that of the host."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(argument: str, value: str, needed: int, device: torch.device | str, remedy: str) -> None:
    """Raise InputError if `needed` bytes exceed the memory of the device.

    Args:
        argument, value, remedy: for the message: the argument's name, its value, and what would be right.
    """
    available = total_memory(device)
    if needed > available:
        device_name = str(device) if torch.device(device).type == "cuda" else "the host"
        raise InputError(
            f"{value} needs {needed / 2**30:.1f} GiB on {device_name}, which has {available / 2**30:.1f} GiB; {remedy}",
            argument,
        )
