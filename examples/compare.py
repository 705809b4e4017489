"""Compare the methods on generated scenes, or on any data: one command for each experiment.

    python examples/compare.py methods --size small

| experiment | what is compared |
|---|---|
| methods | every method after the same number of samples, over sizes of the data set and of the batch |
| leverage | R@1 against the batch size after the same number of samples, for OpenCLIP's loss and for ours |
| neuclip | NeuCLIP's network: objective, resets, updates, size, optimizer, learning rate (tables 14-19, figure 3) |
| error | the estimators' errors against the batch size and the size of the data set (figures 2c and 4) |
| amorlip | AmorLIP's schedule, width, target network and objective (tables 2 and 3, figure 4) |

`small` is one data set size, one batch size and one seed; 12 of `methods` take 35 minutes on 2 CPU cores. `medium` is
the grid with three seeds and takes a night; `large` needs a GPU and has n / B in the thousands. The learning rate is
1e-3 at a batch of 32 and scales with the square root of the batch; warm-up takes 6,400 samples. A finished run is not
repeated, an interrupted one resumes. Results: `compare/EXPERIMENT-SIZE.json`, `.md` and `.png`.

Differences to `clip`, or without it to the first variant, are paired by seed and have 95 % intervals.

With other data, here the digits that `python examples/data/make_shards.py digits --out digits` writes:

    python examples/compare.py methods --folder compare-digits --rows 1500 --samples 48000 --data "--val-num-samples 297
        --train-data digits/train-{000000..000001}.tar --val-data digits/val-000000.tar --train-num-samples {n}"
"""

import argparse
import json
import math
import os
import re
import shlex
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

from command import Runs, end_with_trainings, evaluations, positive, results_of
from paired import shown
from palette import styles
from tqdm import tqdm

from open_clip_ext.metrics_file import read_metrics

