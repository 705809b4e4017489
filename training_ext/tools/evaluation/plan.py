"""Check the evaluation's command line: which tasks are to be scored for which checkpoint."""

import json
import logging
import os
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of
from training_ext.openclip.machine import check_device, check_writable
from training_ext.scoring.folders import Source
from training_ext.scoring.scores import open_task
from training_ext.scoring.tasks import DATACOMP, OWN, OWN_PAIRS, Task, own_task, read_tasks
from training_ext.tools.evaluation.arguments import numbers
from training_ext.tools.evaluation.hits import read_hits
from training_ext.tools.evaluation.models import Checkpoint, find_checkpoint, interpolated, load_model
from training_ext.tools.evaluation.results import Results

LINES = ".jsonl"
ALPHAS = "0,0.25,0.5,0.75,1"


@dataclass
class Column:
    """A checkpoint to evaluate, which is a column of the table.

    Args:
        checkpoint: its weights.
        results: its file of results; only process 0 writes it.
        todo: the tasks to evaluate.
    """

    checkpoint: Checkpoint
    results: Results
    todo: list[Task] = field(default_factory=list)

    def confusion_path(self, name: str) -> str:
        return f"{self.results.path.removesuffix(LINES)}-{name}.png"

    def hits_path(self, name: str) -> str:
        return f"{self.results.path.removesuffix(LINES)}-{name}.npz"

    def lacks(self, task: Task, digest: str) -> bool:
        """Whether a task has no result, or one of other data, or lacks its picture or hits."""
        row = self.results.rows.get(task.key)
        if row is None or row.data != digest:
            return True
        if task.kind == OWN_PAIRS:
            return read_hits(self.hits_path(task.name), digest) is None
        return task.kind == OWN and not os.path.exists(self.confusion_path(task.name))


@dataclass
class Plan:
    """What process 0 has checked and sends to all.

    Args:
        columns: the checkpoints.
        table: name of the table of tasks.
        tasks: all tasks of the table.
        folders: by task key, the folder; tasks without one are left out.
    """

    columns: list[Column]
    table: str
    tasks: list[Task]
    folders: dict[str, str]


def check(args: Namespace) -> Plan:
    """Check the command line and open the data sets, without reading their images.

    Raises:
        InputError: one line that names the flag, its value and what would be right.
    """
    for setting, least in (("batch_size", 1), ("workers", 0)):
        if (value := getattr(args, setting)) < least:
            raise InputError(f"{value} is out of range; it must be at least {least}", flag_of(setting))
    check_device(Namespace(device=args.device, given_flags={"device"}, no_set_device_rank=False))
    if args.data is args.zeroshot_data is args.val_data is None:
        problem = "is missing, and there is nothing to evaluate on; give it, --zeroshot-data or --val-data"
        raise InputError(problem, "--data")
    if args.data is None and args.tasks:
        raise InputError(
            f"{' '.join(args.tasks)} has no effect without --data; give the folder of the tasks", "--tasks"
        )
    columns = [Column(one, Results(out, about(args, one))) for one, out in find_checkpoints(args)]
    name, tasks, wanted, folders = (DATACOMP, [], [], {}) if args.data is None else find_tasks(args)
    for path, kind in ((args.zeroshot_data, OWN), (args.val_data, OWN_PAIRS)):
        if path is not None:
            user_task = own_task(path, kind)
            wanted, folders = [*wanted, user_task], folders | {user_task.key: path}
    for task in wanted:
        source = open_task(task, folders[task.key], args)
        source.warn()
        digest = digest_of(task, source)
        for column in columns:
            row = column.results.rows.get(task.key)
            if task.kind in (OWN, OWN_PAIRS) and row is not None and row.data != digest:
                other = "of other data, or of an earlier version; it is replaced"
                logging.warning(f"{column.results.path!r} has {task.name!r} {other}")
            if column.lacks(task, digest):
                column.todo.append(task)
    return Plan(columns, name, tasks, folders)


