"""The recovery of optimizer statistics (OSR, see `open_clip_ext.recovery`) in the training command.

Its epochs are OpenCLIP's, at learning rate 0. Their order of the data differs from that of the training's epochs.
"""

import hashlib
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from math import ceil
from typing import Any

import torch
from open_clip_train.distributed import broadcast_object

from open_clip_ext.errors import InputError
from open_clip_ext.recovery import FrozenWeights, check_frozen, epoch_lengths, zero_learning_rates
from open_clip_ext.surrogates import Identity
from training_ext.core import row_folders
from training_ext.core.checkpoint import keeps_files
from training_ext.core.loss import TrainingLoss, build_loss
from training_ext.core.rows import DataRows
from training_ext.features.recovery import recovered
from training_ext.flags.data_checks import samples_per_epoch

FIRST_EPOCH = 1 << 20  # number of the recovery's first epoch, which seeds the order of the data
UNFINISHED = "recovery.state"  # in the experiment's folder; not *.pt, which `--resume latest` would take


class ShortLoader:
    """The first `num_batches` batches of a train loader.

    Args:
        loader: a train loader with `num_batches` and `num_samples`.
        num_batches: batches to take.
        accum_freq: batches per optimizer step.
        after_step: called once, after the optimizer's first step.
    """

    def __init__(self, loader: Any, num_batches: int, accum_freq: int, after_step: Callable[[], None]):
        self.num_samples = round(loader.num_samples * num_batches / loader.num_batches)
        self.num_batches = num_batches
        self._loader = loader
        self._accum_freq = accum_freq
        self._after_step = after_step

    def __iter__(self) -> Iterator[Any]:
        number, left = 0, self.num_batches - getattr(self._loader, "first", 0)
        for number, batch in enumerate(islice(self._loader, left), 1):
            if number == self._accum_freq + 1:
                self._after_step()
            yield batch
        # `islice` does not ask for the batch after the last one, which is when a RowLoader ends the step.
        if number and number == left and hasattr(self._loader, "after_step"):
            self._loader.after_step(self.num_batches)

    def __len__(self) -> int:
        return self.num_batches

    def __getattr__(self, name: str) -> Any:
        # Not `self._loader`, which would come here again: it is absent while a copy or a pickle is being made.
        return getattr(object.__getattribute__(self, "_loader"), name)


