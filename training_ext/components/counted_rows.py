"""Count the train samples before the start: n, and by its place each sample's row in the state of the loss.

A run ends with one line at a shard that no longer has the samples that were counted.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from open_clip_train.distributed import broadcast_object

from open_clip_ext.options import option
from training_ext.core.component import Component
from training_ext.core.seam import TRAIN_DATA, Seam
from training_ext.data.rows import DataRows
from training_ext.data.shard_rows import CountedShards
from training_ext.data.shards import shard_urls


class CountedRows(Component):
    """Gives every process the rows that process 0 has found; without it sizes.json tells the sizes of shards."""

    name = "counted_rows"
    topic = "data"
    needs_ext_loss = True
    may_be_off = False
    counts_rows = True
    shard_sizes: str | None = option(
        None, "JSON file of samples per shard, by file name or URL, if there is no sizes.json beside the shards",
        metavar="FILE",
    )  # fmt: skip
    seams = (
        Seam(
            "open_clip_train.main", "get_data",
            why="every process needs the row of every sample before it builds its loader",
            contract="main calls get_data(args, transforms, epoch=, tokenizer=) after start-up of the processes",
            replacement=lambda original, component: partial(component.get_data, original),
            used_by="open_clip_train.main:main",
            layer=-1,
        ),
        Seam(
            "open_clip_train.data", "tarfile_to_samples_nothrow",
            why="shards that are not as they were counted give samples the rows of others",
            contract="get_wds_dataset uses it for train data as the stage from shards, dicts with url, to raw samples",
            replacement=lambda original, component: component.counted(original),
            used_by="open_clip_train.data:get_wds_dataset",
            scopes=(TRAIN_DATA,),
            layer=-2,
        ),
    )  # fmt: skip

    def get_data(self, original: Callable, args: Namespace, *rest: Any, **kwargs: Any) -> dict[str, Any]:
        """Replaces main's `get_data`."""
        data = self.training.data
        if args.loss is not None and args.distributed:
            data.rows = broadcast_object(args, data.rows)
            if data.rows is not None and data.rows.shards is not None:  # at another path on another machine
                shards = data.rows.shards.at(shard_urls(args.train_data))
                data.rows = replace(data.rows, shards=shards)
        if (rows := self._rows_of_shards()) is not None:
            data.sizes = rows.size_of
            if args.train_num_samples is None:
                args.train_num_samples = rows.num_listed(args.train_data)
        return original(args, *rest, **kwargs)

    def counted(self, original: Callable) -> Callable:
        """Replaces OpenCLIP's reader of shards."""
        shards = self._rows_of_shards()
        return original if shards is None else CountedShards(original, shards)

    def _rows_of_shards(self) -> Any:
        rows: DataRows | None = self.training.data.rows
        return rows.shards if rows is not None and self.args.uses_ext_loss else None
