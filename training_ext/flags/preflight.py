"""Check a command line on process 0, before anything is written."""

import os
from argparse import Namespace
from math import ceil

import open_clip
import torch

from open_clip_ext import MODEL_CONFIGS
from open_clip_ext.errors import InputError
from open_clip_ext.losses import Loss
from open_clip_ext.memory import check_fits
from open_clip_ext.normalizers import Normalizer
from open_clip_ext.row_state import bytes_per_row
from training_ext.core.loss import build_loss
from training_ext.core.plan import global_batch, trains, world_info
from training_ext.core.run import Run
from training_ext.data import row_folders
from training_ext.data.checkpoint_files import bring_up_to_date, resumed_path
from training_ext.data.epochs import check_steps, samples_per_epoch
from training_ext.data.metrics import evaluated_metrics
from training_ext.data.rows import DataRows, find_rows
from training_ext.flags.resumed import check_folder, find_resumed
from training_ext.flags.rules import check_rules
from training_ext.flags.trial import try_start
from training_ext.openclip.hosts import check_flags as check_ignored
from training_ext.openclip.loading import known_config
from training_ext.openclip.machine import check_device, check_name, processes_here


def check(run: Run) -> None:
    """Check the command line, and find the rows of the train data if the run needs them.

    Process 0 checks everything; the others wait for it when the process group starts. The first process of each machine
    finds the rows.

    Raises:
        InputError: one line that names the flag, its value and what would be right.
    """
    args = run.args
    local_rank, rank, _ = world_info()
    open_clip.add_model_config(MODEL_CONFIGS)
    prepare_shapes(args)
    if args.loss is None:
        if rank == 0:
            check_open_clips_own(run)
            bring_up_to_date(args)
        return
    if not trains(args):  # evaluate all but what is never due, whatever the epoch of the checkpoint
        args.val_frequency, args.zeroshot_frequency = min(1, args.val_frequency), min(1, args.zeroshot_frequency)
    if rank == 0:
        check_first(run)
        bring_up_to_date(args)
    elif not any(component.counts_rows for component in run.components):
        return  # OpenCLIP and the core find out what the data are as they build them
    elif local_rank == 0 and trains(args):  # another machine may have other data; `processes_alike` compares them
        rows = find_rows(args)
        run.data.rows = rows if needs_rows(args) else None


def needs_rows(args: Namespace) -> bool:
    return trains(args) and (args.uses_ext_loss or args.epochs_before > 0)


def check_first(run: Run) -> None:
    """What process 0 checks of a run with --loss."""
    args = run.args
    # Quick checks come before the scan of shards.
    loss, resumed = check_flags(run)
    check_device(args)
    if args.val_data or args.imagenet_val:
        from training_ext.flags import val_data

        val_data.check_imagenet(args)
        val_data.check(args)
    rows = None
    if trains(args) and any(component.counts_rows for component in run.components):
        processes = world_info()[2]
        rows = find_rows(args)
        check_shards(args, rows, processes)
        check_steps(args, rows.kind, samples_per_epoch(args, rows), processes)
        if loss is not None:
            check_memory(args, loss, rows.num_rows, processes)
    check_rows(run, rows, resumed)


def check_rows(run: Run, rows: DataRows | None, resumed: tuple[str, dict | None] | None) -> None:
    """Check that the run can go on with the rows of its data, if they are known.

    Args:
        resumed: the result of `find_resumed`.
    """
    if not trains(run.args):
        return
    if rows is not None:
        for component in run.components:
            component.check_rows(rows, resumed is not None)
        run.data.rows = rows if needs_rows(run.args) else None
    if resumed is not None:
        path, entry = resumed
        run.state.check_entry(path, entry)  # the data, too
        if entry is not None:
            row_folders.check(path, row_folders.rows_folder_of(entry), entry["state"], "--resume")


def check_shards(args: Namespace, rows: DataRows, processes: int) -> None:
    """Raise InputError if OpenCLIP would wait forever for a batch of these shards, or repeat them within an epoch."""
    if rows.kind == "webdataset":
        from training_ext.data import counting

        counting.check_loaders(args, rows, processes)
        counting.check_num_samples(args, rows)


def check_open_clips_own(run: Run) -> None:
    """Check a run without `--loss`, which accepts what OpenCLIP accepts: flags of ours, and what another run has made.

    Raises:
        InputError: as `check`.
    """
    args = run.args
    check_plan(run)
    if args.resume is not None and args.resume != "latest" and trains(args):
        find_resumed(run, args.resume)
    check_experiment(args)


def check_plan(run: Run) -> None:
    metrics = evaluated_metrics(run.args, run.components)
    for component in run.components:
        component.check_plan(metrics)


def check_flags(run: Run) -> tuple[Loss | None, tuple[str, dict | None] | None]:
    """Check the flags, without reading the data; returns the loss with one row, and the result of `find_resumed`."""
    args = run.args
    check_ignored(args)
    if args.name is not None:
        check_name(args)
    loss = build_loss(args, num_rows=1, device="cpu") if args.uses_ext_loss else None  # of parts that go together
    check_rules(args)
    if any(one.is_resumed() and one.state_is_needed for one in run.components):
        if getattr(args, "fsdp_checkpoint", "full") == "sharded":
            raise InputError("'sharded' would leave out the state of components; give full", "--fsdp-checkpoint")
    path = resumed_path(args)
    check_folder(path, args)
    resumed = find_resumed(run, path)
    check_experiment(args)
    check_plan(run)
    try_start(args)
    return loss, resumed


def prepare_shapes(args: Namespace) -> None:
    """Set the paths of generated scenes, if the data are these."""
    if args.dataset_type == "shapes":
        from training_ext.data.scenes import set_paths

        set_paths(args)


def check_experiment(args: Namespace) -> None:
    """Refuse an existing experiment, for which OpenCLIP returns -1 once the processes have started."""
    if args.name is None or args.resume == "latest":
        return
    name = "out-0" if args.log_local else "out.log"
    path = os.path.join(args.logs, args.name, name)
    if os.path.exists(path):
        raise InputError(
            f"the experiment {args.name!r} exists in {args.logs!r}; choose another, or --resume latest", "--name"
        )


def check_memory(args: Namespace, loss: Loss, num_rows: int, world_size: int) -> None:
    """Check that the loss's state fits in memory.

    A table must also fit a second time on process 0's host, where a checkpoint gathers it.
    """
    loss.limit_to(num_rows)
    row_bytes = sum(bytes_per_row(loss).values())
    per_process = ceil(num_rows / world_size) * row_bytes
    local_processes = processes_here()
    on_device = args.device.startswith("cuda") and torch.cuda.is_available()
    rows_on_device = on_device and args.rows_on != "host"
    table = f"{args.normalizer!r} with {num_rows} rows"
    remedy = "use more processes or a normalizer without rows"
    gathered = 0 if row_folders.splits(args, num_rows * row_bytes) else num_rows * row_bytes
    on_host = gathered + (0 if rows_on_device else per_process * local_processes)
    check_fits("normalizer", table, on_host, "cpu", remedy)
    if rows_on_device:
        check_fits("normalizer", table, per_process, args.device, remedy)
    dimension = (known_config(args.model) or {}).get("embed_dim")
    check_batch(loss, args)
    for module in loss.modules():
        if isinstance(module, Normalizer) and dimension is not None:
            module.check_memory(dimension, args.device if on_device else "cpu", world_size)


def check_batch(loss: Loss, args: Namespace) -> None:
    for module in loss.modules():
        if isinstance(module, Normalizer):
            module.check_batch(global_batch(args))
