"""Check a command line on process 0, before anything is written."""

import logging
import os
import socket
from argparse import Namespace
from contextlib import ExitStack
from math import ceil
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.distributed as dist
from open_clip.pretrained import is_pretrained_cfg
from open_clip_train import params as open_clip_params

from open_clip_ext import MODEL_CONFIGS, factory
from open_clip_ext.errors import InputError
from open_clip_ext.files import InUseError, only_user
from open_clip_ext.losses import Loss
from open_clip_ext.memory import check_fits
from open_clip_ext.normalizers import Normalizer
from open_clip_ext.options import flag_of
from open_clip_ext.row_state import bytes_per_row
from training_ext.context import Run
from training_ext.core import checkpoint, row_folders
from training_ext.core.captions import check_captions
from training_ext.core.checkpoint_files import bring_up_to_date, find_resumed, resumed_path
from training_ext.core.keys import check_keys
from training_ext.core.loss import build_loss
from training_ext.core.rows import HELD_OUT_SCENES, DataRows, check_usable, find_rows, kind_of, trains
from training_ext.feature import Feature
from training_ext.features.advice import advise_on_captions
from training_ext.features.own_classes import check_own_classes
from training_ext.features.recovery import recovered
from training_ext.features.recovery.recovery import find_unfinished, read_unfinished
from training_ext.flags.data_checks import (
    check_shards,
    check_size_known,
    check_steps,
    check_upsampling,
    check_val_data,
    samples_per_epoch,
)
from training_ext.flags.params import recovers
from training_ext.flags.ranges import check_ranges
from training_ext.flags.recipes.resolved import NOT_FLAGS
from training_ext.flags.reference_inputs import check_reference_inputs
from training_ext.flags.rehearsal import check_model, check_optimizer, check_resumed, known_config
from training_ext.flags.task_flags import check_loop
from training_ext.openclip.hosts import SCHEMAS, host
from training_ext.openclip.launch import processes_here, world_info
from training_ext.openclip.loading import load_verified, one_line
from training_ext.openclip.machine import check_logs, check_machine, check_writable
from training_ext.run import Features

