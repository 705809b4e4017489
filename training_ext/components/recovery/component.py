"""The recovery's flags, what they need, and when it runs (`--osr-epochs`, `--osr-load`, ...).

`recovered` and `recovery` are imported where there is a recovery.
"""

import logging
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NoReturn

from open_clip_ext import factory
from open_clip_ext.errors import InputError
from open_clip_ext.options import flag_of, option
from open_clip_ext.surrogates import Identity
from training_ext.core.component import Component
from training_ext.core.epoch import Epoch
from training_ext.data.rows import DataRows
from training_ext.data.seeding import kept_random_state
from training_ext.openclip.hosts import starts_from_weights

PAPERS = Identity.name  # surrogate of the recovery (TuneCLIP, Algorithm 1)
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
        f"(default: {PAPERS})",
        metavar="{identity,hinge}",
    )  # fmt: skip
    osr_save: str | None = option(None, "file to save the recovered statistics to", **GIVEN)
    osr_load: str | None = option(None, "load recovered statistics from this file instead", **GIVEN)

    _in_progress: Any = None  # `StatisticsRecovery`
    _is_due = False
    _done = 0  # its completed epochs, of a checkpoint within it

    @classmethod
    def resolve(cls, args: Namespace) -> None:
        given = args.given_flags - args.recipe_flags
        if "osr_epochs" not in args.given_flags and not starts_from_weights(args):
            args.osr_epochs = None  # from scratch a loss's default has nothing to recover
        if "osr_load" in args.recipe_flags and "osr_epochs" in given:
            args.osr_load = None
        if args.osr_load is not None:
            from training_ext.components.recovery import recovered

            if args.osr_save is not None:
                refuse("osr_save", f"{args.osr_save!r} with --osr-load, which recovers nothing; leave it out")
            saved = recovered.read(args.osr_load)["epochs"]
            if "osr_epochs" in given and args.osr_epochs != saved:
                refuse("osr_epochs", f"{args.osr_epochs:g}, but {args.osr_load!r} has {saved:g}; leave it out")
            args.osr_epochs = saved
        args.osr_epochs = args.epochs_before = args.osr_epochs or 0.0
        for name in ("osr_transfer", "osr_surrogate", "osr_save") if args.osr_epochs == 0 else ():
            if getattr(args, name) is not None and (name == "osr_save" or name not in args.recipe_flags):
                refuse(name, "has no effect without a recovery; give --osr-epochs or leave it out")
            setattr(args, name, None)
        args.osr_transfer = args.osr_transfer or "both"
        if args.osr_transfer == "table" and not args.uses_ext_loss:
            refuse("osr_transfer", f"'table' with --loss {args.loss}, whose only statistics are the moments")
        if args.osr_transfer == "none" and args.osr_save is not None:
            refuse("osr_save", "nothing is recovered with --osr-transfer none; leave out one of the two")
        preset = factory.find_preset(args.loss)
        chosen, own = args.osr_surrogate, (args.surrogate or preset.surrogate) if preset.has_parts else None
        usable = (PAPERS, own) if recovers(args) and own is not None else ()
        if chosen is None or (chosen not in usable and "osr_surrogate" in args.recipe_flags):
            args.osr_surrogate = PAPERS if usable else None
        elif not recovers(args):
            other = "--osr-transfer none" if args.osr_load is None else "--osr-load"
            refuse("osr_surrogate", f"{chosen!r} with {other}, which recovers nothing; leave it out")
        elif own is None:
            refuse("osr_surrogate", f"{chosen!r} with --loss {args.loss}, which has no surrogates; leave it out")
        elif chosen not in usable:
            refuse("osr_surrogate", f"{chosen!r} is neither {PAPERS} nor the training's --surrogate {own}")

    def check_plan(self, metrics: list[str]) -> None:
        if self.osr_epochs > 0 and not self.plan.trains:
            for given in self.options:
                if given.name in self.args.given_flags:
                    refuse(given.name, "needs data to train on; give --train-data")
        if self.osr_save is not None and not os.path.isdir(os.path.dirname(self.osr_save) or "."):
            refuse("osr_save", f"the folder of {self.osr_save!r} does not exist")

    def check_rows(self, rows: DataRows, resumes: bool) -> None:
        if self.osr_epochs > 0:
            from training_ext.components.recovery import recovered

            recovered.check_files(self.args, rows, resumes)

    def begin(self, resumed: bool) -> None:
        self._is_due = self._is_due or (not resumed and self.osr_epochs > 0)

    def epoch(self, epoch: Epoch, train: Callable[[Epoch], None]) -> None:
        if self._is_due:
            self._is_due = False
            self._prepare(epoch)
        train(epoch)

    def _prepare(self, epoch: Epoch) -> None:
        """Recover the statistics, or load them, before the first step."""
        if self.osr_transfer == "none":
            logging.info("No statistics are recovered (--osr-transfer none); schedules continue as after a recovery")
            return
        from training_ext.components.recovery.recovery import StatisticsRecovery

        recovery = StatisticsRecovery(self.training, self.plan, epoch, self._done)
        if self.osr_load is not None:
            recovery.load(self.osr_load)
            logging.info(f"=> loaded the recovered statistics '{self.osr_load}'")
        else:
            if self.plan.is_first:
                logging.info(f"Recovering optimizer statistics for {self.osr_epochs:g} epochs; the weights are fixed")
            self._in_progress, self.state_is_needed = recovery, True
            with kept_random_state(self.args.device):
                recovery.recover()
            self._in_progress, self.state_is_needed = None, False
            if self.osr_save is not None:
                recovery.save(self.osr_save)
        recovery.hand_over()

    def step_done(self, step: int) -> None:
        if self._in_progress is not None and step == 1:  # not after epochs
            self._in_progress.check()

    def saving(self) -> None:
        if self._in_progress is not None:
            self._in_progress.check()

    def state_dict(self) -> dict[str, Any]:
        state = {"epochs": self.args.epochs_before} if self.args.epochs_before else {}
        if self._in_progress is not None:
            state |= {"done": self._in_progress.done, "surrogate": self.osr_surrogate}
        return state

    def older_state(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {"epochs": entry.get("osr_epochs", 0.0)}  # absent in files from before the recovery existed

    def check_state(self, state: dict[str, Any], path: str) -> None:
        epochs, own = state.get("epochs", 0.0), self.args.epochs_before
        if own != epochs and self.args.uses_ext_loss:
            counted = f"{path!r} was trained after {epochs:g}, which its schedules count"
            refuse("osr_epochs", f"{own:g}, but {counted}; give --osr-epochs {epochs:g}")
        if (surrogate := state.get("surrogate", self.osr_surrogate)) != self.osr_surrogate:
            refuse("osr_surrogate", f"{self.osr_surrogate}, but the recovery of {path!r} has {surrogate}; give that")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._is_due, self._done = "done" in state, state.get("done", 0)


def recovers(args: Namespace) -> bool:
    """Whether a training from its start recovers statistics; it may also load them, or begin without."""
    return args.osr_epochs > 0 and args.osr_load is None and args.osr_transfer != "none"


def refuse(name: str, text: str) -> NoReturn:
    """Raise InputError for the option of this name."""
    raise InputError(text, flag_of(name))
