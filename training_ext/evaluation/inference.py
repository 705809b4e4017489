"""Inference of a model on a data set, divided over processes and gathered on process 0.

Shapes: b = samples of a batch, N = samples, C = classes, K = top classes kept, d = dimension of the embeddings.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from open_clip import build_zero_shot_classifier, get_input_dtype
from open_clip_train.precision import get_autocast
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from open_clip_ext.errors import InputError
from training_ext.evaluation.folders import Candidates, Images, Source
from training_ext.openclip.hosts import taken

RANKED = 5  # top classes kept for each sample, or more if a task asks for them


@dataclass
class Encoder:
    """A model with its preprocessing, on one of the processes that divide the samples.

    Args:
        model: OpenCLIP's without wrappers, on `device`.
        transform, tokenizer: OpenCLIP's, for evaluation.
        precision: OpenCLIP's name of it.
        batch_size: images or texts per batch.
        workers: data loader workers.
        rank, world_size: of the processes that divide the samples.
        show: whether to show progress bars.
        worker_init_fn: called in each worker with its number.
    """

    model: Any
    transform: Callable
    tokenizer: Callable
    device: torch.device
    precision: str = "fp32"
    batch_size: int = 64
    workers: int = 0
    rank: int = 0
    world_size: int = 1
    show: bool = False
    worker_init_fn: Callable[[int], None] | None = None

    def autocast(self) -> AbstractContextManager:
        return get_autocast(self.precision, **taken(get_autocast, device_type=self.device.type))()

    def batches(self, source: Source, name: str, size: int | None) -> Iterator[tuple[list[int], Tensor, list, list]]:
        """Batches of this process: sample numbers, unit embeddings (b, d) float32, targets and fields.

        Args:
            name: label of the progress bar.
            size: samples of all processes, for the progress bar; None if unknown.
        """
        loader = DataLoader(
            Images(source, self.transform, self.rank, self.world_size), self.batch_size, num_workers=self.workers,
            collate_fn=list,
            worker_init_fn=self.worker_init_fn,
            generator=torch.Generator(),  # leaves the global random state of a training alone
        )
        share = None if size is None else -(-size // self.world_size)
        with tqdm(total=share, desc=name, unit=" images", disable=not self.show, leave=False) as bar:
            for batch in loader:
                numbers, images, targets, fields = (list(column) for column in zip(*batch, strict=True))
                tensor = torch.stack(images).to(device=self.device, dtype=get_input_dtype(self.precision))
                with self.autocast():
                    features = self.model.encode_image(tensor, normalize=True)
                yield numbers, finite(features), targets, fields
                bar.update(len(batch))

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit embeddings of the texts, (texts, d) float32."""
        parts = []
        for start in range(0, len(texts), self.batch_size):
            tokens = self.tokenizer(list(texts[start : start + self.batch_size])).to(self.device)
            with self.autocast():
                parts.append(finite(self.model.encode_text(tokens, normalize=True)))
        return torch.cat(parts)

    def classifier(self, source: Source) -> Tensor:
        """Zero-shot classifier (d, C): per class the normalized mean of its unit embeddings over templates."""
        # Not str.format, with which a template could read attributes of its argument.
        templates = [lambda name, line=line: line.replace("{c}", name) for line in source.templates]
        at_once = max(1, self.batch_size // len(templates))
        with self.autocast():
            return finite(
                build_zero_shot_classifier(
                    self.model, self.tokenizer, source.classes, templates, at_once, device=self.device
                )
            )


def finite(features: Tensor) -> Tensor:
    if not features.isfinite().all():
        raise InputError("the model's embeddings are not finite")
    return features.float()


@dataclass
class Answers:
    """Predictions of a classification.

    Args:
        ranked: (N, K) classes, the most similar first, of equal ones the earlier; K = min(C, 5 or more).
        labels: (N,), or (N, C) of 0 and 1 for several labels.
        scores: (N, C) cosine similarities for several labels, else None.
        fields: (N, columns) int64 if the samples have fields, else None.
    """

    ranked: NDArray
    labels: NDArray
    scores: NDArray | None
    fields: NDArray | None


@torch.inference_mode()
def classify(
    encoder: Encoder, source: Source, name: str, size: int | None = None, ranked: int = RANKED
) -> Answers | None:
    """Classify all samples; the predictions on process 0, None on the others.

    Args:
        ranked: number of classes to keep for each sample.
    """
    classifier = encoder.classifier(source)
    several = source.type == "multilabel"
    rows: dict[str, list] = {"number": [], "ranked": [], "labels": [], "scores": [], "fields": []}
    for numbers, features, targets, fields in encoder.batches(source, name, size):
        scores = features @ classifier
        rows["number"].append(np.asarray(numbers, np.int64))
        # Not topk, which leaves the order of equal scores open.
        order = scores.sort(dim=1, descending=True, stable=True).indices
        rows["ranked"].append(order[:, :ranked].cpu().numpy())
        rows["labels"].append(np.asarray(targets, np.int64))
        rows["scores"].append(scores.cpu().numpy() if several else np.empty((len(numbers), 0)))
        rows["fields"].append(table_of(source, fields))
    whole = gather(encoder, source, rows)
    if whole is None:
        return None
    return Answers(
        whole["ranked"], whole["labels"], whole["scores"] if several else None,
        whole["fields"] if whole["fields"].shape[1] else None,
    )


@torch.inference_mode()
def retrieve(encoder: Encoder, source: Source, name: str, size: int | None = None) -> dict[str, NDArray] | None:
    """Embed all images and captions; the result on process 0, None on the others.

    Returns:
        `image` (I, d) and `text` (T, d), unit vectors; `image_of_text` (T,), the number of each text's image.
    """
    images: dict[str, list] = {"number": [], "image": []}
    texts: dict[str, list] = {"number": [], "text": []}
    for numbers, features, targets, _ in encoder.batches(source, name, size):
        images["number"].append(np.asarray(numbers, np.int64))
        images["image"].append(features.cpu().numpy())
        texts["number"].append(np.repeat(images["number"][-1], [len(captions) for captions in targets]))
        captions = [caption for captions in targets for caption in captions]
        texts["text"].append(encoder.embed_texts(captions).cpu().numpy())
    image, text = gather(encoder, source, images), gather(encoder, source, texts, several=True)
    if image is None or text is None:
        return None
    return {"image": image["image"], "text": text["text"], "image_of_text": text["number"]}


@torch.inference_mode()
def associate(encoder: Encoder, source: Candidates, name: str) -> list[NDArray] | None:
    """Cosine similarities (n,) of each instance's n candidates with its cue, on process 0; None on the others."""
    rows: dict[str, list] = {"number": [], "image": []}
    for numbers, features, *_ in encoder.batches(source, name, len(source.images)):
        rows["number"].append(np.asarray(numbers, np.int64))
        rows["image"].append(features.cpu().numpy())
    whole = gather(encoder, source, rows)
    if whole is None:
        return None
    cues = encoder.embed_texts([prompt_of(cue) for cue, *_ in source.instances]).cpu().numpy()
    return [whole["image"][numbers] @ cue for (_, numbers, _), cue in zip(source.instances, cues, strict=True)]


def prompt_of(cue: str) -> str:
    """The prompt for a cue, as in DataComp: "An eagle", "A bald"."""
    cue = cue.lower()
    return f"An {cue}" if cue[0] in "aeiou" else f"A {cue}"


def table_of(source: Source, fields: list[NDArray | None]) -> NDArray:
    """The fields of a batch, (b, columns) int64; no columns if its samples have none."""
    try:
        table = np.stack([np.empty(0) if one is None else np.atleast_1d(one) for one in fields])
    except ValueError:
        raise source.wrong(f"{source.folder!r}: samples have .npy of different lengths, or none") from None
    if table.ndim != 2 or not (np.isfinite(table) & (table == np.rint(table))).all():
        raise source.wrong(f"{source.folder!r}: a .npy has something other than one row of whole numbers")
    return table.astype(np.int64)


def gather(
    encoder: Encoder, source: Source, own: dict[str, list[NDArray]], several: bool = False
) -> dict[str, NDArray] | None:
    """The rows of all processes in the order of their `number`, on process 0; None on the others.

    Args:
        own: this process's batches by name.
        several: whether a number may have several rows.

    Raises:
        InputError: there are no samples, or the processes read different data.
    """
    every: list[Any] = [own]
    if encoder.world_size > 1:
        every = [None] * encoder.world_size
        dist.gather_object(own, every if encoder.rank == 0 else None)
        if encoder.rank != 0:
            return None
    batches = {name: [batch for part in every for batch in part[name]] for name in own}
    if not batches["number"]:
        raise source.wrong(f"{source.folder!r} has no samples")
    try:
        whole = {name: np.concatenate(parts) for name, parts in batches.items()}
    except ValueError:
        raise source.wrong(f"{source.folder!r}: samples have .npy of different lengths") from None
    order = np.argsort(whole["number"], kind="stable")
    if not several and not np.array_equal(whole["number"][order], np.arange(len(order))):
        raise source.wrong(f"{source.folder!r}: the processes see different samples; give all the same folder")
    return {name: values[order] for name, values in whole.items()}
