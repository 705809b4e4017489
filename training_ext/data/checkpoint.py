"""What this package's state in a checkpoint says of the order of the data, and where a sharded checkpoint has it."""

import os
from argparse import Namespace
from typing import Any

from open_clip_ext.distributed import world_size
from open_clip_ext.errors import InputError
from training_ext.openclip.loading import load_verified, one_line

SHARDED = "open_clip_ext.state"  # in the folder of a checkpoint of shards
SHARDED_PARTS = (".metadata", "_metadata_extra.pt")  # OpenCLIP's and torch's files of a complete one


def order_of(args: Namespace, streams: int) -> dict[str, Any]:
    """What the order of the train data depends on, by flag or name; `streams` as in `RowLoader`."""
    order = {"--seed": args.seed, "processes": world_size(), "--batch-size": args.batch_size}
    order["--accum-freq"] = args.accum_freq
    if streams:
        order |= {"--workers": streams, "--dataset-resampled": args.dataset_resampled}
        order["--train-data-upsampling-factors"] = args.train_data_upsampling_factors
    return order


def read_sharded_entry(folder: str) -> dict[str, Any] | None:
    """Our entry of a checkpoint that is a folder, None if there is none. Tensors stay on disk.

    Raises:
        InputError: the checkpoint or the entry is not complete.
    """
    path = os.path.join(folder, SHARDED)
    missing = [name for name in SHARDED_PARTS if not os.path.exists(os.path.join(folder, name))]
    try:
        if missing:
            raise FileNotFoundError(f"it has no {missing[0]}")
        return load_verified(path) if os.path.exists(path) else None
    except Exception as error:
        raise InputError(f"{folder!r} is not a complete checkpoint: {one_line(error)}", "--resume") from None
