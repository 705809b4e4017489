"""The command `open_clip_ext.evaluate`: its flags and its steps."""

import argparse
import logging
import os
from argparse import Namespace
from collections.abc import Mapping
from typing import NoReturn

import open_clip
import torch
import torch.distributed as dist
from open_clip_train.distributed import init_distributed_device

from open_clip_ext import MODEL_CONFIGS
from open_clip_ext.errors import InputError
from open_clip_ext.files import whole_file
from training_ext.evaluation.aggregates import averages
from training_ext.evaluation.inference import Encoder
from training_ext.evaluation.models import load_model
from training_ext.evaluation.pictures import draw_comparison, write_confusion
from training_ext.evaluation.plan import ALPHAS, LINES, Column, Plan, check, digest_of
from training_ext.evaluation.results import Row, table
from training_ext.evaluation.scores import open_task, score
from training_ext.evaluation.tasks import OWN, own_task
from training_ext.openclip.machine import world_info

PROG = "open_clip_ext.evaluate"
PRECISIONS = ("fp32", "amp", "amp_bf16", "bf16", "fp16", "pure_bf16", "pure_fp16")
COMPARISON = "comparison.png"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parse(argv: list[str]) -> Namespace:
    """Parse the command's flags.

    Raises:
        InputError: a wrong flag.
    """
    parser = Parser(
        prog=PROG,
        allow_abbrev=False,
        description="Scores checkpoints zero-shot on those of the 38 DataComp tasks that a folder has, and on your own "
        "classes. Nothing is downloaded.",
    )
    add = parser.add_argument
    add("--checkpoint", required=True, nargs="+", metavar="PATH", help="weights of OpenCLIP models")
    add("--interpolate", metavar="START", help="score weights between these and those of --checkpoint (WiSE-FT)")
    add("--alphas", metavar="LIST", help=f"shares of --checkpoint in them, in [0, 1] (default: {ALPHAS})")
    add(
        "--save-best", metavar="FILE.pt",
        help="save the interpolated weights with the best average of the tasks, or accuracy of --zeroshot-data",
    )
    add("--model", metavar="NAME", help="OpenCLIP's name of the model (default: from params.txt beside the checkpoint)")
    add(
        "--pretrained", metavar="TAG",
        help="use the preprocessing of these pretrained weights of OpenCLIP (default: from params.txt, or the model's)",
    )
    add("--data", metavar="FOLDER", help="folder with the folders of the tasks")
    add("--tasks", nargs="+", metavar="NAME", help="evaluate these only, by name or key (default: all with a folder)")
    add("--zeroshot-data", metavar="DIR", help="classify your own images: class folders of images, or shards")
    add(
        "--out", required=True, metavar="PATH",
        help=f"file for the results, *{LINES}, or a folder for several checkpoints; results in it are kept",
    )
    add("--batch-size", type=int, default=64, metavar="INT", help="images per batch (default: 64)")
    add("--workers", type=int, default=2, metavar="INT", help="data loader workers (default: 2)")
    add("--precision", default="fp32", choices=PRECISIONS, help="(default: fp32, as DataComp's)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=device, help="(default: cuda, or cpu where there is none)")
    return parser.parse_args(argv)


def run(argv: list[str]) -> None:
    """Run the evaluation; every process calls it.

    Raises:
        InputError: one line. Nothing has been written, unless it is about the contents of the data.
    """
    args = parse(argv)
    open_clip.add_model_config(MODEL_CONFIGS)
    # As in the training, process 0 checks the command line while the others wait for it in the process group.
    plans = [check(args) if world_info()[1] == 0 else None]
    device = init_distributed_device(args)
    if args.distributed:
        dist.broadcast_object_list(plans, src=0)
    (plan,) = plans
    assert plan is not None
    if args.rank == 0:
        logging.getLogger().setLevel(logging.WARNING)
        for column in plan.columns:
            os.makedirs(os.path.dirname(column.results.path) or ".", exist_ok=True)
    for column in plan.columns:
        if column.todo:
            evaluate(args, device, column, plan.folders)
    if args.rank == 0:
        finish(plan)
        if args.save_best is not None:
            save_best(args, plan)
    if args.distributed:
        dist.barrier()
        dist.destroy_process_group()


def evaluate(args: Namespace, device: torch.device, column: Column, folders: Mapping[str, str]) -> None:
    """Evaluate a checkpoint on its tasks to do."""
    label = column.checkpoint.label
    encoder = Encoder(
        *load_model(column.checkpoint, args), device, args.precision, args.batch_size, args.workers, args.rank,
        args.world_size, show=args.rank == 0,
    )
    for task in column.todo:
        source = open_task(task, folders[task.key])
        # Before the files are read, so that a change meanwhile is seen by the next run.
        digest = digest_of(task, source)
        found = score(encoder, task, source)
        if found is None:  # not on process 0
            continue
        folder = os.path.abspath(source.folder) if task.kind == OWN else None
        column.results.add(Row(task.key, task.name, found.metrics, found.samples, digest, folder))
        if found.confusion is None:
            print(f"{label}: {task.name}: {100 * found.metrics['main_metric']:.2f}", flush=True)
        else:
            path = column.confusion_path(task.name)
            write_confusion(path, f"{task.name}, {label}", source.classes, found.metrics, found.confusion)


def finish(plan: Plan) -> None:
    """Print the table and draw the figure."""
    labels = [column.checkpoint.label for column in plan.columns]
    results = [column.results for column in plan.columns]
    if plan.tasks:
        print(table(plan.table, plan.tasks, labels, results, plan.folders))
    for label, column in zip(labels, plan.columns, strict=True):
        if column.stale:
            changed = ", ".join(task.name for task in column.stale)
            print(f"{label}: evaluate again, since data or task have changed: {changed}")
        for row in column.results.rows.values():
            if row.key.startswith(f"{OWN}/"):
                top1, balanced = (100 * row.metrics[name] for name in ("acc1", "mean_per_class_recall"))
                print(
                    f"{label}: {row.name}: accuracy {top1:.2f}, balanced accuracy {balanced:.2f} of {row.samples} "
                    f"images; {column.confusion_path(row.name)}"
                )
    if plan.tasks and len(labels) > 1:
        scores = [found.scores() for found in results]
        rows = [
            (task.name, [found.get(task.key) for found in scores])
            for task in plan.tasks if any(task.key in found for found in scores)
        ]
        path = os.path.join(os.path.dirname(results[0].path), COMPARISON)
        with whole_file(path) as file:
            means = averages(plan.table, plan.tasks, scores)
            draw_comparison(file, labels, rows, means, f"Zero-shot scores, {plan.table} tasks")
        print(path)
    print("\n".join(found.path for found in results), flush=True)


def save_best(args: Namespace, plan: Plan) -> None:
    """Save the weights with the highest average of the tasks, or without tasks the highest accuracy of own classes."""
    results = [column.results for column in plan.columns]
    if plan.tasks:
        name, values = averages(plan.table, plan.tasks, [found.scores() for found in results])[0]
    else:
        key = own_task(args.zeroshot_data).key
        name, values = "accuracy", [found.rows[key].metrics["acc1"] for found in results]
    best = plan.columns[values.index(max(values))].checkpoint
    model, _, _ = load_model(best)
    with whole_file(args.save_best) as file:
        torch.save({"state_dict": model.state_dict(), "alpha": best.alpha}, file)
    print(f"{args.save_best}: {best.label}, {name} {100 * max(values):.2f}", flush=True)