class StatisticsRecovery:
    """Recovers the optimizer's and the loss's statistics for fixed weights, saves them and passes them to the training.

    Args:
        args: as `params.parse_args` gives them, completed by OpenCLIP.
        rows: the rows of the train data.
        loss: this package's loss, or None for OpenCLIP's.
        model, optimizer, scaler: those that OpenCLIP trains with.
        reference: digest of the reference model of --distill-model, if there is one.
    """

    def __init__(
        self,
        args: Namespace,
        rows: DataRows,
        loss: TrainingLoss | None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: Any,
        reference: str | None = None,
    ):
        self.args = args
        self.rows = rows
        self.reference = reference
        self.loss = loss
        self.optimizer = optimizer
        self.scaler = scaler
        self.weights = FrozenWeights(model)

    # Algorithm 1

    def recover(self, run_epoch: Callable[..., None], loader: Any) -> None:
        """Run the remaining epochs and save the recovered statistics.

        Args:
            run_epoch: runs OpenCLIP's epoch without a schedule of learning rates; its arguments are the loader, the
                epoch's number, the batches of all epochs, and the last two of `midepoch.Interruptions.epoch`.
            loader: the train loader.
        """
        lengths = self._lengths(loader)
        saved = self._resume()
        done = 0 if saved is None else saved["done"]
        loss = None if self.loss is None else self.loss.loss
        own = self.args.osr_surrogate in (None, self.args.surrogate)
        with zero_learning_rates(self.optimizer, loss, None if own else Identity()):
            for epoch in range(done, len(lengths)):
                if loss is not None:
                    loss.set_epoch(epoch)
                short = ShortLoader(loader, lengths[epoch], self.args.accum_freq, self._check)
                run_epoch(short, epoch, lengths, saved, partial(self._save_within, epoch))
                saved = None
                self._check()
                self._save(self._unfinished, epoch + 1)
        if self.args.osr_save:
            self._save(self.args.osr_save, len(lengths))

    def _lengths(self, loader: Any) -> list[int]:
        """Number of batches of each epoch."""
        accum_freq = self.args.accum_freq
        return [steps * accum_freq for steps in epoch_lengths(self.args.osr_epochs, loader.num_batches // accum_freq)]

    def _check(self) -> None:
        loss = None if self.loss is None else self.loss.loss
        check_frozen(self.weights, self.optimizer, loss, f"--opt: {self.args.opt}", "use adamw, or --osr-epochs 0")

    # Passing the statistics to the training

    def hand_over(self) -> None:
        """Keep the statistics that --osr-transfer names, and reset the others to their state before the recovery."""
        transfer = self.args.osr_transfer
        if transfer not in ("both", "moments"):
            self.optimizer.state.clear()
            for group in self.optimizer.param_groups:
                group.pop("step", None)
        if self.loss is not None and transfer not in ("both", "table"):
            del self.loss.loss  # first, since memory may not hold two tables
            self.loss.loss = build_loss(
                self.args, self.rows.num_rows, self.args.device, samples_per_epoch(self.args, self.rows)
            )

    # Files

    @property
    def _unfinished(self) -> str | None:
        """The file from which an interrupted recovery resumes; None if the run writes no files."""
        return unfinished_path(self.args)

    def identity(self) -> dict[str, str]:
        """What the statistics belong to, including the weights and the trained parameters."""
        trained = hashlib.sha256(" ".join(self._trained()).encode()).hexdigest()
        own = {
            **recovered.identity(self.args, self.rows),
            "weights": f"digest {self.weights.digest()}",
            "trained parameters": f"{len(self._trained())}, digest {trained[:16]}",
        }
        return own if self.reference is None else {**own, "reference model": f"digest {self.reference[:16]}"}

    def _trained(self) -> list[str]:
        """Names of the parameters in the optimizer's order."""
        return [self.weights.names[p] for group in self.optimizer.param_groups for p in group["params"]]

    def _save_within(self, epoch: int, place: dict[str, Any]) -> None:
        self._check()
        if place["position"]["batches"] == place["position"]["of"]:
            self._save(self._unfinished, epoch + 1)
        else:
            self._save(self._unfinished, epoch, **place)

    def _save(self, path: str | None, done: int, **place: Any) -> None:
        """Write the statistics on process 0; every process calls this.

        Args:
            done: number of completed epochs.
            place: position within the next epoch, as in `midepoch`.
        """
        if path is None:
            return
        state: dict[str, Any] = {}
        folder = None
        if self.loss is not None:
            state, folder = row_folders.save_state(self.args, self.loss.loss, path)
        if self.args.rank != 0:
            return
        content = {
            "identity": self.identity(),
            "settings": recovered.settings(self.args),
            "epochs": self.args.osr_epochs,
            "surrogate": self.args.osr_surrogate,
            "done": done,
            "moments": {self.weights.names[p]: dict(moments) for p, moments in self.optimizer.state.items()},
            "group_steps": [group["step"] for group in self.optimizer.param_groups if "step" in group],
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "loss_state": state,
            "rows": folder,
            **place,
        }
        recovered.save(path, content)

    def load(self, path: str, flag: str = "--osr-load") -> dict[str, Any]:
        """Load the statistics in a file, and return how far its recovery went: `done`, `order`, `position`.

        Raises:
            InputError: the file cannot be read, or belongs to another model, data set, loss or optimizer.
        """
        content = recovered.read(path, flag)
        recovered.check(content, self.identity(), path, flag)
        if self.args.rank == 0:
            recovered.tell_differences(content, self.args, path)
        own = self.optimizer.state_dict()
        moments = content["moments"]
        own["state"] = {number: moments[name] for number, name in enumerate(self._trained()) if name in moments}
        for group, step in zip(own["param_groups"], content["group_steps"], strict=False):
            group["step"] = step
        self.optimizer.load_state_dict(own)
        if self.scaler is not None and content["scaler"]:
            self.scaler.load_state_dict(content["scaler"])
        if self.loss is not None:
            folder = row_folders.folder_of(path, content.get("rows"), flag)
            row_folders.load_state(self.loss.loss, content["loss_state"], folder, f"{flag}: {path!r}")
        return {name: content.get(name) for name in ("done", "order", "position")}

    def _resume(self) -> dict[str, Any] | None:
        """Load what an interrupted run of this experiment saved; None if there is nothing."""
        path = self._unfinished
        found = path is not None and os.path.exists(path)
        if self.args.distributed:
            found = broadcast_object(self.args, found)
        if path is None or not found:
            return None
        read_unfinished(self.args, path)
        saved, epochs = self.load(path, "--resume"), ceil(self.args.osr_epochs)
        logging.info(f"=> resuming the recovery of statistics from '{path}' (epoch {saved['done']} of {epochs})")
        return saved


def unfinished_path(args: Namespace) -> str | None:
    return os.path.join(args.logs, args.name, UNFINISHED) if keeps_files(args) else None


def find_unfinished(args: Namespace) -> str | None:
    """The file of the interrupted recovery that --resume latest continues, before OpenCLIP has changed `args`."""
    path = unfinished_path(args) if args.resume == "latest" and args.name is not None else None
    return path if path is not None and os.path.exists(path) else None


def read_unfinished(args: Namespace, path: str) -> dict[str, Any]:
    """Read the file of an interrupted recovery, as `recovered.read`.

    Raises:
        InputError: it cannot be read, or was to be of another length or with another surrogate.
    """
    content = recovered.read(path, "--resume")
    epochs, surrogate = content["epochs"], content.get("surrogate", args.surrogate)
    if surrogate != args.osr_surrogate:
        raise InputError(
            f"{args.osr_surrogate}, but the interrupted recovery {path!r} has {surrogate}; give that, "
            "or remove the file",
            "--osr-surrogate",
        )
    if epochs != args.osr_epochs:
        raise InputError(
            f"{args.osr_epochs:g}, but the interrupted recovery {path!r} has {epochs:g}; give that, or "
            "remove the file",
            "--osr-epochs",
        )
    return content


def remove_unfinished(args: Namespace) -> None:
    """Remove the file of an interrupted recovery, once the training has a checkpoint of its own."""
    path = unfinished_path(args)
    if args.rank == 0 and path is not None:
        with suppress(FileNotFoundError):
            os.remove(path)
        recovered.remove_folders(path)
