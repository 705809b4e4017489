"""Resume from the checkpoint with the most training that is whole, also in folders whose names mislead OpenCLIP."""

from functools import partial

from training_ext.core.component import Component
from training_ext.core.seam import Seam
from training_ext.data.checkpoint_files import latest_checkpoint


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
            used_by="open_clip_train.main:main",
            parameters=("remote",),
        ),
    )  # fmt: skip
