"""Fine-tune a pretrained model with twelve variants, and follow what it forgets.

    python examples/finetune.py
    python examples/finetune.py --icons FOLDER

A tiny model is pretrained on generated scenes, then fine-tuned on shifted ones: other colours, and short captions that
fit many images, some of them wrong. It is evaluated on held-out scenes of the first kind before the first step and
after each epoch.

With `--icons` it is pretrained on monochrome icons and fine-tuned on emoji, and evaluated on both: zero-shot
classification of monochrome icons from sets that no run saw and of the emoji of a vendor that no run saw, and retrieval
of held-out emoji of the other vendors. FOLDER/mono and FOLDER/emoji are made by `python
examples/data/make_shards.py icons --kinds mono` and `--kinds emoji` (docs/icons.md).

Logs, checkpoints, recovered statistics, `results.json` and a plot go to `finetune/`. Finished runs are not repeated.
"""

import argparse
import functools
import json
import os
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from command import Runs, end_with_trainings, evaluations, positive, results_of
from paired import shown
from palette import styles
from tqdm import tqdm

EVIDENCE = Path(__file__).parent / "evidence"
BATCH = 64
PICTURED = (
    "clip", "recovery + clip", "recovery + GCL", "recovery + HGCL", "GCL, no recovery", "HGCL, no recovery"
)  # more curves than six cannot be told apart


@dataclass(frozen=True)
class Data:
    """What to pretrain, to fine-tune and to evaluate on.

    Args:
        common: flags of the model and of the evaluation.
        pretraining: flags of the pretraining, of `first_epochs` epochs of `first_size` pairs.
        tuning: flags of the data to fine-tune on, of `size` pairs.
        metrics: name in the evaluation and title of each metric.
        title: of the plot.
        script: in place of the command itself.
        held_out: folder of zero-shot data on which every checkpoint is scored, as `HELD_OUT`.
    """

    common: str
    pretraining: str
    first_epochs: int
    first_size: int
    tuning: str
    size: int
    metrics: dict[str, str]
    title: str
    script: str | None = None
    held_out: Path | None = None


MODEL = "ViT-icons-tiny"  # of `icons`
HELD_OUT = "zeroshot-emoji-top1"
RECALLS = {"image_to_text_R@1": "R@1 image to text", "text_to_image_R@1": "R@1 text to image"}
COMMON = f"--device cpu --precision fp32 --workers 1 --batch-size {BATCH} --log-every-n-steps 5"


def scenes(size: int) -> Data:
    return Data(
        common=f"{COMMON} --model ViT-shapes-tiny --dataset-type shapes --val-num-samples 1000 "
        "--aug-cfg scale=(0.95,1.0)",
        pretraining="--loss clip --train-num-samples 20000 --lr 1e-3 --wd 0.1 --warmup 200",
        first_epochs=10,
        first_size=20_000,
        tuning=f"--shapes-shifted --shapes-seed 1 --train-num-samples {size}",
        size=size,
        metrics={"shapes-zeroshot-top1": "zero-shot accuracy", **RECALLS},
        title=f"Held-out scenes while fine-tuning on {size:,} shifted ones",
    )


def icons(folder: Path) -> Data:
    mono, emoji = (shlex.quote(str(folder / name)) for name in ("mono", "emoji"))
    shards = sorted((folder / "emoji").glob("train-*.tar"))
    sizes = json.loads((folder / "emoji" / "sizes.json").read_text())
    size = sum(sizes[shard.name] for shard in shards)
    return Data(
        common=f"{COMMON} --model {MODEL} --dataset-type webdataset --val-data {emoji}/test-000000.tar "
        f"--zeroshot-data {mono}/zeroshot-concepts",
        pretraining=f"--loss clip --train-data {mono}/train-{{000000..000009}}.tar --train-num-samples 100000 "
        "--lr 1.4e-3 --wd 0.1 --warmup 250",
        first_epochs=4,
        first_size=100_000,
        tuning=f"--train-data {emoji}/train-{{000000..{len(shards) - 1:06}}}.tar --train-num-samples {size}",
        size=size,
        metrics={
            "zeroshot-data-top1": "zero-shot accuracy, monochrome icons",
            HELD_OUT: "held-out vendor, zero-shot accuracy of its emoji",
            "image_to_text_R@10": "R@10 image to text, emoji",
            "text_to_image_R@10": "R@10 text to image, emoji",
        },
        title=f"Fine-tuning on {size:,} emoji after monochrome icons",
        script=str(EVIDENCE / "train.py"),
        held_out=folder / "emoji" / "zeroshot-emoji",
    )


