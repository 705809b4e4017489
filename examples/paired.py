"""Differences between runs: paired by seed, or Welch's where the order of the data differs."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

# Student's t at 97.5 %, for 1, 2, ... degrees of freedom; the last one for more, a little too wide.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
LEAST = 3  # differences of an interval: the spread of two lies between 0.03 and 2.2 times the true one


def interval(differences: Sequence[float]) -> tuple[float, float | None]:
    """The mean and half of its 95 % interval, None for fewer than `LEAST` differences."""
    n = len(differences)
    half = T[min(n - 1, len(T)) - 1] * stdev(differences) / math.sqrt(n) if n >= LEAST else None
    return mean(differences), half


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Where a further value lies with 95 % (prediction interval), not below 0."""
    n = len(values)
    half = T[min(n - 1, len(T)) - 1] * stdev(values) * math.sqrt(1 + 1 / n)
    return max(0.0, mean(values) - half), mean(values) + half


def difference(ours: Sequence[float], theirs: Sequence[float], paired: bool) -> tuple[float, float, float]:
    """The difference of the means, half of its 95 % interval, and p: Student's t over the pairs, or Welch's."""
    from scipy import stats

    test = stats.ttest_rel(ours, theirs) if paired else stats.ttest_ind(ours, theirs, equal_var=False)
    low, high = test.confidence_interval()
    return mean(ours) - mean(theirs), (high - low) / 2, float(test.pvalue)


def p_values(every: Sequence[Sequence[float]]) -> list[float]:
    """Two-sided p-values of the means of several comparisons by Student's t, with Holm's correction for their number.

    Args:
        every: the differences of each comparison, at least two and not all equal.
    """
    from scipy import stats

    return holm([float(stats.ttest_1samp(differences, 0).pvalue) for differences in every])


def holm(plain: Sequence[float], family: int = 0) -> list[float]:
    """p-values with Holm's correction for their number, or for that of their `family` if it is larger."""
    number = max(family, len(plain))
    corrected, least = [0.0] * len(plain), 0.0
    for rank, one in enumerate(sorted(range(len(plain)), key=plain.__getitem__)):
        least = max(least, min(1.0, (number - rank) * plain[one]))
        corrected[one] = least
    return corrected


def shown(differences: Sequence[float]) -> str:
    """The mean with its 95 % interval, `+5.4 ± 2.9`."""
    middle, half = interval(differences)
    return f"{middle:+.1f}" + ("" if half is None else f" ± {half:.1f}")
