"""Inference of a model on a data set, divided over processes and gathered on process 0.

Shapes: b = samples of a batch, N = samples, C = classes, d = dimension of the embeddings.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from open_clip import build_zero_shot_classifier, get_input_dtype
from open_clip_train.precision import get_autocast
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from open_clip_ext.losses import NonFiniteError
from training_ext.openclip.hosts import taken
from training_ext.scoring.folders import Images, Source


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

    def columns(
        self, source: Source, name: str, size: int | None, answer: Callable[[Tensor, Sequence], Iterable[Any]]
    ) -> tuple | None:
        """Embed all images; on process 0 the targets, the fields and the answers of the N samples, None on the others.

        Args:
            name: label of the progress bar.
            size: N, for the progress bar; None if unknown.
            answer: from unit embeddings (b, d) float32 and targets of a batch to an answer for each.

        Raises:
            InputError: there are no samples, or the processes read different data.
        """
        loader = DataLoader(
            Images(source, self.transform, self.rank, self.world_size), self.batch_size, num_workers=self.workers,
            collate_fn=list,
            worker_init_fn=self.worker_init_fn,
            generator=torch.Generator(),  # leaves the global random state of a training alone
        )
        rows: list[tuple] = []
        share = None if size is None else -(-size // self.world_size)
        with tqdm(total=share, desc=name, unit=" images", disable=not self.show, leave=False) as bar:
            for batch in loader:
                numbers, images, targets, fields = zip(*batch, strict=True)
                tensor = torch.stack(images).to(device=self.device, dtype=get_input_dtype(self.precision))
                with self.autocast():
                    features = finite(self.model.encode_image(tensor, normalize=True))
                rows += zip(numbers, targets, fields, answer(features, targets), strict=True)
                bar.update(len(batch))
        every: list[Any] = [rows]
        if self.world_size > 1:
            every *= self.world_size
            dist.gather_object(rows, every if self.rank == 0 else None)
            if self.rank != 0:
                return None
        samples = sorted(chain(*every), key=itemgetter(0))
        if not samples:
            raise source.wrong(f"{source.folder!r} has no samples")
        numbers, *columns = zip(*samples, strict=True)
        if numbers != tuple(range(len(samples))):
            raise source.wrong(f"{source.folder!r}: the processes see different samples; give all the same folder")
        return tuple(columns)


def finite(features: Tensor) -> Tensor:
    if not features.isfinite().all():
        raise NonFiniteError("the model's embeddings are not finite")
    return features.float()
