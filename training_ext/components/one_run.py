"""Lock the run's folder, so that a second run in it ends at once instead of mixing its files with these."""

from argparse import Namespace
from contextlib import ExitStack

import torch
from open_clip_train.distributed import broadcast_object

from open_clip_ext.errors import InputError
from open_clip_ext.files import InUseError, only_user
from training_ext.core.component import Component
from training_ext.core.plan import world_info
from training_ext.openclip.machine import check_name, check_writable


class OneRun(Component):
    """Locks the run's folder on process 0: at the start, or once OpenCLIP has given it a name."""

    name = "one_run"

    def __init__(self, args: Namespace):
        super().__init__(args)
        self._is_named = args.name is not None

    def prepare(self, until: ExitStack) -> None:
        self._until = until
        self._keep_others_out()

    def model_built(self, model: torch.nn.Module) -> None:
        """Refuse on every process, if process 0 finds another run in the folder."""
        if self._is_named:
            return
        refused = None
        try:
            self._keep_others_out()
        except InputError as error:
            refused = str(error)
        if self.args.distributed:
            refused = broadcast_object(self.args, refused)
        if refused is not None:
            raise InputError(refused)

    def _keep_others_out(self) -> None:
        """Let no other run use this one's folder until it ends; process 0 does so for all.

        Raises:
            InputError: another run uses the folder, or it cannot be written.
        """
        args, folder = self.args, self.plan.folder
        # Processes of horovod do not know their rank yet.
        if world_info()[1] > 0 or not self.plan.keeps_files or getattr(args, "horovod", False):
            return
        check_writable("--logs", args.logs)
        if folder is None:
            return
        if args.loss is not None:
            check_name(args)
        try:
            self._until.enter_context(only_user(folder))
        except InUseError as holder:
            raise InputError(
                f"the folder {folder!r} is in use by {holder}; let that run end, or give another name", "--name"
            ) from None
        except OSError as error:
            raise InputError(f"{folder!r} cannot be locked: {error.strerror}: {error.filename!r}", "--name") from None
