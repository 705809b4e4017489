"""What an optimizer gets from flags, and a checkpoint replaces."""

from argparse import Namespace
from typing import Any

from torch.optim import Optimizer


def given_settings(optimizer: Optimizer, args: Namespace) -> list[dict[str, Any]]:
    """The settings that each group was built with, for after a checkpoint is loaded, whose own come with its groups.

    The rate is one of them with --skip-scheduler only; else it is the schedule's, and belongs to the last step.
    """
    names = ["weight_decay", "betas", "eps", "momentum", "lr_scale", *(getattr(args, "opt_kwargs", None) or ())]
    if args.skip_scheduler:
        names.append("lr")
    return [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
