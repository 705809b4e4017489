"""The whole extension: a run of the core with every component, and its failures in one line."""

from argparse import Namespace

from open_clip_ext.losses import NonFiniteError
from training_ext.core import hosts
from training_ext.core.component import Components
from training_ext.core.run import Run, check_seams, machine_faults
from training_ext.data.checkpoint_files import last_saved
from training_ext.data.usual import likely_cause


def build(args: Namespace) -> Run:
    """The run of a command line as `params.parse_args` gives it.

    Raises:
        InputError: the installed OpenCLIP does not keep the contract of a seam that is needed.
    """
    host = hosts.installed()
    check_seams(host)
    return Run(args, Components.of(args), host)


def train(run: Run) -> None:
    """Run OpenCLIP's main.

    Raises:
        InputError: OpenCLIP ended early, or the machine failed before the first step.
        MachineError: it failed later: a full disk, a worker that was killed.
        NonFiniteError: a value is not finite; the message names the step, the tensor and the likely cause.
        Stopped: after SIGTERM or Ctrl-C.
    """
    try:
        with machine_faults(run, last_saved):
            run.train()
    except NonFiniteError as error:
        raise NonFiniteError(f"{error}; {likely_cause(run.args)}") from None
