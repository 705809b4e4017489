"""Count the rows of shards, and look at their first samples."""

from argparse import Namespace

from open_clip_ext.errors import InputError
from training_ext.data.captions import captions_of_samples
from training_ext.data.first_look import look_at_shards
from training_ext.data.rows import DataRows, needs_index, tolerated
from training_ext.data.sample_keys import key_of_samples
from training_ext.data.seen_captions import SeenCaptions
from training_ext.data.shards import check_missing, digest_of_list, find_shards, shard_urls


def check_usable(args: Namespace) -> SeenCaptions | None:
    """Check that shards exist and that the first samples are usable pairs; raises InputError as `rows.check_usable`.

    Returns:
        The captions of the first samples of local shards.
    """
    urls = shard_urls(args.train_data)
    missing = check_missing(urls, max_bad=tolerated(args))
    urls = [url for url in urls if url not in missing]
    return look_at_shards(urls, key_of_samples(args), captions_of_samples(args))


def find(args: Namespace) -> DataRows:
    """The rows of --train-data; raises InputError as `rows.find_rows`."""
    if args.train_num_samples is not None and not needs_index(args):
        if getattr(args, "shard_sizes", None):
            raise InputError(f"--loss {args.loss} with --train-num-samples does not use it", "--shard-sizes")
        caption_summary = check_usable(args)
        listing = digest_of_list(args.train_data)
        return DataRows("webdataset", args.train_num_samples, listing, listing=listing, seen=caption_summary)
    shards = find_shards(args.train_data, getattr(args, "shard_sizes", None), max_bad=tolerated(args))
    urls = [url for url in shards.urls if shards.size_of[url]]
    caption_summary = look_at_shards(urls, key_of_samples(args), captions_of_samples(args))
    listing = digest_of_list(args.train_data)
    return DataRows("webdataset", shards.num_rows, shards.digest, shards, listing, seen=caption_summary)
