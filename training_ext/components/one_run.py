"""Lock the run's folder, so that a second run in it ends at once instead of mixing its files with these."""

import os
from argparse import Namespace
from contextlib import ExitStack

import torch
from open_clip_train.distributed import broadcast_object

from open_clip_ext.errors import InputError
from open_clip_ext.files import InUseError, only_user
from training_ext.core.component import Component
from training_ext.core.plan import Plan, world_info
from training_ext.openclip.machine import check_name, check_writable


class OneRun(Component):
    """Locks the run's folder on process 0: at the start, or once OpenCLIP has given it a name."""

    name = "one_run"

    def __init__(self, args: Namespace):
        super().__init__(args)
        self._is_named = args.name is not None

    def prepare(self, until: ExitStack) -> None:
        keep_others_out(self.args, until)
        self._until = until

    def model_built(self, model: torch.nn.Module) -> None:
        """Refuse on every process, if process 0 finds another run in the folder."""
        if self._is_named:
            return
        refused = None
        try:
            keep_others_out(self.args, self._until)
        except InputError as error:
            refused = str(error)
        if self.args.distributed:
            refused = broadcast_object(self.args, refused)
        if refused is not None:
            raise InputError(refused)


def keep_others_out(args: Namespace, until: ExitStack) -> None:
    """Let no other run use this one's folder until `until` ends; called before anything in it is read or written.

    Process 0 does so for all. A run without `--name` gets its name, and calls this again, when its processes have met.

    Raises:
        InputError: another run uses the folder, or it cannot be written.
    """
    # Processes of horovod do not know their rank yet.
    if world_info()[1] > 0 or not Plan(args).keeps_files or getattr(args, "horovod", False):
        return
    check_writable("--logs", args.logs)
    if args.name is None:
        return
    if args.loss is not None:
        check_name(args)
    folder = os.path.join(args.logs, args.name)
    try:
        until.enter_context(only_user(folder))
    except InUseError as holder:
        raise InputError(
            f"the folder {folder!r} is in use by {holder}; let that run end, or give another name", "--name"
        ) from None
    except OSError as error:
        raise InputError(f"{folder!r} cannot be locked: {error.strerror}: {error.filename!r}", "--name") from None