# All variants use the optimizer of TuneCLIP's Table 6, at a learning rate for this model, which was pretrained at 1e-3.
OPTIMIZER = "--lr {lr} --beta1 0.9 --beta2 0.98 --wd 0.02 --warmup 0"
# "recovery + HGCL" saves the statistics that the ablations load.
SAVE, LOAD = "--osr-epochs {osr_epochs} --osr-save {state}", "--osr-load {state}"
VARIANTS = {
    "clip": "--loss clip",
    "clip, warm-up": "--loss clip --warmup {one_epoch}",
    "clip, quarter lr": "--loss clip --lr {quarter_lr}",
    "recovery + clip": "--loss clip --osr-epochs {osr_epochs}",
    "fastclip-v3": "--loss fastclip-v3 --gamma 0.9 --gamma-decay-epochs 4 --rho 5",
    "recovery + GCL": "--loss tuneclip --surrogate identity --osr-epochs {osr_epochs}",
    "recovery + HGCL": f"--loss tuneclip {SAVE}",
    "recovery with the hinge": "--loss tuneclip --osr-surrogate hinge --osr-epochs {osr_epochs}",
    "GCL, no recovery": "--loss tuneclip --surrogate identity --osr-epochs 0",
    "HGCL, moments only": f"--loss tuneclip {LOAD} --osr-transfer moments",
    "HGCL, table only": f"--loss tuneclip {LOAD} --osr-transfer table",
    "HGCL, no recovery": f"--loss tuneclip {LOAD} --osr-transfer none",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path("finetune")
    parser.add_argument("--folder", type=Path, default=folder, help=f"folder of all output (default: {folder})")
    parser.add_argument("--icons", type=Path, metavar="FOLDER", help="real data (default: generated scenes)")
    parser.add_argument("--samples", type=positive, default=4000, help="scenes to fine-tune on (default: 4000)")
    parser.add_argument("--epochs", type=positive, default=5, help="epochs of the fine-tuning (default: 5)")
    parser.add_argument("--osr-epochs", type=float, default=5, help="epochs of the statistics' recovery (default: 5)")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate of the fine-tuning (default: 1e-4)")
    parser.add_argument("--seeds", type=positive, default=3, help="fine-tunings of each variant (default: 3)")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="runs at a time (default: cores)")
    parser.add_argument("--pretrained", type=Path, help="start from this checkpoint (default: pretrain one)")
    args = parser.parse_args()
    if any("--osr-load" in VARIANTS[variant] for variant in args.variants) and "recovery + HGCL" not in args.variants:
        parser.error("--variants: the ablations load what 'recovery + HGCL' recovers; add it")
    if args.icons and not (args.icons / "emoji" / "sizes.json").exists():
        parser.error(f"--icons: {str(args.icons)!r} has no emoji/sizes.json; give the folder that make_shards wrote to")
    end_with_trainings()
    data = icons(args.icons) if args.icons else scenes(args.samples)
    pretrained = args.pretrained or pretrain(data, args)
    results = fine_tune(pretrained, data, args)
    (args.folder / "results.json").write_text(json.dumps(results, indent=1))
    report(results, data.metrics)
    draw(results, data, args)
    print(f"\nresults: {args.folder / 'results.json'}\ncurves: {args.folder / 'curves.png'}")


def pretrain(data: Data, args) -> Path:
    epochs, size = data.first_epochs, data.first_size
    with tqdm(total=epochs * size, desc="pretraining", unit=" pairs", unit_scale=True) as bar:
        experiment = Runs(args.folder / "logs", bar).train(
            "pretrained", f"{data.common} {data.pretraining}", epochs, size, script=data.script
        )
    return experiment / "checkpoints" / f"epoch_{epochs}.pt"


