"""The recovery's flags, what they need, and when it runs (`--osr-epochs`, `--osr-load`, ...)."""

import logging
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from open_clip_ext import factory
from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of, option
from training_ext.data import row_folders
from training_ext.data.rows import DataRows
from training_ext.data.seeding import kept_random_state
from training_ext.feature import Epoch, Feature, NewTraining
from training_ext.features.recovery import recovered
from training_ext.features.recovery.recovery import StatisticsRecovery, read_unfinished, unfinished_path
from training_ext.openclip.hosts import starts_from_weights
from training_ext.openclip.machine import check_writable

GIVEN: dict[str, Any] = dict(valid=bool, expected="not empty", metavar="PATH")


class Recovery(Feature):
    """Recovers the optimizer's statistics before a new training, or loads them (TuneCLIP, Section 4.1)."""

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

    def check(self, metrics: list[str]) -> None:
        if self.osr_epochs > 0 and not self.run.trains:
            for given in self.options:
                if given.name in self.run.args.given_flags:
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
        if self.osr_load is not None and not (resumes and self.run.args.uses_ext_loss):
            self._check_file(recovered.read(self.osr_load), rows, self.osr_load, "--osr-load")
        if resumes:  # after the recovery, so nothing is written
            return
        args, path = self.run.args, self.osr_save
        content: dict[str, Any] | None = None
        unfinished = unfinished_path(self.run) if args.resume == "latest" and recovers(args) else None
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
        recovered.check(content, recovered.identity(self.run.args, rows), path, flag)
        row_folders.check(path, content.get("rows"), content["loss_state"], flag)

    def before_training(self, training: NewTraining) -> None:
        if self.osr_epochs == 0:
            return
        if self.osr_transfer == "none":
            logging.info("No statistics are recovered (--osr-transfer none); schedules continue as after a recovery")
            return
        recovery = StatisticsRecovery(self.run, training)
        if self.osr_load is not None:
            recovery.load(recovered.read(self.osr_load), self.osr_load, "--osr-load")
            logging.info(f"=> loaded the recovered statistics '{self.osr_load}'")
        else:
            if self.run.is_first:
                logging.info(f"Recovering optimizer statistics for {self.osr_epochs:g} epochs; the weights are fixed")
            self._in_progress = recovery
            with kept_random_state(self.run.args.device):
                recovery.recover()
            self._in_progress = None
        recovery.hand_over()

    def step_done(self, step: int, numbers: dict[str, float]) -> None:
        if self._in_progress is not None and step == 1:  # not after epochs
            self._in_progress.check()

    @contextmanager
    def epoch(self, epoch: Epoch) -> Iterator[None]:
        if epoch.is_training and epoch.number > 0:
            self._remove_unfinished(epoch.number)
        yield

    def end(self, trained: bool) -> None:
        if hasattr(self.run.args, "checkpoint_path"):  # else the run ended before it had one
            self._remove_unfinished(self.run.args.epochs)

    def _remove_unfinished(self, epochs: int) -> None:
        """Remove the file of an interrupted recovery, if the training has its checkpoint after `epochs` epochs."""
        path = unfinished_path(self.run)
        if self.osr_epochs == 0 or path is None or not self.run.is_first:
            return
        if os.path.exists(self.run.checkpoint_after(epochs)):
            with suppress(FileNotFoundError):
                os.remove(path)
            recovered.remove_folders(path)


def recovers(args: Namespace) -> bool:
    """Whether a training from its start recovers statistics; it may also load them, or begin without."""
    return args.osr_epochs > 0 and args.osr_load is None and args.osr_transfer != "none"
