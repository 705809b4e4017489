"""The groups of an optimizer, and `GivenSettings`: what it gets from flags, and a checkpoint replaces."""

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from training_ext.core.component import Component


def regroup(optimizer: Optimizer, model: nn.Module, components: "Sequence[Component]") -> None:
    """Let components change the optimizer's groups, before its first step.

    Args:
        model: without wrappers, with the parameters that are trained.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    for component in components:
        optimizer.param_groups[:] = component.param_groups(list(optimizer.param_groups), names)

    def loaded(optimizer: Optimizer) -> None:
        for component in components:
            component.optimizer_loaded(optimizer)

    optimizer.register_load_state_dict_post_hook(loaded)


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
