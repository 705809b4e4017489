"""Run OpenCLIP's main with the names of `seams` replaced."""

from argparse import Namespace

from open_clip_ext.errors import InputError, fault_of_machine
from open_clip_ext.losses import NonFiniteError
from training_ext.core.component import warn_early
from training_ext.data.checkpoint_files import last_saved
from training_ext.data.usual import likely_cause
from training_ext.openclip.hosts import LEGACY, host, open_clip_version
from training_ext.seam import RUN
from training_ext.seams import scoped, seams
from training_ext.session import Session


def session_class() -> type[Session]:
    """The class of the session for the chosen training loop."""
    if host().loop == LEGACY:
        return Session
    from training_ext.task_session import TaskSession  # OpenCLIP before 4 has no tasks

    return TaskSession


def check_seams(args: Namespace) -> None:
    """Check that every replaced name exists, and warn of those that a run goes on without.

    Raises:
        InputError: one that is needed does not; one line with OpenCLIP's version.
        ImportError: the training loop itself cannot be imported.
    """
    if not hasattr(host().main_module, "main"):
        raise ImportError(f"cannot import name 'main' from {host().main!r}")
    for seam in seams():
        if seam.is_there():
            continue
        version = open_clip_version()
        if seam.may_be_off and not any(getattr(args, name, None) for name in seam.needed_by):
            warn_early(f"open_clip_torch {version} has no {seam.name}, so this is off: {seam.why}")
            continue
        raise InputError(
            f"open_clip_torch {version} has no {seam.name}, which open_clip_ext replaces; it runs with {host().range}"
        )


def run(session: Session) -> None:
    """Run OpenCLIP's main with the names replaced.

    Raises:
        InputError: OpenCLIP ended early, or the machine failed: a full disk, a worker that was killed.
        NonFiniteError: a value is not finite; the message names the step, the tensor and the likely cause.
        Stopped: after SIGTERM or Ctrl-C.
    """
    try:
        with scoped(session, RUN):
            if host().main_module.main(None):
                flag = None if session.args.remote_sync is None else "--remote-sync"
                raise InputError("OpenCLIP ended before it trained; the reason is in its own output above", flag)
            session.completed = True
    except NonFiniteError as error:
        raise NonFiniteError(f"{error}; {likely_cause(session.args)}") from None
    except (MemoryError, OSError, RuntimeError) as error:
        fault = fault_of_machine(error, session.run.folder)
        if fault is None:
            raise
        raise InputError(f"{fault}{last_saved(session.args)}") from None
    finally:
        session.close()
