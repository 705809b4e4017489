"""The command line of the commands that read checkpoints, and their processes."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from open_clip_train.distributed import init_distributed_device

from open_clip_ext.distributed import object_of_first
from open_clip_ext.errors import InputError
from training_ext.core.plan import world_info

Checked = TypeVar("Checked")


def numbers(
    text: str, kind: Callable[[str], Any], flag: str, expected: str, valid: Callable[[Any], bool] = lambda number: True
) -> list[Any]:
    """The numbers in `text`, separated by commas.

    Raises:
        InputError: one is not of the `kind`, or not `valid`.
    """
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = None
    if values is None or not all(map(valid, values)):
        raise InputError(f"{text!r} must be {expected}", flag)
    return values


@contextmanager
def checked_by_first(args: Namespace, check: Callable[[], Checked]) -> Iterator[tuple[torch.device, Checked]]:
    """Within it the processes that `args` describes are a group, each with its device and what process 0 has checked.

    As in the training, the others wait for it in the process group, so that one line tells what is wrong.
    """
    checked: Any = check() if world_info()[1] == 0 else None
    device = init_distributed_device(args)
    yield device, object_of_first(checked)
    if args.distributed:
        dist.barrier()
        dist.destroy_process_group()
