"""Train data whose samples have their row number, and whose epochs can start at any batch.

The row is one extra column at the end of each sample's tokens, so that OpenCLIP's loaders, samplers and
collation need no change; `RowLoader` removes it before OpenCLIP's loop sees the batch. A sample's number in the
stream of a loader worker is another such column. In OpenCLIP 4's task loop the row is the batch's `index`;
samples of data without shards are dicts there and have `index` from the start.
"""

import hashlib
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pandas as pd
import torch
from open_clip_train import data as open_clip_data
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from open_clip_ext import factory
from open_clip_ext.data import Scenes
from open_clip_ext.errors import InputError
from training_ext.core.captions import Pictures, SeenCaptions, captions_of_samples, is_empty, see
from training_ext.core.first_look import look_at_lines, look_at_shards
from training_ext.core.keys import Keys, check_column, columns_of_text, key_of_samples
from training_ext.core.seeding import AT_BATCH, AT_EPOCH, IN_SAMPLE, SeededEpochs, Start, seed_host
from training_ext.core.shards import Shards, check_missing, digest_of_list, find_shards, shard_urls, split_row
from training_ext.openclip.hosts import TASKS, host

_DAMAGED_ARCHIVE = (zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)
HELD_OUT_SCENES = 1 << 40  # first row of the validation scenes, beyond any training set


@dataclass(frozen=True)
class DataRows:
    """The rows of the train data.

    Args:
        kind: webdataset, csv, synthetic or shapes.
        num_rows: n.
        digest: equal for two runs if their rows are the same samples.
        shards: offsets and sizes, for a webdataset whose samples were counted; else n is --train-num-samples.
        listing: of a webdataset, equal for two runs if their shards have the same names.
        captions: of a csv, the digest in checkpoints of earlier versions, which does not cover the images.
        seen: captions of a csv or of local shards.
    """

    kind: str
    num_rows: int
    digest: str
    shards: Shards | None = None
    listing: str | None = None
    captions: str | None = None
    seen: SeenCaptions | None = field(default=None, compare=False)

    @property
    def counted(self) -> bool:
        """Whether n is the number of samples."""
        return self.listing is None or self.shards is not None


def trains(args: Namespace) -> bool:
    """Whether OpenCLIP trains, by its own rule; otherwise it only evaluates."""
    return bool(args.train_data) or args.dataset_type == "synthetic"


def needs_index(args: Namespace) -> bool:
    """Whether the chosen loss keeps state per sample."""
    return args.uses_ext_loss and any(part.needs_index for part in factory.parts_of(args.loss, vars(args)))


def check_usable(args: Namespace) -> SeenCaptions | None:
    """Check that the train data exist and that the first samples have usable pairs.

    Returns:
        The captions of the first samples of local shards.

    Raises:
        InputError: more shards or lines are missing than --max-bad-samples allows, or nothing is usable.
    """
    kind = kind_of(args, args.train_data)
    if kind == "csv":
        read_csv(args, args.train_data, max_bad=tolerated(args))
    elif kind == "webdataset":
        urls = shard_urls(args.train_data)
        missing = check_missing(urls, max_bad=tolerated(args))
        return look_at_first(args, [url for url in urls if url not in missing])
    return None


