"""Checkpoints within an epoch, between two optimizer steps, and how a run resumes from one.

They are OpenCLIP's own files with the number of completed epochs and, in our entry, the position in the next one:

    order       what the order of the data depends on, besides data and epoch, by flag
    position    batches   completed in the epoch, per process
                of        batches of the whole epoch
                samples   that left each loader worker's stream, (processes, workers); (1, 0) with a sampler
                shown     state of the loss's diagnostics

The order of an epoch is a function of its number (see `seeding`), so the rest of it is the same as in an
uninterrupted run: a sampler skips indices, a worker's stream skips samples before they are decoded.
"""

import logging
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from open_clip_ext.distributed import all_gather, world_size
from open_clip_ext.errors import InputError, Stopped
from open_clip_ext.files import PARTIAL
from training_ext.core.checkpoint import SHARDED, SHARDED_PARTS, atomic_save, keeps_files, take_entry
from training_ext.core.loss import TrainingLoss
from training_ext.core.row_folders import MARK, remove_unnamed
from training_ext.core.rows import trains
from training_ext.features.seeding import Start
from training_ext.features.stopping import StopRequest
from training_ext.openclip.hosts import TASKS, host
from training_ext.openclip.loading import load_mapped

# In the order of OpenCLIP's --resume latest, epoch_3_step_N.pt lies between epoch_3.pt and epoch_4.pt.
NAME, PATTERN = "epoch_{epoch}_step_{step}.pt", re.compile(r"epoch_\d+_step_\d+\.pt")
EPOCH = re.compile(r"epoch_\d+\.pt")


def check_flag(args: Namespace) -> None:
    """Raise InputError for a --save-every-steps that is out of range or cannot work."""
    if args.save_every_steps is None:
        return
    given = f"--save-every-steps: {args.save_every_steps}"
    if args.save_every_steps < 1:
        raise InputError(f"{given} is out of range; it must be at least 1")
    if not args.uses_ext_loss:
        raise InputError(f"{given} with --loss {args.loss}, with which OpenCLIP's order of the data cannot be repeated")
    if not trains(args):
        raise InputError(f"{given} without training; give --train-data")
    if not keeps_files(args):
        raise InputError(f"{given} with --logs {args.logs}, which writes no files; give a folder")


def order_of(args: Namespace, streams: int) -> dict[str, Any]:
    """What the order of the train data depends on, by flag or name.

    Args:
        streams: as in `RowLoader`; without streams the number of workers does not matter.
    """
    order = {"--seed": args.seed, "processes": world_size(), "--batch-size": args.batch_size}
    order["--accum-freq"] = args.accum_freq
    if streams:
        order |= {"--workers": streams, "--dataset-resampled": args.dataset_resampled}
        order["--train-data-upsampling-factors"] = args.train_data_upsampling_factors
    return order


