"""The whole extension: a run of the core with every component, and its failures in one line."""

from argparse import Namespace

from open_clip_ext.errors import MachineError
from open_clip_ext.losses import NonFiniteError
from training_ext.core import hosts
from training_ext.core.component import Components
from training_ext.core.run import Run, check_seams
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
    """`Run.train`, whose errors say the likely cause of numbers that are not finite, and what checkpoint is left."""

    def advice(error: BaseException) -> str:
        cause = f"; {likely_cause(run.args)}" if isinstance(error, NonFiniteError) else ""
        saves = run.training.steps > 0 or isinstance(error, MachineError)
        return cause + (last_saved(run.args) if saves else "")

    run.train(advice)
