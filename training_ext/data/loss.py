"""The loss of a command line, and the length of its epochs."""

from argparse import Namespace
from math import ceil

import torch

from open_clip_ext.losses import Loss
from training_ext.core.loss import build_loss as build
from training_ext.core.plan import global_batch
from training_ext.data.rows import DataRows


def build_loss(
    args: Namespace, num_rows: int, device: torch.device | str, samples_per_epoch: int | None = None
) -> Loss:
    """Build the loss of the command line.

    Args:
        num_rows: rows of the train data.
        samples_per_epoch: of OpenCLIP's epochs, which --train-num-samples may make shorter or longer than a pass over
            the rows; None: `num_rows`.

    Raises:
        InputError: the parts cannot be combined, or a setting is out of range.
    """
    return build(args, num_rows, device, samples_per_epoch or num_rows, global_batch(args))


def samples_per_epoch(args: Namespace, rows: DataRows) -> int:
    """Number of samples that OpenCLIP trains on in an epoch; for shards that of --train-num-samples, if given."""
    if rows.kind != "webdataset":
        return rows.num_rows
    if args.train_num_samples is not None:
        return args.train_num_samples
    return rows.num_rows if rows.shards is None else rows.shards.num_listed(args.train_data)


def steps_per_epoch(args: Namespace, kind: str, num_samples: int, world_size: int) -> int:
    """Number of optimizer steps that OpenCLIP makes in an epoch of `num_samples`."""
    if kind == "webdataset":
        loaders = max(1, args.workers)
        batches = ceil(ceil(num_samples / (args.batch_size * world_size)) / loaders) * loaders
    else:
        batches = ceil(num_samples / world_size) // args.batch_size
    return batches // args.accum_freq