RECIPE = (
    "--model ViT-shapes-tiny --device {device} --precision fp32 --workers 1 --wd 0.1 --lr {lr:.2e} --warmup {warmup} "
    "--log-every-n-steps 10 --aug-cfg scale=(0.95,1.0) --delete-previous-checkpoint"
)
SCENES = "--dataset-type shapes --train-num-samples {n} --val-num-samples 1000"
OURS = "--rho 5 --lr-tau 1e-3"
NETWORK = f"--loss neuclip {OURS} --npn-prototypes 1024 --npn-lr 1"  # the paper's rate, as in docs/evidence/scenes.md
PAPER = f"{NETWORK} --npn-restart-every 500"
METHODS = {
    "clip": "--loss clip",
    "siglip": "--loss siglip",
    "cyclip": "--loss cyclip",
    "minibatch": f"--loss fastclip-v3 --normalizer batch {OURS}",
    "fastclip-v3": f"--loss fastclip-v3 {OURS}",
    "fastclip-v3, gamma 0.6": f"--loss fastclip-v3 {OURS} --gamma 0.6",
    "isogclr": "--loss isogclr",
    "amorlip": "--loss amorlip --lr-tau 1e-3",
    "neuclip": NETWORK,
    "neuclip, T_r 500": PAPER,
    "neuclip, mixing 0.6": f"{NETWORK} --mixing 0.6",
    "neuclip, tau 0.05": NETWORK.replace(OURS, "--temperature fixed --tau-init 0.05"),
    "queue, compositional": f"--loss queue --encoder-objective compositional {OURS} --queue-size 1024",
    "queue": f"--loss queue {OURS} --queue-size 1024",
    # docs/neighbours.md; with what their authors' scripts leave to the data
    "scent": f"--loss scent {OURS}",
    "tempnet": "--loss tempnet",
    "drrho-clip": "--loss drrho-clip --distill-model ViT-shapes-tiny --distill-pretrained {clip}",
    "glofnd": "--loss glofnd --glofnd-share 1e-3 --glofnd-start 2",
    "nuclr": "--loss nuclr --nuclr-start 2",
}
SCRIPTS = ("glofnd", "nuclr")  # losses that are an example each
NEUCLIP = {
    "as the paper": PAPER,
    "l2-log": f"{PAPER} --npn-objective l2-log",
    "mlp": f"--loss neuclip {OURS} --normalizer mlp",
    "mlp, l2-log": f"--loss neuclip {OURS} --normalizer mlp --npn-objective l2-log",
    "joint": f"--loss neuclip {OURS} --npn-prototypes 1024 --npn-joint",
    **{f"T_r {every}": f"{NETWORK} --npn-restart-every {every}" for every in (0, 50, 2000)},
    **{f"T_u {updates}": f"{PAPER} --npn-updates {updates}" for updates in (0, 1, 30)},
    **{f"m {m}": f"{PAPER.replace('1024', str(m))}" for m in (256, 4096)},
    **{f"AdaGrad {lr}": f"{PAPER} --npn-lr {lr}" for lr in (0.3, 0.1, 0.05, 0.01)},
    **{f"Adam {lr}": f"{PAPER} --npn-opt adam --npn-lr {lr}" for lr in (0.01, 0.001)},
    "T_r 50, AdaGrad 0.05": f"{NETWORK} --npn-restart-every 50 --npn-lr 0.05",
    "T_r 50, mixing 0.6": f"{NETWORK} --npn-restart-every 50 --mixing 0.6",
    "clip": METHODS["clip"],
    "fastclip-v3": METHODS["fastclip-v3"],
}
AMORLIP = {
    "as released": "--loss amorlip --lr-tau 1e-3",
    **{f"T_online {every}": f"--loss amorlip --lr-tau 1e-3 --amor-online-every {every}" for every in (1, 32)},
    **{f"width {width}": f"--loss amorlip --lr-tau 1e-3 --mlp-width {width}" for width in (0.25, 1)},
    **{f"EMA {ema}": f"--loss amorlip --lr-tau 1e-3 --amor-ema {ema}" for ema in (0.92, 0.99)},
    **{f"beta {beta}": f"--loss amorlip --lr-tau 1e-3 --amor-beta {beta}" for beta in (0, 0.5, 1.0)},
    **{o: f"--loss amorlip --lr-tau 1e-3 --amor-objective {o}" for o in ("kl", "js")},
    "negatives alone": "--loss amorlip --lr-tau 1e-3 --amor-target negatives",
    "the paper's form": "--loss amorlip --lr-tau 1e-3 --amor-denominator target --amor-positive-weight 1",
}
SEVERAL = ["clip", "minibatch", "fastclip-v3", "neuclip", "queue"]
# By size: rows of the data set, batch sizes, samples seen, seeds.
GRIDS = {
    "small": ([8000], [32], 64_000, 1),
    "medium": ([2000, 8000, 32000], [16, 64, 256], 64_000, 3),
    "large": ([256_000], [64], 1_000_000, 1),
}
EXPERIMENTS = {
    "methods": METHODS,
    "leverage": METHODS,
    "neuclip": NEUCLIP,
    "error": METHODS,
    "amorlip": AMORLIP,
}
DEFAULTS = {"leverage": SEVERAL, "error": SEVERAL[1:]}  # without --variants; every variant in the others
BATCHES = {"leverage": [16, 32, 64, 128, 256], "error": [8, 32, 128]}
LEVEL = 35  # percent of R@1; a model that cannot tell the shapes of the scenes has at most 31
METRICS = {
    "image_to_text_R@1": "R@1 image to text, %",
    "text_to_image_R@1": "R@1 text to image, %",
    "shapes-zeroshot-top1": "zero-shot, %",
    "normalizer_mse": "error of log-normalizers",
}
DIGITS = {"normalizer_mse": 2, "tau": 3}  # one for the others


