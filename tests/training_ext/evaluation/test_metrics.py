"""Each metric against its definition, written as loops in float64, and against scikit-learn's where that has it."""

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, f1_score, recall_score

from training_ext.scoring import metrics

RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 7, 200)
LABELS[LABELS == 5] = 3  # class 5 has no samples
SCORES = RANDOM.normal(size=(200, 7)) + 1.5 * np.eye(7)[LABELS]
RANKED = np.argsort(-SCORES, axis=1)
PREDICTED = RANKED[:, 0]


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
