"""A control for `queue`: the latest embeddings as further negatives in OpenCLIP's loss, as in XBM (arXiv 1912.06798).

`queue` takes old embeddings for the estimate of a normalizer; XBM, MoCo and ALBEF put them into the denominator of each
anchor's softmax, beside the batch. train.py beside this file knows `--loss xbm`. For one process.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from open_clip_ext.losses import Loss
from open_clip_ext.options import AT_LEAST_1, not_negative, option
from open_clip_ext.presets import LossPreset
from open_clip_ext.temperatures import LearnedLogitScale


class XBM(Loss):
    """OpenCLIP's loss, whose anchors also have the last `xbm_size` texts, or images, as negatives, without gradient."""

    name = "xbm"
    optimizer_options = LearnedLogitScale.options
    xbm_size: int = option(1024, "pairs of embeddings that are kept", **AT_LEAST_1)
    xbm_start: int = option(0, "first epoch that has them as negatives", valid=not_negative, expected="at least 0")

    def materialize(self, dimension: int, device: torch.device, dtype: torch.dtype) -> None:
        super().materialize(dimension, device, dtype)
        self.memory = torch.zeros(2, 0, dimension, device=device, dtype=dtype)  # texts, images

    def compute(
        self, image: Tensor, text: Tensor, logit_scale: Tensor, index: Tensor | None, update_state: bool
    ) -> Tensor:
        memory = self.memory if max(self.epoch, 0) >= self.xbm_start else self.memory[:, :0]
        texts, images = (torch.cat(parts) for parts in zip((text, image), memory, strict=True))
        positives = torch.arange(len(image), device=image.device)
        value = cross_entropy(logit_scale * image @ texts.T, positives)
        value = (value + cross_entropy(logit_scale * text @ images.T, positives)) / 2
        if update_state:
            latest = torch.stack([text, image]).detach()
            self.memory = torch.cat([self.memory, latest], dim=1)[:, -self.xbm_size :]
        return value

    def full_state(self) -> dict[str, Any]:
        return super().full_state() | ({"memory": self.memory.cpu()} if self.dimension else {})

    def load_full_state(self, state: dict[str, Any]) -> None:
        super().load_full_state(state)
        if self.dimension:
            self.memory = state["memory"].to(self.memory)


PRESET = LossPreset(
    XBM.name, "OpenCLIP's loss with the latest embeddings as further negatives", "Wang et al. 2020, arXiv 1912.06798",
    loss=XBM,
)