class Interruptions:
    """Saves checkpoints within epochs, and ends the run at one after SIGTERM or Ctrl-C.

    Args:
        args: completed by OpenCLIP.
        loss: with the train loader.
    """

    def __init__(self, args: Namespace, loss: TrainingLoss):
        self.args = args
        self.loss = loss
        self.order = order_of(args, loss.loader.streams)
        self._request = StopRequest() if keeps_files(args) else None
        self._epoch = self._batches = 0
        self._save: Callable[[dict[str, Any]], None]
        if self._request is not None:
            loss.loader.after_step = self._after_step

    @contextmanager
    def epoch(
        self, number: int, batches: int, saved: dict[str, Any] | None, save: Callable[[dict[str, Any]], None],
        saves_last: bool = False,
    ) -> Iterator[None]:
        """Context of one epoch of OpenCLIP's, after the loss's `set_epoch`.

        Args:
            number: number of the epoch, which seeds the order of the data.
            batches: number of batches of the whole epoch.
            saved: "order" and "position" of the checkpoint from which the run resumes in this epoch, or None.
            save: called by every process with "order" and "position" to save a checkpoint.
            saves_last: whether to save one after the last step, because an evaluation may fail or be killed.
        """
        self._epoch, self._batches, self._save, self._saves_last = number, batches, save, saves_last
        loader = self.loss.loader
        loader.start_at(None if saved is None else self._start_from(saved))
        yield
        loader.start_at(None)

    def _start_from(self, saved: dict[str, Any]) -> Start | None:
        """Where this process resumes, also logged; None at the start of an epoch.

        If the order of the data has changed, the run resumes after the same fraction of the epoch.
        """
        position, before = saved.get("position"), saved.get("order")
        if before is None:  # in files from before `position` existed
            return None
        order = self.order
        changed = [f"{name} {old}, now {order.get(name)}" for name, old in before.items() if order.get(name) != old]
        if changed and self.args.rank == 0:
            logging.warning(f"The order of the data changes: the checkpoint was written with {'; '.join(changed)}")
        if position is None:
            return None
        batches, workers, keep = position["batches"], self.loss.loader.streams, self.args.accum_freq
        if position["of"] != self._batches and self.args.rank == 0:
            steps = position["of"] // keep, self._batches // keep
            logging.warning("The length of an epoch changes: %d steps in the checkpoint, now %d", *steps)
        if not changed and batches < self._batches:
            samples = position["samples"][self.args.rank].tolist() if workers else []
            self.loss.load_diagnostics_state(position["shown"])
        else:
            batches = batches * self._batches // position["of"] // keep * keep
            samples = [len(range(worker, batches, workers)) * self.args.batch_size for worker in range(workers)]
        logging.info(f"=> resuming after step {batches // keep} of {self._batches // keep} in this epoch")
        return Start(self._epoch, batches, self._batches, samples)

    def _after_step(self, batches: int) -> None:
        assert self._request is not None
        step, steps = batches // self.args.accum_freq, self._batches // self.args.accum_freq
        stops = self._request.agreed(at_once=step == steps)  # an evaluation may follow the last step
        every = self.args.save_every_steps
        is_due = every is not None and (self._epoch * steps + step) % every == 0
        if not (stops or is_due or (self._saves_last and step == steps)):
            return
        self._save({"order": self.order, "position": self._position(batches)})
        if self.args.distributed:
            dist.barrier()  # the file exists before any process ends
        if stops:
            raise Stopped(
                stops,
                f"after step {step} of {steps} of an epoch; the checkpoint is saved, and --name {self.args.name} "
                "--resume latest resumes there",
            )

    def _position(self, batches: int) -> dict[str, Any]:
        own = torch.tensor([self.loss.loader.numbers], dtype=torch.int64, device=self.loss.device)
        samples = all_gather(own).cpu() if self.loss.loader.streams else own.cpu()
        shown = self.loss.loss.diagnostics_state()
        return {"batches": batches, "of": self._batches, "samples": samples, "shown": shown}

    def close(self) -> None:
        if self._request is not None:
            self._request.close()


def content(
    args: Namespace, epoch: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any
) -> dict[str, Any]:
    """The contents of OpenCLIP's checkpoint after an epoch.

    Args:
        epoch: number of completed epochs.
        optimizer: the optimizer, whose state has our entry.
    """
    content = {
        "epoch": epoch,
        "name": args.name,
        "state_dict": getattr(model, "_orig_mod", model).state_dict(),  # without torch.compile's prefix
        "optimizer": optimizer.state_dict(),
    }
    if scaler is not None:
        content["scaler"] = scaler.state_dict()
    return content


def write(args: Namespace, content: dict[str, Any], position: dict[str, Any]) -> None:
    """Write a mid-epoch checkpoint, and remove older ones.

    Args:
        content: result of `content`.
        position: position in the next epoch.
    """
    epoch = content["epoch"]
    name = host().main_module.LATEST_CHECKPOINT_NAME if args.save_most_recent else name_of(args, epoch, position)
    path = os.path.join(args.checkpoint_path, name)
    atomic_save(torch.save, content, path)
    remove_older(path)
    logging.info(f"Saved after step {position['batches'] // args.accum_freq} of epoch {epoch}: {path}")


