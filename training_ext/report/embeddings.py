"""Embed every row of the train data once, without augmentation, and keep the embeddings on disk.

Each block of consecutive rows is a file in the cache's folder, written under a temporary name and renamed, so that an
existing file is complete and an interrupted run resumes with the missing blocks.
"""

import json
import logging
import os
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import safetensors.torch
import torch
from open_clip import get_input_dtype
from open_clip_train.precision import get_autocast
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm

from open_clip_ext.errors import InputError
from open_clip_ext.files import whole_file
from training_ext.core.reading import Source
from training_ext.openclip.hosts import taken

BLOCK_ROWS = 4096
KEY_FILE = "key.json"


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


class EmbeddingCache:
    """Blocks of embeddings on disk.

    Args:
        folder: folder of the files.
        num_rows: n, rows of the data set.
        retries: whether a row that could not be read is tried again, since the key does not depend on its file.
    """

    def __init__(self, folder: str, num_rows: int, retries: bool):
        self.folder = folder
        self.num_rows = num_rows
        self.retries = retries

    def path(self, block: int) -> str:
        return os.path.join(self.folder, f"block-{block:06d}.safetensors")

    def begin(self, key: dict[str, Any]) -> list[int]:
        """Create the folder and return the numbers of the blocks to embed; one process calls it.

        Args:
            key: what the embeddings depend on, as JSON values.

        Raises:
            InputError: the folder has embeddings with another key, or other files.
        """
        path, key = os.path.join(self.folder, KEY_FILE), {**key, "rows": self.num_rows, "block_rows": BLOCK_ROWS}
        if os.path.exists(path):
            try:
                with open(path) as file:
                    found = dict(json.load(file))
            except (OSError, ValueError, TypeError) as error:
                raise InputError(f"{path!r} cannot be read: {error}; choose another folder", "--out") from None
            for name in key:
                if found.get(name) != key[name]:
                    raise InputError(
                        f"the embeddings in {self.folder!r} were computed with other {name.replace('_', ' ')}; "
                        "choose another folder, or delete this one",
                        "--out",
                    )
        elif os.path.isdir(self.folder) and os.listdir(self.folder):
            raise InputError(f"{self.folder!r} has files that are not embeddings; choose another folder", "--out")
        try:
            os.makedirs(self.folder, exist_ok=True)
            with whole_file(path, text=True) as file:
                json.dump(key, file)
        except OSError as error:
            raise InputError(f"{self.folder!r}: {error}", "--out") from None
        return [block for block in range(-(-self.num_rows // BLOCK_ROWS)) if not self._is_whole(block)]

    def _is_whole(self, block: int) -> bool:
        try:
            with safe_open(self.path(block), framework="pt") as file:
                return not (self.retries and file.metadata().get("problem"))
        except (OSError, SafetensorError):
            return os.path.exists(self.path(block))  # a damaged one is named by `open`

    def write(self, block: int, image: Tensor, text: Tensor, rows: Tensor, problem: str) -> None:
        tensors = {"image": image, "text": text, "rows": rows}
        with whole_file(self.path(block)) as file:
            file.write(safetensors.torch.save(tensors, metadata={"problem": problem}))

    def open(self) -> Embedded:
        """Open all blocks.

        Raises:
            InputError: a block is missing or damaged, or fewer than 2 rows could be read.
        """
        found = Embedded([], [], torch.empty(0, dtype=torch.int64), self.num_rows, None)
        rows = []
        for block in range(-(-self.num_rows // BLOCK_ROWS)):
            try:
                with safe_open(self.path(block), framework="pt") as file:
                    found.problem = found.problem or file.metadata().get("problem") or None
                    rows.append(file.get_tensor("rows"))
                    if len(rows[-1]):
                        found.image.append(file.get_tensor("image"))
                        found.text.append(file.get_tensor("text"))
            except (OSError, SafetensorError) as error:
                raise InputError(
                    f"{self.path(block)!r} cannot be read: {' '.join(str(error).split())}; delete it, and give "
                    "a folder that every process sees",
                    "--out",
                ) from None
        found.rows = torch.cat(rows)
        if len(found.rows) < 2:
            raise InputError(
                f"{len(found.rows)} of {self.num_rows} rows can be read, 2 are needed; the first problem: "
                f"{found.problem}",
                "--train-data",
            )
        return found


Batch = tuple[list[int], Tensor, Tensor]  # rows, images and tokens


class Blocks(IterableDataset):
    """Reads blocks of rows in batches; every loader worker reads blocks of its own.

    Iterating yields tuples of a block's number, a batch, and None; and after its last batch the number, None, and the
    first problem with its rows, if any.
    """

    def __init__(self, source: Source, blocks: list[int], num_rows: int, batch_size: int):
        super().__init__()
        self.source = source
        self.blocks = blocks
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.block_rows = BLOCK_ROWS

    def __iter__(self) -> Iterator[tuple[int, Batch | None, str | None]]:
        info = get_worker_info()
        for block in self.blocks if info is None else self.blocks[info.id :: info.num_workers]:
            problems: list[str] = []
            start = block * self.block_rows
            samples = self.source(start, min(start + self.block_rows, self.num_rows), problems.append)
            while batch := list(islice(samples, self.batch_size)):
                rows, images, tokens = zip(*batch, strict=True)
                yield block, (list(rows), torch.stack(images), torch.stack(tokens)), None
            yield block, None, problems[0] if problems else None


@torch.inference_mode()
def embed(
    model: torch.nn.Module, source: Source, cache: EmbeddingCache, blocks: list[int], args: Namespace
) -> None:
    """Embed blocks and write them to the cache.

    Args:
        model: OpenCLIP's model on args.device, in evaluation mode.
        args: precision, device, batch_size, workers and rank are used.

    Raises:
        InputError: an embedding is not finite.
    """
    dataset = Blocks(source, blocks, cache.num_rows, args.batch_size)
    loader = DataLoader(dataset, batch_size=None, num_workers=min(args.workers, len(blocks)), collate_fn=_as_it_is)
    sizes = {block: min(BLOCK_ROWS, cache.num_rows - block * BLOCK_ROWS) for block in blocks}
    parts: dict[int, list[tuple[Tensor, ...]]] = defaultdict(list)
    with tqdm(total=sum(sizes.values()), desc="Embedding", unit=" pairs", disable=args.rank != 0) as bar:
        for block, batch, problem in loader:
            if batch is not None:
                parts[block].append((*embed_batch(model, batch, args), torch.tensor(batch[0])))
                bar.update(len(batch[0]))
                continue
            empty = (torch.empty(0, 0), torch.empty(0, 0), torch.empty(0, dtype=torch.int64))
            image, text, rows = map(torch.cat, zip(*(parts.pop(block, None) or [empty]), strict=True))
            if left_out := sizes[block] - len(rows):
                problem = problem or f"{left_out} rows of block {block} have no image or caption"
                logging.warning(f"{left_out} rows are left out: {problem}")
                bar.update(left_out)
            cache.write(block, image, text, rows, problem if left_out and problem else "")


def _as_it_is(batch: Any) -> Any:
    return batch


def embed_batch(model: torch.nn.Module, batch: Batch, args: Namespace) -> tuple[Tensor, Tensor]:
    """Float32 unit vectors of images and texts on the CPU, (b, d) each."""
    rows, images, tokens = batch
    device = torch.device(args.device)
    images = images.to(device=device, dtype=get_input_dtype(args.precision), non_blocking=True)
    with get_autocast(args.precision, **taken(get_autocast, device_type=device.type))():
        outputs = model(images, tokens.to(device=device, non_blocking=True))
    features = (outputs["image_features"], outputs["text_features"]) if isinstance(outputs, dict) else outputs[:2]
    image, text = (normalize(side.float(), dim=1).cpu() for side in features)
    if not (image.isfinite().all() and text.isfinite().all()):
        raise InputError(f"its embeddings of rows {rows[0]} to {rows[-1]} are not finite", "--checkpoint")
    return image, text
