"""Confusion matrices as pictures."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from open_clip_ext.files import whole_file

INK = "#222222"
SHOWN_CLASSES, NUMBERED_CLASSES = 30, 15


def write_confusion(
    path: str, title: str, classes: Sequence[str], metrics: Mapping[str, float], counts: NDArray
) -> None:
    """Draw the confusion matrix of a classification as a PNG, each row in percent of the class's images.

    Args:
        path: the file, which is complete or absent.
        classes: their names. Of more than 30 the 30 with most errors are drawn.
        metrics: of the classification, for the title.
        counts: (C, C), row the label, column the prediction.
    """
    from matplotlib.colors import LinearSegmentedColormap  # here because it is slow, and most runs draw nothing
    from matplotlib.figure import Figure

    accuracy, balanced = (100 * metrics[name] for name in ("acc1", "mean_per_class_recall"))
    title = f"{title}: accuracy {accuracy:.1f} %, balanced {balanced:.1f} %"
    samples = counts.sum(axis=1)
    errors = samples + counts.sum(axis=0) - 2 * counts.diagonal()
    chosen = np.arange(len(classes))
    if len(classes) > SHOWN_CLASSES:
        chosen = np.sort(np.argsort(-errors, kind="stable")[:SHOWN_CLASSES])
        title += f"\nthe {SHOWN_CLASSES} of {len(classes)} classes with most errors"
    percents = 100 * (counts / np.maximum(samples, 1)[:, None])[np.ix_(chosen, chosen)]
    side = 3.2 + 0.24 * len(chosen)
    figure = Figure(figsize=(side + 1.2, side), layout="constrained")
    axis = figure.subplots()
    colours = LinearSegmentedColormap.from_list("shares", ["#ffffff", "#a9cfe5", "#2a6f97", "#08243d"])
    heatmap = axis.imshow(percents, vmin=0, vmax=100, cmap=colours)
    figure.colorbar(heatmap, ax=axis, label="percent of the class's images", shrink=0.8)
    for row, column in np.argwhere(percents >= 0.5) if len(chosen) <= NUMBERED_CLASSES else ():
        value = percents[row, column]
        axis.text(
            column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color="white" if value > 45 else INK
        )
    shown_names = [classes[index] for index in chosen.tolist()]
    names = [name if len(name) <= 24 else name[:23] + "…" for name in shown_names]
    labels = [f"{name} ({samples[index]})" for name, index in zip(names, chosen, strict=True)]
    as_text: dict[str, Any] = {"fontsize": 8, "parse_math": False}  # what is between two $ is no formula
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor", **as_text)
    axis.set_yticks(range(len(names)), labels, **as_text)
    axis.set(xlabel="taken for", ylabel="class (images)")
    axis.set_title(title, fontsize=10, color=INK, parse_math=False)
    with whole_file(path) as file:
        figure.savefig(file, dpi=130, format="png")