@dataclass(frozen=True)
class Cell:
    """A variant with a data set size, a batch size and a seed: one run."""

    variant: str
    n: int
    batch: int
    seed: int

    @property
    def name(self) -> str:
        return f"{re.sub('[^a-z0-9.]+', '-', self.variant.lower())}-n{self.n}-b{self.batch}-s{self.seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path("compare")
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--size", choices=GRIDS, default="small", help="how much to run (default: small)")
    parser.add_argument("--variants", nargs="+",
                        help="some of the experiment's variants (default: all; in leverage and error the main ones)")
    parser.add_argument("--data", default=SCENES, help="data flags (default: generated scenes)")
    parser.add_argument("--flags", default="", help="flags added to every run, such as --wd 0.3; they override its own")
    parser.add_argument("--rows", type=positive, nargs="+", metavar="N", help="sizes of the data (default: the grid's)")
    parser.add_argument("--batches", type=positive, nargs="+", metavar="B", help="batch sizes (default: the grid's)")
    parser.add_argument("--samples", type=positive, help="training samples of each run (default: the grid's)")
    parser.add_argument("--seeds", type=positive, help="runs of each variant (default: the grid's)")
    parser.add_argument("--device", default="cpu", help="where to train (default: cpu)")
    parser.add_argument("--folder", type=Path, default=folder, help=f"folder of all output (default: {folder})")
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="runs at a time (default: cores)")
    args = parser.parse_args()
    variants = EXPERIMENTS[args.experiment]
    if unknown := set(args.variants or ()) - set(variants):
        parser.error(f"--variants: {unknown.pop()!r} is not one of {', '.join(variants)}")
    chosen = args.variants or DEFAULTS.get(args.experiment) or list(variants)
    if "drrho-clip" in chosen and "clip" not in chosen:
        parser.error("--variants: drrho-clip needs clip, its reference")
    # In the order of the experiment: clip comes before what takes its model as a reference.
    variants = {name: flags for name, flags in variants.items() if name in chosen}

    rows, batches, samples, seeds = GRIDS[args.size]
    rows, samples, seeds = args.rows or rows, args.samples or samples, args.seeds or seeds
    batches = args.batches or BATCHES.get(args.experiment, batches)
    cells = [Cell(v, n, batch, s) for s in range(seeds) for n in rows for batch in batches for v in variants]
    end_with_trainings()
    results = train(cells, variants, samples, args)
    base = args.folder / f"{args.experiment}-{args.size}"
    base.parent.mkdir(parents=True, exist_ok=True)
    kept = [{**vars(cell), "epochs": metrics} for cell, metrics in results.items()]
    base.with_suffix(".json").write_text(json.dumps(kept, indent=1))
    text = table(results, samples)
    if args.experiment == "leverage":
        text += "\n" + leverage(results)
    base.with_suffix(".md").write_text(text)
    draw(results, args, base.with_suffix(".png"))
    print(f"\n{text}\n{base}.json, .md and .png")