def fine_tune(pretrained: Path, data: Data, args) -> dict[str, list[list[dict]]]:
    """Metrics of every evaluation, by variant and seed."""
    common = f"{data.common} --pretrained {shlex.quote(str(pretrained))} {data.tuning} {OPTIMIZER.format(lr=args.lr)}"
    recovers = {variant: args.osr_epochs * ("{osr_epochs}" in flags) for variant, flags in VARIANTS.items()}
    total = args.seeds * sum(args.epochs + recovers[variant] for variant in args.variants) * data.size
    with (
        ThreadPoolExecutor(args.jobs) as pool,
        tqdm(total=round(total), desc="fine-tuning", unit=" pairs", unit_scale=True) as bar,
    ):
        runs = Runs(args.folder / "logs", bar)

        def tune(variant: str, seed: int) -> list[dict]:
            name = f"{re.sub('[ ,+]+', '-', variant).lower()}-{seed}"
            flags = VARIANTS[variant].format(
                osr_epochs=args.osr_epochs,
                state=shlex.quote(str(args.folder / f"hgcl-{seed}.state")),
                one_epoch=data.size // BATCH,
                quarter_lr=args.lr / 4,
            )
            flags = f"{common} --seed {seed} {flags}"
            folder = runs.train(name, flags, args.epochs, data.size, recovers[variant], data.script) / "checkpoints"
            metrics = evaluations(folder.parent)
            if data.held_out is not None:
                for one in metrics:
                    epoch = one["epoch"]
                    one[HELD_OUT] = accuracy(folder / f"epoch_{epoch}.pt" if epoch else pretrained, data.held_out)
            return metrics

        results = {}
        for loads in (False, True):
            chosen = [variant for variant in args.variants if ("--osr-load" in VARIANTS[variant]) == loads]
            pairs = [(variant, seed) for variant in chosen for seed in range(args.seeds)]
            for (variant, _), metrics in results_of({pair: pool.submit(tune, *pair) for pair in pairs}).items():
                results.setdefault(variant, []).append(metrics)
        return results


@functools.cache
def accuracy(checkpoint: Path, folder: Path) -> float:
    sys.path.append(str(EVIDENCE))
    import zero_shot  # imports torch, which waiting does not need

    return zero_shot.accuracy(MODEL, checkpoint, folder)


def report(results: dict[str, list[list[dict]]], metrics: dict[str, str]) -> None:
    titles = [title.partition(",")[0] for title in metrics.values()]
    print(f"\n{'percent, mean over seeds (spread)':34}" + "".join(f"{title:>26}" for title in titles))
    first = next(iter(results.values()))
    print(f"{'the pretrained model':34}" + "".join(f"{100 * first[0][0][metric]:>26.1f}" for metric in metrics))
    for variant, seeds in results.items():
        for row, (epoch, when) in enumerate([(1, "epoch 1"), (-1, "last epoch")]):
            cells = []
            for metric in metrics:
                values = [100 * evaluated[epoch][metric] for evaluated in seeds]
                spread = f" ({stdev(values):.1f})" if len(values) > 1 else ""
                cells.append(f"{mean(values):.1f}{spread}".rjust(26))
            print(f"{'' if row else variant:23}{when:11}" + "".join(cells))
    base = "clip" if "clip" in results else next(iter(results))
    print(f"\n{f'minus {base}, last epoch, by seed; 95 %':34}" + "".join(f"{title:>26}" for title in titles))
    for variant, seeds in results.items():
        if variant != base:
            pairs = list(zip(seeds, results[base], strict=True))
            cells = [shown([100 * (ours[-1][m] - theirs[-1][m]) for ours, theirs in pairs]) for m in metrics]
            print(f"{variant:34}" + "".join(f"{cell:>26}" for cell in cells))


def draw(results: dict[str, list[list[dict]]], data: Data, args) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(data.metrics), figsize=(4.6 * len(data.metrics), 4.6), constrained_layout=True)
    chosen = {variant: seeds for variant, seeds in results.items() if variant in PICTURED} or results
    for axis, (metric, title) in zip(axes, data.metrics.items(), strict=True):
        for variant, look in styles(chosen).items():
            curves = [[100 * evaluated[metric] for evaluated in run] for run in chosen[variant]]
            middle = [mean(values) for values in zip(*curves, strict=True)]
            low, high = ([f(values) for values in zip(*curves, strict=True)] for f in (min, max))
            axis.plot(range(len(middle)), middle, marker="o", markersize=3, label=variant, **look)
            axis.fill_between(range(len(middle)), low, high, color=look["color"], alpha=0.12, linewidth=0)
        axis.axhline(middle[0], color="black", linewidth=0.8, linestyle=":")
        axis.set_ylim(bottom=0)
        axis.set(title=f"{title}, %", xlabel="epochs of fine-tuning")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.suptitle(f"{data.title}; bands: {args.seeds} seeds")
    figure.savefig(args.folder / "curves.png", dpi=120)


if __name__ == "__main__":
    main()