def find_rows(args: Namespace) -> DataRows:
    """Find the rows of `--train-data`; reads headers and captions, writes nothing but the cache of shard sizes.

    Shards are not read if the number of samples is given and the loss has no state per sample.

    Raises:
        InputError: the data cannot be read, or their rows cannot be counted; the message says what to provide.
    """
    kind = kind_of(args, args.train_data)
    if kind == "webdataset":
        if args.train_num_samples is not None and not needs_index(args):
            if args.shard_sizes:
                raise InputError(f"--loss {args.loss} with --train-num-samples does not use it", "--shard-sizes")
            seen = check_usable(args)
            listing = digest_of_list(args.train_data)
            return DataRows(kind, args.train_num_samples, listing, listing=listing, seen=seen)
        shards = find_shards(args.train_data, args.shard_sizes, max_bad=tolerated(args))
        seen = look_at_first(args, [url for url in shards.urls if shards.size_of(url)])
        return DataRows(kind, shards.num_rows, shards.digest, shards, digest_of_list(args.train_data), seen=seen)
    if args.shard_sizes:
        raise InputError(f"--dataset-type {kind} has no shards and does not use it", "--shard-sizes")
    if kind == "csv":
        table = read_csv(args, args.train_data, max_bad=tolerated(args))
        check_column(args, table)
        captions = table[args.csv_caption_key]
        if len(captions) == 0:
            raise InputError(f"{args.train_data!r} has no rows below its header", "--train-data")
        lines = hashlib.sha256()
        for number, caption in enumerate(captions):
            lines.update(b"\x1f" * bool(number) + str(caption).encode())
        num_rows = len(captions)
        if args.several_captions:
            pictures = Pictures(table[args.csv_img_key].tolist())
            if args.same_key is not None:
                pictures.check_alike(table[args.same_key], table[args.csv_img_key])
            num_rows = len(pictures)
            lines.update(pictures.of.astype("<i8").tobytes())
        by_captions = lines.hexdigest()
        for path in below_common_folder(table[args.csv_img_key]):
            lines.update(b"\x1f" + path.encode())
        images = table[args.csv_img_key] if args.several_captions else None
        seen = see(captions, images, "the {} captions")
        return DataRows(kind, num_rows, lines.hexdigest(), captions=by_captions, seen=seen)
    if not args.train_num_samples or args.train_num_samples < 1:
        raise InputError(f"{args.train_num_samples} with --dataset-type {kind}; give at least 1", "--train-num-samples")
    seed = args.shapes_seed if kind == "shapes" else None
    shifted = " shifted" if args.shapes_shifted else ""
    digest = hashlib.sha256(f"{kind} {args.train_num_samples} {seed}{shifted}".encode()).hexdigest()
    return DataRows(kind, args.train_num_samples, digest)


def tolerated(args: Namespace) -> float | None:
    """The share of the data that may be unusable, where a feature has a flag for it."""
    return getattr(args, "max_bad_samples", None)


def below_common_folder(images: pd.Series) -> Iterator[str]:
    """Each path without the longest folder that all have, since moved images are the same data; "" of an empty cell."""
    known = images.dropna()
    folder = os.path.commonprefix([known.min(), known.max()]).rpartition("/")[0] if len(known) else ""
    return (path[len(folder):] for path in images.fillna(""))


def look_at_first(args: Namespace, urls: list[str]) -> SeenCaptions | None:
    """As `look_at_shards`, for the train data."""
    return look_at_shards(urls, key_of_samples(args), captions_of_samples(args))


def kind_of(args: Namespace, path: str, flag: str = "--train-data") -> str:
    """The kind of the data at `path`, by OpenCLIP's own rule."""
    if args.dataset_type != "auto":
        return args.dataset_type
    builders = {open_clip_data.get_wds_dataset: "webdataset", open_clip_data.get_csv_dataset: "csv"}
    try:
        return builders[open_clip_data.get_dataset_fn(path, "auto")]
    except ValueError:
        raise InputError(
            f"{path!r} ends neither in .tar nor in .csv or .tsv; give --dataset-type", flag
        ) from None


