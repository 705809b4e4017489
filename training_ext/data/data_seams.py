"""`DataSeams`: the functions that replace OpenCLIP's in the data pipeline, and the state that they share."""

import logging
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from open_clip_train.data import SharedEpoch
from open_clip_train.distributed import is_master
from torch.utils.data import IterableDataset

from open_clip_ext.retrieval import ANY_CAPTION
from training_ext.data.captions import DigestLoader, Pictures, captions_of_samples, draw_from_lines
from training_ext.data.keys import find_keys, key_name, key_of_samples, read_table
from training_ext.data.loader import RowLoader, WithRow
from training_ext.data.pair_folders import is_folder
from training_ext.data.rows import DataRows, kind_of, shapes_dataset
from training_ext.data.seeding import LateSampler, SampleStream, SeededEpochs, seed_all, seed_of_shards
from training_ext.data.shard_rows import ShardRows
from training_ext.data.shards import Shards, shard_urls
from training_ext.data.tags import KEY, NUMBER, ROW, Tags
from training_ext.data.usable import CountIncomplete, Decode, DecodeImages, SampleWatch, UsableLines
from training_ext.data.workers import WorkersIgnoreSigterm
from training_ext.openclip.hosts import host

TRAIN_DATA, VAL_DATA = "train data", "validation data"


