"""Losses, and what the encoders minimise once the log-normalizers are known."""

from open_clip_ext.losses.amorlip import AmorLIPLoss
from open_clip_ext.losses.base import Loss, NonFiniteError
from open_clip_ext.losses.compositional import Compositional
from open_clip_ext.losses.cyclip import CyCLIPLoss
from open_clip_ext.losses.global_contrastive import GlobalContrastiveLoss
from open_clip_ext.losses.unified import Unified

OBJECTIVES = {objective.name: objective for objective in (Compositional, Unified)}

__all__ = [
    "OBJECTIVES", "AmorLIPLoss", "Compositional", "CyCLIPLoss", "GlobalContrastiveLoss", "Loss", "NonFiniteError",
    "Unified",
]
