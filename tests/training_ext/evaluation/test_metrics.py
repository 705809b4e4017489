"""Each metric against its definition, written as loops in float64, and against scikit-learn's where that has it."""

import math

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score, jaccard_score, recall_score

from training_ext.evaluation import metrics

RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 7, 200)
LABELS[LABELS == 5] = 3  # class 5 has no samples
SCORES = RANDOM.normal(size=(200, 7)) + 1.5 * np.eye(7)[LABELS]
RANKED = np.argsort(-SCORES, axis=1)
PREDICTED = RANKED[:, 0]


def test_accuracy():
    assert 0.3 < metrics.top_k_accuracy(RANKED, LABELS, 1) < 0.9
    for k in (1, 5):
        right = sum(LABELS[i] in sorted(range(7), key=lambda c: -SCORES[i, c])[:k] for i in range(200))
        assert metrics.top_k_accuracy(RANKED, LABELS, k) == pytest.approx(right / 200, abs=1e-12)


def test_means_over_classes_leave_out_a_class_without_samples():
    assert 5 in PREDICTED
    present = np.unique(LABELS)
    recall = metrics.mean_per_class_recall(PREDICTED, LABELS)
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        assert recall == pytest.approx(balanced_accuracy_score(LABELS, PREDICTED), abs=1e-12)
    assert recall == pytest.approx(recall_score(LABELS, PREDICTED, average="macro", labels=present), abs=1e-12)
    # As WILDS asks scikit-learn for it.
    expected = f1_score(LABELS, PREDICTED, average="macro", labels=present)
    assert metrics.macro_f1(PREDICTED, LABELS) == pytest.approx(expected, abs=1e-12)
    assert expected != pytest.approx(f1_score(LABELS, PREDICTED, average="macro"), abs=1e-3)


def test_confusion():
    found = metrics.confusion(PREDICTED, LABELS, 7)
    assert np.array_equal(found, confusion_matrix(LABELS, PREDICTED, labels=range(7)))


def test_groups():
    groups = RANDOM.integers(0, 4, 200) * 2  # numbers with gaps, as of regions that do not occur
    right = metrics.is_among(RANKED, LABELS, 2)
    found = metrics.by_group(right, groups)
    assert sorted(found) == [0, 2, 4, 6]
    for group, (mean, count) in found.items():
        own = [i for i in range(200) if groups[i] == group]
        assert count == len(own)
        assert mean == pytest.approx(sum(LABELS[i] in RANKED[i, :2] for i in own) / len(own), abs=1e-12)


def test_mean_average_precision():
    targets = (RANDOM.random((60, 4)) < [0.5, 0.2, 0.05, 0]).astype(int)
    scores = RANDOM.normal(size=(60, 4)) + targets
    expected = []
    for column in range(4):
        hits, precisions = 0, []
        for place, i in enumerate(sorted(range(60), key=lambda i: -scores[i, column]), 1):
            if targets[i, column]:
                hits += 1
                precisions.append(hits / place)
        expected.append(sum(precisions) / max(len(precisions), 1))
    assert expected[3] == 0 < min(expected[:3])
    assert metrics.mean_average_precision(scores, targets) == pytest.approx(sum(expected) / 4, abs=1e-12)


def test_jaccard_of_picks():
    for _ in range(20):
        similarities = RANDOM.normal(size=12)
        truth = np.isin(np.arange(12), RANDOM.choice(12, RANDOM.integers(1, 5), replace=False))
        picked = np.isin(np.arange(12), np.argsort(similarities)[-truth.sum():])
        found = metrics.jaccard_of_picks(similarities, truth)
        assert found == pytest.approx(jaccard_score(truth, picked), abs=1e-12)
        both = sum(t and p for t, p in zip(truth, picked, strict=True))
        assert math.isclose(found, both / sum(t or p for t, p in zip(truth, picked, strict=True)))
