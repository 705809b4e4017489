"""`Samples`: the functions that replace OpenCLIP's in the data pipeline, and the state that they share."""

import logging
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from open_clip_train.data import SharedEpoch
from open_clip_train.distributed import broadcast_object, is_master
from torch.utils.data import IterableDataset

from open_clip_ext.retrieval import ANY_CAPTION
from training_ext.core.rows import TrainData
from training_ext.core.seam import TRAIN_DATA, VAL_DATA
from training_ext.data.captions import (
    DigestLoader,
    Pictures,
    captions_of_samples,
    draw_from_lines,
    with_captions_in_txt,
)
from training_ext.data.keys import find_keys, key_argument, key_name, key_of_samples, read_table
from training_ext.data.loader import RowLoader, WithRow
from training_ext.data.loss import samples_per_epoch
from training_ext.data.pair_folders import is_folder
from training_ext.data.rows import DataRows, kind_of, shapes_dataset
from training_ext.data.seeding import LateSampler, SampleStream, SeededEpochs, seed_all, seed_of_shards
from training_ext.data.shard_rows import ShardRows
from training_ext.data.shards import Shards, shard_urls
from training_ext.data.tags import KEY, NUMBER, ROW, Tags
from training_ext.data.usable import CountIncomplete, Decode, DecodeImages, SampleWatch, UsableLines
from training_ext.data.workers import WorkersIgnoreSigterm
from training_ext.openclip.hosts import host


class Samples(TrainData):
    """The train and validation data of one run.

    Args:
        watch: is told of the samples that cannot be used.

    Attributes:
        epoch: number that seeds the order, the augmentation and the captions of the data.
        rows: of the train data, on process 0; the others get them before the data are built.
        val_images: what is equal for equal images, in the order of the validation pairs; none of generated data.
    """

    def __init__(self, args: Namespace, watch: SampleWatch):
        super().__init__(args)
        self.args = args
        self.rows: DataRows | None = None
        self.watch = watch
        self._lines = 0  # of a csv to train on
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
    def known_shards(self) -> Shards | None:
        """Those of the rows, if they are known."""
        return None if self.rows is None else self.rows.shards

    @property
    def epoch(self) -> int:
        return self._shared_epoch.get_value()

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._shared_epoch.set_value(epoch)

    def get_data(self, original: Callable, args: Any, *rest: Any, **kwargs: Any) -> dict[str, Any]:
        """Replaces main's `get_data`, before which every process needs the rows of the train data."""
        if args.loss is not None and args.distributed:
            self.rows = broadcast_object(args, self.rows)
            if (shards := self.known_shards) is not None:  # at another path on another machine
                self.rows = replace(self.known_rows, shards=shards.at(shard_urls(args.train_data)))
        if args.uses_ext_loss and args.train_num_samples is None and (shards := self.known_shards) is not None:
            args.train_num_samples = shards.num_listed(args.train_data)
        data = original(args, *rest, **kwargs)
        if args.uses_ext_loss:
            for info in data.values():
                self.workers.workers_of(info.dataloader)
        return data

    def val_pictures(self) -> Pictures | None:
        """The validation pairs by image; None if each image has one pair, or a feature asks for it (--keep-best)."""
        images = list(self.val_images)
        pictures = Pictures(images)
        return pictures if len(pictures) < len(images) or getattr(self.args, "keep_best", None) in ANY_CAPTION else None

    def of_last_step(self) -> dict[str, Any]:
        loader = self.loader.loader
        return {name: loader.latest(tag) for name, tag in (("index", ROW), (key_argument(self.args), KEY))}

    def _begin(self, original: Callable[[int], None], epoch: int) -> None:
        self.epoch = epoch
        super()._begin(original, epoch)

    def dataset_fn(self, original: Callable, path: str, kind: str) -> Callable:
        kind = "synthetic" if kind == "shapes" else kind
        build = with_captions_in_txt(original)(path, "csv" if is_folder(path, kind) else kind)
        return partial(self._build, build)

    def map_style(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    def _build(
        self, build: Callable, args: Any, transform: Callable, is_train: bool, tokenizer: Any = None, **kwargs: Any
    ) -> Any:
        self._building = TRAIN_DATA if is_train else VAL_DATA
        streams, tags = 0, Tags((ROW,))
        if is_train and args.uses_ext_loss and self.known_rows.kind == "webdataset":
            streams = max(1, args.workers)
            carried = {KEY: key_name(args) is not None, ROW: self.known_shards is not None, NUMBER: True}
            tags = Tags(tuple(name for name, is_carried in carried.items() if is_carried))
            tokenizer = tags.tokenizer(tokenizer)
        with self._in_place(self._building):
            info = build(args, transform, is_train, tokenizer=tokenizer, **kwargs)
        if is_train:
            of_epoch, of_data = info.dataloader.num_batches * args.batch_size * args.world_size, self._lines
            if self.known_shards is not None and not args.dataset_resampled:
                listed = self.known_shards.num_listed(args.train_data)
                of_data = listed if listed <= of_epoch else 0
            self.watch.expect(of_epoch, of_data)
        elif kind_of(args, args.val_data, "--val-data") == "webdataset":
            info = replace(info, dataloader=DigestLoader(info.dataloader))
            self.val_images = info.dataloader.digests
        if not is_train:
            return info
        rows = self.rows
        self.num_rows = 0 if rows is None else rows.num_rows
        self.samples_per_epoch = 0 if rows is None else samples_per_epoch(args, rows)
        if not args.uses_ext_loss:
            return self.followed(info, args.accum_freq, False)
        loader = info.dataloader
        order = self._seeded_epochs or LateSampler(loader.sampler, args.batch_size)
        if isinstance(order, SeededEpochs):
            order.shared_epoch = info.shared_epoch
        else:
            loader.batch_sampler.sampler = order
        keys = find_keys(args, self.known_rows.kind)
        info.dataloader = RowLoader(loader, args.accum_freq, tags, streams, self._seed, order, keys)
        return self.followed(info, args.accum_freq, False)

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

    def shards(self, original: Callable) -> Callable:
        shards = self.known_shards if self.args.uses_ext_loss else None
        if self.args.train_data and kind_of(self.args, self.args.train_data) == "webdataset":
            self.watch.of_shards({url: number for number, url in enumerate(shard_urls(self.args.train_data))})
        if self._recaption is not None and is_master(self.args):
            logging.info(f"One of the captions in the field {self._recaption.named!r} is drawn each epoch")
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
