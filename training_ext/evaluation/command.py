"""The command `open_clip_ext.evaluate`: its flags and its steps."""

import argparse
import json
import logging
import os
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, NoReturn

import open_clip
import torch
import torch.distributed as dist
from open_clip_train.distributed import init_distributed_device

from open_clip_ext import MODEL_CONFIGS
from open_clip_ext.errors import InputError
from open_clip_ext.files import whole_file
from open_clip_ext.options import flag_of
from training_ext.evaluation.aggregates import averages
from training_ext.evaluation.folders import Source, open_own_classes, warn_of_contents
from training_ext.evaluation.inference import Encoder
from training_ext.evaluation.models import Checkpoint, find_checkpoint, interpolated, load_model
from training_ext.evaluation.own_classes import KEY, name_of, score_own_classes, write_confusion
from training_ext.evaluation.pictures import draw_comparison
from training_ext.evaluation.results import Results, Row, table
from training_ext.evaluation.scores import open_task, score
from training_ext.evaluation.tasks import DATACOMP, Task, read_tasks
from training_ext.openclip.launch import world_info
from training_ext.openclip.machine import check_device, check_writable

PROG = "open_clip_ext.evaluate"
PRECISIONS = ("fp32", "amp", "amp_bf16", "bf16", "fp16", "pure_bf16", "pure_fp16")
LINES = ".jsonl"
COMPARISON = "comparison.png"
ALPHAS = "0,0.25,0.5,0.75,1"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parse(argv: list[str]) -> argparse.Namespace:
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
    parser.add_argument(
        "--checkpoint", required=True, nargs="+", metavar="PATH", help="weights of OpenCLIP models"
    )
    parser.add_argument(
        "--interpolate", metavar="START", help="score weights between these and those of --checkpoint (WiSE-FT)"
    )
    parser.add_argument(
        "--alphas", metavar="LIST", help=f"shares of --checkpoint in them, in [0, 1] (default: {ALPHAS})"
    )
    parser.add_argument(
        "--save-best", metavar="FILE.pt",
        help="save the interpolated weights with the best average of the tasks, or accuracy of --zeroshot-data",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="OpenCLIP's name of the model (default: from params.txt beside the checkpoint)"
    )
    parser.add_argument(
        "--pretrained", metavar="TAG",
        help="use the preprocessing of these pretrained weights of OpenCLIP (default: from params.txt, or the model's)",
    )
    parser.add_argument("--data", metavar="FOLDER", help="folder with the folders of the tasks")
    parser.add_argument(
        "--tasks", nargs="+", metavar="NAME", help="evaluate these only, by name or key (default: all with a folder)"
    )
    parser.add_argument(
        "--zeroshot-data", metavar="DIR", help="classify your own images: class folders of images, or shards"
    )
    parser.add_argument(
        "--out", required=True, metavar="PATH",
        help=f"file for the results, *{LINES}, or a folder for several checkpoints; results in it are kept",
    )
    parser.add_argument("--batch-size", type=int, default=64, metavar="INT", help="images per batch (default: 64)")
    parser.add_argument("--workers", type=int, default=2, metavar="INT", help="data loader workers (default: 2)")
    parser.add_argument("--precision", default="fp32", choices=PRECISIONS, help="(default: fp32, as DataComp's)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="(default: cuda, or cpu where there is none)")
    return parser.parse_args(argv)


@dataclass
class Job:
    """What process 0 has checked and sends to all.

    Args:
        checkpoints: the checkpoints to evaluate.
        outs: file of results of each checkpoint.
        picture: path of the figure that compares checkpoints, or None.
        table: name of the table of tasks.
        tasks: all tasks of the table.
        folders: by task key, the folder; tasks without one are left out.
        todo: for each checkpoint the keys to evaluate; the user's own classes have a key, too.
        stale: for each checkpoint the keys that are not to be evaluated, though their data or task have changed.
        own: key of the user's own classes, or None.
    """

    checkpoints: list[Checkpoint]
    outs: list[str]
    picture: str | None
    table: str
    tasks: list[Task]
    folders: dict[str, str]
    todo: list[list[str]]
    stale: list[list[str]]
    own: str | None


def run(argv: list[str]) -> None:
    """Run the evaluation; every process calls it.

    Raises:
        InputError: one line. Nothing has been written, unless it is about the contents of the data.
    """
    args = parse(argv)
    open_clip.add_model_config(MODEL_CONFIGS)
    job: Job | None = None
    results: list[Results] = []
    # As in the training, process 0 checks the command line while the others wait for it in the process group.
    if world_info()[1] == 0:
        job, results = check(args)
    device = init_distributed_device(args)
    if args.distributed:
        jobs = [job]
        dist.broadcast_object_list(jobs, src=0)
        job = jobs[0]
    assert job is not None
    if args.rank == 0:
        logging.getLogger().setLevel(logging.WARNING)
        for out in job.outs:
            os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    for number in range(len(job.checkpoints)):
        if job.todo[number]:
            evaluate_checkpoint(args, device, job, number, results[number] if args.rank == 0 else None)
    if args.rank == 0:
        finish(job, results)
        if args.save_best is not None:
            save_best(job, results, args.save_best)
    if args.distributed:
        dist.barrier()
        dist.destroy_process_group()


def check(args: argparse.Namespace) -> tuple[Job, list[Results]]:
    """Check the command line and open the data sets, without reading their images.

    Raises:
        InputError: one line that names the flag, its value and what would be right.
    """
    for setting, least in (("batch_size", 1), ("workers", 0)):
        if (value := getattr(args, setting)) < least:
            raise InputError(f"{flag_of(setting)}: {value} is out of range; it must be at least {least}")
    check_device(Namespace(device=args.device, given_flags={"device"}, no_set_device_rank=False))
    if args.data is None and args.zeroshot_data is None:
        raise InputError("is missing, and there is nothing to evaluate on; give it, or --zeroshot-data", "--data")
    alphas = check_interpolation(args)
    number = len(alphas or args.checkpoint)
    several = number > 1
    if several and args.out.endswith(LINES):
        raise InputError(f"{args.out!r} is one file for {number} checkpoints; give a folder", "--out")
    if os.path.isdir(args.out) == args.out.endswith(LINES) and os.path.exists(args.out):
        raise InputError(f"{args.out!r} must be a folder, or a file whose name ends in {LINES}", "--out")
    check_writable("--out", os.path.dirname(args.out) if args.out.endswith(LINES) else args.out)
    checkpoints = [find_checkpoint(path, args.model, args.pretrained) for path in args.checkpoint]
    if args.interpolate is not None:
        checkpoints = interpolated(checkpoints[0], args.interpolate, alphas)
        load_model(checkpoints[0], Namespace(precision="fp32", device="cpu"))  # raises unless both are of the model
    labels = [one.label for one in checkpoints]
    if len({label.replace("/", "-") for label in labels}) < len(labels):
        raise InputError(f"the names {', '.join(labels)} must differ, since results are filed by name", "--checkpoint")
    if args.out.endswith(LINES):
        outs = [args.out]
    else:
        outs = [os.path.join(args.out, label.replace("/", "-") + LINES) for label in labels]
    results = [Results(out, about(args, one)) for out, one in zip(outs, checkpoints, strict=True)]
    name, tasks, folders = DATACOMP, list[Task](), dict[str, str]()
    sources: dict[str, Source] = {}
    own_key = None
    if args.data is not None:
        name, tasks, folders = find_tasks(args)
        wanted = [task for task in tasks if task.key in folders and is_wanted(task, args)]
        sources = {task.key: open_task(task, folders[task.key]) for task in wanted}
    elif args.tasks:
        raise InputError(
            f"{' '.join(args.tasks)} has no effect without --data; give the folder of the tasks", "--tasks"
        )
    if args.zeroshot_data is not None:
        own = open_own_classes("--zeroshot-data", args.zeroshot_data)
        warn_of_contents(own)
        own_key = KEY + name_of(own)
        sources[own_key] = own
    by_key = {task.key: task for task in tasks}
    digests = {key: digest_of(by_key.get(key), source) for key, source in sources.items()}
    todo, stale = [], []
    for out, found in zip(outs, results, strict=True):
        todo.append([key for key, own in sources.items() if is_to_do(own, found.rows.get(key), digests[key], out)])
        stale.append([key for key in found.rows if key not in sources and is_stale(by_key.get(key), found, folders)])
    picture = os.path.join(args.out, COMPARISON) if several and tasks else None
    return Job(checkpoints, outs, picture, name, tasks, folders, todo, stale, own_key), results


def check_interpolation(args: argparse.Namespace) -> list[float]:
    """The alphas of --interpolate; empty without it."""
    if args.interpolate is None:
        for setting in ("alphas", "save_best"):
            if (value := getattr(args, setting)) is not None:
                raise InputError(f"{flag_of(setting)}: {value} has no effect without --interpolate; give the start")
        return []
    if len(args.checkpoint) > 1:
        raise InputError(f"{len(args.checkpoint)} files with --interpolate; give one, the end", "--checkpoint")
    text = ALPHAS if args.alphas is None else args.alphas
    try:
        alphas = [float(word) for word in text.split(",")]
    except ValueError:
        alphas = [-1.0]
    if not all(0 <= alpha <= 1 for alpha in alphas):
        raise InputError(f"{text!r} must be numbers in [0, 1] with commas between them, such as {ALPHAS}", "--alphas")
    if (path := args.save_best) is not None:
        if not path.endswith(".pt") or os.path.isdir(path):
            raise InputError(f"{path!r} must be a file whose name ends in .pt", "--save-best")
        if os.path.realpath(path) in map(os.path.realpath, (*args.checkpoint, args.interpolate)):
            raise InputError(f"{path!r} is one of the two that are interpolated; give another file", "--save-best")
        check_writable("--save-best", os.path.dirname(path))
    return alphas


def digest_of(task: Task | None, source: Source) -> str:
    """Digest of a data set and of what its task measures; of the user's own classes without a task."""
    return source.digest() if task is None else f"{task.digest()}-{source.digest()}"


def is_to_do(source: Source, row: Row | None, digest: str, out: str) -> bool:
    """Whether a data set has no result, or one of other contents, or lacks its picture.

    Raises:
        InputError: the result is of the user's own classes in another folder with the same name.
    """
    if row is None:
        return True
    if row.folder is not None:
        if row.data != digest and row.folder != os.path.abspath(source.folder):
            raise InputError(
                f"{source.folder!r} has the name of {row.folder!r}, whose result is in {out!r}; "
                "choose another --out, or rename the folder",
                "--zeroshot-data",
            )
        if not os.path.exists(confusion_path(out, source)):
            return True
    return row.data != digest


def is_stale(task: Task | None, found: Results, folders: dict[str, str]) -> bool:
    """Whether a result that is not evaluated now is of other data, or of another definition of its task."""
    if task is None or task.key not in folders:
        return False
    try:
        return found.rows[task.key].data != digest_of(task, open_task(task, folders[task.key]))
    except InputError:
        return True


def about(args: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, Any]:
    """What a score depends on besides the data; results of anything else in the same file are refused."""
    settings = json.loads(json.dumps(checkpoint.flags))  # tuples become lists, as in the file
    return {
        "checkpoint": checkpoint.digest, "model": checkpoint.model, "precision": args.precision, "settings": settings
    }


def find_tasks(args: argparse.Namespace) -> tuple[str, list[Task], dict[str, str]]:
    """Name of the table of tasks, all its tasks, and by key the folders that exist."""
    if not os.path.isdir(args.data):
        raise InputError(f"there is no folder {args.data!r}", "--data")
    name, every = read_tasks(args.data)
    tasks = list(every)
    if args.tasks:
        known = {word: task for task in every for word in (task.key, task.name)}
        unknown = [word for word in args.tasks if word not in known]
        if unknown:
            raise InputError(f"{unknown[0]!r} is not one of {', '.join(task.name for task in every)}", "--tasks")
    folders = {}
    for task in tasks:
        paths = [os.path.join(args.data, folder) for folder in task.folder_names()]
        found = next((path for path in paths if os.path.isdir(path)), None)
        if found is not None:
            folders[task.key] = found
    wanted = [task for task in tasks if is_wanted(task, args)]
    if not any(task.key in folders for task in wanted):
        looked_for = f"{wanted[0].folder_names()[0]} for {wanted[0].name}"
        raise InputError(f"{args.data!r} has no folder of a task, such as {looked_for}", "--data")
    return name, tasks, folders


def is_wanted(task: Task, args: argparse.Namespace) -> bool:
    return not args.tasks or task.key in args.tasks or task.name in args.tasks


def evaluate_checkpoint(
    args: argparse.Namespace, device: torch.device, job: Job, number: int, results: Results | None
) -> None:
    """Evaluate checkpoint `number` on its tasks to do; `results` is None except on process 0."""
    checkpoint = job.checkpoints[number]
    model, transform, tokenizer = load_model(checkpoint, args)
    encoder = Encoder(
        model, transform, tokenizer, device, args.precision, args.batch_size, args.workers, args.rank, args.world_size,
        show=args.rank == 0,
    )
    tasks = {task.key: task for task in job.tasks}
    for key in job.todo[number]:
        if key not in tasks:
            evaluate_own_classes(args, encoder, job, number, results)
            continue
        source = open_task(tasks[key], job.folders[key])
        # Before the files are read, so that a change meanwhile is seen by the next run.
        digest = digest_of(tasks[key], source)
        scored = score(encoder, tasks[key], source)
        if results is not None:
            assert scored is not None
            found, samples = scored
            results.add(Row(key, tasks[key].name, found, samples, digest))
            print(f"{checkpoint.label}: {tasks[key].name}: {100 * found['main_metric']:.2f}", flush=True)


def evaluate_own_classes(
    args: argparse.Namespace, encoder: Encoder, job: Job, number: int, results: Results | None
) -> None:
    source = open_own_classes("--zeroshot-data", args.zeroshot_data)
    digest = source.digest()  # as for the tasks
    scores = score_own_classes(encoder, source)
    if results is None:
        return
    assert scores is not None
    found = {"acc1": scores.top1, "acc5": scores.top5, "mean_per_class_recall": scores.balanced, "main_metric": None}
    label, path = job.checkpoints[number].label, confusion_path(job.outs[number], source)
    images, folder = int(scores.counts.sum()), os.path.abspath(source.folder)
    results.add(Row(KEY + name_of(source), name_of(source), found, images, digest, folder))
    write_confusion(path, source, scores, label)


def confusion_path(out: str, source: Source) -> str:
    return f"{out.removesuffix(LINES)}-{name_of(source)}.png"


def finish(job: Job, results: list[Results]) -> None:
    """Print the table and draw the figure."""
    labels = [checkpoint.label for checkpoint in job.checkpoints]
    if job.tasks:
        missing = [
            task for task in job.tasks
            if task.key not in job.folders and not any(task.key in own.rows for own in results)
        ]
        print(table(job.table, job.tasks, labels, results, missing))
        names = {task.key: task.name for task in job.tasks}
        for label, keys in zip(labels, job.stale, strict=True):
            if keys:
                changed = ", ".join(names[key] for key in keys)
                print(f"{label}: evaluate again, since data or task have changed: {changed}")
    for label, out, own in zip(labels, job.outs, results, strict=True):
        for row in own.rows.values():
            if row.key.startswith(KEY):
                top1, balanced = (100 * row.metrics[name] for name in ("acc1", "mean_per_class_recall"))
                print(
                    f"{label}: {row.name}: accuracy {top1:.2f}, balanced accuracy {balanced:.2f} of {row.samples} "
                    f"images; {out.removesuffix(LINES)}-{row.name}.png"
                )
    if job.picture is not None:
        scores = [own.scores() for own in results]
        tasks = [(task.name, [own.get(task.key) for own in scores]) for task in job.tasks]
        shown = [row for row in tasks if any(value is not None for value in row[1])]
        means = averages(job.table, job.tasks, scores)
        with whole_file(job.picture) as file:
            draw_comparison(file, labels, shown, means, f"Zero-shot scores, {job.table} tasks")
        print(job.picture)
    print("\n".join(job.outs), flush=True)


def save_best(job: Job, results: list[Results], path: str) -> None:
    """Save the weights with the highest average of the tasks, or without tasks the highest accuracy of own classes."""
    if job.tasks:
        name, values = averages(job.table, job.tasks, [own.scores() for own in results])[0]
    else:
        assert job.own is not None
        name, values = "accuracy", [own.rows[job.own].metrics["acc1"] for own in results]
    best = job.checkpoints[values.index(max(values))]
    model, _, _ = load_model(best, Namespace(precision="fp32", device="cpu"))
    with whole_file(path) as file:
        torch.save({"state_dict": model.state_dict(), "alpha": best.alpha}, file)
    print(f"{path}: {best.label}, {name} {100 * max(values):.2f}", flush=True)
