"""Train on one of several captions of an image, drawn anew each epoch (`--several-captions`, `--captions-field`).

The captions are the lines of a csv with the same image, the lines of a folder's .txt, or a list in the .json of a
shard's sample. OpenCLIP 4's own draw among the fields of --json-text-key is made here, too, so that it can be resumed.
"""

import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from open_clip_ext.options import option
from training_ext.core.component import Component
from training_ext.core.epoch import Epoch
from training_ext.core.hosts.both import GET_DATASET_FN
from training_ext.core.seam import DATA, TRAIN_DATA, Seam
from training_ext.data.captions import captions_of_samples, draw_from_lines
from training_ext.data.seeding import SharedEpoch


class Captions(Component):
    name = "captions"
    topic = "data"
    needs_loss = True
    layer = -1  # a sample's caption is there before others look at it
    several_captions: bool = option(
        False, "lines of the csv with the same image, or of one .txt in a folder, are one sample, and one of their "
        "captions is drawn each epoch"
    )
    captions_field: str | None = option(
        None, "field of the samples' .json in shards with a list of captions, of which one is drawn each epoch",
        metavar="NAME",
    )  # fmt: skip
    seams = (
        Seam(
            DATA, "CsvDataset",
            why="the lines of one image are one sample",
            contract="get_csv_dataset builds CsvDataset(path, ...), with the cells in images and captions",
            replacement=lambda original, component: partial(component.of_images, original),
            used_by=f"{DATA}:get_csv_dataset",
            scopes=(TRAIN_DATA,),
            layer=-1,
        ),
        replace(
            GET_DATASET_FN,
            why="captions of --json-text-key are in .txt by then",
            contract="get_data reads json_text_key in the args of get_dataset_fn(path, type)(args, ...)",
            replacement=lambda original, component: partial(component.from_txt, original),
            layer=1,
        ),
    )  # fmt: skip

    def __init__(self, args: Namespace):
        super().__init__(args)
        self._epoch = SharedEpoch(args.workers)
        self._draw = captions_of_samples(args, self._epoch)

    def wanted(self) -> bool:
        return self.several_captions or self._draw is not None

    def of_images(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Replaces OpenCLIP's data set of a csv."""
        lines = original(*args, **kwargs)
        if self.several_captions:
            captions, pictures = len(lines), draw_from_lines(lines, self.args.seed, self._epoch)
            if self.plan.is_first:
                of = f"{captions} captions of {len(pictures)} pictures"
                logging.info(f"{of}: one of each picture's is drawn each epoch")
        return lines

    def from_txt(self, original: Callable, path: str, kind: str) -> Callable:
        """Replaces OpenCLIP's `get_dataset_fn`."""

        def build(args: Namespace, transform: Any, is_train: bool, **more: Any) -> Any:
            if is_train and self._draw is not None:
                if self.plan.is_first:
                    logging.info(f"One of the captions in the field {self._draw.named!r} is drawn each epoch")
                args = Namespace(**{**vars(args), "json_text_key": None})
            return original(path, kind)(args, transform, is_train, **more)

        return build

    def raw_sample(self, sample: dict[str, Any]) -> dict[str, int] | None:
        return {} if self._draw is None else self._draw(sample)

    def epoch(self, epoch: Epoch, train: Callable[[Epoch], None]) -> None:
        self._epoch.set_value(epoch.seed)
        train(epoch)