def find_checkpoints(args: Namespace) -> list[tuple[Checkpoint, str]]:
    """The checkpoints to evaluate, each with its file of results."""
    alphas = alphas_of(args)
    number = len(alphas or args.checkpoint)
    is_file = args.out.endswith(LINES)
    if is_file and number > 1:
        raise InputError(f"{args.out!r} is one file for {number} checkpoints; give a folder", "--out")
    if os.path.exists(args.out) and os.path.isdir(args.out) == is_file:
        raise InputError(f"{args.out!r} must be a folder, or a file whose name ends in {LINES}", "--out")
    check_writable("--out", os.path.dirname(args.out) if is_file else args.out)
    checkpoints = [find_checkpoint(path, args.model, args.pretrained) for path in args.checkpoint]
    if args.interpolate is not None:
        checkpoints = interpolated(checkpoints[0], args.interpolate, alphas)
        load_model(checkpoints[0])  # raises unless both are of the model
    labels = [one.label for one in checkpoints]
    names = [label.replace("/", "-") + LINES for label in labels]
    if len(set(names)) < len(names):
        raise InputError(f"the names {', '.join(labels)} must differ, since results are filed by name", "--checkpoint")
    outs = [args.out] if is_file else [os.path.join(args.out, name) for name in names]
    return list(zip(checkpoints, outs, strict=True))


def alphas_of(args: Namespace) -> list[float]:
    """The alphas of --interpolate; empty without it."""
    if args.interpolate is None:
        for setting in ("alphas", "save_best"):
            if (value := getattr(args, setting)) is not None:
                raise InputError(f"{value} has no effect without --interpolate; give the start", flag_of(setting))
        return []
    if len(args.checkpoint) > 1:
        raise InputError(f"{len(args.checkpoint)} files with --interpolate; give one, the end", "--checkpoint")
    text = ALPHAS if args.alphas is None else args.alphas
    alphas = numbers(text, float, "--alphas", f"numbers in [0, 1], such as {ALPHAS}", lambda one: 0 <= one <= 1)
    if (path := args.save_best) is not None:
        if not path.endswith(".pt") or os.path.isdir(path):
            raise InputError(f"{path!r} must be a file whose name ends in .pt", "--save-best")
        if os.path.realpath(path) in map(os.path.realpath, (*args.checkpoint, args.interpolate)):
            raise InputError(f"{path!r} is one of the two that are interpolated; give another file", "--save-best")
        check_writable("--save-best", os.path.dirname(path))
    return alphas


def about(args: Namespace, checkpoint: Checkpoint) -> dict[str, Any]:
    """What a score depends on besides the data; results of anything else in the same file are refused."""
    settings = json.loads(json.dumps(checkpoint.flags))  # tuples become lists, as in the file
    return {
        "checkpoint": checkpoint.digest, "model": checkpoint.model, "precision": args.precision, "settings": settings
    }


def find_tasks(args: Namespace) -> tuple[str, list[Task], list[Task], dict[str, str]]:
    """Name of the table of tasks, all its tasks, those to evaluate, and by key the folders that exist."""
    if not os.path.isdir(args.data):
        raise InputError(f"there is no folder {args.data!r}", "--data")
    name, tasks = read_tasks(args.data)
    for word in args.tasks or ():
        if not any(word in (task.key, task.name) for task in tasks):
            raise InputError(f"{word!r} is not one of {', '.join(task.name for task in tasks)}", "--tasks")
    wanted = [task for task in tasks if not args.tasks or task.key in args.tasks or task.name in args.tasks]
    folders = {task.key: folder for task in tasks if (folder := task.folder_in(args.data))}
    there = [task for task in wanted if task.key in folders]
    if not there:
        looked_for = f"{wanted[0].folder_names()[0]} for {wanted[0].name}"
        raise InputError(f"{args.data!r} has no folder of a task, such as {looked_for}", "--data")
    return name, list(tasks), there, folders


def digest_of(task: Task, source: Source) -> str:
    """Digest of a data set and of what its task measures."""
    return f"{task.digest()}-{source.digest()}" if task.main_metric else source.digest()
