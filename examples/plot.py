"""Plot one or several runs: retrieval and zero-shot accuracy, temperature, error, throughput.

    python examples/plot.py logs/neuclip logs/clip --out curves.png

Each folder is a run of `open_clip_ext.main` with --loss; the values come from its metrics.jsonl (docs/logs.md). Losses
are not plotted: those of two runs are comparable only if they have the same name.
"""

import argparse
import os
from pathlib import Path
from statistics import median
from typing import Any

from command import image_file
from palette import styles

from open_clip_ext.metrics_file import FILE, read_metrics
from training_ext.data.metrics import standard_error

PERCENT = {
    "R@1": "R@1, mean of both directions, %\n(band: standard error; dotted: chance)",
    "top1": "zero-shot top-1, %",
}
ENDINGS = {"R@1": "_R@1", "top1": "top1"}
STEPS = {
    "tau": "temperature",
    "error": "error of log-normalizers\n(dotted: of the minibatch's)",
    "throughput": "samples per second",
}
WINDOW = 5  # throughput is a median over so many logged steps, since one may include the start of workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path, metavar="FOLDER", help="a run's folder, with metrics.jsonl")
    parser.add_argument("--names", nargs="+", help="the runs' names in the legend (default: the folders')")
    parser.add_argument("--out", type=image_file, default=Path("curves.png"), help="image file (default: curves.png)")
    args = parser.parse_args()
    args.logs = [path.parent if path.name == FILE else path for path in args.logs]
    names = args.names or [os.path.basename(os.path.abspath(folder)) for folder in args.logs]
    if len(names) != len(args.logs):
        parser.error(f"--names: {len(names)} for {len(args.logs)} folder(s); give one per folder")
    runs = {}
    for name, folder in zip(names, args.logs, strict=True):
        if not (lines := read_metrics(folder)):
            parser.error(f"{folder}: no metrics.jsonl, or an empty one; give the folder of a run with --loss")
        if name in runs:
            parser.error(f"{name}: two runs have this name; give --names")
        runs[name] = curves(lines)
    if not any(runs.values()):
        parser.error(f"{args.logs[0]}: no step of the training has been logged yet")
    draw(runs, args.out)
    print(args.out)


def curves(lines: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Points (thousand samples seen, value) by name of the panel; "minibatch" is the dotted curve of "error", "chance"
    and "R@1 standard error" belong to R@1."""
    found: dict[str, list[tuple[float, float]]] = {}
    steps = [line for line in lines if line["stage"] == "train"]
    per_epoch = samples_per_epoch(steps[0]) if steps else 1000.0
    metrics = {panel: in_every_evaluation(lines, ending) for panel, ending in ENDINGS.items()}
    for line in lines:
        if line["stage"] == "eval":
            values = {panel: percent([line.get(name) for name in names]) for panel, names in metrics.items()}
            seen = line["epoch"] * per_epoch
            recall, pairs = values["R@1"], line.get("num_samples")
            if recall is not None and pairs:
                values["R@1 standard error"] = 100 * standard_error(recall / 100, pairs)
                values["chance"] = 100 / pairs
        elif line["stage"] == "train":
            values = {
                "tau": line.get("tau"),
                "error": line.get("normalizer_mse"),
                "minibatch": line.get("minibatch_mse"),
                "throughput": line["throughput"],
            }
            seen = line["samples"]
        else:
            continue
        for name, value in values.items():
            if value is not None:
                found.setdefault(name, []).append((seen / 1000, value))
    if "throughput" in found:
        rates = found["throughput"]
        places = range(len(rates))
        found["throughput"] = [
            (rates[i][0], median(rate for _, rate in rates[max(0, i - WINDOW + 1) : i + 1])) for i in places
        ]
    return found


def samples_per_epoch(line: dict[str, Any]) -> float:
    """From a step's line: `samples` counts from the first epoch on, in a resumed run, too."""
    return line["samples"] / (line["epoch"] * line["steps"] + line["step"]) * line["steps"]


def in_every_evaluation(lines: list[dict[str, Any]], ending: str) -> list[str]:
    """The metrics with this ending that every evaluation with any of them has, so that a curve has one meaning."""
    found = [{name for name in line if name.endswith(ending)} for line in lines if line["stage"] == "eval"]
    return sorted(set.intersection(*filter(None, found))) if any(found) else []


def percent(values: list[float | None]) -> float | None:
    """The mean in percent; None without values, or if one is missing or was not finite."""
    known = [value for value in values if value is not None]
    return 100 * sum(known) / len(known) if known and len(known) == len(values) else None


def draw(runs: dict[str, dict[str, list[tuple[float, float]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    panels = {name: title for name, title in (PERCENT | STEPS).items() if any(name in run for run in runs.values())}
    looks, columns = styles(runs), 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = 4 * columns, 3.2 * rows + 0.4
    figure, grid = plt.subplots(rows, columns, figsize=size, constrained_layout=True, squeeze=False)
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (panel, title) in zip(grid.flat, panels.items(), strict=False):
        for name, run in runs.items():
            style: dict[str, Any] = {**looks[name], "linewidth": 1.4}
            points = run.get(panel, [])
            marker = "o" if len(points) < 20 else None
            axis.plot([x for x, _ in points], [y for _, y in points], marker=marker, markersize=3, **style)
            if panel == "R@1" and (errors := dict(run.get("R@1 standard error", []))):
                bands = [(x, y - errors[x], y + errors[x]) for x, y in points if x in errors]
                axis.fill_between(*zip(*bands, strict=True), color=style["color"], alpha=0.15, linewidth=0)
                axis.plot(*zip(*run["chance"], strict=True), color="grey", linewidth=1, linestyle=":")
            if panel == "error":
                points = run.get("minibatch", [])
                axis.plot([x for x, _ in points], [y for _, y in points], **style | {"linestyle": ":"})
        axis.set(title=title, xlabel="thousand samples", xlim=(0, None))
        axis.title.set_fontsize(10)
        if panel == "error":
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    lines = [Line2D([], [], linewidth=1.4, **look) for look in looks.values()]
    labels = [name.replace("$", r"\$") for name in runs]
    figure.legend(lines, labels, loc="outside lower center", ncols=min(len(runs), 5))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
