"""Differences between runs, paired by seed."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

# Student's t at 97.5 %, for 1, 2, ... degrees of freedom; the last one for more, a little too wide.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def interval(differences: Sequence[float]) -> tuple[float, float | None]:
    """The mean and half of its 95 % interval, None for one difference."""
    n = len(differences)
    half = T[min(n - 1, len(T)) - 1] * stdev(differences) / math.sqrt(n) if n > 1 else None
    return mean(differences), half


def p_values(every: Sequence[Sequence[float]]) -> list[float]:
    """Two-sided p-values of the means of several comparisons by Student's t, with Holm's correction for their number.

    Args:
        every: the differences of each comparison, at least two and not all equal.
    """
    from scipy import stats

    plain = [float(stats.ttest_1samp(differences, 0).pvalue) for differences in every]
    corrected, least = [0.0] * len(plain), 0.0
    for rank, number in enumerate(sorted(range(len(plain)), key=plain.__getitem__)):
        least = max(least, min(1.0, (len(plain) - rank) * plain[number]))
        corrected[number] = least
    return corrected


def shown(differences: Sequence[float]) -> str:
    """The mean with its 95 % interval, `+5.4 ± 2.9`."""
    middle, half = interval(differences)
    return f"{middle:+.1f}" + ("" if half is None else f" ± {half:.1f}")
