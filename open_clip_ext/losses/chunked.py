"""OpenCLIP's own two losses, computed block by block: `clip-chunked` and `siglip-chunked`."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from open_clip_ext.batch import Batch
from open_clip_ext.kernels.choice import KERNELS
from open_clip_ext.kernels.chunked import clip_loss, siglip_loss, unicl_loss
from open_clip_ext.kernels.streaming import largest
from open_clip_ext.losses.graphed import GraphedLoss
from open_clip_ext.options import option
from open_clip_ext.temperatures import LearnedLogitScale


class ChunkedLoss(GraphedLoss):
    """Base of the chunked losses: a kernel gives value and gradients of the global batch, tile by tile."""

    optimizer_options = LearnedLogitScale.options
    loss_precision: str = option(
        "float32", "factors of the loss's matrix products, whose sums are float32 in either case",
        choices=("float32", "bfloat16"),
    )
    kernels: str = KERNELS

    def _attached(self, kernel: Any, image: Tensor, text: Tensor, *parameters: Tensor) -> Tensor:
        inputs = (image, text, *parameters)
        with torch.no_grad():
            batch = Batch.gather(image, text, parameters[0].reciprocal())
            self.note(largest(batch.all_image, batch.all_text, parameters[0]))
            value, gradients = kernel(
                batch, *parameters, low=self.loss_precision == "bfloat16", kernels=self.kernels
            )
        return self.attached(value, list(zip(inputs, gradients, strict=True)))


class ChunkedCLIPLoss(ChunkedLoss):
    """Value and gradient of OpenCLIP's `ClipLoss` for the global batch, whose matrix of similarities is never stored.

    In plain PyTorch: `equations.clip`.

    The gradients, once averaged over processes, are exact for the global batch: those that `ClipLoss` gives with
    `local_loss` and `gather_with_grad`, or with neither and one process. Beyond the features of the global batch and
    its own gradients a step takes memory that does not depend on B.

    With a `positive_key` it is UniCL's loss, `equations.unicl`.
    """

    name = "clip-chunked"
    takes_positives = True

    def compute(
        self, image: Tensor, text: Tensor, logit_scale: Tensor, index: Tensor | None, update_state: bool,
        positive_key: Tensor | None = None,
    ) -> Tensor:
        """The loss of the global batch; the value is equal on every process."""
        kernel = clip_loss if positive_key is None else partial(unicl_loss, positive_key)
        return self._attached(kernel, image, text, logit_scale)


class ChunkedSigLIPLoss(ChunkedLoss):
    """Value and gradient of OpenCLIP's `SigLipLoss` for the global batch, whose matrix of similarities is never stored.

    In plain PyTorch: `equations.siglip`. Gradients and memory are as in `ChunkedCLIPLoss`.

    `forward` takes the `logit_bias`, 0 by default.
    """

    name = "siglip-chunked"
    takes_bias = True
    needs_negatives = False  # a sigmoid for each pair

    def compute(
        self, image: Tensor, text: Tensor, logit_scale: Tensor, index: Tensor | None, update_state: bool,
        logit_bias: Tensor | None = None,
    ) -> Tensor:
        """The loss of the global batch; the value is equal on every process."""
        bias = torch.zeros_like(logit_scale) if logit_bias is None else logit_bias
        return self._attached(siglip_loss, image, text, logit_scale, bias)
