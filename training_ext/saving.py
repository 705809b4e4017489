"""`Saving`: our state in OpenCLIP's checkpoints, of the one that a run resumes from and of the next one."""

import logging
import math
import os
from typing import Any

import torch

from open_clip_ext.distributed import plain_name
from open_clip_ext.losses import Loss, NonFiniteError
from training_ext.context import Run
from training_ext.core.temperature import whole
from training_ext.data import checkpoint, row_folders
from training_ext.data.data_seams import DataSeams
from training_ext.data.loss import TrainingLoss
from training_ext.flags import recipes
from training_ext.openclip.hosts import LEGACY, host


class Saving:
    """Takes our entry out of a checkpoint that is resumed, and gathers the entry of the next one.

    Attributes:
        entry: of the next checkpoint, on process 0.
        is_done: whether the resumed checkpoint has all epochs.
        reference: digest of the frozen model of --distill-model, if there is one.
    """

    def __init__(self, run: Run, data: DataSeams):
        self.run = run
        self.data = data
        self.entry: dict[str, Any] | None = None
        self.is_done = False
        self.reference: str | None = None
        self._restored: dict[str, Any] | None = None
        self._restored_rows: str | None = None  # the folder of the restored rows per sample
        self._restored_recipe: recipes.Recipe | None = None
        self._recipe: dict[str, Any] | None = None  # to be written

    def take(self, loaded: Any, path: str) -> None:
        """Take our entry out of a loaded file, and let the names of its weights fit the model."""
        args = self.run.args
        entry = checkpoint.take_entry(loaded)
        checkpoint.fit_names(loaded, host().loop == LEGACY and args.distributed and not args.horovod)
        if not self.run.trains or not isinstance(loaded, dict):
            return
        if "epoch" in loaded:
            self.restore(entry, path, loaded["epoch"])
        elif args.uses_ext_loss and args.tau_init is not None:
            for name, value in loaded.items():  # weights only
                if plain_name(name) == "logit_scale" and isinstance(value, torch.Tensor):
                    loaded[name] = torch.full_like(value, -math.log(args.tau_init))

    def restore(self, entry: dict[str, Any] | None, path: str, epoch: int) -> None:
        """Check the entry of the checkpoint to resume, which has `epoch` completed epochs; `load_into` loads it."""
        args, rows = self.run.args, self.data.rows
        # Remote files are first read here; local ones were checked before anything was written.
        checkpoint.check_entry(entry, path, args, rows)
        self._restored = entry
        self._restored_recipe = None if args.loss is None else recipes.with_checkpoint(path)
        if entry is not None:
            checkpoint.check_reference(entry, path, args, self.reference)
            self._restored_rows = row_folders.folder_of(path, entry.get("rows"), "--resume")
            if self.run.is_first and entry["data_digest"] == self.data.known_rows.captions:
                logging.warning(f"{path!r} does not say which images its captions had; check that they are the same")
        if epoch >= args.epochs:
            self.is_done = True
            logging.info(f"Nothing is left to train: {path!r} has completed {epoch} of {args.epochs} epochs")

    def keep_recipe(self, flags: dict[str, Any]) -> None:
        """Process 0: say what the run changes in the recipe of the one that it resumes, and write its own.

        A recipe that is there stays until the first save, since every checkpoint is of it until then.

        Args:
            flags: as `recipes.resolved_flags` gives them.
        """
        args, rows, before = self.run.args, self.data.rows, self._restored_recipe
        self._recipe = recipes.of_run(args, flags, args.train_num_samples if rows is None else rows.num_rows)
        if before is not None and (changed := recipes.changes(before, self._recipe, args)):
            logging.warning(f"Changed since the checkpoint: {changed}")
        if before is None or not os.path.exists(os.path.join(self.run.folder or "", recipes.RECIPE)):
            self._write_recipe()

    def _write_recipe(self) -> None:
        if self._recipe is not None and self.run.folder is not None:
            recipes.save(self.run.folder, self._recipe)
        self._recipe = None

    def load_into(self, loss: Loss) -> None:
        """Load the loss's state, if the run resumes."""
        if self._restored is not None:
            path = self.run.args.resume
            row_folders.load_state(loss, self._restored.pop("state"), self._restored_rows, path, "--resume")

    def begin_epoch(self) -> dict[str, Any] | None:
        """The entry from which the run resumes, in its first epoch; None in the others."""
        saved, self._restored, self.entry = self._restored, None, None
        return saved

    def begin_save(self, model: torch.nn.Module, loss: TrainingLoss | None) -> None:
        """Every process calls it before a checkpoint, at the end of an epoch or within."""
        self.raise_if_not_finite(model, loss)
        self._write_recipe()

    def prepare(
        self, loss: TrainingLoss, name: str, order: dict[str, Any], position: dict[str, Any] | None = None
    ) -> None:
        """Gather the state that only some processes hold, for the checkpoint `name`; every process calls this.

        Args:
            order, position: as in `features.resume`, None at the end of an epoch.
        """
        file = os.path.join(self.run.args.checkpoint_path, name.removesuffix(".pt"))
        state, folder = row_folders.save_state(self.run.args, loss.loss, file)
        if self.run.is_first:
            self.entry = checkpoint.make_entry(
                self.run.args, self.data.known_rows, state, folder, self.reference, order, position
            )

    def add_to(self, optimizer_state: dict[str, Any]) -> None:
        """Put the entry into the optimizer's state, with which OpenCLIP writes it."""
        if self.entry is not None:
            optimizer_state[checkpoint.KEY] = self.entry

    def raise_if_not_finite(self, model: torch.nn.Module, loss: TrainingLoss | None) -> None:
        """Raise NonFiniteError before a save; only the parameters show whether the last step was finite."""
        when = f"epoch {self.data.epoch}"
        if loss is not None:
            loss.loss.raise_if_not_finite()
            when = f"step {loss.loss.steps}"
        named = dict(model.named_parameters())
        # One wait for the device, not one for each parameter.
        finite = torch.stack([whole(parameter.isfinite().all()) for parameter in named.values()]).tolist()
        for name, is_finite in zip(named, finite, strict=True):
            if not is_finite:
                raise NonFiniteError(f"{when}: {plain_name(name)} is not finite; training cannot continue")
