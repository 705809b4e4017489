"""Metrics of classification, retrieval and association: pure functions of numpy arrays, in float64.

Shapes: N = samples, C = classes, I = images, T = texts, d = dimension. Every value returned is in [0, 1].
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 24  # similarities held at once: 128 MiB


def top_k_accuracy(ranked: NDArray, labels: NDArray, k: int) -> float:
    """Fraction of the samples whose label is among the first k predictions.

    Args:
        ranked: (N, at least k) classes, the best prediction first.
        labels: (N,).
    """
    return float(is_among(ranked, labels, k).mean())


def is_among(ranked: NDArray, labels: NDArray, k: int) -> NDArray:
    """Whether each label is among the first k predictions, (N,) float64 of 0 and 1."""
    return (ranked[:, :k] == labels[:, None]).any(axis=1).astype(np.float64)


def confusion(predicted: NDArray, labels: NDArray, num_classes: int) -> NDArray:
    """Confusion matrix (C, C) of counts: row the label, column the prediction."""
    counts = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes)


def mean_per_class_recall(predicted: NDArray, labels: NDArray) -> float:
    """Mean recall over the classes that occur among the labels."""
    right = (predicted == labels).astype(np.float64)
    return float(np.mean([right[labels == label].mean() for label in np.unique(labels)]))


def macro_f1(predicted: NDArray, labels: NDArray) -> float:
    """Mean F1 over the classes that occur among the labels; classes that are only predicted are not in the mean."""
    scores = []
    for label in np.unique(labels):
        true, found = labels == label, predicted == label
        scores.append(2 * (true & found).sum() / (true.sum() + found.sum()))
    return float(np.mean(scores))


def by_group(values: NDArray, groups: NDArray) -> dict[int, tuple[float, int]]:
    """Mean and number of the `values` (N,) by group, for each group in `groups` (N,)."""
    own = {int(group): values[groups == group] for group in np.unique(groups)}
    return {group: (float(part.mean()), len(part)) for group, part in own.items()}


def mean_average_precision(scores: NDArray, targets: NDArray) -> float:
    """Mean over all classes of the average precision; a class without positives counts as 0.

    Args:
        scores: (N, C); ties go to the earlier sample.
        targets: (N, C), 1 where the class is in the sample.
    """
    order = np.argsort(-scores, axis=0, kind="stable")
    true = np.take_along_axis(targets, order, axis=0).astype(np.float64)
    precision = true.cumsum(axis=0) / np.arange(1, len(true) + 1)[:, None]
    return float(((precision * true).sum(axis=0) / np.maximum(true.sum(axis=0), 1)).mean())


def retrieval_recall(image: NDArray, text: NDArray, image_of_text: NDArray, ks: Iterable[int]) -> dict[str, float]:
    """Recall at k in both directions, under clip_benchmark's names.

    A text counts as a hit if its image is among the k most similar images, an image if any of its texts is among the k
    most similar texts. Ties go to the earlier candidate, so a model whose embeddings are all equal scores as chance.

    Args:
        image: (I, d). text: (T, d).
        image_of_text: (T,) index of each text's image; each image has at least one text.
    """
    image, text = image.astype(np.float64), text.astype(np.float64)
    image_rank = first_positive(text, image, lambda rows: image_of_text[rows, None] == np.arange(len(image)))
    text_rank = first_positive(image, text, lambda rows: rows[:, None] == image_of_text)
    metrics = {}
    for k in ks:
        metrics[f"image_retrieval_recall@{k}"] = float((image_rank < k).mean())
        metrics[f"text_retrieval_recall@{k}"] = float((text_rank < k).mean())
    return metrics


def first_positive(queries: NDArray, candidates: NDArray, positives: Callable[[NDArray], NDArray]) -> NDArray:
    """Rank from 0 of each query's best positive among the candidates, (queries,).

    Args:
        positives: maps indices of queries, (q,), to (q, candidates) bool: which candidates are positives.
    """
    step = max(1, CHUNK // len(candidates))
    ranks = []
    for start in range(0, len(queries), step):
        rows = np.arange(start, min(start + step, len(queries)))
        scores = queries[rows] @ candidates.T
        best = np.where(positives(rows), scores, -np.inf).argmax(axis=1)  # ties: the earliest
        level = scores[np.arange(len(rows)), best][:, None]
        ahead = (scores > level) | ((scores == level) & (np.arange(len(candidates)) < best[:, None]))
        ranks.append(ahead.sum(axis=1))
    return np.concatenate(ranks)


def jaccard_of_picks(similarities: NDArray, is_association: NDArray) -> float:
    """WinoGAViL's score of one instance: Jaccard index of the associations and as many most similar candidates.

    Args:
        similarities: (n,) similarities of the candidates with the cue.
        is_association: (n,) bool, true at least once.
    """
    picks = np.argsort(-similarities, kind="stable")[: is_association.sum()]
    hits = is_association[picks].sum()
    return float(hits / (2 * len(picks) - hits))
