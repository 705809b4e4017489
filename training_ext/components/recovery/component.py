"""The recovery's flags, what they need, and when it runs (`--osr-epochs`, `--osr-load`, ...)."""

import logging
import os
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from open_clip_ext import factory
from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of, option
from training_ext.components.recovery import recovered
from training_ext.components.recovery.recovery import StatisticsRecovery, read_unfinished, unfinished_path
from training_ext.core.component import Component
from training_ext.core.epoch import Epoch
from training_ext.data import row_folders
from training_ext.data.rows import DataRows
from training_ext.data.seeding import kept_random_state
from training_ext.openclip.hosts import starts_from_weights
from training_ext.openclip.machine import check_writable

GIVEN: dict[str, Any] = dict(valid=bool, expected="not empty", metavar="PATH")


class Recovery(Component):
    """Recovers the optimizer's statistics before a new training, or loads them (TuneCLIP, Section 4.1)."""

    name = "recovery"
    needs_loss = True
    layer = -15  # its epochs are within those of others
    state_is_needed: bool = False
    topic = "recovery of the optimizer's statistics, for pretrained models"
    osr_epochs: float = option(
        0.0, "recover the optimizer's statistics before training: number of epochs, also a fraction, that update "
        "Adam's moments and the loss's table while the weights are fixed (default: 5 for tuneclip with --pretrained, "
        "else 0)",
        valid=lambda epochs: 0 <= epochs <= 1e6, expected="a number >= 0, at most 1e6", metavar="EPOCHS",
    )  # fmt: skip
    osr_transfer: str = option(
        "both", "which recovered statistics the training keeps; none: no recovery is run (default: both)",
        choices=("both", "moments", "table", "none"),
    )  # fmt: skip
    osr_surrogate: str | None = option(
        None, "surrogate of the loss in the recovery: identity, as TuneCLIP's Algorithm 1, or the training's "
        f"(default: {recovered.SURROGATE})",
        metavar="{identity,hinge}",
    )  # fmt: skip
    osr_save: str | None = option(None, "file to save the recovered statistics to", **GIVEN)
    osr_load: str | None = option(None, "load recovered statistics from this file instead", **GIVEN)

    _in_progress: StatisticsRecovery | None = None
    _is_new = False  # the training, which has not begun
    _reference: torch.nn.Module | None = None

    @classmethod
    def resolve(cls, args: Namespace) -> None:
        given = args.given_flags - args.recipe_flags
        if "osr_epochs" not in args.given_flags and not starts_from_weights(args):
            args.osr_epochs = None  # from scratch a loss's default has nothing to recover
        if "osr_load" in args.recipe_flags and "osr_epochs" in given:
            args.osr_load = None
        if args.osr_load is not None:
            if args.osr_save is not None:
                text = f"{args.osr_save!r} with --osr-load, which recovers nothing; leave it out"
                raise InputError(text, "--osr-save")
            saved = recovered.read(args.osr_load)["epochs"]
            if "osr_epochs" in given and args.osr_epochs != saved:
                text = f"{args.osr_epochs:g}, but {args.osr_load!r} has {saved:g}; leave it out"
                raise InputError(text, "--osr-epochs")
            args.osr_epochs = saved
        args.osr_epochs = args.epochs_before = args.osr_epochs or 0.0
        for name in ("osr_transfer", "osr_surrogate", "osr_save") if args.osr_epochs == 0 else ():
            if getattr(args, name) is not None and (name == "osr_save" or name not in args.recipe_flags):
                raise InputError("has no effect without a recovery; give --osr-epochs or leave it out", flag_of(name))
            setattr(args, name, None)
        args.osr_transfer = args.osr_transfer or "both"
        if args.osr_transfer == "table" and not args.uses_ext_loss:
            text = f"'table' with --loss {args.loss}, whose only statistics are the moments"
            raise InputError(text, "--osr-transfer")
        if args.osr_transfer == "none" and args.osr_save is not None:
            raise InputError("nothing is recovered with --osr-transfer none; leave out one of the two", "--osr-save")
        preset = factory.find_preset(args.loss)
        chosen, own = args.osr_surrogate, (args.surrogate or preset.surrogate) if preset.has_parts else None
        usable = (recovered.SURROGATE, own) if recovers(args) and own is not None else ()
        if chosen is None or (chosen not in usable and "osr_surrogate" in args.recipe_flags):
            args.osr_surrogate = recovered.SURROGATE if usable else None
        elif not recovers(args):
            other = "--osr-transfer none" if args.osr_load is None else "--osr-load"
            raise InputError(f"{chosen!r} with {other}, which recovers nothing; leave it out", "--osr-surrogate")
        elif own is None:
            text = f"{chosen!r} with --loss {args.loss}, which has no surrogates; leave it out"
            raise InputError(text, "--osr-surrogate")
        elif chosen not in usable:
            raise InputError(f"{chosen!r} is neither identity nor the training's --surrogate {own}", "--osr-surrogate")

    def check_plan(self, metrics: list[str]) -> None:
        if self.osr_epochs > 0 and not self.plan.trains:
            for given in self.options:
                if given.name in self.args.given_flags:
                    raise InputError("needs data to train on; give --train-data", given.flag)
        path = self.osr_save
        if path is None:
            return
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise InputError(f"the folder of {path!r} does not exist", "--osr-save")
        if path.endswith(".pt"):
            instead = path.removesuffix(".pt") + ".state"
            raise InputError(f"--resume latest may take {path!r} for a checkpoint; call it {instead!r}", "--osr-save")

    def check_rows(self, rows: DataRows, resumes: bool) -> None:
        if self.osr_load is not None and not (resumes and self.args.uses_ext_loss):
            self._check_file(recovered.read(self.osr_load), rows, self.osr_load, "--osr-load")
        if resumes:  # after the recovery, so nothing is written
            return
        args, path = self.args, self.osr_save
        content: dict[str, Any] | None = None
        unfinished = unfinished_path(self.plan) if args.resume == "latest" and recovers(args) else None
        if unfinished is not None and os.path.exists(unfinished):
            content = read_unfinished(args, unfinished)
            self._check_file(content, rows, unfinished, "--resume")
        if path is None:
            return
        if os.path.exists(path):
            if content is None:
                raise InputError(f"{path!r} exists; give another path, or load it with --osr-load", "--osr-save")
            if not recovered.is_same(path, content):
                text = f"{path!r} exists and is not of the interrupted recovery {unfinished!r}; give another path"
                raise InputError(text, "--osr-save")
        check_writable("--osr-save", os.path.dirname(path) or ".")

    def _check_file(self, content: dict[str, Any], rows: DataRows, path: str, flag: str) -> None:
        recovered.check(content, recovered.identity(self.args, rows), path, flag)
        row_folders.check(path, content.get("rows"), content["loss_state"], flag)

    def reference_built(self, model: torch.nn.Module) -> None:
        self._reference = model

    def begin(self, resumed: bool) -> None:
        self._is_new = not resumed and self.osr_epochs > 0

    def epoch(self, epoch: Epoch, train: Callable[[Epoch], None]) -> None:
        if self._is_new:
            self._is_new = False
            self._prepare(epoch)
        if epoch.is_training and epoch.number > 0:
            self._remove_unfinished(epoch.number)
        train(epoch)

    def _prepare(self, epoch: Epoch) -> None:
        """Recover the statistics, or load them, before the first step."""
        if self.osr_transfer == "none":
            logging.info("No statistics are recovered (--osr-transfer none); schedules continue as after a recovery")
            return
        recovery = StatisticsRecovery(self.training, self.plan, epoch, self._reference)
        if self.osr_load is not None:
            recovery.load(recovered.read(self.osr_load), self.osr_load, "--osr-load")
            logging.info(f"=> loaded the recovered statistics '{self.osr_load}'")
        else:
            if self.plan.is_first:
                logging.info(f"Recovering optimizer statistics for {self.osr_epochs:g} epochs; the weights are fixed")
            self._in_progress = recovery
            with kept_random_state(self.args.device):
                recovery.recover()
            self._in_progress = None
        recovery.hand_over()

    def step_done(self, step: int) -> None:
        if self._in_progress is not None and step == 1:  # not after epochs
            self._in_progress.check()

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.args.epochs_before} if self.args.epochs_before else {}

    def older_state(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {"epochs": entry.get("osr_epochs", 0.0)}  # absent in files from before the recovery existed

    def check_state(self, state: dict[str, Any], path: str) -> None:
        epochs = state.get("epochs", 0.0)
        if self.args.epochs_before != epochs and self.args.uses_ext_loss:
            raise InputError(
                f"{self.args.epochs_before:g}, but {path!r} was trained after {epochs:g}, which its schedules "
                f"count; give --osr-epochs {epochs:g}",
                "--osr-epochs",
            )

    def end(self, completed: bool) -> None:
        if hasattr(self.args, "checkpoint_path"):  # else the run ended before it had one
            self._remove_unfinished(self.args.epochs)

    def _remove_unfinished(self, epochs: int) -> None:
        """Remove the file of an interrupted recovery, if the training has its checkpoint after `epochs` epochs."""
        path = unfinished_path(self.plan)
        if self.osr_epochs == 0 or path is None or not self.plan.is_first:
            return
        if os.path.exists(self.plan.checkpoint_after(epochs)):
            with suppress(FileNotFoundError):
                os.remove(path)
            recovered.remove_folders(path)


def recovers(args: Namespace) -> bool:
    """Whether a training from its start recovers statistics; it may also load them, or begin without."""
    return args.osr_epochs > 0 and args.osr_load is None and args.osr_transfer != "none"
