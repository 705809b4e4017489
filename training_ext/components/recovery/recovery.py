"""The recovery's epochs: OpenCLIP's own at learning rate 0, whose order of the data differs from the training's.

The algorithm is that of `open_clip_ext.recovery`.
"""

import hashlib
import logging
import os
from argparse import Namespace
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any

from open_clip_ext.distributed import object_of_first
from open_clip_ext.metrics_file import RECOVERY
from open_clip_ext.recovery import FrozenWeights, check_frozen, digest_of, epoch_lengths, zero_learning_rates
from open_clip_ext.surrogates import Identity
from training_ext.components.recovery import recovered
from training_ext.core.epoch import Epoch
from training_ext.core.patching import StandIn
from training_ext.core.plan import Plan
from training_ext.core.training import Training
from training_ext.data import checkpoint_files, row_folders
from training_ext.data.seeding import AT_EPOCH, seed_all

FIRST_EPOCH = 1 << 20  # number of the recovery's first epoch, which seeds the order of the data


class ShortLoader(StandIn):
    """The first `num_batches` batches of a train loader.

    Args:
        loader: a train loader with `num_batches` and `num_samples`.
        num_batches: batches to take.
    """

    stands_for = "_loader"

    def __init__(self, loader: Any, num_batches: int):
        self.num_samples = round(loader.num_samples * num_batches / loader.num_batches)
        self.num_batches = num_batches
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return islice(self._loader, self.num_batches - getattr(self._loader, "first", 0))


class StatisticsRecovery:
    """Recovers the optimizer's and the loss's statistics for fixed weights, saves them and passes them to the training.

    Args:
        plan: of the run, whose options of the recovery are resolved.
        first: the training's first epoch, which follows.
        done: number of completed epochs.
    """

    def __init__(self, training: Training, plan: Plan, first: Epoch, done: int):
        self.plan, self.args = plan, plan.args
        self.training, self.first = training, first
        self.optimizer, self.scaler = first.optimizer, first.scaler
        self.weights = FrozenWeights(first.model)
        self.done = done

    # Algorithm 1

    def recover(self) -> None:
        """Run the remaining epochs, with a checkpoint after each."""
        freq, steps = self.args.accum_freq, self.plan.steps(self.first.loader.num_batches)
        lengths = [steps * freq for steps in epoch_lengths(self.args.osr_epochs, steps)]  # in batches
        loss = self.training.loss
        surrogate = None if self.args.osr_surrogate in (None, self.args.surrogate) else Identity()
        with zero_learning_rates(self.optimizer, loss, surrogate):
            while self.done < len(lengths):
                if loss is not None:
                    loss.set_epoch(self.done)
                epoch = self._epoch(self.done, lengths)
                self.first.run(epoch)
                self.check()
                self.done += 1
                if self.plan.keeps_files:
                    checkpoint_files.save_within(self.plan, self.training, epoch, epoch.steps)

    def _epoch(self, number: int, lengths: list[int]) -> Epoch:
        """An epoch without OpenCLIP's schedule, which appears in the log only."""
        steps = [self.plan.steps(batches) for batches in lengths]
        training = self.args.epochs * self.first.steps
        seed = FIRST_EPOCH + number
        if self.training.loss is None:
            seed_all(self.args.seed, AT_EPOCH, seed, self.args.rank)
        train = copy(self.first.data["train"])
        train.dataloader = copy(train.dataloader)
        train.dataloader.loader = ShortLoader(train.dataloader.loader, lengths[number])
        return replace(
            self.first, stage=RECOVERY, number=number, of=len(steps), seed=seed,
            data={**self.first.data, "train": train},
            before=sum(steps[:number]), ahead=sum(steps[number + 1 :]) + training,
            scheduler=lambda step: None, writer=None,
            args=Namespace(**{**vars(self.args), "save_logs": False, "wandb": False, "trackio": False}),
        )

    def check(self) -> None:
        """Raise InputError if the optimizer has changed the weights; restore them."""
        self.training.check_finite()
        instead = "use adamw, or --osr-epochs 0"
        check_frozen(self.weights, self.optimizer, self.training.loss, f"--opt: {self.args.opt}", instead)

    # Passing the statistics to the training

    def hand_over(self) -> None:
        """Keep the statistics that --osr-transfer names, and reset the others to their state before the recovery."""
        transfer = self.args.osr_transfer
        if transfer not in ("both", "moments"):
            self.optimizer.state.clear()
            for group in self.optimizer.param_groups:
                group.pop("step", None)
        if self.training.loss is not None and transfer not in ("both", "table"):
            self.training.loss = None  # first, since memory may not hold two tables
            self.training.loss = self.training.new_loss()

    # Files

    def identity(self) -> dict[str, str]:
        """What the statistics belong to, including the weights and the trained parameters."""
        trained = hashlib.sha256(" ".join(self._trained()).encode()).hexdigest()
        own = {
            **recovered.identity(self.args, self.training.data.rows),
            "weights": f"digest {self.weights.digest()}",
            "trained parameters": f"{len(self._trained())}, digest {trained[:16]}",
        }
        if self.training.reference is not None and self.args.uses_ext_loss:
            own["reference model"] = f"digest {digest_of(self.training.reference.state_dict())[:16]}"
        return own

    def _trained(self) -> list[str]:
        """Names of the parameters in the optimizer's order."""
        return [self.weights.names[p] for group in self.optimizer.param_groups for p in group["params"]]

    def save(self, path: str) -> None:
        """Write the statistics on process 0, unless a run that this one resumes has; every process calls this."""
        if object_of_first(os.path.exists(path)):  # a new run is refused then
            if self.args.rank == 0:
                logging.info(f"--osr-save: '{path}' exists and is left as it is")
            return
        loss = self.training.loss
        state, folder = ({}, None) if loss is None else row_folders.save_state(self.args, loss, path)
        needed = {one.name: one.state_dict() for one in self.training.components if one.state_is_needed}
        if self.args.rank != 0:
            return
        content = {
            "identity": self.identity(),
            "epochs": self.args.osr_epochs,
            "moments": {self.weights.names[p]: dict(moments) for p, moments in self.optimizer.state.items()},
            "group_steps": [group["step"] for group in self.optimizer.param_groups if "step" in group],
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "loss_state": state,
            "states": {name: own for name, own in needed.items() if own},
            "rows": folder,
        }
        recovered.save(path, content)

    def load(self, path: str) -> None:
        """Load the statistics that `path`, the value of --osr-load, contains.

        Raises:
            InputError: they belong to another model, data set, loss or optimizer.
        """
        content = recovered.read(path)
        recovered.check(content, self.identity(), path)
        own = self.optimizer.state_dict()
        moments = content["moments"]
        own["state"] = {number: moments[name] for number, name in enumerate(self._trained()) if name in moments}
        for group, step in zip(own["param_groups"], content["group_steps"], strict=False):
            group["step"] = step
        self.optimizer.load_state_dict(own)
        if self.scaler is not None and content["scaler"]:
            self.scaler.load_state_dict(content["scaler"])
        if self.training.loss is not None:
            folder = row_folders.folder_of(path, content.get("rows"), recovered.FLAG)
            row_folders.load_state(self.training.loss, content["loss_state"], folder, path, recovered.FLAG)
        for component in self.training.components:  # a file from before version 0.1 has no states of theirs
            if state := content.get("states", {}).get(component.name):
                component.load_state_dict(state)
