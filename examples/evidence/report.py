"""Write tables and a plot of the grid's results.

    python examples/evidence/report.py --out evidence

writes evidence.md and evidence.png; of a grid that declares its comparisons, evidence.md with their tables alone.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from grid import HERE, WAYS, Grid, last_recall, read_results, recall, told, tuning_value

sys.path.append(str(HERE.parent))
from paired import LEAST, holm, interval, p_values
from paired import difference as tested
from palette import styles

LEVELS = (2, 4, 8)  # percent of R@1
BY_RULE = "fastclip-v3, gamma by rule"
PAIRS = (
    ("neuclip", "clip"), ("fastclip-v3", "clip"), ("queue, unified", "clip"), ("neuclip", "fastclip-v3"),
    ("queue, unified", "neuclip"), ("queue, unified", "fastclip-v3"), ("neuclip", "clip, slow tau"),
    ("minibatch", "clip"), ("fastclip-v3", "minibatch"), ("neuclip", "minibatch"), ("queue, unified", "minibatch"),
    (BY_RULE, "clip"), (BY_RULE, "fastclip-v3"), (BY_RULE, "minibatch"), ("neuclip", BY_RULE),
    ("queue, unified", BY_RULE),
)  # fmt: skip
CURVES = ("clip", "clip, batch 256", "minibatch", "fastclip-v3", "neuclip", "queue, unified")  # drawn before others
MOST_CURVES, MOST_ROWS = 6, 8
HEADER = (
    "method", "settings", "temperature", "seeds", "R@1, %", "image to text, text to image",
    "against clip, paired by seed", "zero-shot concepts, %", "against clip, paired by seed", "zero-shot emoji, %",
    "tau, last epoch",
    *(f"steps to {level} %" for level in LEVELS), "CPU hours",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, default=HERE / "grid.yaml", help="(default: beside this file)")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl", help="(default: beside this file)")
    parser.add_argument("--out", type=Path, default=Path("evidence"), help="name without suffix (default: evidence)")
    parser.add_argument("--cells", nargs="+", metavar="CELL", help="only these (default: all)")
    args = parser.parse_args()
    if not args.out.parent.is_dir():
        parser.error(f"--out: there is no folder {str(args.out.parent)!r}")
    with told(parser):
        grid, results = Grid(args.grid), list(read_results(args.results).values())
    if grid.comparisons:
        text = progress(grid, results) + scores(grid, results) + declared(grid, results) + tuning(grid, results)
        Path(f"{args.out}.md").write_text(text)
        return print(text)
    known = [cell for cell in grid.cells if cell != "tune"]
    if unknown := sorted(set(args.cells or known) - set(known)):
        parser.error(f"--cells: {unknown[0]!r} is not one of {', '.join(known)}")
    cells = {cell: by_method(results, grid, cell) for cell in args.cells or known}
    cells = {cell: methods for cell, methods in cells.items() if methods}
    text = progress(grid, results) + "\n"
    text += "\n".join(table(grid, cell, methods) for cell, methods in cells.items())
    text += goals(grid, cells.get("main", {})) + tuning(grid, results)
    Path(f"{args.out}.md").write_text(text)
    if cells:
        draw(grid, cells, Path(f"{args.out}.png"))
    print(text)


def progress(grid: Grid, results: list[dict]) -> str:
    """A table of the cells and how many of their declared runs are done."""
    done = {result["run"] for result in results}
    lines = ["| cell | rows | epochs | methods | runs done | hours, estimated |\n|---|---|---|---|---|---|"]
    for cell, about in grid.cells.items():
        runs = [run for run in grid.runs if run.cell == cell]
        if runs:
            finished = sum(run.name in done for run in runs)
            methods, hours = len({run.method for run in runs}), sum(map(grid.hours, runs))
            size = f"{about['rows']:,} | {about['epochs']} | {methods}"
            lines.append(f"| `{cell}` | {size} | {finished} of {len(runs)} | {hours:.1f} |")
    return "\n".join(lines) + "\n"


def by_method(results: list[dict], grid: Grid, cell: str) -> dict[str, dict[int, dict]]:
    """The results of a cell by method, in the grid's order, and seed."""
    found = {
        method: {result["seed"]: result for result in results if (result["cell"], result["method"]) == (cell, method)}
        for method in grid.methods
    }
    return {method: seeds for method, seeds in found.items() if seeds}


