"""Figures: the scores of several checkpoints, and confusion matrices."""

from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from open_clip_ext.files import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#2a6f97", "#d1702b", "#4f8a3c", "#8a4f9e", "#b3892b", "#7a7a7a")
MARKERS = ("o", "D", "s", "^", "v", "P")
INK, GRID, BAND = "#222222", "#d9d9d9", "#f3f3f3"
SHOWN_CLASSES, NUMBERED_CLASSES = 30, 15

Rows = Sequence[tuple[str, Sequence[float | None]]]


def plain(text: str) -> str:
    """The text as matplotlib shows it without a formula: it takes what is between two `$` for one."""
    return text.replace("$", r"\$")


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure  # here because it is slow, and most runs draw nothing

    return Figure(figsize=(width, height), layout="constrained")


def draw_comparison(file: IO[bytes], labels: Sequence[str], tasks: Rows, averages: Rows, title: str) -> None:
    """Write a PNG with a row for each task and each average, and a marker for each checkpoint.

    Args:
        labels: names of the checkpoints.
        tasks, averages: names, and one score in [0, 1] per checkpoint, None if it is missing.
    """
    rows = [*tasks, *averages]
    figure = new_figure(9, 1.6 + 0.27 * len(rows) + 0.2 * len(labels))
    axis = figure.subplots()
    places = np.arange(len(rows))[::-1]
    percents = 100 * np.array([values for _, values in rows], dtype=float)  # nan where a score is missing
    if averages:
        axis.axhspan(-0.5, len(averages) - 0.5, color=BAND, zorder=0)
    axis.hlines(places, np.nanmin(percents, axis=1), np.nanmax(percents, axis=1), color=GRID, linewidth=2, zorder=1)
    for number, label in enumerate(labels):
        axis.scatter(
            # Each marker is smaller than the one before, so that equal scores stay visible.
            percents[:, number], places, s=20 + 60 / (number + 1), zorder=2, label=plain(label), linewidths=0,
            color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)],
        )
    axis.set_yticks(places, [plain(name) for name, _ in rows])
    axis.scatter(0, 0, s=0)  # the axis begins at zero, so that a difference is seen in proportion
    axis.set(ylim=(-0.6, len(rows) - 0.4), xlabel="score, percent")
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    figure.legend(
        loc="outside upper center", ncols=min(3, len(labels)), frameon=False, fontsize=9, title=plain(title),
        title_fontsize=11,
    )
    figure.savefig(file, dpi=130, format="png")


def write_confusion(
    path: str, title: str, classes: Sequence[str], metrics: Mapping[str, float], counts: NDArray
) -> None:
    """Draw the confusion matrix of a classification with these metrics to `path`; the file is complete or absent."""
    accuracy, balanced = (100 * metrics[name] for name in ("acc1", "mean_per_class_recall"))
    with whole_file(path) as file:
        draw_confusion(file, counts, classes, f"{title}: accuracy {accuracy:.1f} %, balanced {balanced:.1f} %")


def draw_confusion(file: IO[bytes], counts: NDArray, classes: Sequence[str], title: str) -> None:
    """Write a PNG of the confusion matrix, each row in percent of the class's images.

    Args:
        counts: (C, C), row the label, column the prediction.
        classes: their names. Of more than 30 the 30 with most errors are drawn.
    """
    from matplotlib.colors import LinearSegmentedColormap

    samples = counts.sum(axis=1)
    errors = samples + counts.sum(axis=0) - 2 * counts.diagonal()
    chosen = np.arange(len(classes))
    if len(classes) > SHOWN_CLASSES:
        chosen = np.sort(np.argsort(-errors, kind="stable")[:SHOWN_CLASSES])
        title += f"\nthe {SHOWN_CLASSES} of {len(classes)} classes with most errors"
    percents = 100 * (counts / np.maximum(samples, 1)[:, None])[np.ix_(chosen, chosen)]
    side = 3.2 + 0.24 * len(chosen)
    figure = new_figure(side + 1.2, side)
    axis = figure.subplots()
    colours = LinearSegmentedColormap.from_list("shares", ["#ffffff", "#a9cfe5", COLOURS[0], "#08243d"])
    shown = axis.imshow(percents, vmin=0, vmax=100, cmap=colours)
    figure.colorbar(shown, ax=axis, label="percent of the class's images", shrink=0.8)
    for row, column in np.argwhere(percents >= 0.5) if len(chosen) <= NUMBERED_CLASSES else ():
        value = percents[row, column]
        axis.text(
            column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color="white" if value > 45 else INK
        )
    shown_names = [classes[index] for index in chosen.tolist()]
    names = [plain(name if len(name) <= 24 else name[:23] + "…") for name in shown_names]
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axis.set_yticks(
        range(len(names)), [f"{name} ({samples[index]})" for name, index in zip(names, chosen, strict=True)], fontsize=8
    )
    axis.set(xlabel="taken for", ylabel="class (images)")
    axis.set_title(plain(title), fontsize=10, color=INK)
    figure.savefig(file, dpi=130, format="png")
