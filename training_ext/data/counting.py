"""Count the rows of shards, and check that OpenCLIP can train on them."""

import multiprocessing
from argparse import Namespace
from dataclasses import replace

from open_clip_train.data import expand_urls

from open_clip_ext.errors import InputError
from training_ext.data.captions import captions_of_samples
from training_ext.data.first_look import look_at_shards
from training_ext.data.rows import DataRows, needs_index, tolerated
from training_ext.data.sample_keys import key_of_samples
from training_ext.data.shards import check_missing, digest_of_list, estimated_samples, find_shards, shard_urls

MOST_PASSES = 5


def find(args: Namespace) -> DataRows:
    """The rows of --train-data; raises InputError as `rows.find_rows`."""
    listing = digest_of_list(args.train_data)
    if args.train_num_samples is not None and not needs_index(args):
        if getattr(args, "shard_sizes", None):
            raise InputError(f"--loss {args.loss} with --train-num-samples does not use it", "--shard-sizes")
        missing = check_missing(shard_urls(args.train_data), max_bad=tolerated(args))
        urls = [url for url in shard_urls(args.train_data) if url not in missing]
        rows = DataRows("webdataset", args.train_num_samples, listing, listing=listing)
    else:
        shards = find_shards(args.train_data, getattr(args, "shard_sizes", None), max_bad=tolerated(args))
        urls = [url for url in shards.urls if shards.size_of[url]]
        rows = DataRows("webdataset", shards.num_rows, shards.digest, shards, listing)
    return replace(rows, seen=look_at_shards(urls, key_of_samples(args), captions_of_samples(args)))


def check_loaders(args: Namespace, rows: DataRows, world_size: int) -> None:
    """Loader workers must be forked, and each needs a full batch in its shards, or OpenCLIP waits forever."""
    if args.workers and (method := multiprocessing.get_start_method()) != "fork":
        raise InputError(
            f"{args.workers} processes that read shards must be forked, and this machine starts them by {method!r}, to "
            "which OpenCLIP's pipeline cannot be sent; give 0", "--workers",
        )
    if args.dataset_resampled:
        return
    urls = expand_urls(args.train_data)[0]
    loaders = max(1, args.workers)
    # Without a count, as if every shard were large.
    sizes = sorted(args.batch_size if rows.shards is None else rows.shards.size_of[url] for url in urls)
    fewest = len(sizes) // world_size // loaders
    if sum(sizes[:fewest]) < args.batch_size:
        raise InputError(
            f"{args.workers} in each of {world_size} process(es) get {fewest} of the {len(sizes)} shards each, which "
            f"may hold only {sum(sizes[:fewest])} samples but --batch-size is {args.batch_size}; lower one of the two, "
            "write smaller shards or use --dataset-resampled",
            "--workers",
        )


def check_num_samples(args: Namespace, rows: DataRows) -> None:
    """Refuse an epoch of more than `MOST_PASSES` over shards, where --train-num-samples is likely another data set's.

    Shards that were not counted are, if their sizes in bytes and a count of the largest say that it may be one.
    """
    num_samples, shards = args.train_num_samples, rows.shards
    if num_samples is None or args.dataset_resampled:
        return
    if shards is None:
        about = estimated_samples(args.train_data)
        if about is None or num_samples <= MOST_PASSES * about:
            return
        shards = find_shards(args.train_data, max_bad=tolerated(args))
    there = shards.num_listed(args.train_data)
    if num_samples > MOST_PASSES * there:
        raise InputError(
            f"{num_samples}, but {args.train_data!r} has {there}; leave it out, or give more --epochs",
            "--train-num-samples",
        )