def concepts(result: dict) -> float:
    """Zero-shot accuracy on the concepts, in percent; 0 for a run that diverged."""
    return 100 * result["zero_shot"].get("zeroshot-concepts", 0.0)


MEASURES = {
    "R@1": last_recall, "R@10": partial(last_recall, k=10), "zero-shot": concepts,
    "zero-shot, characters": lambda result: 100 * result["zero_shot"].get("zeroshot-characters", 0.0),
    "R@10, new": partial(last_recall, k=10), "R@10, old": lambda result: result["old_R@10"], "zero-shot, old": concepts,
    "tau, last epoch": lambda result: result["tau"], "CPU seconds": lambda result: result["cpu_seconds"],
    "peak, MiB": lambda result: result["peak_mib"],
    "mean rank": lambda result: mean(result["by_epoch"][-1][f"{way}_mean_rank"] for way in WAYS),
}  # fmt: skip
FORMS = {"tau, last epoch": ".3f", "CPU seconds": ".0f", "peak, MiB": ",.0f"}


def paired(
    runs: dict[int, dict], base: dict[int, dict], value: Callable[[dict], float] = last_recall
) -> tuple[float, float | None, int] | None:
    """Mean difference of `value` over the common seeds, half of its 95 % interval (None below `LEAST`), number."""
    differences = by_seed(runs, base, value)
    return (*interval(differences), len(differences)) if differences else None


def by_seed(runs: dict[int, dict], base: dict[int, dict], value: Callable[[dict], float]) -> list[float]:
    """The differences of `value` over the common seeds."""
    return [value(runs[seed]) - value(base[seed]) for seed in sorted(runs.keys() & base.keys())]


def crossing(result: dict, level: float) -> float | None:
    """Samples after which R@1 first reaches `level`, interpolated between epochs; None if it does not."""
    before = 0.0
    for metrics in result["by_epoch"]:
        now = recall(metrics)
        if now >= level:
            return result["rows"] * (metrics["epoch"] - 1 + (level - before) / (now - before))
        before = now
    return None


