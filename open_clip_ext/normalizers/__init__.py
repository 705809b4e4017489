"""Estimators of each sample's log-normalizer, log(eps + g_i) over the whole data set."""

from open_clip_ext.normalizers.base import Normalizer
from open_clip_ext.normalizers.batch import BatchNormalizer
from open_clip_ext.normalizers.mlp import MLP
from open_clip_ext.normalizers.prototypes import Prototypes
from open_clip_ext.normalizers.queue import Queue
from open_clip_ext.normalizers.table import MovingAverageTable, RowNormalizer

NORMALIZERS = {
    normalizer.name: normalizer for normalizer in (BatchNormalizer, MovingAverageTable, Prototypes, MLP, Queue)
}

__all__ = [
    "MLP", "NORMALIZERS", "BatchNormalizer", "MovingAverageTable", "Normalizer", "Prototypes", "Queue", "RowNormalizer",
]  # fmt: skip
