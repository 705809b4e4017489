"""TuneCLIP against interpolated weights (WiSE-FT): what is kept of the old kind at the same knowledge of the new.

    python examples/finetune.py --icons kinds --folder finetune-icons --epochs 2 --osr-epochs 2 --variants \
        clip "recovery + GCL" "recovery + HGCL"
    python examples/evidence/interpolate.py --icons kinds --folder finetune-icons

The weights of each run's end are interpolated with those of the pretrained model at nine shares, and scored on the old
kind (zero-shot accuracy) and on the new (R@10, mean of both directions). Two comparisons with Holm's correction, paired
by seed and declared before the first score: the old kind's accuracy of recovery + GCL, and of recovery + HGCL, less the
best of `clip` interpolated that has at least the same R@10 of the new kind, along straight lines between the shares.

Finished scores are not repeated. All go to interpolated.jsonl beside this file, from where they are read without
`--icons`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

from grid import HERE

sys.path.append(str(HERE.parent))
from paired import holm, p_values, shown
from palette import styles

ALPHAS = [number / 8 for number in range(9)]
OURS = ("recovery + GCL", "recovery + HGCL")
NAMES = {"clip": "clip", "recovery + GCL": "recovery-gcl", "recovery + HGCL": "recovery-hgcl"}  # folders of the runs
Curve = list[tuple[float, float]]  # (new, old) in percent at each of ALPHAS
Curves = dict[str, dict[int, Curve]]  # by variant and seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--icons", type=Path, help="folder of mono/ and emoji/, as for finetune.py")
    parser.add_argument("--folder", type=Path, default=Path("finetune-icons"), help="--folder of finetune.py")
    parser.add_argument("--results", type=Path, default=HERE / "interpolated.jsonl", help="(default: beside this file)")
    parser.add_argument("--plot", type=Path, default=Path("interpolated.png"), help="(default: interpolated.png)")
    args = parser.parse_args()
    if args.icons:
        runs = [
            (variant, end.parts[-3].removeprefix(f"{name}-"), end)
            for variant, name in NAMES.items()
            for end in sorted((args.folder / "logs").glob(f"{name}-[0-9]/checkpoints/epoch_2.pt"))
        ]
        if not runs:
            parser.error(f"--folder: {str(args.folder)!r} has no logs/clip-0; give the folder that finetune.py wrote")
        lines = [
            {"variant": variant, "seed": int(seed), "alpha": alpha, "new": new, "old": old}
            for variant, seed, end in runs
            for alpha, (new, old) in zip(ALPHAS, score(args, end), strict=True)
        ]
        args.results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = read_curves(args.results)
    print("\n".join(report(curves)))
    draw(curves, args.plot)


def read_curves(path: Path) -> Curves:
    found: Curves = {}
    for line in map(json.loads, path.read_text().splitlines()):
        found.setdefault(line["variant"], {}).setdefault(line["seed"], []).append((line["new"], line["old"]))
    return found


def score(args: argparse.Namespace, end: Path) -> Curve:
    """The scores of one run's weights at each share."""
    start = args.folder / "logs" / "pretrained" / "checkpoints" / "epoch_4.pt"
    out = args.folder / "interpolated" / end.parts[-3]
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "open_clip_ext.evaluate", "--checkpoint", str(end), "--interpolate", str(start)]
    command += ["--alphas", ",".join(map(str, ALPHAS)), "--device", "cpu", "--workers", "0", "--out", str(out)]
    command += ["--zeroshot-data", str(args.icons / "mono" / "zeroshot-concepts")]
    command += ["--val-data", str(args.icons / "emoji" / "test-000000.tar")]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        sys.exit(2)
    return [read(next(out.glob(f"*@{alpha:g}.jsonl"))) for alpha in ALPHAS]


def read(path: Path) -> tuple[float, float]:
    metrics: dict[str, float] = {}
    for line in path.read_text().splitlines():
        metrics |= json.loads(line)["metrics"]
    recalls = [metrics[f"{way}_retrieval_recall@10"] for way in ("text", "image")]
    return 50 * sum(recalls), 100 * metrics["acc1"]


def best_old(curve: Curve, new: float) -> float:
    """The largest accuracy of the old kind on the curve where it has at least `new` of the new kind."""
    found = [old for ours, old in curve if ours >= new]
    for (x0, y0), (x1, y1) in zip(curve, curve[1:], strict=False):
        if min(x0, x1) <= new <= max(x0, x1) and x0 != x1:
            found.append(y0 + (y1 - y0) * (new - x0) / (x1 - x0))
    return max(found)


def differences(curves: Curves, variant: str) -> list[float]:
    """Old accuracy of the variant's end less the best of clip interpolated at no less of the new kind, by seed."""
    ends = {seed: curve[-1] for seed, curve in curves[variant].items()}
    return [old - best_old(curves["clip"][seed], new) for seed, (new, old) in sorted(ends.items())]


def report(curves: Curves) -> list[str]:
    lines = ["| share of the fine-tuned weights | " + " | ".join(f"{alpha:g}" for alpha in ALPHAS) + " |"]
    lines.append("|---|" + "---|" * len(ALPHAS))
    for variant, runs in curves.items():
        for kind, place in (("old", 1), ("new", 0)):
            cells = [f"{mean(point[place] for point in points):.1f}" for points in zip(*runs.values(), strict=True)]
            lines.append(f"| {variant}: {kind} | " + " | ".join(cells) + " |")
    found = {variant: differences(curves, variant) for variant in OURS if len(curves.get(variant, {})) > 1}
    plain = [p_values([values])[0] for values in found.values()]
    for (variant, values), p in zip(found.items(), holm(plain, len(OURS)), strict=True):
        told = ", ".join(f"{value:+.1f}" for value in values)
        lines.append(f"{variant} less clip interpolated, old kind: {shown(values)} (p {p:.3f}; by seed {told})")
    return lines


def draw(curves: Curves, path: Path) -> None:
    """Draw the old kind against the new along the shares: thick the means, thin the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4.4), constrained_layout=True)
    for variant, look in styles(curves).items():
        runs = curves[variant].values()
        middle = [tuple(map(mean, zip(*points, strict=True))) for points in zip(*runs, strict=True)]
        for curve in runs:
            axis.plot(*zip(*curve, strict=True), linewidth=0.6, alpha=0.5, **look)
        axis.plot(*zip(*middle, strict=True), linewidth=2.2, marker="o", markersize=3, label=variant, **look)
        axis.plot(*middle[-1], marker="*", markersize=15, color=look["color"])
    axis.set(xlabel="new kind: R@10 on emoji, %", ylabel="old kind: zero-shot accuracy, %")
    axis.set(xlim=(0, None), ylim=(0, None))
    axis.set_title("From the pretrained weights to the fine-tuned (stars)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