def read_csv(
    args: Namespace, path: str, flag: str = "--train-data", max_bad: float | None = None
) -> pd.DataFrame:
    """The csv as OpenCLIP reads it, with images and captions as text.

    Raises:
        InputError: it cannot be read, lacks the named columns, has empty cells in them in more than a share of
            `max_bad` of its lines (none by default), or none of its first images can be read.
    """
    try:
        table = pd.read_csv(path, sep=args.csv_separator, dtype=columns_of_text(args))
        # A header with one name fewer than the lines makes labels of the first column.
        table = table.reset_index(drop=True)
    # Several characters are a pattern to pandas; a path may be a URL, and a file compressed.
    except (OSError, ValueError, re.error, ImportError, EOFError, *_DAMAGED_ARCHIVE) as error:
        if isinstance(error, FileNotFoundError):
            raise InputError(f"{path!r} does not exist", flag) from None
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path!r} cannot be read with --csv-separator {args.csv_separator!r}: {reason}", flag
        ) from None
    for key, column in (("--csv-img-key", args.csv_img_key), ("--csv-caption-key", args.csv_caption_key)):
        if column not in table.columns:
            columns = ", ".join(repr(name) for name in table.columns)
            other = next((other for other in ",\t;|" if len(table.columns) == 1 and other in table.columns[0]), None)
            if other is not None:
                text = f"{args.csv_separator!r} does not separate {columns}, the first line of {path!r}; give {other!r}"
                raise InputError(text, "--csv-separator")
            raise InputError(
                f"{path!r} has no column {column!r}; its columns with --csv-separator {args.csv_separator!r} are "
                f"{columns}",
                key,
            )
    cells = table[[args.csv_img_key, args.csv_caption_key]].apply(lambda column: column.map(is_empty))
    empty = cells.any(axis=1).to_numpy().nonzero()[0]
    if len(empty) and len(empty) / len(table) > (max_bad or 0):
        column = cells.columns[cells.iloc[empty[0]]][0]
        instead = "fill or remove it" + ("" if flag == "--val-data" else ", or skip such lines by --max-bad-samples")
        raise InputError(
            f"{len(empty)} of {len(table)} lines of {path!r} have an empty cell, the first line {empty[0] + 2} "
            f"in column {column!r} (words such as NA and null count as empty); {instead}",
            flag,
        )
    look_at_lines(table, args.csv_img_key, path, flag)
    return table


class WithRow(Dataset):
    """A map-style data set of the host's images and tokens, with the row added to each sample.

    Args:
        dataset: OpenCLIP's, whose augmentations draw from the global generators.
        seed: the run's seed.
        epoch: OpenCLIP's SharedEpoch; the augmentation is seeded by epoch and row.
    """

    def __init__(self, dataset: Dataset, seed: int, epoch: Any):
        self.dataset = dataset
        self.seed = seed
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # torch's class does not declare the length

    def __getitem__(self, row: int) -> Any:
        seed_host(self.seed, IN_SAMPLE, self.epoch.get_value(), row)
        sample = self.dataset[row]
        if host().loop == TASKS:
            return {**sample, "index": row}
        image, tokens = host().pair(sample)
        return host().batch(image, append_row(tokens, row))


class RowTokenizer:
    """Tokenizer for captions with numbers in front, which it appends to the tokens in reverse order.

    Args:
        tokenizer: OpenCLIP's.
        numbers: how many numbers there are: that of `SampleStream`, then those of `ShardRows`.
    """

    def __init__(self, tokenizer: Callable, numbers: int):
        self.tokenizer = tokenizer
        self.numbers = numbers

    def __call__(self, text: str) -> Tensor:
        numbers = []
        for _ in range(self.numbers):
            number, text = split_row(text)
            numbers.append(number)
        tokens = self.tokenizer(text)[0]
        for number in reversed(numbers):
            tokens = append_row(tokens, number)
        return tokens[None]


def append_row(tokens: Tensor, row: int) -> Tensor:
    """Append the row to the tokens (L,); (L + 1,) int64."""
    return torch.cat([tokens.long(), torch.tensor([row])])


class LateSampler(Sampler[int]):
    """A sampler whose next epoch can start at a later batch.

    Args:
        sampler: OpenCLIP's.
        batch_size: batch size of this process.
    """

    def __init__(self, sampler: Sampler[int], batch_size: int):
        self.sampler = sampler
        self.batch_size = batch_size
        self._skipped = 0

    def start_at(self, start: Start) -> None:
        self._skipped = start.batches * self.batch_size

    def __iter__(self) -> Iterator[int]:
        skipped, self._skipped = self._skipped, 0
        return islice(iter(self.sampler), skipped, None)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # torch's class does not declare the length