def name_of(args: Namespace, epoch: int, position: dict[str, Any]) -> str:
    return NAME.format(epoch=epoch, step=position["batches"] // args.accum_freq)


def save_checkpoint(save: Callable, content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces OpenCLIP's `torch.save` by `atomic_save`; an epoch's file replaces the mid-epoch ones."""
    atomic_save(save, content, path, *args, **kwargs)
    if isinstance(path, str) and EPOCH.fullmatch(os.path.basename(path)):
        remove_older(path)


def progress(path: str) -> tuple[int, int]:
    """The completed epochs of a checkpoint, and the batches of the next one."""
    if os.path.isdir(path):
        if not is_whole_folder(path):
            raise FileNotFoundError(path)
        return load_mapped(os.path.join(path, SHARDED_PARTS[-1]))["epoch"], 0  # at the end of an epoch only
    loaded = load_mapped(path)
    position = (take_entry(loaded) or {}).get("position") or {}
    return loaded["epoch"], position.get("batches", 0)


def is_whole_folder(path: str) -> bool:
    """Whether `path` is a complete checkpoint of shards, which only the task loop can resume from."""
    return host().loop == TASKS and all(os.path.exists(os.path.join(path, part)) for part in SHARDED_PARTS)


def furthest(folder: str, names: Iterable[str]) -> str | None:
    """The one of these checkpoints with the most training, of equals the first; None if none of them is whole."""
    best: tuple[tuple[int, int], str] | None = None
    for path in (os.path.join(folder, name) for name in names):
        with suppress(Exception):  # a file that is missing or torn
            if best is None or progress(path) > best[0]:
                best = progress(path), path
    return None if best is None else best[1]


def newest_numbered(folder: str) -> str | None:
    """Name of the checkpoint with the largest epoch and step in its name."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    numbered = [name for name in names if EPOCH.fullmatch(name) or PATTERN.fullmatch(name)]
    numbered += [
        name for name in names if EPOCH.fullmatch(f"{name}.pt") and is_whole_folder(os.path.join(folder, name))
    ]
    # The name decides between file and folder of an epoch: the file, as in OpenCLIP's order.
    return max(
        numbered, key=lambda name: ([int(digits) for digits in re.findall(r"\d+", name)], name), default=None
    )


def remove_older(path: str) -> None:
    """Remove the mid-epoch checkpoints beside a newer checkpoint at `path`."""
    folder, newer = os.path.split(path)
    for name in os.listdir(folder):
        if PATTERN.fullmatch(name) and name != newer:
            os.remove(os.path.join(folder, name))
    remove_folders(folder)


def remove_folders(folder: str) -> None:
    """Remove what no run resumes from: folders of rows without a checkpoint, what a kill left half-written, and the
    file of --save-most-recent if the folder of shards that has taken its place is newer."""
    file = os.path.join(folder, host().main_module.LATEST_CHECKPOINT_NAME)
    shards = file.removesuffix(".pt")
    if os.path.exists(file) and os.path.isdir(shards) and furthest("", (file, shards)) == shards:
        os.remove(file)
    paths = [os.path.join(folder, name) for name in os.listdir(folder)]
    for path in paths:
        if path.endswith(PARTIAL):
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    sharded = [os.path.join(path, SHARDED) for path in paths if os.path.isdir(path)]
    # Recovered statistics (--osr-save) may lie here, too, with rows of their own in FILE.rows-*.
    with_rows = {path.rpartition(MARK)[0] for path in paths}
    files = [path for path in paths if path.endswith(".pt") or path in with_rows]
    remove_unnamed(folder, files + sharded, begin="epoch_")
