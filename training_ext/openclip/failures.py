"""A failure before the first optimizer step: one line on all processes, exit code 2, and no file of this start left."""

import os
import shutil
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

from torch.optim.optimizer import register_optimizer_step_post_hook

from open_clip_ext.errors import Stopped, lost_another_process
from open_clip_ext.files import LOCK, is_only_user


@contextmanager
def in_one_line(args: Namespace) -> Iterator[None]:
    """End every failure within the block, before an optimizer has made a step, as an InputError on all processes.

    Without `--loss` and after a step the block does nothing.

    Args:
        args: as `params.parse_args` gives them; by the end it has the name that OpenCLIP gave to the run.

    Raises:
        InputError: one line with the failure of the first process that failed.
    """
    if args.loss is None:
        yield
        return
    begun = Event()
    hook = register_optimizer_step_post_hook(lambda *_: begun.set())
    files = NewFiles(args)
    try:
        yield
    except Stopped:
        raise
    except (Exception, SystemExit) as error:
        if begun.is_set() or (isinstance(error, SystemExit) and not error.code):
            raise
        if args.traceback:
            traceback.print_exc()
        from training_ext.openclip.failure_lines import acknowledge, agreed, in_words

        lost = isinstance(error, RuntimeError) and lost_another_process(error)
        agreed_error = agreed(None if lost else in_words(error, args))
        if agreed_error is None:
            raise
        files.remove(args)
        acknowledge()
        if agreed_error is error:
            raise
        raise agreed_error from error
    finally:
        hook.remove()


class NewFiles:
    """The files that a run makes in its folder, unless there were some before it or the folder is another run's."""

    def __init__(self, args: Namespace):
        self._named = args.name is not None
        folder = Path(args.logs, args.name or "").absolute()
        # A run without a name gets one from the time.
        self._was_used = self._named and folder.is_dir() and any(path.name != LOCK for path in folder.iterdir())
        self._missing = [path for path in (folder, *folder.parents) if not path.exists()]

    def remove(self, args: Namespace) -> None:
        """Remove them, and the folders above that were not there; process 0 does, which has the folder's lock."""
        if self._was_used or args.name is None:
            return
        folder = Path(args.logs, args.name).absolute()
        if not is_only_user(folder):  # two runs of one second have the same name
            return
        for path in folder.iterdir() if folder.is_dir() else ():
            if self._named and path.name == LOCK:  # `only_user` removes it, and then the folders
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    os.remove(path)
        for path in (*([] if self._named else [folder]), *self._missing):
            with suppress(OSError):
                path.rmdir()
