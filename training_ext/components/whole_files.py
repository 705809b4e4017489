"""Resume from the checkpoint with the most training that is whole, also in folders whose names mislead OpenCLIP.

OpenCLIP's own losses have no checkpoints within an epoch; that of its end is written before the evaluation, too.
"""

import logging
import os
from collections.abc import Callable
from functools import partial

import torch

from training_ext.core.component import Component
from training_ext.core.epoch import Epoch
from training_ext.core.seam import Seam
from training_ext.data.checkpoint_files import EPOCH, latest_checkpoint, replace_older
from training_ext.data.metrics import saves_before_evaluation


class WholeFiles(Component):
    name = "whole_files"
    may_be_off = False
    seams = (
        Seam(
            "open_clip_train.main", "get_latest_checkpoint",
            why="--resume latest finds nothing in a folder with [ or * in its name, and takes files from "
            "checkpoints_old",
            contract="main calls get_latest_checkpoint(folder, remote=bool) and resumes from the path that it returns",
            replacement=lambda original, component: partial(latest_checkpoint, original),
            parameters=("remote",),
        ),
    )  # fmt: skip

    def epoch(self, epoch: Epoch, train: Callable[[Epoch], None]) -> None:
        train(epoch)
        is_openclips = self.args.loss is not None and not self.args.uses_ext_loss
        if not is_openclips or self.plan.shards_model or not self.plan.is_first:
            return
        if saves_before_evaluation(self.plan, self.training.components, epoch):
            path = self.plan.checkpoint_after(epoch.number + 1)
            self.training.state.save(torch.save, epoch.content(epoch.number + 1), path)
            logging.info(f"Saved before the evaluation: {path}")

    def saved(self, path: str) -> None:
        if EPOCH.fullmatch(os.path.basename(path)):
            replace_older(path)
