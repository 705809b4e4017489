"""The verdict of a report: how large a batch would estimate the normalizers as well, and what to change."""

from math import exp, log, sqrt
from typing import Any

import numpy as np

# What to change if the estimates are worse than those of a small batch.
INSTEAD = {
    "queue": "lower --queue-size, whose oldest embeddings are stale",
    "table": "raise --gamma, since the averages lag behind",
    "prototypes": "lower --npn-lr or --npn-restart-every",
    "mlp": "lower --npn-lr, or take another --normalizer",
}
GOOD = "good is a batch larger than the one that you train with"


def verdict(summary: dict[str, Any]) -> str:
    """The verdict, one line.

    Args:
        summary: as `numbers.compare` fills it, up to the errors of the estimators.
    """
    errors = {estimator["name"]: estimator["both"]["mse"] for estimator in summary["estimators"]}
    batches = {int(name.removeprefix("batch of ")): mse for name, mse in errors.items() if name.startswith("batch of ")}
    name = summary["normalizer"]
    if name not in errors:
        batch_errors = ", ".join(f"a batch of {size:,} is {off(mse)}" for size, mse in batches.items())
        return f"Verdict: nothing is estimated beyond the batch; {batch_errors or 'no batch was compared'}"
    mse = errors[name]
    if mse is None:
        return f"Verdict: the {name} normalizer has no estimates yet; train on"
    mixing = summary["mixing"]
    judged = f"{name} normalizer, before --mixing {mixing:g}," if mixing else f"{name} normalizer"
    return f"Verdict: the {judged} is {off(mse)} and {worth(mse, batches, name)}"


def off(mse: float) -> str:
    """The root mean squared error as a factor: by how much it changes the weight of an anchor's gradient."""
    return f"off by a factor of {exp(min(sqrt(mse), 99)):.3g}"


def worth(mse: float, batches: dict[int, float], normalizer: str) -> str:
    """The batch size whose own estimates have the same error, interpolated in logs between those compared."""
    if not batches:
        return "no batch was compared"
    sizes = sorted(batches)
    if mse > batches[sizes[0]]:
        remedy = INSTEAD.get(normalizer, "take another --normalizer")
        return f"worse than a batch of {sizes[0]:,}: {remedy}, or raise --mixing"
    if mse <= batches[sizes[-1]]:
        return f"worth more than a batch of {sizes[-1]:,}, the largest compared ({GOOD})"
    least = np.minimum.accumulate([max(batches[size], 1e-12) for size in sizes])  # 0 for a batch of all rows
    equal = exp(np.interp(-log(mse), -np.log(least), np.log(sizes)))
    return f"worth a batch of {float(f'{equal:.2g}'):,.0f} ({GOOD})"
