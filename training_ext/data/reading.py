"""Read rows of the train data as they are: not shuffled, not augmented, with nothing in place of unreadable ones."""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from open_clip_train import data as open_clip_data
from torch.utils.data import Dataset

from training_ext.core.patching import replaced
from training_ext.core.rows import pair_of
from training_ext.core.tags import ROW, Tags
from training_ext.data.captions import captions_of_samples, draw_from_lines
from training_ext.data.scenes import shapes_dataset
from training_ext.data.seeding import SharedEpoch
from training_ext.data.shard_rows import rows_of_shards
from training_ext.data.shards import Shards
from training_ext.data.tables import is_empty, read_table
from training_ext.data.tars import decode_pairs

Report = Callable[[str], object]
Source = Callable[[int, int, Report], Iterator[tuple[int, Any, Any]]]
"""Yields row, image and tokens of the readable rows from a first to before a last, in order; the third argument gets a
message for each other."""


def source_of(
    args: Namespace, kind: str, shards: Shards | None, transform: Callable, image_size: Any, tokenizer: Callable
) -> Source:
    """The train data of a command line; of several captions a picture, those that epoch 0 draws.

    Args:
        kind: `DataRows.kind` of the train data.
        shards: the shards of a webdataset, else None.
        transform: from a PIL image to what is read.
        image_size: of generated scenes.
        tokenizer: OpenCLIP's, from a caption or a list of captions to tokens.
    """
    if shards is not None:
        return partial(_read_shards, shards, transform, tokenizer, captions_of_samples(args))
    if kind == "csv":
        columns = {"img_key": args.csv_img_key, "caption_key": args.csv_caption_key, "sep": args.csv_separator}
        with replaced({("open_clip_train.data", "pd.read_csv"): partial(read_table, args)}):  # as in the training
            csv = open_clip_data.CsvDataset(args.train_data, transform, **columns, tokenizer=tokenizer)
        if getattr(args, "several_captions", None):
            draw_from_lines(csv, args.seed, SharedEpoch(args.workers))
        return partial(_read, partial(_line, csv))
    if kind == "shapes":
        dataset: Dataset = shapes_dataset(args, True, transform, image_size, tokenizer=tokenizer)
    else:
        size = args.train_num_samples
        dataset = open_clip_data.SyntheticDataset(transform, dataset_size=size, tokenizer=tokenizer)
    return partial(_read, dataset.__getitem__)


def _line(csv: Any, row: int) -> Any:
    """A line of a csv; one without caption or image is an error, since the training skips it.

    OpenCLIP's data set takes the nan of an empty cell for the text "nan".
    """
    for name, cells in (("caption", csv.captions), ("image", csv.images)):
        if is_empty(cells[row]):
            raise ValueError(f"its {name} is empty")
    return csv[row]


def _read(get: Callable[[int], Any], start: int, stop: int, report: Report) -> Iterator[tuple[int, Any, Any]]:
    for row in range(start, stop):
        try:
            image, tokens = pair_of(get(row))
        except Exception as error:  # image libraries may raise anything
            report(f"row {row}: {error!r}")
        else:
            yield row, image, tokens


def _read_shards(
    shards: Shards, transform: Callable, tokenizer: Callable, recaption: Callable | None, start: int, stop: int,
    report: Report,
) -> Iterator[tuple[int, Any, Any]]:
    def tell(error: Exception) -> bool:
        report(f"{os.path.basename(url)}: {error!r}")
        return True

    def wanted(samples: Iterator[dict]) -> Iterator[dict]:
        for row, sample in enumerate(samples, first_row):
            if row >= stop:
                return
            if row >= start and sample.get("txt") and open_clip_data.filter_no_caption_or_no_image(sample):
                yield sample

    wds = open_clip_data.wds
    hooks = () if recaption is None else (recaption,)
    stage = rows_of_shards(shards, lambda url, error, *_: tell(error), hooks=hooks)
    for url, first_row in shards.offsets.items():
        if first_row >= stop or first_row + shards.size_of[url] <= start:
            continue
        decoded = decode_pairs(wds.decode)("pilrgb", handler=tell)(wanted(stage([{"url": url}])))
        for sample in wds.rename(image="jpg;png;jpeg;webp", text="txt")(decoded):
            try:
                (row,), caption = Tags((ROW,)).split(sample["text"])
                yield row, transform(sample["image"]), tokenizer(caption)[0]
            except Exception as error:
                tell(error)
