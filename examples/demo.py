"""Train with NeuCLIP and with OpenCLIP's own loss on the same generated pairs; compare retrieval and zero-shot scores.

    make demo

It uses two processes on the CPU and takes about 5 minutes on 2 cores. Shards, logs, checkpoints, scores and plots go to
`demo/`. A second run starts over.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from command import end_with_trainings, evaluations, positive, run
from tqdm import tqdm

# The papers' settings are for a hundred thousand steps and millions of pairs. A few hundred steps need a larger
# learning rate of the temperature and a smaller one of the network.
LOSSES = {
    "neuclip": "--loss neuclip --npn-prototypes 512 --npn-restart-every 50 --npn-lr 0.05 --rho 5 --lr-tau 5e-3",
    "clip": "--loss clip",
}
MAKE_SHARDS = Path(__file__).with_name("data") / "make_shards.py"
MARK = ".demo"  # in a folder that a demo has made; a second one removes its runs and scores
RECIPE = (
    "--model ViT-shapes-tiny --device {device} --precision {precision} --workers 1 --batch-size {batch} "
    "--epochs {epochs} --lr 2e-3 --wd 0.1 --warmup 30 --dataset-type webdataset --log-every-n-steps 5 "
    "--aug-cfg scale=(0.95,1.0)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="folder of all output (default: demo)")
    parser.add_argument("--samples", type=positive, default=6000, help="training pairs (default: 6000)")
    parser.add_argument("--epochs", type=positive, default=7)
    parser.add_argument("--batch", type=positive, default=64, help="pairs per process and step (default: 64)")
    parser.add_argument("--processes", type=positive, default=2)
    parser.add_argument("--device", default="cpu", help="as OpenCLIP's flag (default: cpu)")
    parser.add_argument("--precision", default="fp32", help="as OpenCLIP's flag (default: fp32)")
    args = parser.parse_args()
    mark = args.folder / MARK
    if args.folder.exists() and any(args.folder.iterdir()) and not mark.exists():
        parser.error(f"--folder: {str(args.folder)!r} has files, and not from this demo; give another folder")
    args.folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    end_with_trainings()

    shards = make_data(args)
    results = {name: train(name, flags, shards, args) for name, flags in LOSSES.items()}
    picture = args.folder / "curves.png"
    draw(results, args, picture)

    print(f"\nR@1 over 1000 held-out pairs after {args.samples * args.epochs:,} samples:")
    for name, epochs in results.items():
        last = epochs[-1]
        image, text = last["image_to_text_R@1"], last["text_to_image_R@1"]
        print(f"  {name:8} image to text {100 * image:5.1f} %   text to image {100 * text:5.1f} %")
    score(args)
    print()
    for name in LOSSES:
        experiment = args.folder / "logs" / name
        print(f"{name}: log {experiment}/out.log, checkpoint {experiment}/checkpoints/epoch_{args.epochs}.pt")
    print(f"curves: {picture}")


def make_data(args) -> dict[str, str]:
    folder = args.folder / "shards"
    for name in LOSSES:
        shutil.rmtree(args.folder / "logs" / name, ignore_errors=True)
    print(f"Writing {args.samples} generated pairs as webdataset shards to {folder}", flush=True)
    command = [sys.executable, str(MAKE_SHARDS), "shapes", "--out", str(folder)]
    sizes = ["--num-samples", str(args.samples), "--val-samples", "1000", "--image-size", "48"]
    subprocess.run([*command, *sizes, "--overwrite"], check=True, stdout=subprocess.DEVNULL)
    last = {split: max(folder.glob(f"{split}-*.tar")).stem.split("-")[1] for split in ("train", "val")}
    return {split: f"{folder}/{split}-{{000000..{number}}}.tar" for split, number in last.items()}


def train(name: str, flags: str, shards: dict[str, str], args) -> list[dict]:
    """Run the command and show its progress; return the metrics of every epoch."""
    logs = args.folder / "logs"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.processes)]
    # Without the --, torchrun takes --logs for an abbreviation of its own flags.
    command += ["-m", "--", "open_clip_ext.main", *flags.split()]
    command += RECIPE.format(**vars(args)).split()
    command += ["--train-data", shards["train"], "--val-data", shards["val"], "--val-num-samples", "1000"]
    command += ["--logs", str(logs), "--name", name]
    print(f"\ntorchrun {' '.join(command[3:])}", flush=True)
    with tqdm(total=args.samples * args.epochs, desc=name, unit=" pairs", unit_scale=True) as bar:

        def show(line: dict) -> None:
            bar.set_postfix(epoch=line["epoch"], tau=f"{line['tau']:.3g}", refresh=False)
            bar.update(round((line["epoch"] + line["step"] / line["steps"]) * args.samples) - bar.n)

        run(command, logs / name, show)
    return evaluations(logs / name)


def score(args) -> None:
    """Score both models on a folder of tasks in DataComp's format; the command prints a table."""
    folder = args.folder / "evalset"
    shutil.rmtree(args.folder / "scores", ignore_errors=True)
    checkpoints = [str(args.folder / "logs" / name / "checkpoints" / f"epoch_{args.epochs}.pt") for name in LOSSES]
    make = [str(MAKE_SHARDS), "evalset", "--out", str(folder), "--overwrite"]
    evaluate = ["-m", "open_clip_ext.evaluate", "--checkpoint", *checkpoints, "--data", str(folder), "--device", "cpu"]
    evaluate += ["--out", str(args.folder / "scores")]
    for command in (make, evaluate):
        print(f"\npython {' '.join(command)}", flush=True)
        subprocess.run([sys.executable, *command], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def draw(results: dict[str, list[dict]], args, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, constrained_layout=True)
    sides = {"image_to_text_R@1": "image to text", "text_to_image_R@1": "text to image"}
    for axis, (metric, title) in zip(axes, sides.items(), strict=True):
        for name, epochs in results.items():
            seen = [epoch["epoch"] * args.samples / 1000 for epoch in epochs]
            axis.plot(seen, [100 * epoch[metric] for epoch in epochs], marker="o", label=name)
        axis.set(title=title, xlabel="samples seen (thousands)", xlim=(0, None), ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("R@1 over 1000 held-out pairs, %")
    axes[0].legend()
    figure.suptitle(f"Generated scenes, {args.samples:,} pairs, batch {args.batch * args.processes}")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
