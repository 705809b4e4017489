"""A checkpoint's hits on the user's own pairs, kept in a file beside its results, and the comparison of several."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from open_clip_ext.files import whole_file
from open_clip_ext.retrieval import RECALLS
from training_ext.scoring.metrics import paired_difference
from training_ext.tools.evaluation.results import Row

NAMES = tuple(f"{side}_retrieval_recall@{k}" for side in ("text", "image") for k in RECALLS)
DATA, WEIGHTS = "pairs", "weights"  # digests in the file
CONFIDENCE_95 = 1.96  # standard errors
WIDTH = 16


def write_hits(path: str, hits: Mapping[str, NDArray], data: str, weights: str) -> None:
    """Write `Score.hits` with the digests of data and weights, as arrays of numpy."""
    arrays: dict[str, Any] = {**hits, DATA: data, WEIGHTS: weights}
    with whole_file(path) as file:
        np.savez_compressed(file, **arrays)


def read_hits(path: str, data: str) -> dict[str, NDArray] | None:
    """What `write_hits` wrote; None without such a file, or if it is of other data."""
    try:
        with np.load(path, allow_pickle=False) as file:
            content = {name: file[name] for name in (*NAMES, DATA, WEIGHTS)}
    except Exception:  # a damaged archive may raise anything
        return None
    return content if content[DATA] == data else None


def table_of_pairs(rows: Mapping[str, Row], hits: Sequence[dict[str, NDArray] | None]) -> str:
    """The table for stdout: recalls of each checkpoint, and the differences to the first.

    Args:
        rows: by the checkpoint's label its results on the same pairs.
        hits: of each checkpoint, as `read_hits` gives them.
    """
    baseline, *others = rows
    wide = 2 + max(map(len, rows))
    row = rows[baseline]
    lines = [
        f"{row.name}, {row.samples} images: recall in %, ± standard error",
        " " * wide + "".join(f"{side:{3 * WIDTH}}" for side in ("    image to text", "    text to image")).rstrip(),
        " " * wide + 2 * "".join(f"{f'R@{k}':>{WIDTH}}" for k in RECALLS),
    ]

    def line(label: str, cells: Sequence[tuple[float, float]], sign: str = "") -> str:
        texts = (f"{100 * value:{sign}.2f} ± {100 * error:.2f}" for value, error in cells)
        return f"{label:{wide}}" + "".join(f"{text:>{WIDTH}}" for text in texts)

    for label, row in rows.items():
        lines.append(line(label, [(row.metrics[name], row.metrics[f"{name}_error"]) for name in NAMES]))
    differences = []
    for label, hits_of_label in zip(others, hits[1:], strict=True):
        if hits_of_label is None or hits[0] is None:
            continue
        gaps = [paired_difference(hits_of_label[name], hits[0][name]) for name in NAMES]
        cells = line(label, [(gap, CONFIDENCE_95 * error) for gap, error in gaps], "+")
        is_equal = hits_of_label[WEIGHTS] == hits[0][WEIGHTS]
        differences.append(f"{label:{wide}}    the same weights" if is_equal else cells)
    if differences:
        lines.append(f"difference to {baseline} on the same images, ± 95 % interval; one within its ± may be chance")
    return "\n".join(lines + differences)
