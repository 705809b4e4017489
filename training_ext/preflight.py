"""What is wrong with a command line, found on process 0 before anything is written."""

import os

import torch

from open_clip_ext.errors import InputError
from open_clip_train.distributed import world_info_from_env
from open_clip_train.main import LATEST_CHECKPOINT_NAME, get_latest_checkpoint
from training_ext import checkpoint
from training_ext.data import DataRows, find_rows, read_csv
from training_ext.session import needs_index


def check(args) -> DataRows | None:
    """The rows of the train data on process 0, if the loss is ours and there are any; None on the others.

    The others wait for process 0 when the process group starts.

    Raises:
        InputError: one line that names the flag, its value and what would be right.
    """
    _, rank, world_size = world_info_from_env()
    prepare_shapes(args)
    if rank != 0:
        return None
    check_experiment(args)
    rows = None
    if args.uses_ext_loss:
        check_combination(args, world_size)
        if args.train_data or args.dataset_type == "synthetic":
            rows = find_rows(args)
            check_shards(args, rows, world_size)
            if needs_index(args):
                check_memory(args, rows.num_rows, world_size)
    check_val_csv(args)
    check_resume(args, rows)
    return rows


def prepare_shapes(args) -> None:
    """Generated scenes have no path, but OpenCLIP trains and evaluates only where it is given one."""
    if args.dataset_type != "shapes":
        return
    for name in ("train_num_samples", "val_num_samples"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')}: {value} scenes; give at least 1")
    if not args.train_num_samples and not args.val_num_samples:
        raise InputError("--train-num-samples: --dataset-type shapes needs a number of scenes")
    if args.shapes_seed < 0:
        raise InputError(f"--shapes-seed: {args.shapes_seed} is out of range; it must be at least 0")
    args.train_data = "shapes" if args.train_num_samples else None
    args.val_data = "shapes" if args.val_num_samples else None


def check_combination(args, world_size: int) -> None:
    given = f"--loss {args.loss}"
    if args.horovod:
        raise InputError(f"--horovod: {given} runs under torch.distributed only; use torchrun")
    if args.distill_model is not None or args.distill_pretrained is not None:
        raise InputError(f"--distill-model: {given} does not distill; use OpenCLIP's own loss for that")
    if "coca" in args.model.lower():
        raise InputError(f"--model: {given} has no captioning part for {args.model!r}; use --loss clip with CoCa")
    if args.batch_size * world_size * args.accum_freq < 2:
        raise InputError(f"--batch-size: {given} needs at least 2 pairs per step, other pairs are the negatives")
    if args.lr is None:
        raise InputError(f"--lr: {given} needs a learning rate with --opt {args.opt}")
    if args.seed < 0:
        raise InputError(f"--seed: {args.seed} is out of range; it must be at least 0")


def check_experiment(args) -> None:
    """OpenCLIP returns -1 for an existing experiment, on process 0, once the processes have started."""
    if args.name is None or args.resume == "latest":
        return
    name = "out-0" if args.log_local else "out.log"
    path = os.path.join(args.logs, args.name, name)
    if os.path.exists(path):
        raise InputError(f"--name: the experiment {args.name!r} exists in {args.logs!r}; choose another, or --resume latest")


def check_shards(args, rows: DataRows, world_size: int) -> None:
    if rows.kind != "webdataset" or args.dataset_resampled:
        return
    loaders = max(1, args.workers) * world_size
    if len(rows.shards.urls) < loaders:
        raise InputError(
            f"--workers: {args.workers} in each of {world_size} process(es) need {loaders} shards and there are "
            f"{len(rows.shards.urls)}; lower --workers, write smaller shards or use --dataset-resampled"
        )


def check_memory(args, num_rows: int, world_size: int) -> None:
    """A table must fit where it is kept, and once more on process 0's host while a checkpoint is written."""
    row_bytes = 8
    per_process = -(-num_rows // world_size) * row_bytes
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_device = args.device.startswith("cuda") and torch.cuda.is_available()
    needs = [("the host", num_rows * row_bytes + (0 if on_device else per_process * local_processes), host)]
    if on_device:
        needs.append((args.device, per_process, torch.cuda.mem_get_info()[1]))
    for place, needed, there in needs:
        if needed > there:
            raise InputError(
                f"--normalizer: a table of {num_rows} rows needs {needed / 2**30:.1f} GiB on {place}, which has "
                f"{there / 2**30:.1f} GiB; use more processes or a normalizer without rows"
            )


def check_val_csv(args) -> None:
    if args.uses_ext_loss and args.val_data and args.dataset_type in ("csv", "auto"):
        if args.dataset_type == "csv" or args.val_data.rsplit(".", 1)[-1] in ("csv", "tsv"):
            read_csv(args, args.val_data, flag="--val-data")


def check_resume(args, rows: DataRows | None) -> None:
    path = args.resume
    if path == "latest" and args.remote_sync is None and args.name is not None:
        folder = os.path.join(args.logs, args.name, "checkpoints")
        if args.save_most_recent:
            path = os.path.join(folder, LATEST_CHECKPOINT_NAME)
            path = path if os.path.exists(path) else None
        else:
            path = get_latest_checkpoint(folder, remote=False)
    if path in (None, "latest") or "://" in path:
        return
    has_training_state, entry = checkpoint.read_entry(path)
    if has_training_state:
        checkpoint.check_entry(entry, path, args, rows)
