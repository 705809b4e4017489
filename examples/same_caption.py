"""Captions that repeat: R@1 with and without --same-caption, on generated scenes of 480 captions.

    python examples/same_caption.py

A caption names two objects of four shapes and four colours, and which is to the left of or above the other; 4,000
pictures share 480 of them, so that in a batch of 64 every eighth anchor meets another picture of its caption among the
negatives. Evaluated on one held-out picture of each caption, so that R@1 counts no true caption as wrong. Everything
goes to `same-caption/`; what is there already is not run again.
"""

import argparse
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from statistics import mean

from command import Runs, end_with_trainings, evaluations, positive, results_of
from tqdm import tqdm

from open_clip_ext.data.scenes import RELATIONS, Scene, describe_scene

SHAPES, COLOURS = ("circle", "square", "star", "cross"), ("red", "green", "blue", "yellow")
CAPTIONS = 16 * 15 * 2
MODEL = (
    "--model ViT-shapes-tiny --device cpu --precision fp32 --workers 1 --batch-size 64 --lr 1.4e-3 --wd 0.1 "
    "--warmup 100 --log-every-n-steps 10 --aug-cfg scale=(0.95,1.0) --delete-previous-checkpoint"
)
METRICS = ("image_to_text_R@1", "text_to_image_R@1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path("same-caption")
    parser.add_argument("--folder", type=Path, default=folder, help=f"where everything goes (default: {folder})")
    parser.add_argument("--pictures", type=positive, default=4000, help="to train on (default: 4000)")
    parser.add_argument("--epochs", type=positive, default=8, help="of each run (default: 8)")
    parser.add_argument("--seeds", type=positive, default=2, help="runs of each variant (default: 2)")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--loss", default="fastclip-v3 --rho 5", help="with its flags (default: fastclip-v3 --rho 5)")
    args = parser.parse_args()
    end_with_trainings()
    data = write_pictures(args.folder / f"data-{args.pictures}", args.pictures)
    variants = {"as they are": "", "--same-caption": "--same-caption"}
    cells = [(name, seed) for seed in range(args.seeds) for name in variants]
    with (
        ThreadPoolExecutor(args.jobs) as pool,
        tqdm(total=len(cells) * args.epochs * args.pictures, unit=" pairs", unit_scale=True) as bar,
    ):
        runs = Runs(args.folder / "logs", bar)

        def one(name: str, seed: int) -> list[float]:
            flags = f"{MODEL} {data} --val-frequency {args.epochs} --loss {args.loss} {variants[name]} --seed {seed}"
            run = f"{args.loss.split()[0]}{variants[name].replace('--', '-')}-s{seed}"
            last = evaluations(runs.train(run, flags, args.epochs, args.pictures))[-1]
            return [100 * last[metric] for metric in METRICS]

        results = results_of({cell: pool.submit(one, *cell) for cell in cells})
    print("\n| captions that repeat | " + " | ".join(METRICS) + " | mean of both, each seed |\n|---|---|---|---|")
    for name in variants:
        seeds = [results[name, seed] for seed in range(args.seeds)]
        columns = [f"{mean(values):.1f}" for values in zip(*seeds, strict=True)]
        print(f"| {name} | {' | '.join(columns)} | {', '.join(f'{mean(both):.1f}' for both in seeds)} |")


def write_pictures(folder: Path, pictures: int) -> str:
    """Write both sets unless they are there; the flags of the data."""
    train, held_out = folder / "train.csv", folder / "val.csv"
    if not held_out.exists():
        (folder / "images").mkdir(parents=True, exist_ok=True)
        lines: list[str] = []
        one_each: dict[str, str] = {}
        for row, scene in tqdm(scenes(), desc="drawing", unit=" scenes"):
            caption = f"a {scene.first.name} {RELATIONS[scene.relation]} a {scene.second.name}"
            line = f"{folder.absolute()}/images/{row}.png\t{caption}"
            if len(lines) < pictures:
                lines.append(line)
            elif caption not in one_each:
                one_each[caption] = line
            else:
                continue
            scene.render(48).save(folder / "images" / f"{row}.png")
            if len(one_each) == CAPTIONS:
                break
        for path, chosen in ((train, lines), (held_out, one_each.values())):
            path.write_text("\n".join(["filepath\ttitle", *chosen]) + "\n")
    train_data, val_data = (shlex.quote(str(path.absolute())) for path in (train, held_out))
    return f"--train-data {train_data} --val-data {val_data}"


def scenes() -> Iterator[tuple[int, Scene]]:
    for row in count():
        scene = describe_scene(0, row)
        things = (scene.first, scene.second)
        if scene.relation in ("left", "above") and all(t.shape in SHAPES and t.colour in COLOURS for t in things):
            yield row, scene


if __name__ == "__main__":
    main()
