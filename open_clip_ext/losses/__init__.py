"""Losses to train with in place of OpenCLIP's: global contrastive, AmorLIP, CyCLIP, and CLIP and SigLIP in blocks."""

from open_clip_ext.losses.amorlip import AmorLIPLoss
from open_clip_ext.losses.base import Loss, NonFiniteError
from open_clip_ext.losses.chunked import ChunkedCLIPLoss, ChunkedSigLIPLoss
from open_clip_ext.losses.cyclip import CyCLIPLoss
from open_clip_ext.losses.global_contrastive import GlobalContrastiveLoss

__all__ = [
    "AmorLIPLoss", "ChunkedCLIPLoss", "ChunkedSigLIPLoss", "CyCLIPLoss", "GlobalContrastiveLoss", "Loss",
    "NonFiniteError",
]
