"""The command `open_clip_ext.evaluate`: its flags and its steps."""

import logging
import os
from argparse import Namespace
from collections.abc import Mapping

import open_clip
import torch

from open_clip_ext import MODEL_CONFIGS
from open_clip_ext.files import whole_file
from open_clip_ext.recovery import digest_of as digest_of_weights
from training_ext.core.flags import OneLineParser
from training_ext.scoring.inference import Encoder
from training_ext.scoring.pictures import write_confusion
from training_ext.scoring.scores import open_task, score
from training_ext.scoring.tasks import OWN, OWN_PAIRS, averages, own_task
from training_ext.tools.evaluation.arguments import checked_by_first
from training_ext.tools.evaluation.hits import read_hits, table_of_pairs, write_hits
from training_ext.tools.evaluation.models import load_model
from training_ext.tools.evaluation.plan import ALPHAS, LINES, Column, Plan, check, digest_of
from training_ext.tools.evaluation.results import Row, table

PROG = "open_clip_ext.evaluate"
PRECISIONS = ("fp32", "amp", "amp_bf16", "bf16", "fp16", "pure_bf16", "pure_fp16")


def parse(argv: list[str]) -> Namespace:
    """Parse the command's flags.

    Raises:
        InputError: a wrong flag.
    """
    parser = OneLineParser(
        prog=PROG,
        allow_abbrev=False,
        description="Scores checkpoints zero-shot on those of the 38 DataComp tasks that a folder has, on your own "
        "classes and on your own pairs. Nothing is downloaded.",
    )
    add = parser.add_argument
    add("--checkpoint", required=True, nargs="+", metavar="PATH", help="weights of OpenCLIP models")
    add("--interpolate", metavar="START", help="score weights between these and those of --checkpoint (WiSE-FT)")
    add("--alphas", metavar="LIST", help=f"shares of --checkpoint in them, in [0, 1] (default: {ALPHAS})")
    add(
        "--save-best", metavar="FILE.pt",
        help="save the interpolated weights with the best average of the tasks, else accuracy of --zeroshot-data, else "
        "mean R@1 of --val-data",
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
        "--val-data", metavar="PATH",
        help="retrieval on your own pairs: a csv, shards or folder as for a training, or a retrieval task's folder",
    )
    add("--csv-separator", default="\t", metavar="CHAR", help="of a csv (default: a tab)")
    add("--csv-img-key", default="filepath", metavar="NAME", help="column of the images (default: filepath)")
    add("--csv-caption-key", default="title", metavar="NAME", help="column of the captions (default: title)")
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
    with checked_by_first(args, lambda: check(args)) as (device, plan):
        if args.rank == 0:
            logging.getLogger().setLevel(logging.WARNING)
            for path in (*(column.results.path for column in plan.columns), args.save_best or ""):
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        for column in plan.columns:
            if column.todo:
                evaluate(args, device, column, plan.folders)
        if args.rank == 0:
            finish(plan)
            if args.save_best is not None:
                save_best(args, plan)


def evaluate(args: Namespace, device: torch.device, column: Column, folders: Mapping[str, str]) -> None:
    """Evaluate a checkpoint on its tasks to do."""
    label = column.checkpoint.label
    encoder = Encoder(
        *load_model(column.checkpoint, args), device, args.precision, args.batch_size, args.workers, args.rank,
        args.world_size, show=args.rank == 0,
    )
    for task in column.todo:
        source = open_task(task, folders[task.key], args)
        # Before the files are read, so that a change meanwhile is seen by the next run.
        digest = digest_of(task, source)
        result = score(encoder, task, source)
        if result is None:  # not on process 0
            continue
        if result.hits is not None:  # before the result, without which they are not used
            weights = digest_of_weights(encoder.model.state_dict())
            write_hits(column.hits_path(task.name), result.hits, digest, weights)
        column.results.add(Row(task.key, task.name, result.metrics, result.samples, digest))
        if task.main_metric:
            print(f"{label}: {task.name}: {100 * result.metrics['main_metric']:.2f}", flush=True)
        if result.confusion is not None:
            path = column.confusion_path(task.name)
            write_confusion(path, f"{task.name}, {label}", source.classes, result.metrics, result.confusion)


def finish(plan: Plan) -> None:
    """Print the table and the files of results."""
    labels = [column.checkpoint.label for column in plan.columns]
    results = [column.results for column in plan.columns]
    if plan.tasks:
        print(table(plan.table, plan.tasks, labels, results, plan.folders))
    of_pairs: dict[tuple[str, str], dict[str, Column]] = {}  # columns by task and data
    for label, column in zip(labels, plan.columns, strict=True):
        for row in column.results.rows.values():
            if row.key.startswith(f"{OWN_PAIRS}/"):
                of_pairs.setdefault((row.key, row.data), {})[label] = column
            if row.key.startswith(f"{OWN}/"):
                top1, balanced = (100 * row.metrics[name] for name in ("acc1", "mean_per_class_recall"))
                print(
                    f"{label}: {row.name}: accuracy {top1:.2f}, balanced accuracy {balanced:.2f} of {row.samples} "
                    f"images; {column.confusion_path(row.name)}"
                )
    for (key, data), columns in of_pairs.items():
        rows = {label: column.results.rows[key] for label, column in columns.items()}
        hits = [read_hits(column.hits_path(rows[label].name), data) for label, column in columns.items()]
        print(table_of_pairs(rows, hits))
    print("\n".join(result_file.path for result_file in results), flush=True)


def save_best(args: Namespace, plan: Plan) -> None:
    """Save the weights with the highest average of the tasks, or without tasks the best on the user's own data."""
    results = [column.results for column in plan.columns]
    if plan.tasks:
        name, values = averages(plan.table, plan.tasks, [result_file.scores() for result_file in results])[0]
    elif args.zeroshot_data is not None:
        key, name = own_task(args.zeroshot_data).key, "accuracy"
        values = [result_file.rows[key].metrics["acc1"] for result_file in results]
    else:
        key, name = own_task(args.val_data, OWN_PAIRS).key, "mean R@1"
        values = [result_file.rows[key].metrics["mean_recall@1"] for result_file in results]
    best = plan.columns[values.index(max(values))].checkpoint
    model, _, _ = load_model(best)
    with whole_file(args.save_best) as file:
        torch.save({"state_dict": model.state_dict(), "alpha": best.alpha}, file)
    print(f"{args.save_best}: {best.label}, {name} {100 * max(values):.2f}", flush=True)
