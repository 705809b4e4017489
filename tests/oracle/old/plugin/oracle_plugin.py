"""A user's package with a normalizer and a loss of its own, as docs/extending.md showed them for version 0.1."""

import math

import torch
from torch.nn.functional import softplus

from open_clip_ext.losses import Loss
from open_clip_ext.normalizers import Normalizer
from open_clip_ext.options import option
from open_clip_ext.presets import LossPreset
from open_clip_ext.temperatures import LearnedLogitScale


class Shared(Normalizer):
    name = "shared"
    shared_keep: float = option(
        0.9, "weight of the previous average", valid=lambda value: 0 < value < 1, expected="in (0, 1)"
    )

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("log_mean", torch.full((2, 1), -math.inf), persistent=False)

    def update(self, batch):
        new = batch.all_log_batch.logsumexp(dim=1, keepdim=True) - math.log(batch.size)
        mixed = torch.logaddexp(math.log(self.shared_keep) + self.log_mean, math.log(1 - self.shared_keep) + new)
        mixed = torch.where(self.log_mean == -math.inf, new, mixed)
        self.log_mean = torch.where(batch.finite, mixed, self.log_mean)

    def forward(self, batch, updated=None):
        return torch.where(self.log_mean == -math.inf, batch.log_batch, self.log_mean)

    def full_state(self):
        return {"log_mean": self.log_mean.cpu()}

    def load_full_state(self, state):
        self.log_mean.copy_(state["log_mean"])


class Pairwise(Loss):
    name = "pairwise"
    optimizer_options = LearnedLogitScale.options

    def compute(self, image, text, logit_scale, index, update_state):
        logits = logit_scale * image @ text.T
        positives = logits.diagonal()
        value = softplus(logits - positives[:, None]).mean() + softplus(logits - positives[None, :]).mean()
        finite = [tensor.isfinite().all() for tensor in (image, text, logit_scale)]
        self.note(~torch.stack(finite))
        return value


SHARED = LossPreset("shared", "one moving average for all samples", "not from a paper", normalizer="shared")
PAIRWISE = LossPreset("pairwise", "logistic loss of the gaps, no normalizer", "not from a paper", loss=Pairwise)
