"""Save the loss's rows per sample, where they are large, by each process in a file beside the checkpoint."""

import os
from typing import Any

from open_clip_ext.losses import Loss
from open_clip_ext.options import AT_LEAST_0, option
from training_ext.core.component import Component
from training_ext.core.epoch import Epoch
from training_ext.data import checkpoint_files, row_folders


class RowFiles(Component):
    name = "row_files"
    topic = "data"
    needs_loss = True
    state_is_needed: bool = False
    split_rows_above: float | None = option(
        None, "if the loss's state per sample is larger than this, each process saves its own part, in a folder beside "
        f"the checkpoint (default: {row_folders.SPLIT_ABOVE:g})",
        metavar="MIB", **AT_LEAST_0,
    )  # fmt: skip
    _folder: str | None = None  # name of that of the next checkpoint

    def save_rows(self, loss: Loss, file: str) -> dict[str, Any]:
        state, self._folder = row_folders.save_state(self.args, loss, file)
        self.state_is_needed = self._folder is not None
        return state

    def state_dict(self) -> dict[str, Any]:
        return {} if self._folder is None else {"folder": self._folder}

    def older_state(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {} if entry.get("rows") is None else {"folder": entry["rows"]}

    def load_rows(self, loss: Loss, rest: dict[str, Any], state: dict[str, Any], path: str) -> bool:
        folder = row_folders.folder_of(path, state.get("folder"), "--resume")
        row_folders.load_state(loss, rest, folder, path, "--resume")
        return True

    def epoch(self, epoch: Epoch, train: Any) -> None:
        if self.args.save_logs:  # only on the process that saves
            checkpoint_files.remove_folders(self.args.checkpoint_path)
        train(epoch)

    def end(self, completed: bool) -> None:
        if completed and self.args.loss is not None and self.plan.trains and self.args.save_logs:
            if os.path.isdir(self.args.checkpoint_path):
                checkpoint_files.remove_folders(self.args.checkpoint_path)
