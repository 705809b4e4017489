"""Embed every row of the train data once, without augmentation, and keep the embeddings on disk.

Each block of consecutive rows is a file in the cache's folder, written under a temporary name and renamed, so that an
existing file is complete and an interrupted run resumes with the missing blocks.
"""

import json
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import safetensors.torch
import torch
from open_clip import get_input_dtype
from open_clip_train import data as open_clip_data
from open_clip_train.precision import get_autocast
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from tqdm import tqdm

from open_clip_ext.errors import InputError
from open_clip_ext.files import whole_file
from training_ext.core.rows import shapes_dataset
from training_ext.core.shards import ROW_SEPARATOR, ShardRows, Shards, split_row
from training_ext.features.captions import (
    JsonCaptions,
    captions_of_samples,
    draw_from_lines,
    index_by_position,
    is_empty,
)
from training_ext.features.keys import columns_of_text
from training_ext.openclip.hosts import host, taken
from training_ext.openclip.loading import decode_pairs
from training_ext.openclip.patching import replaced

BLOCK_ROWS = 4096
KEY_FILE = "key.json"

Sample = tuple[int, Any, Any]  # row, image tensor, tokens


class MapSource:
    """Reads rows of one of OpenCLIP's map-style data sets."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def read(self, start: int, stop: int, report: Callable[[str], None]) -> Iterator[Sample]:
        """Yield the readable rows among `start` .. `stop - 1` in order; `report` gets a message for each other."""
        for row in range(start, stop):
            try:
                image, tokens = host().pair(self.dataset[row])
            except Exception as error:  # image libraries may raise anything
                report(f"row {row}: {error!r}")
            else:
                yield row, image, tokens


class CsvLines(Dataset):
    """The lines of a csv; reading one without caption or image is an error, since the training skips it.

    Args:
        csv: OpenCLIP's data set, indexed by position, which takes the nan of an empty cell for the text "nan".
    """

    def __init__(self, csv: Any):
        self.csv = csv

    def __getitem__(self, row: int) -> Any:
        for name, cells in (("caption", self.csv.captions), ("image", self.csv.images)):
            if is_empty(cells[row]):
                raise ValueError(f"its {name} is empty")
        return self.csv[row]


class ShardSource:
    """Reads rows of a webdataset, numbered as in training (see `shards`).

    Args:
        shards: offsets and sizes of the shards.
        transform: from a PIL image to a tensor.
        tokenizer: from a caption to tokens (1, L).
        recaption: as in `ShardRows`.
    """

    def __init__(
        self, shards: Shards, transform: Callable, tokenizer: Callable, recaption: JsonCaptions | None = None
    ):
        self.shards = shards
        self.recaption = recaption
        self.transform = transform
        self.tokenizer = tokenizer

    def read(self, start: int, stop: int, report: Callable[[str], None]) -> Iterator[Sample]:
        """As `MapSource.read`."""
        for url, first in self.shards.offsets.items():
            if first < stop and start < first + self.shards.size_of(url):
                yield from self._read_shard(url, start, stop, report)

    def _read_shard(self, url: str, start: int, stop: int, report: Callable[[str], None]) -> Iterator[Sample]:
        def tell(error: Exception) -> bool:
            report(f"{os.path.basename(url)}: {error!r}")
            return True

        def wanted(samples: Iterator[dict]) -> Iterator[dict]:
            for sample in samples:
                if not sample.get("txt"):
                    continue
                row = int(sample["txt"].partition(ROW_SEPARATOR.encode())[0])
                if row >= stop:
                    return
                if row >= start and open_clip_data.filter_no_caption_or_no_image(sample):
                    yield sample

        wds = open_clip_data.wds
        stage = ShardRows(self.shards, lambda url, error, *place: tell(error), recaption=self.recaption)
        tagged = stage([{"url": url}])
        decoded = decode_pairs(wds.decode)("pilrgb", handler=tell)(wanted(tagged))
        for sample in wds.rename(image="jpg;png;jpeg;webp", text="txt")(decoded):
            try:
                row, caption = split_row(sample["text"])
                yield row, self.transform(sample["image"]), self.tokenizer(caption)[0]
            except Exception as error:
                tell(error)


Source = MapSource | ShardSource


def source_of(args: Namespace, kind: str, shards: Shards | None, transforms: tuple, tokenizer: Callable) -> Source:
    """The train data of a command line; of several captions a picture, those that epoch 0 draws.

    Args:
        kind: `DataRows.kind` of the train data.
        shards: the shards of a webdataset, else None.
        transforms: OpenCLIP's for training, which has the image size of generated scenes, and for evaluation.
        tokenizer: OpenCLIP's, from a caption or a list of captions to tokens.
    """
    train_transform, transform = transforms
    if shards is not None:
        return ShardSource(shards, transform, tokenizer, captions_of_samples(args))
    if kind == "csv":
        columns = {"img_key": args.csv_img_key, "caption_key": args.csv_caption_key, "sep": args.csv_separator}
        as_text = partial(pd.read_csv, dtype=columns_of_text(args))  # as in the training, see `seams`
        with replaced({("open_clip_train.data", "pd.read_csv"): as_text}):
            csv = open_clip_data.CsvDataset(args.train_data, transform, **columns, tokenizer=tokenizer)
        index_by_position(csv)
        if args.several_captions:
            draw_from_lines(csv, args.seed, open_clip_data.SharedEpoch())
        return MapSource(CsvLines(csv))
    if kind == "shapes":
        size = train_transform.transforms[0].size
        return MapSource(shapes_dataset(args, True)(transform=transform, image_size=size, tokenizer=tokenizer))
    size = args.train_num_samples
    return MapSource(open_clip_data.SyntheticDataset(transform=transform, dataset_size=size, tokenizer=tokenizer))


@dataclass
class Piece:
    """A batch of rows of one block. The one with `last` ends the block and may be empty."""

    block: int
    rows: list[int]
    images: Tensor | None
    tokens: Tensor | None
    problem: str | None
    last: bool


class BlockPieces(IterableDataset):
    """Reads blocks in pieces of a batch each; every loader worker reads blocks of its own.

    Args:
        source: reads the rows.
        blocks: numbers of the blocks to read.
        num_rows: n, rows of the data set.
        block_rows, batch_size: rows per block and per piece.
    """

    def __init__(self, source: Source, blocks: list[int], num_rows: int, block_rows: int, batch_size: int):
        super().__init__()
        self.source = source
        self.blocks = blocks
        self.num_rows = num_rows
        self.block_rows = block_rows
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[Piece]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for block in self.blocks[first::step]:
            yield from self._pieces(block)

    def _pieces(self, block: int) -> Iterator[Piece]:
        problems: list[str] = []
        samples: list[Sample] = []
        start = block * self.block_rows
        for sample in self.source.read(start, min(start + self.block_rows, self.num_rows), problems.append):
            samples.append(sample)
            if len(samples) == self.batch_size:
                yield self._piece(block, samples, problems)
                samples = []
        yield self._piece(block, samples, problems, last=True)

    @staticmethod
    def _piece(block: int, samples: list[Sample], problems: list[str], last: bool = False) -> Piece:
        problem = problems[0] if problems else None
        if not samples:
            return Piece(block, [], None, None, problem, last)
        rows, images, tokens = zip(*samples, strict=True)
        return Piece(block, list(rows), torch.stack(images), torch.stack(tokens), problem, last)


class EmbeddingCache:
    """Blocks of embeddings on disk.

    Args:
        folder: folder of the files.
        key: what the embeddings depend on, as JSON values; a folder with another key is refused.
        num_rows: n, rows of the data set.
        block_rows: rows per block; None: `BLOCK_ROWS`.
        retries: whether a row that could not be read is tried again, since `key` does not depend on its file.
    """

    def __init__(
        self, folder: str, key: dict[str, Any], num_rows: int, block_rows: int | None = None, retries: bool = True
    ):
        self.folder = folder
        self.num_rows = num_rows
        self.block_rows = block_rows or BLOCK_ROWS
        self.retries = retries
        self.key = {**key, "rows": num_rows, "block_rows": self.block_rows}

    @property
    def num_blocks(self) -> int:
        return -(-self.num_rows // self.block_rows)

    def path(self, block: int) -> str:
        return os.path.join(self.folder, f"block-{block:06d}.safetensors")

    def check(self) -> None:
        """Raise InputError if the folder has other files, or embeddings with another key."""
        path = os.path.join(self.folder, KEY_FILE)
        if not os.path.exists(path):
            if os.path.isdir(self.folder) and os.listdir(self.folder):
                raise InputError(f"{self.folder!r} has files that are not embeddings; choose another folder", "--out")
            return
        try:
            with open(path) as file:
                found = json.load(file)
        except (OSError, ValueError) as error:
            raise InputError(f"{path!r} cannot be read: {error}; choose another folder", "--out") from None
        if not isinstance(found, dict):
            raise InputError(f"{path!r} is not a key of embeddings; choose another folder", "--out")
        for name, value in self.key.items():
            if found.get(name) != value:
                raise InputError(
                    f"the embeddings in {self.folder!r} were computed with other {name.replace('_', ' ')}; "
                    "choose another folder, or delete this one",
                    "--out",
                )

    def begin(self) -> None:
        """Create the folder with its key; called by one process."""
        os.makedirs(self.folder, exist_ok=True)
        path = os.path.join(self.folder, KEY_FILE)
        with whole_file(path, text=True) as file:
            json.dump(self.key, file)

    def missing(self) -> list[int]:
        """Numbers of the blocks that are not on disk, or lack a row that is tried again."""
        return [block for block in range(self.num_blocks) if not self._is_whole(block)]

    def _is_whole(self, block: int) -> bool:
        try:
            with safe_open(self.path(block), framework="pt") as file:
                return not (self.retries and (file.metadata() or {}).get("problem"))
        except (OSError, SafetensorError):
            return os.path.exists(self.path(block))  # a damaged one is named by `open`

    def write(self, block: int, image: Tensor, text: Tensor, rows: Tensor, problem: str | None) -> None:
        tensors = {"image": image, "text": text, "rows": rows}
        with whole_file(self.path(block)) as file:
            file.write(safetensors.torch.save(tensors, metadata={"problem": problem or ""}))

    def open(self) -> "Embedded":
        """Open all blocks.

        Raises:
            InputError: a block is missing or damaged, or no row could be read.
        """
        images, texts, rows, problems = [], [], [], []
        for block in range(self.num_blocks):
            try:
                with safe_open(self.path(block), framework="pt") as file:
                    found = file.get_tensor("rows")
                    problems.append((file.metadata() or {}).get("problem"))
                    if len(found):
                        rows.append(found)
                        images.append(file.get_tensor("image"))
                        texts.append(file.get_tensor("text"))
            except (OSError, SafetensorError) as error:
                raise InputError(
                    f"{self.path(block)!r} cannot be read: {' '.join(str(error).split())}; delete it, and give "
                    "a folder that every process sees",
                    "--out",
                ) from None
        problem = next((problem for problem in problems if problem), None)
        if sum(map(len, rows)) < 2:
            count = sum(map(len, rows))
            raise InputError(
                f"{count} of {self.num_rows} rows can be read, 2 are needed; the first problem: {problem}",
                "--train-data",
            )
        return Embedded(images, texts, torch.cat(rows), self.num_rows, problem)


@dataclass
class Embedded:
    """Embeddings of the rows that could be read.

    Args:
        image, text: a list of blocks, each (n_b, d) float32 unit vectors.
        rows: their rows in the data set, (n,) int64, ascending.
        num_rows: number of rows of the data set.
        problem: why the first unreadable row could not be read, or None.
    """

    image: list[Tensor]
    text: list[Tensor]
    rows: Tensor
    num_rows: int
    problem: str | None


@torch.inference_mode()
def embed(
    model: torch.nn.Module, source: Source, cache: EmbeddingCache, blocks: list[int], args: Namespace,
    show: bool = True,
) -> int:
    """Embed blocks and write them to the cache.

    Args:
        model: OpenCLIP's model on args.device, in evaluation mode.
        blocks: numbers of the blocks.
        args: precision, device, batch_size and workers are used.
        show: whether to show a progress bar.

    Returns:
        The number of embedded rows.

    Raises:
        InputError: an embedding is not finite.
    """
    pieces = BlockPieces(source, blocks, cache.num_rows, cache.block_rows, args.batch_size)
    workers = min(args.workers, len(blocks))
    loader = DataLoader(pieces, batch_size=None, num_workers=workers, collate_fn=_as_it_is)
    sizes = {block: min(cache.block_rows, cache.num_rows - block * cache.block_rows) for block in blocks}
    waiting: dict[int, list[tuple[Tensor, Tensor, list[int]]]] = {}
    embedded = 0
    with tqdm(total=sum(sizes.values()), desc="Embedding", unit=" pairs", disable=not show) as bar:
        for piece in loader:
            parts = waiting.setdefault(piece.block, [])
            if piece.rows:
                parts.append((*_embed_piece(model, piece, args), piece.rows))
                embedded += len(piece.rows)
                bar.update(len(piece.rows))
            if piece.last:
                images, texts, numbers = zip(*waiting.pop(piece.block), strict=True) if parts else ((), (), ())
                rows = torch.tensor([row for part in numbers for row in part], dtype=torch.int64)
                empty = torch.empty(0, 0)
                image, text = (torch.cat(side) if side else empty for side in (images, texts))
                problem = piece.problem
                if problem is None and len(rows) < sizes[piece.block]:
                    problem = f"{sizes[piece.block] - len(rows)} rows of block {piece.block} have no image or caption"
                if problem is not None:
                    logging.warning(f"{sizes[piece.block] - len(rows)} rows are left out: {problem}")
                bar.update(sizes[piece.block] - len(rows))
                cache.write(piece.block, image, text, rows, problem)
    return embedded


def _as_it_is(piece: Any) -> Any:
    return piece


def _embed_piece(model: torch.nn.Module, piece: Piece, args: Namespace) -> tuple[Tensor, Tensor]:
    assert piece.images is not None and piece.tokens is not None
    device = torch.device(args.device)
    images = piece.images.to(device=device, dtype=get_input_dtype(args.precision), non_blocking=True)
    tokens = piece.tokens.to(device=device, non_blocking=True)
    with get_autocast(args.precision, **taken(get_autocast, device_type=device.type))():
        outputs = model(images, tokens)
    if not isinstance(outputs, dict):
        outputs = {"image_features": outputs[0], "text_features": outputs[1]}
    image, text = (normalize(outputs[f"{side}_features"].float(), dim=1).cpu() for side in ("image", "text"))
    if not (image.isfinite().all() and text.isfinite().all()):
        raise InputError(f"its embeddings of rows {piece.rows[0]} to {piece.rows[-1]} are not finite", "--checkpoint")
    return image, text
