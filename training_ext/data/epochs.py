"""The length of OpenCLIP's epochs."""

from argparse import Namespace
from math import ceil

from open_clip_ext.errors import InputError
from training_ext.data.rows import DataRows


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


def check_steps(args: Namespace, kind: str, num_samples: int, world_size: int) -> int:
    """Refuse epochs without a step, for which OpenCLIP would save the untrained model; return the number of steps."""
    steps = steps_per_epoch(args, kind, num_samples, world_size)
    if steps < 1:
        raise InputError(
            f"{args.batch_size} x {world_size} process(es) x --accum-freq {args.accum_freq} is more than "
            f"the {num_samples} samples of an epoch; lower it",
            "--batch-size",
        )
    return steps