class RowLoader:
    """A train loader that removes the columns of numbers, and keeps rows and keys of the last `keep` batches.

    Args:
        loader: OpenCLIP's, with its `num_batches` and `num_samples`.
        keep: batches per optimiser step.
        has_rows: whether the tokens include a row.
        streams: loader workers that number their samples, as the last token; 0 for map-style data.
        seed: seeds this process's generators for a use (of `seeding`) and a place in this epoch.
        order: a LateSampler or SeededEpochs, which determines the loader's order.
        keys: finds the keys of a batch and removes them from the tokens; None without keys.

    Attributes:
        first: number of batches of the epoch that an earlier run completed.
        numbers: number of the latest sample of each stream.
        after_step: called between two optimizer steps with the number of completed batches of the epoch.
    """

    def __init__(
        self, loader: Any, keep: int, has_rows: bool, streams: int, seed: Callable[..., None],
        order: LateSampler | SeededEpochs | None = None, keys: Keys | None = None,
    ):
        self.loader = loader
        self.keep = keep
        self.has_rows = has_rows
        self.streams = streams
        self.seed = seed
        self.order = order
        self.keys = keys
        self.first = 0
        self.numbers = [0] * streams
        self.after_step: Callable[[int], None] = lambda batches: None
        self._latest: deque[Tensor] = deque(maxlen=keep)
        self._latest_keys: deque[Tensor] = deque(maxlen=keep)

    def start_at(self, start: Start | None) -> None:
        """Start the next epoch at `start`; None: at its first batch."""
        self.first = 0 if start is None else start.batches
        self.numbers = [0] * self.streams if start is None else list(start.samples)
        if start is not None:
            assert self.order is not None
            self.order.start_at(start)

    def __iter__(self) -> Iterator[Any]:
        self._latest.clear()
        self._latest_keys.clear()
        self.seed(AT_EPOCH)
        empty = self.first % self.streams if self.streams else 0  # see `SeededEpochs`
        for done, batch in enumerate(islice(self.loader, empty, None), self.first + 1):
            images, tokens = host().pair(batch)
            # So that the model's random numbers do not depend on what the loader draws in this process.
            self.seed(AT_BATCH, done)
            if self.streams:
                self.numbers[(done - 1) % self.streams] = int(tokens[-1, -1])
                tokens = tokens[:, :-1]
            rows = None
            if isinstance(batch, dict) and "index" in batch:
                rows = batch["index"]
            elif self.has_rows:
                rows, tokens = tokens[:, -1].contiguous(), tokens[:, :-1]
            if rows is not None:
                self._latest.append(rows)
            if self.keys is not None:
                tokens, keys = self.keys(tokens, rows)
                self._latest_keys.append(keys)
            yield self._given(batch, images, tokens.contiguous())
            if done % self.keep == 0:
                self.after_step(done)

    def _given(self, batch: Any, images: Tensor, tokens: Tensor) -> Any:
        """The batch that OpenCLIP's loop gets."""
        if host().loop != TASKS:
            return host().batch(images, tokens)
        own = {"index": self._latest[-1]} if self.has_rows else {}
        if self.keys is not None:
            own["key"] = self._latest_keys[-1]
        return {**batch, "text": tokens, **own}

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        # Not `self.loader`, which would come here again: it is absent while a copy or a pickle is being made.
        return getattr(object.__getattribute__(self, "loader"), name)

    def latest_rows(self) -> Tensor:
        """Rows of the last `keep` batches, one after the other, int64 on the CPU."""
        return torch.cat(list(self._latest))

    def latest_keys(self) -> Tensor | None:
        """Keys of the last `keep` batches, one after the other, int64 on the CPU; None without keys."""
        return torch.cat(list(self._latest_keys)) if self.keys is not None else None


class HostScenes(Scenes):
    """Generated scenes as samples of the host."""

    def __getitem__(self, i: int) -> Any:
        return host().batch(*super().__getitem__(i))


def shapes_dataset(args: Namespace, is_train: bool) -> Callable[..., Dataset]:
    """The replacement of SyntheticDataset in OpenCLIP's builder for `--dataset-type shapes`."""

    def build(
        transform: Callable | None = None, image_size: int | tuple[int, ...] | list[int] = 64,
        caption: str | None = None, dataset_size: int | None = None, tokenizer: Callable | None = None,
        variable_text: bool = False,
    ) -> Scenes:
        return HostScenes(
            num_samples=args.train_num_samples if is_train else args.val_num_samples,
            seed=args.shapes_seed,
            image_size=max(image_size) if isinstance(image_size, (tuple, list)) else int(image_size),
            first_row=0 if is_train else HELD_OUT_SCENES,
            shifted=is_train and args.shapes_shifted,
            transform=transform,
            tokenizer=tokenizer,
        )

    return build