def table(grid: Grid, cell: str, methods: dict[str, dict[int, dict]]) -> str:
    about = grid.cells[cell]
    lines = [
        f"## {cell}: n = {about['rows']:,}, {about['epochs']} epochs, batch {grid.batch}\n",
        f"R@1 on the {about['gallery']} gallery, mean of both directions; steps are of 32 samples.\n",
        f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}",
    ]
    for method, seeds in methods.items():
        runs = list(seeds.values())
        both = [f"{mean(last_recall(run, (way,)) for run in runs):.1f}" for way in WAYS]
        base = baseline(grid, method)
        against = [difference(paired(seeds, methods.get(base, {}), value)) for value in (last_recall, concepts)]
        if base not in (None, "clip"):
            against = [found and f"{found}, against {grid.label(base)}" for found in against]
        emoji = [run["zero_shot"].get("zeroshot-emoji") for run in runs]
        crossings = [[crossing(run, level) for run in runs] for level in LEVELS]
        columns = [
            grid.label(method),
            f"`{runs[0]['candidate']}`",
            grid.methods[method]["tau"],
            str(len(runs)) + "".join(f", {run['seed']} diverged" for run in runs if run["diverged"]),
            f"{mean(map(last_recall, runs)):.1f}",
            ", ".join(both),
            against[0],
            f"{mean(map(concepts, runs)):.1f}",
            against[1],
            average([value and 100 * value for value in emoji], ".1f"),
            average([run["tau"] for run in runs], ".4f"),
            *(average([samples and samples / 32 for samples in some], ",.0f") for some in crossings),
            average([run["cpu_seconds"] and run["cpu_seconds"] / 3600 for run in runs], ".2f"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def baseline(grid: Grid, method: str) -> str | None:
    """The method that a method is compared with."""
    return None if method == "clip" else grid.methods[method].get("against", "clip")


def compared(grid: Grid, cell: str, methods: dict[str, dict[int, dict]]) -> list[tuple[str, str]]:
    """The pairs of methods whose differences are drawn: each and its baseline, in the cell main also `PAIRS`.

    Where some have `LEAST` seeds in common only these, which have an interval.
    """
    pairs = [(method, base) for method in methods if (base := baseline(grid, method)) is not None]
    pairs += [pair for pair in PAIRS if cell == "main" and pair[0] in methods and pair not in pairs]
    seeds = {pair: len(methods[pair[0]].keys() & methods.get(pair[1], {}).keys()) for pair in pairs}
    least = LEAST if any(n >= LEAST for n in seeds.values()) else 2
    return [pair for pair in pairs if seeds[pair] >= least]


def goals(grid: Grid, methods: dict[str, dict[int, dict]]) -> str:
    """The differences between the main methods in the cell main, as far as both have run.

    p is Student's, with Holm's correction over all differences of the table from three seeds or more.
    """
    found = {
        (pair, value): by_seed(*(methods.get(method, {}) for method in pair), value)
        for pair in PAIRS
        for value in (last_recall, concepts)
    }
    several = [key for key, differences in found.items() if len(differences) >= LEAST]
    p = dict(zip(several, p_values([found[key] for key in several]), strict=True))
    lines = ["\n## main: differences, paired\n", f"| methods | R@1 | p | zero-shot concepts | p |\n|{'---|' * 5}"]
    for pair in PAIRS:
        if not found[pair, last_recall]:
            continue
        columns = []
        for value in (last_recall, concepts):
            differences = found[pair, value]
            columns.append(difference((*interval(differences), len(differences))))
            columns.append(f"{p[pair, value]:.4f}" if (pair, value) in p else "")
        ours, theirs = map(grid.label, pair)
        lines.append(f"| `{ours}` - `{theirs}` | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def scores(grid: Grid, results: list[dict]) -> str:
    """Tables of the scores of the methods with `LEAST` seeds, for cells with declared comparisons."""
    tables: dict[tuple[str, ...], list[str]] = {}
    for cell in dict.fromkeys(about["cell"] for about in grid.comparisons.values()):
        measures, others = measured(grid, cell)
        lines = tables.setdefault((*(f"{name}, %" for name in measures), *others), [])
        for method, seeds in by_method(results, grid, cell).items():
            if len(seeds) < LEAST:
                continue
            means = [average(list(map(MEASURES[name], seeds.values())), FORMS.get(name, ".1f"))
                     for name in (*measures, *others)]  # fmt: skip
            lines.append(f"| `{cell}` | {grid.label(method)} | {len(seeds)} | {' | '.join(means)} |")
    return "".join(table_of(("cell", "run", "seeds", *names), lines) for names, lines in tables.items())


def measured(grid: Grid, cell: str) -> tuple[Sequence[str], Sequence[str]]:
    """The measures of a cell, and what its table has beside them."""
    about = grid.cells[cell]
    return about.get("measures", ("R@1", "R@10", "zero-shot")), about.get("beside", ("tau, last epoch",))


def table_of(header: Sequence[str], lines: list[str]) -> str:
    return "\n".join(["", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *lines]) + "\n"


def declared(grid: Grid, results: list[dict]) -> str:
    """Tables of the declared comparisons whose methods have `LEAST` seeds in common.

    p is Student's over the pairs of seeds, or Welch's, with Holm's correction for the size of the whole family: in each
    measure, or over all its measures if it says `over measures`.
    """
    tables: dict[tuple[str, ...], list[str]] = {}
    for family, about in grid.comparisons.items():
        methods = by_method(results, grid, about["cell"])
        measures = tuple(grid.cells[about["cell"]].get("measures", ("R@1", "zero-shot")))
        rows = []
        for pair in about["pairs"]:
            ours, theirs = (methods.get(method, {}) for method in pair)
            seeds, paired_by_seed = sorted(ours.keys() & theirs.keys()), grid.unpaired.isdisjoint(pair)
            seeds = [seed for seed in seeds if seed in about.get("seeds", seeds)]
            if len(seeds) >= LEAST:
                names = " - ".join(f"`{grid.label(method)}`" for method in pair)
                found = [
                    tested(*([MEASURES[name](runs[seed]) for seed in seeds] for runs in (ours, theirs)), paired_by_seed)
                    for name in measures
                ]
                rows.append((names, f"{len(seeds)}, {'paired' if paired_by_seed else 'Welch'}", found))
        columns = [[p for _, _, p in column] for column in zip(*(row[2] for row in rows), strict=True)]
        groups = [sum(columns, [])] if about.get("over measures") else columns
        p_of = [p for some in groups for p in holm(some, len(about["pairs"]) * len(measures) // len(groups))]
        lines = tables.setdefault(measures, [])
        for number, (names, how, found) in enumerate(rows):
            corrected = zip(found, p_of[number :: len(rows)], strict=True)
            told = [f"{value:+.1f} ± {half:.1f}, p {p:.4f}" for (value, half, _), p in corrected]
            lines.append(f"| {family} | {names} | {how} | {' | '.join(told)} |")
    return "".join(table_of(("family", "runs", "seeds", *measures), lines) for measures, lines in tables.items())


def difference(found: tuple[float, float | None, int] | None) -> str:
    if not found:
        return ""
    value, half, n = found
    return f"{value:+.1f}" + ("" if half is None else f" ± {half:.1f}") + (f", {n} seeds" if n > 1 else ", one seed")


def average(values: list[float | None], form: str) -> str:
    """The mean of the values that are not None, with their number if some are."""
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    return f"{mean(there):{form}}" + (f" ({len(there)} of {len(values)})" if len(there) < len(values) else "")


def tuning(grid: Grid, results: list[dict]) -> str:
    """A table of all tuning runs, each method's best in bold."""
    about = grid.cells["tune"]
    lines = [
        f"\n## Tuning: n = {about['rows']:,}, {about['epochs']} epochs, {about['gallery']} gallery\n",
        "| method | flags | mean of R@1 and R@5, % | R@1, % | tau, last epoch |\n|---|---|---|---|---|",
    ]
    for method in grid.methods:
        tried = [result for result in results if result["cell"] == "tune" and result["method"] == method]
        best = max(map(tuning_value, tried), default=0)
        for result in tried:
            value = f"{tuning_value(result):.1f}" + (", diverged" if result["diverged"] else "")
            shown = f"**{value}**" if tuning_value(result) == best else value
            last = f"{last_recall(result):.1f} | {average([result['tau']], '.4f')}"
            lines.append(f"| {grid.label(method)} | `{result['candidate']}` | {shown} | {last} |")
    return "\n".join(lines) + "\n"


def draw(grid: Grid, cells: dict[str, dict[str, dict[int, dict]]], path: Path) -> None:
    """Plot for each cell a few curves, of methods with three seeds if there are, and the differences between them with
    their intervals; more cannot be told apart."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(cells), 3, figsize=(11, 4.2 * len(cells)), constrained_layout=True, squeeze=False, width_ratios=(5, 3, 3)
    )
    for (cell, methods), (left, *rights) in zip(cells.items(), axes, strict=True):
        about = grid.cells[cell]
        often = {method: seeds for method, seeds in methods.items() if len(seeds) > 2} or methods
        first = sorted(often, key=lambda method: method not in CURVES)[:MOST_CURVES]
        shown = {method: seeds for method, seeds in often.items() if method in first}
        style = styles(map(grid.label, shown))
        for method, seeds in shown.items():
            curves = [[0.0, *map(recall, run["by_epoch"])] for run in seeds.values() if not run["diverged"]]
            if curves:
                name, epochs = grid.label(method), list(zip(*curves, strict=True))
                left.plot(range(len(epochs)), list(map(mean, epochs)), label=name, linewidth=2, **style[name])
                low, high = (list(map(bound, epochs)) for bound in (min, max))
                left.fill_between(range(len(epochs)), low, high, color=style[name]["color"], alpha=0.12, linewidth=0)
        pairs = [pair for pair in compared(grid, cell, methods) if set(pair) <= shown.keys()][:MOST_ROWS]
        for right, value, name in zip(rights, (last_recall, concepts), ("R@1", "zero-shot accuracy"), strict=True):
            for method, base in pairs:
                center, half, _ = paired(methods[method], methods[base], value)
                ours, theirs = grid.label(method), grid.label(base)
                color = style[ours]["color"]
                right.errorbar(center, f"{ours}\n- {theirs}", xerr=half, fmt="o", capsize=3, color=color)
            right.axvline(0, color="gray", linewidth=0.8)
            right.invert_yaxis()
            right.set(title=name, xlabel="difference in points, 95 %")
            right.grid(alpha=0.3)
        rights[-1].set_yticklabels([])
        left.set(title=f"{cell}: {about['rows']:,} pairs, batch {grid.batch}", ylim=(0, None))
        left.set(xlabel="epoch (bands: range of the seeds)", ylabel=f"R@1 on the {about['gallery']} gallery, %")
        left.xaxis.get_major_locator().set_params(integer=True)
        left.grid(alpha=0.3)
        left.legend(loc="upper left")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
