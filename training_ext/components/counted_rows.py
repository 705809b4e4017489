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
from training_ext.core.hosts.both import SHARD_READER
from training_ext.core.hosts.both_events import GET_DATA
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
        replace(
            GET_DATA,
            why="every process needs the row of every sample before it builds its loader",
            replacement=lambda original, component: partial(component.get_data, original),
            layer=-1,
        ),
        replace(
            SHARD_READER,
            why="shards that are not as they were counted give samples the rows of others",
            replacement=lambda original, component: component.counted(original),
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
