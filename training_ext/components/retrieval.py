"""Retrieval metrics of the validation pairs by blocks, with an image's other captions as right."""

from typing import Any

import torch

from open_clip_ext.retrieval import validation_metrics
from training_ext.core.component import Component
from training_ext.core.seam import Seam


class Retrieval(Component):
    name = "retrieval"
    seams = (
        Seam(
            "open_clip_train.train", "get_clip_metrics",
            why="takes 22 bytes for each image and text, before 4.0, and counts an image's other captions as wrong",
            contract="evaluate calls get_clip_metrics(image_features=, text_features=, ...) with the features of all "
            "validation pairs in their order, or lists of batches of them, and adds what it returns to metrics",
            replacement=lambda original, own: own.metrics_of,
            used_by="open_clip_train.train:evaluate",
        ),
    )  # fmt: skip

    def metrics_of(self, image_features: Any, text_features: Any, **unused: Any) -> dict[str, Any]:
        """Replaces OpenCLIP's `get_clip_metrics`."""
        given = image_features, text_features
        image, text = (torch.cat(features) if isinstance(features, list) else features for features in given)
        device = torch.device(self.args.device)
        on_gpu = device.type == "cuda"  # others may lack float64
        pictures = self.training.data.val_pictures()
        of = None if pictures is None else torch.from_numpy(pictures.of)
        return validation_metrics(image, text, of, device if on_gpu else image.device)
