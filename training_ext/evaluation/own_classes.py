"""Zero-shot classification of the user's own classes: `--zeroshot-data` of the evaluation and of the training."""

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
IMAGES = "zeroshot-data-images"  # the number of images, logged with the metrics


@dataclass(frozen=True)
class OwnScores:
    """Accuracies in [0, 1].

    Args:
        top1, top5: top-1 and top-5 accuracy; `top5` is None for fewer than 5 classes.
        balanced: mean per-class recall.
        counts: confusion matrix (C, C) of counts: row the class, column the prediction.
    """

    top1: float
    top5: float | None
    balanced: float
    counts: NDArray


def name_of(source: Source) -> str:
    return os.path.basename(os.path.normpath(os.path.abspath(source.folder)))


def score_own_classes(encoder: Encoder, source: Source) -> OwnScores | None:
    """Score the classification; the scores on process 0, None on the others."""
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
    """Draw the confusion matrix to `path`; the file is complete or absent."""
    title = f"{name_of(source)}, {label}: accuracy {100 * scores.top1:.1f} %, balanced {100 * scores.balanced:.1f} %"
    with whole_file(path) as file:
        draw_confusion(file, scores.counts, source.classes, title)
