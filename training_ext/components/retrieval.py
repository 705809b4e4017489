"""Compute the retrieval metrics of the validation pairs in blocks, counting each caption of an image as right."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from open_clip_ext.retrieval import ANY_CAPTION, validation_metrics
from training_ext.core.component import Component
from training_ext.core.rows import pair_of
from training_ext.core.seam import Seam
from training_ext.data.captions import Pictures
from training_ext.data.rows import kind_of


class Retrieval(Component):
    name = "retrieval"
    seams = (
        Seam(
            "open_clip_train.train", "get_clip_metrics",
            why="takes 22 bytes for each image and text, before 4.0, and counts an image's other captions as wrong",
            contract="evaluate calls get_clip_metrics(image_features=, text_features=, ...) with the features of all "
            "validation pairs in their order, or lists of batches of them, and adds what it returns to metrics",
            replacement=lambda original, component: component.metrics_of,
            used_by="open_clip_train.train:evaluate",
        ),
    )  # fmt: skip

    _images: Iterable[Any] = ()  # equal for equal images, in the order of the validation pairs

    def data_built(self, data: dict[str, Any]) -> None:
        if "val" not in data:
            return
        kind, info = kind_of(self.args, self.args.val_data, "--val-data"), data["val"]
        if kind == "csv":
            self._images = info.dataloader.dataset.images
        elif kind == "webdataset":
            info.dataloader = DigestLoader(info.dataloader)
            self._images = info.dataloader.digests

    def metrics_of(self, image_features: Any, text_features: Any, **unused: Any) -> dict[str, Any]:
        """Replaces OpenCLIP's `get_clip_metrics`."""
        given = image_features, text_features
        image, text = (torch.cat(features) if isinstance(features, list) else features for features in given)
        device = torch.device(self.args.device)
        on_gpu = device.type == "cuda"  # others may lack float64
        return validation_metrics(image, text, self._image_of_pairs(), device if on_gpu else image.device)

    def _image_of_pairs(self) -> torch.Tensor | None:
        """The number of each pair's image; None if each image has one pair, unless --keep-best asks for it."""
        images = list(self._images)
        pictures = Pictures(images)
        is_needed = len(pictures) < len(images) or getattr(self.args, "keep_best", None) in ANY_CAPTION
        return torch.from_numpy(pictures.of) if is_needed else None


class DigestLoader:
    """OpenCLIP's loader of validation pairs without paths, whose equal images are told by the pixels for the model.

    Attributes:
        digests: of the images of the latest pass, in their order.
    """

    def __init__(self, loader: Any):
        self.loader = loader
        self.num_samples, self.num_batches = loader.num_samples, loader.num_batches
        self.digests: list[bytes] = []

    def __iter__(self) -> Iterator[Any]:
        self.digests.clear()
        for batch in self.loader:
            images, _ = pair_of(batch)
            self.digests += [hashlib.blake2b(image.contiguous().numpy(), digest_size=16).digest() for image in images]
            yield batch
