"""Refuse to train if a process was started with other settings, or sees other data, than process 0."""

import os
import socket
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from open_clip_ext.distributed import all_gather_object
from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of
from training_ext.core.component import Component
from training_ext.core.plan import Plan
from training_ext.core.seam import Seam
from training_ext.data.rows import DataRows, find_rows
from training_ext.flags.run_recipe import NOT_FLAGS

# `check_alike` lets no other flag differ, so nothing that the processes do together may depend on these.
OWN = frozenset(  # of a process or machine
    {"cache_dir", "debug", "device", "dist_backend", "dist_url", "distributed", "local_rank", "log_local",
     "no_set_device_rank", "rank", "traceback", "world_size"}
)  # fmt: skip
# A machine may have its own paths, as long as all processes have one or none.
PATHS = frozenset(
    {"train_data", "val_data", "imagenet_val", "imagenet_v2", "zeroshot_data", "pretrained", "distill_pretrained",
     "pretrained_image_path", "pretrained_text_path", "shard_sizes", "logs", "remote_sync"}
)  # fmt: skip
# Only process 0 uses them; the others get its values.
OF_FIRST = frozenset(
    {"copy_codebase", "recipe", "remote_sync_frequency", "remote_sync_protocol", "report_to", "trackio_project_name",
     "wandb_notes", "wandb_project_name", *NOT_FLAGS}
)  # fmt: skip


class ProcessesAlike(Component):
    name = "processes_alike"
    seams = (
        Seam(
            "open_clip_train.main", "init_distributed_device",
            why="processes started with another loss or other data must be detected before they train together",
            contract="main(args) calls init_distributed_device(args) once, before it writes; then the group is there",
            replacement=lambda original, component: partial(component.init_distributed, original),
        ),
    )  # fmt: skip

    def init_distributed(self, original: Callable, args: Namespace) -> Any:
        device = original(args)
        if args.loss is not None and args.distributed and not args.horovod:
            check_alike(args, self.training.data.rows)
        return device


def check_alike(args: Namespace, rows: DataRows | None) -> None:
    """Check that all processes were started alike; every process calls it once the process group exists.

    Raises:
        InputError: a process has another loss, another setting that must be the same, or other data.
    """
    own = {name: value for name, value in sorted(vars(args).items()) if name not in OWN}
    own["logs"] = args.logs if Plan(args).keeps_files else None
    own["files"], own["has_rows"] = _files_of(args), rows is not None
    every = all_gather_object(own)
    first = every[0]
    # Defaults follow from the loss and from other flags, so that a given flag is the cause.
    given = frozenset().union(*(theirs["given_flags"] for theirs in every))
    names = sorted(first, key=lambda name: (name != "loss", name not in given))
    for other, theirs in enumerate(every):
        for name in names:
            value = first[name]
            if name in OF_FIRST or name in ("files", "has_rows") or theirs.get(name) == value:
                continue
            if name in PATHS and None not in (theirs.get(name), value):
                continue
            raise InputError(
                f"process {other} has {theirs.get(name)!r} and process 0 {value!r}; start every "
                "process alike",
                flag_of(name),
            )
    vars(args).update({name: first[name] for name in OF_FIRST & first.keys()})
    if first["has_rows"]:
        _check_same_data(args, rows, own["files"] in [theirs["files"] for theirs in every if theirs["has_rows"]])


def _check_same_data(args: Namespace, rows: DataRows | None, known: bool) -> None:
    """Compare the data of all processes; `known`: whether the first process of a machine has this one's."""
    found: Any = None
    try:
        rows = find_rows(args) if rows is None and not known else rows
        found = None if rows is None else (rows.num_rows, rows.digest)
    except InputError as error:
        found = f"{error} (process {args.rank})"
    every = all_gather_object(found)
    for other, theirs in enumerate(every):
        if isinstance(theirs, str):
            raise InputError(theirs)
        if theirs not in (None, every[0]):
            raise InputError(
                f"process {other} has {theirs[0]} rows and process 0 {every[0][0]}, or the same number "
                "of other samples; give every process the same data",
                "--train-data",
            )


def _files_of(args: Namespace) -> tuple:
    """Equal for two processes if they read the same train data on the same machine."""
    path = os.path.abspath(args.train_data or "")
    found = os.stat(path) if os.path.exists(path) else None
    return socket.gethostname(), path if found is None else (found.st_dev, found.st_ino)