# `check_alike` lets no other flag differ, so nothing that the processes do together may depend on these.
OWN = frozenset(  # of a process or machine
    {"cache_dir", "debug", "device", "dist_backend", "dist_url", "distributed", "local_rank", "log_local",
     "no_set_device_rank", "rank", "world_size"}
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


def keep_others_out(args: Namespace, until: ExitStack) -> None:
    """Let no other run use this one's folder until `until` ends; called before anything in it is read or written.

    Process 0 does so for all. A run without `--name` gets its name, and calls this again, when its processes have met.

    Raises:
        InputError: another run uses the folder.
    """
    # Processes of horovod do not know their rank yet.
    if world_info()[1] > 0 or not checkpoint.keeps_files(args) or args.name is None or args.horovod:
        return
    if args.loss is not None:
        check_name(args)
        check_logs(args)
    folder = os.path.join(args.logs, args.name)
    try:
        until.enter_context(only_user(folder))
    except InUseError as holder:
        raise InputError(
            f"the folder {folder!r} is in use by {holder}; let that run end, or give another name", "--name"
        ) from None
    except OSError as error:
        raise InputError(f"{folder!r} cannot be locked: {error.strerror}: {error.filename!r}", "--name") from None


def check(args: Namespace) -> DataRows | None:
    """Check the command line, and find the rows of the train data if the run needs them.

    Process 0 checks everything; the others wait for it when the process group starts. Returns the rows on the first
    process of each machine, else None.

    Raises:
        InputError: one line that names the flag, its value and what would be right.
    """
    local_rank, rank, world_size = world_info()
    open_clip.add_model_config(MODEL_CONFIGS)
    prepare_shapes(args)
    if args.loss is None:
        if rank == 0:
            check_open_clips_own(args)
        return None
    evaluate_once(args)
    needs_rows = trains(args) and (args.uses_ext_loss or args.osr_epochs > 0)
    if rank != 0:
        # Another machine may have other data; `check_alike` compares them.
        if local_rank == 0 and trains(args) and not needs_rows:
            check_usable(args)
        return find_rows(args) if local_rank == 0 and needs_rows else None
    check_own_classes(args)
    # Quick checks come before the scan of shards.
    path, resumed = check_flags(args, world_size)
    check_machine(args)
    if resumed is not None and trains(args):
        checkpoint.check_entry(resumed[1], resumed[0], args, None)
    check_what_is_made(args, path)
    rows = None
    if args.val_data and args.dataset_type != "shapes":
        check_val_data(args)
    if trains(args):
        check_upsampling(args)
        check_size_known(args)
        found = find_rows(args)
        for sentence in advise_on_captions(args, found.seen):
            logging.warning(sentence)
        check_shards(args, found, world_size)
        check_steps(args, found.kind, samples_per_epoch(args, found), world_size)
        if args.uses_ext_loss:
            check_memory(args, found.num_rows, world_size)
        rows = found if needs_rows else None
    if args.osr_load is not None and rows is not None and (resumed is None or not args.uses_ext_loss):
        content = recovered.read(args.osr_load)
        recovered.check(content, recovered.identity(args, rows), args.osr_load)
        row_folders.check(args.osr_load, content.get("rows"), content["loss_state"], "--osr-load")
    unfinished = find_unfinished(args) if recovers(args) and resumed is None else None
    if unfinished is not None and rows is not None:
        content = recovered.read(unfinished, "--resume")
        recovered.check(content, recovered.identity(args, rows), unfinished, "--resume")
        row_folders.check(unfinished, content.get("rows"), content["loss_state"], "--resume")
    if resumed is not None and trains(args):
        path, entry = resumed
        checkpoint.check_entry(entry, path, args, rows)  # the data, too
        if entry is not None:
            row_folders.check(path, entry.get("rows"), entry["state"], "--resume")
    bring_up_to_date(args)
    return rows


def check_open_clips_own(args: Namespace) -> None:
    """Check a run without `--loss`, which accepts what OpenCLIP accepts: flags of ours, and what another run has made.

    Raises:
        InputError: as `check`.
    """
    Features(Run(args)).tell(Feature.check)
    check_own_classes(args)
    check_experiment(args)
    if args.resume is not None and args.resume != "latest":
        resumed = find_resumed(args.resume)
        if resumed is not None and trains(args):
            checkpoint.check_entry(resumed[1], resumed[0], args, None)
    bring_up_to_date(args)


def check_flags(args: Namespace, world_size: int) -> tuple[str | None, tuple[str, dict | None] | None]:
    """Check the flags, without reading the data or the machine.

    Returns:
        The results of `resumed_path` and `find_resumed`.
    """
    host().check_flags(args, open_clip_params.parse_args([]))
    check_ranges(args)
    if args.name is not None:
        check_name(args)
    check_experiment(args)
    check_numbers(args, world_size)
    check_schedule(args)
    if trains(args):
        check_captions(args, kind_of(args, args.train_data))
    if args.uses_ext_loss:
        check_pairs(args)
        check_combination(args)
    path = resumed_path(args)
    check_loop(args, path, world_size)
    resumed = find_resumed(path)
    Features(Run(args)).tell(Feature.check)
    row_folders.check_flag(args)
    check_distillation(args)
    check_pretrained("--pretrained", args.model, args.pretrained)
    check_recovery(args, resumes_training=resumed is not None)
    return path, resumed


def check_alike(args: Namespace, rows: DataRows | None) -> None:
    """Check that all processes were started alike; every process calls it once the process group exists.

    Raises:
        InputError: a process has another loss, another setting that must be the same, or other data.
    """
    own = {name: value for name, value in sorted(vars(args).items()) if name not in OWN}
    own["logs"] = args.logs if checkpoint.keeps_files(args) else None
    own["files"], own["has_rows"] = _files_of(args), rows is not None
    every = _of_all(args, own)
    first = every[0]
    for other, theirs in enumerate(every):
        for name, value in first.items():
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
    every = _of_all(args, found)
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


def _of_all(args: Namespace, own: Any) -> list[Any]:
    every: list[Any] = [None] * args.world_size
    dist.all_gather_object(every, own)
    return every


def evaluate_once(args: Namespace) -> None:
    """Without training, evaluate everything, whatever the epoch of the checkpoint; a frequency of 0 still means never.

    OpenCLIP would evaluate only what is due by frequency after the checkpoint's epoch, perhaps nothing.
    """
    if not trains(args):
        args.val_frequency, args.zeroshot_frequency = min(1, args.val_frequency), min(1, args.zeroshot_frequency)


def prepare_shapes(args: Namespace) -> None:
    """Set the paths of generated scenes, which have none, since OpenCLIP trains and evaluates only with a path."""
    if args.dataset_type != "shapes":
        if args.shapes_seed is not None:
            raise InputError(
                f"{args.shapes_seed} with --dataset-type {args.dataset_type}; only shapes uses it", "--shapes-seed"
            )
        if args.shapes_shifted:
            raise InputError(f"with --dataset-type {args.dataset_type}; only shapes uses it", "--shapes-shifted")
        return
    args.shapes_seed = args.shapes_seed or 0
    if not 0 <= args.shapes_seed < 2**63:
        raise InputError(f"{args.shapes_seed} is out of range; it must be at least 0 and below 2**63", "--shapes-seed")
    if args.train_num_samples is None and args.val_num_samples is None:
        raise InputError("--dataset-type shapes needs a number of scenes", "--train-num-samples")
    for split in ("train", "val"):
        path, scenes = getattr(args, f"{split}_data"), getattr(args, f"{split}_num_samples")
        if path is not None:
            raise InputError(
                f"--{split}-data: {path!r} with --dataset-type shapes, which draws its scenes; "
                f"leave it out and give --{split}-num-samples"
            )
        if scenes is not None and not 1 <= scenes <= HELD_OUT_SCENES:
            raise InputError(f"--{split}-num-samples: {scenes} scenes; give from 1 to {HELD_OUT_SCENES}")
        setattr(args, f"{split}_data", "shapes" if scenes else None)


def check_name(args: Namespace) -> None:
    below = Path(args.name)
    if below.anchor or ".." in below.parts or not below.parts:
        raise InputError(f"{args.name!r} is not a folder inside --logs {args.logs!r}; give one such as run-1", "--name")


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


def check_pretrained(flag: str, model: str, given: str | None) -> None:
    """Check that the weights exist, which OpenCLIP does only after its first files are written."""
    if not given or model.startswith(SCHEMAS) or is_pretrained_cfg(model.replace("/", "-"), given):
        return
    if os.path.isfile(given):
        if not given.endswith((".safetensors", ".npz", ".npy")):
            try:
                load_verified(given)
            except Exception as error:
                raise InputError(f"{given!r} cannot be loaded: {one_line(error)}", flag) from None
        return
    if os.path.isdir(given):
        raise InputError(f"{given!r} is a folder; give --model local-dir:{given} if it is of a hub model", flag)
    tags = ", ".join(open_clip.list_pretrained_tags_by_model(model.replace("/", "-")))
    known = f"the tags {tags}" if tags else "no tags"
    raise InputError(f"there is no file {given!r}, and the model {model} has {known}", flag)


def check_distillation(args: Namespace) -> None:
    if (args.distill_model is None) != (args.distill_pretrained is None):
        one, other = "distill_model", "distill_pretrained"
        if args.distill_model is None:
            one, other = other, one
        raise InputError(f"{flag_of(one)}: {getattr(args, one)!r} needs {flag_of(other)}; give both or none")
    if args.uses_ext_loss and bool(args.reference_gap) != (args.distill_model is not None):
        given = f"--loss {args.loss}{' --reference-gap' if 'reference_gap' in args.given_flags else ''}"
        if args.reference_gap:
            raise InputError(f"{given} needs a reference model; give it and --distill-pretrained", "--distill-model")
        raise InputError(
            f"{args.distill_model!r} with {given}, which does not distill; use --loss clip for that, "
            "or as a reference --loss drrho-clip",
            "--distill-model",
        )
    if args.distill_model is None:
        return
    if args.siglip:
        raise InputError(
            f"{args.distill_model!r} with SigLIP's loss (--siglip), which does not distill; "
            "leave one out",
            "--distill-model",
        )
    if args.accum_freq > 1:
        raise InputError(
            f"{args.accum_freq} with --distill-model, which OpenCLIP refuses; leave it at 1", "--accum-freq"
        )
    check_pretrained("--distill-pretrained", args.distill_model, args.distill_pretrained)
    if args.uses_ext_loss:
        check_reference_inputs(args)


def check_what_is_made(args: Namespace, resumed: str | None) -> None:
    """Try to build model and optimizer, and check that the checkpoint fits them."""
    model = check_model(args)
    size = getattr(getattr(model, "visual", None), "image_size", None)
    if args.trace and not isinstance(size, int | None):
        raise InputError(
            f"OpenCLIP cannot trace {args.model!r}, whose image size is a pair of numbers; leave it out", "--trace"
        )
    optimizer = check_optimizer(args, model) if trains(args) else None
    if resumed is not None and "://" not in resumed and not os.path.isdir(resumed):
        check_resumed(resumed, model, optimizer, args)


def check_recovery(args: Namespace, resumes_training: bool) -> None:
    if args.osr_epochs > 0 and not trains(args):
        for name in ("osr_epochs", "osr_load", "osr_save", "osr_transfer", "osr_surrogate"):
            if name in args.given_flags:
                raise InputError("needs data to train on; give --train-data", flag_of(name))
    unfinished = find_unfinished(args) if recovers(args) and not resumes_training else None
    content = None if unfinished is None else read_unfinished(args, unfinished)
    path = args.osr_save
    if path is None:
        return
    folder, name = os.path.split(path)
    if not os.path.isdir(folder or "."):
        raise InputError(f"the folder of {path!r} does not exist", "--osr-save")
    if path.endswith(".pt"):
        instead = path.removesuffix(".pt") + ".state"
        raise InputError(f"--resume latest may take {path!r} for a checkpoint; call it {instead!r}", "--osr-save")
    if resumes_training:  # after the recovery, so nothing is written
        return
    if os.path.exists(path):
        if content is None:
            raise InputError(f"{path!r} exists; give another path, or load it with --osr-load", "--osr-save")
        if not recovered.is_same(path, content):
            raise InputError(
                f"{path!r} exists and is not of the interrupted recovery {unfinished!r}; give another path",
                "--osr-save",
            )
    check_writable("--osr-save", folder or ".")
    most = os.pathconf(folder or ".", "PC_NAME_MAX") - recovered.LONGEST_END
    if len(os.fsencode(name)) > most:
        raise InputError(f"the name {name!r} is too long; give one of at most {most} bytes", "--osr-save")


def check_numbers(args: Namespace, world_size: int) -> None:
    if not 0 <= args.seed <= 2**32 - world_size:
        raise InputError(f"{args.seed} is out of range; it must be from 0 to {2**32 - world_size}", "--seed")
    if args.lr is None and trains(args):
        raise InputError(f"--opt {args.opt} needs a learning rate", "--lr")
    has_negatives = not args.siglip and "coca" not in args.model.lower()
    if trains(args) and has_negatives and args.batch_size * world_size * args.accum_freq < 2:
        raise InputError(
            f"{args.batch_size} in {world_size} process; a contrastive loss needs at least 2 pairs per "
            "step, since the other pairs are the negatives",
            "--batch-size",
        )


def check_schedule(args: Namespace) -> None:
    if args.lr_scheduler == "const-cooldown":
        if args.epochs_cooldown is None:
            raise InputError("'const-cooldown' needs --epochs-cooldown; give its number of epochs", "--lr-scheduler")
        if args.epochs_cooldown > args.epochs:
            raise InputError(
                f"{args.epochs_cooldown} is more than --epochs {args.epochs}; lower it", "--epochs-cooldown"
            )
    if args.delete_previous_checkpoint and not args.save_most_recent:
        # OpenCLIP removes the checkpoint of the epoch before also after an epoch that saves none.
        if 1 < args.save_frequency < args.epochs - 1:
            raise InputError(
                f"with --save-frequency {args.save_frequency} it removes the only "
                "checkpoint; give --save-frequency 1 or --save-most-recent",
                "--delete-previous-checkpoint",
            )


def check_pairs(args: Namespace) -> None:
    loss = factory.find_preset(args.loss).loss
    least = 1 if loss is None else loss.least_pairs
    if args.batch_size * args.accum_freq < least:
        raise InputError(
            f"{args.batch_size}; --loss {args.loss} needs at least {least} pairs per step in each process",
            "--batch-size",
        )


def check_combination(args: Namespace) -> None:
    given = f"--loss {args.loss}"
    if args.horovod:
        raise InputError(f"{given} runs under torch.distributed only; use torchrun", "--horovod")
    if "coca" in args.model.lower():
        raise InputError(f"{given} has no captioning part for {args.model!r}; use --loss clip with CoCa", "--model")
    if not (trains(args) or args.val_data or args.imagenet_val or args.imagenet_v2 or args.zeroshot_data):
        raise InputError(f"{given} needs data to train on, or --val-data to evaluate on", "--train-data")
    loss = build_loss(args, num_rows=1, device="cpu")  # raises InputError if the parts cannot be combined
    if trains(args):
        check_keys(args, kind_of(args, args.train_data), loss.takes_keys)


def check_memory(args: Namespace, num_rows: int, world_size: int) -> None:
    """Check that the loss's state fits in memory.

    A table must also fit a second time on process 0's host, where a checkpoint gathers it.
    """
    loss = build_loss(args, 1, "cpu")
    loss.limit_to(num_rows)
    row_bytes = sum(bytes_per_row(loss).values())
    per_process = ceil(num_rows / world_size) * row_bytes
    local_processes = processes_here()
    on_device = args.device.startswith("cuda") and torch.cuda.is_available()
    rows_on_device = on_device and args.rows_on != "host"
    what = f"{args.normalizer!r} with {num_rows} rows"
    instead = "use more processes or a normalizer without rows"
    gathered = 0 if row_folders.splits(args, num_rows * row_bytes) else num_rows * row_bytes
    on_host = gathered + (0 if rows_on_device else per_process * local_processes)
    check_fits("normalizer", what, on_host, "cpu", instead)
    if rows_on_device:
        check_fits("normalizer", what, per_process, args.device, instead)
    dimension = (known_config(args.model) or {}).get("embed_dim")
    check_batch(loss, args, world_size)
    for module in loss.modules():
        if isinstance(module, Normalizer) and dimension is not None:
            module.check_memory(dimension, args.device if on_device else "cpu", world_size)


def check_batch(loss: Loss, args: Namespace, world_size: int) -> None:
    for module in loss.modules():
        if isinstance(module, Normalizer):
            module.check_batch(args.batch_size * world_size * args.accum_freq)
