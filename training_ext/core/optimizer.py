"""`GivenSettings`: what an optimizer gets from flags, and a checkpoint replaces."""

from argparse import Namespace

from torch.optim import Optimizer


class GivenSettings:
    """The settings that an optimizer was built with, for after a checkpoint is loaded, whose own come with its groups.

    The rate is one of them with --skip-scheduler only; else it is the schedule's, and belongs to the last step.
    """

    def __init__(self, optimizer: Optimizer, args: Namespace):
        names = ["weight_decay", "betas", "eps", "momentum", "lr_scale", *(getattr(args, "opt_kwargs", None) or ())]
        if args.skip_scheduler:
            names.append("lr")
        self._optimizer = optimizer
        self._groups = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]

    def put_back(self) -> None:
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(settings)