def epochs_of(n: int, samples: int) -> int:
    """Whole epochs of n rows in `samples`, at least one."""
    return max(1, samples // n)


def train(cells: list[Cell], variants: dict[str, str], samples: int, args) -> dict[Cell, list[dict]]:
    """Metrics of every evaluation of every run, with tau and the mean error of the log-normalizers in its epoch."""
    total = sum(epochs_of(cell.n, samples) * cell.n for cell in cells)
    with (
        ThreadPoolExecutor(args.jobs) as pool,
        tqdm(total=total, desc=args.experiment, unit=" pairs", unit_scale=True) as bar,
    ):
        runs = Runs(args.folder / "logs", bar)

        def one(cell: Cell) -> list[dict]:
            warmup = min(6400, samples // 2) // cell.batch
            recipe = RECIPE.format(device=args.device, lr=1e-3 * math.sqrt(cell.batch / 32), warmup=warmup)
            flags = f"{recipe} {args.data.replace('{n}', str(cell.n))}"
            flags += f" --batch-size {cell.batch} --seed {cell.seed} {variants[cell.variant]} {args.flags}"
            epochs = epochs_of(cell.n, samples)
            if "{clip}" in flags:
                reference = replace(cell, variant="clip")
                jobs[reference].result()
                flags = flags.replace(
                    "{clip}", shlex.quote(str(runs.logs / reference.name / f"checkpoints/epoch_{epochs}.pt"))
                )
            script = str(Path(__file__).with_name(f"{cell.variant}.py")) if cell.variant in SCRIPTS else None
            experiment = runs.train(cell.name, flags, epochs, cell.n, script=script)
            training = read_metrics(experiment, "train")
            return [
                metrics | of_training([line for line in training if line["epoch"] + 1 == metrics["epoch"]])
                for metrics in evaluations(experiment)
            ]

        jobs: dict[Cell, Future] = {}
        for cell in cells:
            jobs[cell] = pool.submit(one, cell)
        return results_of(jobs)


def of_training(lines: list[dict]) -> dict[str, float]:
    """An epoch's last tau and its mean error of the log-normalizers, where a method has them."""
    taus, errors = ([line[key] for line in lines if key in line] for key in ("tau", "normalizer_mse"))
    return ({"tau": taus[-1]} if taus else {}) | ({"normalizer_mse": mean(errors)} if errors else {})


def runs_of(results: dict[Cell, list[dict]], **chosen) -> dict[Cell, list[dict]]:
    """The runs whose cell has the values `chosen`."""
    return {cell: epochs for cell, epochs in results.items() if chosen.items() <= vars(cell).items()}


def last(runs: dict[Cell, list[dict]], metric: str) -> list[float]:
    """The last value of a metric in every run that has it; recalls in percent."""
    factor = 1 if metric in ("normalizer_mse", "tau") else 100
    return [factor * epochs[-1][metric] for epochs in runs.values() if metric in epochs[-1]]


def recall(metrics: dict) -> float:
    """R@1 in percent, mean of both directions."""
    return 50 * (metrics["image_to_text_R@1"] + metrics["text_to_image_R@1"])


def zero_shot(metrics: dict) -> float | None:
    return 100 * metrics["shapes-zeroshot-top1"] if "shapes-zeroshot-top1" in metrics else None


def crossing(epochs: list[dict], level: float) -> float | None:
    """Epochs until R@1 reaches `level`, interpolated; None if it does not."""
    before = 0.0
    for metrics in epochs:
        now = recall(metrics)
        if now >= level:
            return metrics["epoch"] - 1 + (level - before) / (now - before)
        before = now
    return None


def table(results: dict[Cell, list[dict]], samples: int) -> str:
    """Means over the seeds, R@1 and the crossing of `LEVEL` by seed, and differences to the baseline by seed."""
    variants = {cell.variant for cell in results}
    base = "clip" if "clip" in variants else next(iter(results)).variant
    head = ["n", "batch", "variant", *METRICS.values(), "tau, last epoch", "R@1 by seed", f"R@1 - {base}"]
    head += [f"zero-shot - {base}", f"epochs to R@1 {LEVEL} %"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for n, batch, variant in dict.fromkeys((cell.n, cell.batch, cell.variant) for cell in results):
        runs = runs_of(results, n=n, batch=batch, variant=variant)
        columns = [f"{n:,}", str(batch), variant]
        for metric in (*METRICS, "tau"):
            values = last(runs, metric)
            columns.append(f"{mean(values):.{DIGITS.get(metric, 1)}f}" if values else "")
        columns.append(", ".join(f"{recall(epochs[-1]):.1f}" for epochs in runs.values()))
        for value in (recall, zero_shot):
            pairs = [(value(runs[cell][-1]), value(results[replace(cell, variant=base)][-1])) for cell in runs]
            differences = [ours - theirs for ours, theirs in pairs if ours is not None]
            columns.append(shown(differences) if differences and variant != base else "")
        crossings = [crossing(epochs, LEVEL) for epochs in runs.values()]
        columns.append(", ".join("-" if epochs is None else f"{epochs:.1f}" for epochs in crossings))
        lines.append(f"| {' | '.join(columns)} |")
    trained = sorted({epochs_of(cell.n, samples) * cell.n for cell in results})
    return f"After {' or '.join(f'{number:,}' for number in trained)} samples.\n\n" + "\n".join(lines) + "\n"


def leverage(results: dict[Cell, list[dict]]) -> str:
    """A table of batch leverage: the batch at which OpenCLIP's loss reaches our R@1, interpolated, divided by ours."""
    curves: dict[str, dict[int, float]] = {}
    for cell in results:
        runs = runs_of(results, variant=cell.variant, batch=cell.batch)
        curves.setdefault(cell.variant, {})[cell.batch] = mean(recall(epochs[-1]) for epochs in runs.values())
    base = sorted(curves.pop("clip").items()) if "clip" in curves else []
    highest = max((value for _, value in base), default=math.inf)
    header = "| variant | batch | R@1, mean of both directions, % | batch of clip with the same | leverage |"
    lines = [header, "|---|---|---|---|---|"]
    for variant, curve in curves.items():
        for batch, value in sorted(curve.items()):
            needed = next(
                (
                    b0 * (b1 / b0) ** ((value - v0) / (v1 - v0))
                    for (b0, v0), (b1, v1) in zip(base, base[1:], strict=False)
                    if v0 <= value <= v1 and v1 > v0
                ),
                None,
            )
            outside = "more than all" if value > highest else "less than all"
            text = f"{needed:.0f}" if needed else outside
            times = f"{needed / batch:.1f}" if needed else ""
            lines.append(f"| {variant} | {batch} | {value:.1f} | {text} | {times} |")
    return "\n".join(lines) + "\n"


def draw(results: dict[Cell, list[dict]], args, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [metric for metric in METRICS if any(metric in metrics[-1] for metrics in results.values())]
    variants = list(dict.fromkeys(cell.variant for cell in results))
    several = len({(cell.n, cell.batch) for cell in results}) > 1
    bars = not several and len(variants) > 12  # too many lines to tell apart
    figure, axes = plt.subplots(1, len(shown), figsize=(4.6 * len(shown), 5.2), constrained_layout=True, sharey=bars)
    for axis, metric in zip(axes, shown, strict=True):
        if bars:
            draw_bars(axis, results, variants, metric)
        else:
            draw_lines(axis, results, variants, metric, several)
        axis.set(title=METRICS[metric])
        axis.grid(alpha=0.3)
    if not bars:
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=math.ceil(len(variants) / 2))
    figure.suptitle(f"{args.experiment}, {args.size}")
    figure.savefig(path, dpi=120)


def draw_lines(axis, results: dict[Cell, list[dict]], variants: list[str], metric: str, several: bool) -> None:
    """Plot a metric by epoch, means thick and single seeds thin; with several cells, the last values by batch size, or
    by n / B if n differs, too."""
    one_n = len({cell.n for cell in results}) == 1
    for variant, look in styles(variants).items():
        style = {**look, "label": variant}
        if several:
            for n in dict.fromkeys(cell.n for cell in results):
                batches = sorted({cell.batch for cell in results if cell.n == n})
                found = {b: last(runs_of(results, n=n, batch=b, variant=variant), metric) for b in batches}
                points = [(b if one_n else n / b, mean(values)) for b, values in found.items() if values]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", markersize=3, **style)
                    if not one_n:
                        offset = {"xytext": (-3, 4), "textcoords": "offset points", "ha": "right"}
                        axis.annotate(f"n = {n:,}", points[0], fontsize=6, color=style["color"], **offset)
                style["label"] = None
        else:
            runs = list(runs_of(results, variant=variant).values())
            factor = 1 if metric == "normalizer_mse" else 100
            epochs = [m["epoch"] for m in runs[0] if metric in m]
            curves = [[factor * m[metric] for m in metrics if metric in m] for metrics in runs]
            if epochs:
                means = [mean(values) for values in zip(*curves, strict=True)]
                axis.plot(epochs, means, linewidth=2.2, **style)
                for curve in curves if len(curves) > 1 else ():
                    axis.plot(epochs, curve, color=style["color"], alpha=0.35, linewidth=0.7)
    if several:
        axis.set_xscale("log", base=2)
    axis.set_xlabel("epoch" if not several else "batch size" if one_n else "n / B")
    if metric == "normalizer_mse":
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)


def draw_bars(axis, results: dict[Cell, list[dict]], variants: list[str], metric: str) -> None:
    """Plot the last values of one cell as bars."""
    found = [last(runs_of(results, variant=variant), metric) for variant in variants]
    heights = [mean(values) if values else 0 for values in found]
    spread = [stdev(values) if len(values) > 1 else 0 for values in found]
    # Reversed, since bars are drawn from the bottom up.
    axis.barh(variants[::-1], heights[::-1], xerr=spread[::-1] if any(spread) else None, color="#2a6f97")
    axis.set_axisbelow(True)
    if metric == "normalizer_mse":
        axis.set_xscale("log")
    else:
        axis.set_xlim(0, 100)


if __name__ == "__main__":
    main()
