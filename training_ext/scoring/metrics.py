"""Metrics of classification and association, and the comparison of recalls: pure functions of numpy arrays, in float64.

Shapes: N = samples, C = classes, I = images. Metrics are in [0, 1].
"""

import numpy as np
from numpy.typing import NDArray


def is_among(ranked: NDArray, labels: NDArray, k: int) -> NDArray:
    """Whether each label is among the first k predictions, (N,) float64 of 0 and 1.

    Args:
        ranked: (N, at least k) classes, the best prediction first.
        labels: (N,).
    """
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
        true, positive = labels == label, predicted == label
        scores.append(2 * (true & positive).sum() / (true.sum() + positive.sum()))
    return float(np.mean(scores))


def by_group(values: NDArray, groups: NDArray) -> dict[int, tuple[float, int]]:
    """Mean and number of the `values` (N,) by group, for each group in `groups` (N,)."""
    members = {int(group): values[groups == group] for group in np.unique(groups)}
    return {group: (float(part.mean()), len(part)) for group, part in members.items()}


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


def jaccard_of_picks(similarities: NDArray, is_association: NDArray) -> float:
    """WinoGAViL's score of one instance: Jaccard index of the associations and as many most similar candidates.

    Args:
        similarities: (n,) similarities of the candidates with the cue.
        is_association: (n,) bool, true at least once.
    """
    picks = np.argsort(-similarities, kind="stable")[: is_association.sum()]
    hits = is_association[picks].sum()
    return float(hits / (2 * len(picks) - hits))


def paired_difference(hits: NDArray, baseline: NDArray) -> tuple[float, float]:
    """Recall less that of another model on the same queries, and the standard error of this difference.

    Images are independent, queries of the same image are not. As in `standard_error`, one more image in favor of each
    model counts, so that the error is not zero where all queries agree.

    Args:
        hits, baseline: (2, I) each model's hits among the queries of an image, and the number of these queries.
    """
    gaps, queries = hits[0] - baseline[0], hits[1]
    difference = gaps.sum() / queries.sum()
    deviations = (gaps - difference * queries) / queries.mean()
    return float(difference), float(np.sqrt((deviations @ deviations + 2) / (len(gaps) + 2) / len(gaps)))
