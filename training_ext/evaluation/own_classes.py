"""Zero-shot classification of one's own classes: `--zeroshot-data`, here and in the training."""

import os
from dataclasses import dataclass

from numpy.typing import NDArray

from open_clip_ext.files import whole_file
from training_ext.evaluation import metrics
from training_ext.evaluation.folders import Source
from training_ext.evaluation.inference import Encoder, classify
from training_ext.evaluation.pictures import draw_confusion

KEY = "zeroshot-data/"
METRICS = ("zeroshot-data-top1", "zeroshot-data-balanced")  # in the training's log
IMAGES = "zeroshot-data-images"  # their number, beside them


@dataclass(frozen=True)
class OwnScores:
    """Accuracies in [0, 1].

    Args:
        top1, top5: share of the images whose class is the best answer, and among the best five; None below 5 classes.
        balanced: mean over the classes of the share of their images that are right.
        counts: (C, C) images by class and answer.
    """

    top1: float
    top5: float | None
    balanced: float
    counts: NDArray


def name_of(source: Source) -> str:
    return os.path.basename(os.path.normpath(os.path.abspath(source.folder)))


def score_own_classes(encoder: Encoder, source: Source) -> OwnScores | None:
    """On process 0; None on the others."""
    answers = classify(encoder, source, name_of(source))
    if answers is None:
        return None
    ranked, labels = answers.ranked, answers.labels
    return OwnScores(
        metrics.top_k_accuracy(ranked, labels, 1),
        metrics.top_k_accuracy(ranked, labels, 5) if len(source.classes) >= 5 else None,
        metrics.mean_per_class_recall(ranked[:, 0], labels),
        metrics.confusion(ranked[:, 0], labels, len(source.classes)),
    )


def write_confusion(path: str, source: Source, scores: OwnScores, label: str) -> None:
    """The picture, whole or not at all."""
    title = f"{name_of(source)}, {label}: accuracy {100 * scores.top1:.1f} %, balanced {100 * scores.balanced:.1f} %"
    with whole_file(path) as file:
        draw_confusion(file, scores.counts, source.classes, title)
