"""Embed every row of the train data once, without augmentation, and keep the embeddings on disk.

Each block of consecutive rows is a file, which is complete or absent: an interrupted run, or a second report on the
same weights and data, embeds the missing blocks only.
"""

import logging
import os
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import safetensors.torch
import torch
from open_clip import get_input_dtype
from open_clip_train.precision import get_autocast
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm

from open_clip_ext.errors import InputError, one_line
from open_clip_ext.files import whole_file
from training_ext.data.reading import Source
from training_ext.openclip.hosts import taken

BLOCK_ROWS = 4096
PROBLEM = "problem"  # in a file's metadata: why the first of its unreadable rows could not be read, or ""

Batch = tuple[list[int], Tensor, Tensor]  # rows, images and tokens


@dataclass
class Embedded:
    """Embeddings of the rows that could be read.

    Args:
        image, text: a list of blocks, each (n_b, d) float32 unit vectors.
        rows: their rows in the data set, (n,) int64, ascending.
        problem: why the first unreadable row could not be read, or None.
    """

    image: list[Tensor]
    text: list[Tensor]
    rows: Tensor
    problem: str | None


def path_of(folder: str, block: int) -> str:
    return os.path.join(folder, f"block-{block:06d}.safetensors")


def is_whole(path: str) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


@dataclass(eq=False)
class Blocks(IterableDataset):
    """Reads blocks of rows in batches; every loader worker reads blocks of its own.

    Iterating yields tuples of a block's number, a batch, and None; and after its last batch the number, None, and the
    first problem with its rows, if any.
    """

    source: Source
    blocks: dict[int, range]
    batch_size: int

    def __iter__(self) -> Iterator[tuple[int, Batch | None, str | None]]:
        info = get_worker_info()
        for block in list(self.blocks)[slice(0, None) if info is None else slice(info.id, None, info.num_workers)]:
            problems: list[str] = []
            samples = self.source(self.blocks[block].start, self.blocks[block].stop, problems.append)
            while batch := list(islice(samples, self.batch_size)):
                rows, images, tokens = zip(*batch, strict=True)
                yield block, (list(rows), torch.stack(images), torch.stack(tokens)), None
            yield block, None, problems[0] if problems else None


@torch.inference_mode()
def embed(model: torch.nn.Module, source: Source, folder: str, num_rows: int, args: Namespace) -> None:
    """Embed this process's part of the blocks that are not in `folder` yet.

    Args:
        model: OpenCLIP's model on args.device, in evaluation mode.
        num_rows: rows of the data set.
        args: precision, device, batch_size, workers, rank and world_size are used.

    Raises:
        InputError: an embedding is not finite.
    """
    block_numbers = range(args.rank, -(-num_rows // BLOCK_ROWS), args.world_size)
    blocks = {
        block: range(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, num_rows))
        for block in block_numbers if not is_whole(path_of(folder, block))
    }
    workers = min(args.workers, len(blocks))
    loader = DataLoader(Blocks(source, blocks, args.batch_size), batch_size=None, num_workers=workers)
    parts: dict[int, list[tuple[Tensor, ...]]] = defaultdict(list)
    total = sum(map(len, blocks.values()))
    with tqdm(total=total, desc="Embedding", unit=" pairs", disable=args.rank != 0 or not blocks) as bar:
        for block, batch, problem in loader:
            if batch is not None:
                parts[block].append((*embed_batch(model, batch, args), torch.tensor(batch[0])))
                bar.update(len(batch[0]))
                continue
            empty = (torch.empty(0, 0), torch.empty(0, 0), torch.empty(0, dtype=torch.int64))
            image, text, rows = map(torch.cat, zip(*(parts.pop(block, None) or [empty]), strict=True))
            if left_out := len(blocks[block]) - len(rows):
                problem = problem or f"{left_out} rows of block {block} have no image or caption"
                logging.warning(f"{left_out} rows are left out: {problem}")
                bar.update(left_out)
            tensors = {"image": image, "text": text, "rows": rows}
            with whole_file(path_of(folder, block)) as file:
                file.write(safetensors.torch.save(tensors, {PROBLEM: (problem or "") if left_out else ""}))


def embed_batch(model: torch.nn.Module, batch: Batch, args: Namespace) -> tuple[Tensor, Tensor]:
    """Float32 unit vectors of images and texts on the CPU, (b, d) each."""
    rows, images, tokens = batch
    device = torch.device(args.device)
    images = images.to(device=device, dtype=get_input_dtype(args.precision), non_blocking=True)
    with get_autocast(args.precision, **taken(get_autocast, device_type=device.type))():
        outputs = model(images, tokens.to(device=device, non_blocking=True))
    features = (outputs[f"{side}_features"] for side in ("image", "text"))
    image, text = (normalize(side.float(), dim=1).cpu() for side in features)
    if not (image.isfinite().all() and text.isfinite().all()):
        raise InputError(f"its embeddings of rows {rows[0]} to {rows[-1]} are not finite", "--checkpoint")
    return image, text


def read(folder: str, num_rows: int) -> Embedded:
    """Open the blocks of all processes; the embeddings stay on disk until they are used.

    Raises:
        InputError: a block is missing, or fewer than 2 rows could be read.
    """
    images, texts, blocks, problem = [], [], [], None
    for path in (path_of(folder, block) for block in range(-(-num_rows // BLOCK_ROWS))):
        try:
            with safe_open(path, framework="pt") as file:
                problem = problem or file.metadata()[PROBLEM] or None
                blocks.append(file.get_tensor("rows"))
                if len(blocks[-1]):
                    images.append(file.get_tensor("image"))
                    texts.append(file.get_tensor("text"))
        except (OSError, SafetensorError) as error:
            why = f"{path!r} cannot be read: {one_line(error)}"
            raise InputError(f"{why}; give a folder that every process sees", "--out") from None
    rows = torch.cat(blocks)
    if len(rows) < 2:
        text = f"{len(rows)} of {num_rows} rows can be read, 2 are needed; the first problem: {problem}"
        raise InputError(text, "--train-data")
    return Embedded(images, texts, rows, problem)