class DataSeams:
    """The replaced data pipeline of one run.

    Args:
        rows: rows of the train data on process 0; the others get them before the data are built.

    Attributes:
        epoch: number that seeds the order, the augmentation and the captions of the data.
        loader: the train loader, once it is built, for this package's losses.
        val_images: what is equal for equal images, in the order of the validation pairs; none of generated data.
    """

    def __init__(self, args: Namespace, rows: DataRows | None, watch: SampleWatch):
        self.args = args
        self.rows = rows
        self.watch = watch
        self._lines = 0  # of a csv to train on
        self.loader: RowLoader
        self.val_images: Iterable[Any] = ()
        self._seeded_epochs: SeededEpochs | None = None
        self._stream: SampleStream
        self._shared_epoch = SharedEpoch()
        self.workers = WorkersIgnoreSigterm()
        self._building = TRAIN_DATA
        self._recaption = captions_of_samples(args, self._shared_epoch)

    @property
    def known_rows(self) -> DataRows:
        """`rows`, once every process has them."""
        assert self.rows is not None
        return self.rows

    @property
    def shards(self) -> Shards | None:
        """Those of the rows, if they are known."""
        return None if self.rows is None else self.rows.shards

    @property
    def epoch(self) -> int:
        return self._shared_epoch.get_value()

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._shared_epoch.set_value(epoch)

    def val_pictures(self) -> Pictures | None:
        """The validation pairs by image; None if each image has one pair, or a feature asks for it (--keep-best)."""
        images = list(self.val_images)
        pictures = Pictures(images)
        return pictures if len(pictures) < len(images) or getattr(self.args, "keep_best", None) in ANY_CAPTION else None

    def dataset_fn(self, original: Callable, scoped: Callable, path: str, dataset_type: str) -> Callable:
        """Return a function that builds OpenCLIP's data set with the names of its scope replaced."""
        dataset_type = "synthetic" if dataset_type == "shapes" else dataset_type
        build = original(path, "csv" if is_folder(path, dataset_type) else dataset_type)
        return partial(self.build_dataset, build, scoped)

    def build_dataset(
        self, build: Callable, scoped: Callable, args: Namespace, transform: Callable, is_train: bool,
        tokenizer: Any = None, **kwargs: Any,
    ) -> Any:
        self._building = TRAIN_DATA if is_train else VAL_DATA
        streams, tags = 0, Tags((ROW,))
        if is_train and args.uses_ext_loss and self.known_rows.kind == "webdataset":
            streams = max(1, args.workers)
            carried = {KEY: key_name(args) is not None, ROW: self.shards is not None, NUMBER: True}
            tags = Tags(tuple(name for name, is_carried in carried.items() if is_carried))
            tokenizer = tags.tokenizer(tokenizer)
        with scoped(self._building):
            info = build(args, transform, is_train, tokenizer=tokenizer, **kwargs)
        if is_train:
            of_epoch, of_data = info.dataloader.num_batches * args.batch_size * args.world_size, self._lines
            if self.shards is not None and not args.dataset_resampled:
                listed = self.shards.num_listed(args.train_data)
                of_data = listed if listed <= of_epoch else 0
            self.watch.expect(of_epoch, of_data)
        elif kind_of(args, args.val_data, "--val-data") == "webdataset":
            info = replace(info, dataloader=DigestLoader(info.dataloader))
            self.val_images = info.dataloader.digests
        if not is_train or not args.uses_ext_loss:
            return info
        loader = info.dataloader
        order = self._seeded_epochs or LateSampler(loader.sampler, args.batch_size)
        if isinstance(order, SeededEpochs):
            order.shared_epoch = info.shared_epoch
        else:
            loader.batch_sampler.sampler = order
        keys = find_keys(args, self.known_rows.kind)
        self.loader = RowLoader(loader, args.accum_freq, tags, streams, self._seed, order, keys)
        return replace(info, dataloader=self.loader)

    def synthetic(self, original: Callable) -> Callable:
        is_train = self._building == TRAIN_DATA
        if self.args.dataset_type == "shapes":
            original = shapes_dataset(self.args, is_train)
        if not is_train or not self.args.uses_ext_loss:
            return original
        return lambda *args, **kwargs: WithRow(original(*args, **kwargs), self.args.seed, self._shared_epoch)

    def csv_lines(self, original: Callable) -> Callable:
        is_train = self._building == TRAIN_DATA

        def build(path: str, *args: Any, **kwargs: Any) -> UsableLines:
            rowed = lines = original(path, *args, **kwargs)
            if not is_train:
                self.val_images = lines.images
                return UsableLines(lines, lines, path, None)
            first_lines = None
            if self.args.several_captions:
                captions = len(lines)
                pictures = draw_from_lines(lines, self.args.seed, self._shared_epoch)
                first_lines = pictures.first.tolist()
                if is_master(self.args):
                    of = f"{captions} captions of {len(pictures)} pictures"
                    logging.info(f"{of}: one of each picture's is drawn each epoch")
            self._lines = len(lines)
            if self.args.uses_ext_loss:
                rowed = WithRow(lines, self.args.seed, self._shared_epoch)
            return UsableLines(lines, rowed, path, self.watch, first_lines)

        return build

    def read_csv(self, original: Callable, path: str, **kwargs: Any) -> Any:
        return read_table(self.args, path, original, **kwargs)

    def complete(self, original: Callable) -> Callable:
        def build(**keys: Any) -> CountIncomplete:
            return CountIncomplete(original(**keys) if host().builds_filter else original, self.watch, self._recaption)

        return build if host().builds_filter else build()

    def shard_rows(self) -> Callable:
        shards = self.shards if self.args.uses_ext_loss else None
        if self.args.train_data and kind_of(self.args, self.args.train_data) == "webdataset":
            self.watch.of_shards({url: number for number, url in enumerate(shard_urls(self.args.train_data))})
        if self._recaption is not None and is_master(self.args):
            logging.info(f"One of the captions in the field {self.args.captions_field!r} is drawn each epoch")
        key = key_of_samples(self.args)
        return ShardRows(shards, self.watch.skip_shard, self.watch.end_shard, key, self._recaption)

    def decode(self, original: Callable) -> Callable:
        return Decode(original, self.watch, self.args.batch_size)

    def decode_images(self, original: Callable) -> Callable:
        return DecodeImages(original, self.watch, self.args.batch_size)

    def seeded_shuffle(self, original: Callable) -> Callable:
        self._stream = SampleStream(self.args.seed, self.args.rank, self.watch.pass_over)
        return lambda **kwargs: self._stream.shuffled_by(original(**kwargs, rng=self._stream.rng))

    def seeded_loader(self, original: Callable) -> Callable:
        def build(dataset: IterableDataset, **kwargs: Any) -> Any:
            self._seeded_epochs = SeededEpochs(dataset, self.args.seed, self.args.rank, self._stream)
            return original(self._seeded_epochs, **kwargs)

        return build

    def seeded_shards(self, original: Callable) -> Callable:
        return partial(original, worker_seed=partial(seed_of_shards, self.args.seed, self.args.rank))

    def _seed(self, use: int, *place: int) -> None:
        seed_all(self.args.seed, use, self.epoch, self.args.rank, *place)
