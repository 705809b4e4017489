"""`Component`: one capability of a training with its flags, seams, hooks and state; and those of a run.

A component is a class in a module of `training_ext.components`, or in another package that names it as an entry point
of the group `open_clip_ext.components`.
"""

import importlib
import logging
import pkgutil
from argparse import Namespace
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from open_clip_ext.errors import InputError, not_one_of
from open_clip_ext.options import WithOptions, flag_of
from training_ext import components
from training_ext.core.seam import Seam

GROUP = "open_clip_ext.components"
LOG = logging.getLogger(__name__)  # not the root, which logging.warning would set up before OpenCLIP does


class Component(WithOptions):
    """One capability of a training.

        class KeepBest(Component):
            name, switch = "keep_best", "keep_best"
            keep_best: str | None = option(None, "keep the weights with the best of this metric", metavar="METRIC")
            seams = (Seam("open_clip_train.main", "evaluate", ...),)

    has the flag `--keep-best` and its value as `self.keep_best`. What it does is imported only when it is used.

    Args:
        args: the run's command line, with OpenCLIP's flags.

    Class attributes:
        name: of the component, its state in checkpoints, and `--without NAME`.
        switch: the option that asks for it; without one, every run has it, unless `wanted` says otherwise.
        seams: the names of OpenCLIP's that it replaces.
        may_be_off: whether a run without its flags goes on without it, after a warning, where OpenCLIP no longer keeps
            a seam's contract; else the run is refused until --without names it.
    """

    name: ClassVar[str]
    switch: ClassVar[str | None] = None
    seams: ClassVar[tuple[Seam, ...]] = ()
    may_be_off: ClassVar[bool] = True

    def __init__(self, args: Namespace):
        super().__init__(**{option.name: getattr(args, option.name, None) for option in self.options})
        self.args = args

    def wanted(self) -> bool:
        """Whether the run has it."""
        return self.switch is None or bool(getattr(self, self.switch))

    def check(self) -> None:
        """Raise InputError for flags that do not go together, before anything is written."""

    def wrap_model(self, model: nn.Module) -> None:
        """Change the model that OpenCLIP has built, in place, before its optimizer and its wrappers."""

    def param_groups(self, groups: list[dict[str, Any]], names: dict[nn.Parameter, str]) -> list[dict[str, Any]]:
        """The optimizer's groups, before its first step; a group's `lr_scale` multiplies OpenCLIP's learning rate.

        Args:
            groups: OpenCLIP's, complete with all settings.
            names: of the parameters in the model without its wrappers.
        """
        return groups

    def losses(self, batch: dict[str, Tensor], output: dict[str, Tensor]) -> dict[str, Tensor]:
        """One loss or more to be added to the run's, by name without `_loss`: means over this process's batch, 0-d.

        Called within the model's forward in training, so that DistributedDataParallel and FSDP see the modules that it
        uses. With --accum-freq a micro-batch passes twice, the first time without gradients, as through the model; the
        sum over the step is divided by --accum-freq.

        Args:
            batch: `image` and `text` of the micro-batch.
            output: the model's, to be left as it is.
        """
        return {}

    def optimizer_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has the state of the checkpoint that is resumed."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings to resume from, the same on every process, each of which calls it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`, before the first epoch."""

    def end(self, completed: bool) -> None:
        """The run ends, after an error or not; `completed`: OpenCLIP's main has come to its end."""

    def export(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights as plain `open_clip.create_model(pretrained=)` loads them: merged, without what it lacks."""
        return weights


warn_early = cache(LOG.warning)  # once, before OpenCLIP sets up the log


def overrides(component: Component, hook: Any) -> bool:
    """Whether the component has its own `hook`, a method of `Component`."""
    return getattr(type(component), hook.__name__) is not hook


def is_resumed(component: Component) -> bool:
    """Whether a checkpoint needs the component to be resumed: it changes the model or its groups, or has a state."""
    hooks = Component.wrap_model, Component.param_groups, Component.state_dict
    return any(overrides(component, hook) for hook in hooks)


@cache
def registry() -> dict[str, type[Component]]:
    """Every component by name; one of another package that cannot be imported is left out with a warning."""
    classes: dict[str, type[Component]] = {}
    for module in pkgutil.iter_modules(components.__path__):
        for value in vars(importlib.import_module(f"{components.__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Component) and value.__module__.startswith(
                f"{components.__name__}.{module.name}"
            ):
                classes[value.name] = value
    for point in entry_points(group=GROUP):
        try:
            loaded = point.load()
            if not issubclass(loaded, Component) or loaded.name != point.name:
                raise TypeError(f"it is no subclass of {__name__}.Component with that name")
        except Exception as error:
            LOG.warning(f"The component {point.name!r} ({point.value}) is left out: {error!r}")
            continue
        if point.name in classes:
            LOG.warning(f"The component {point.name!r} ({point.value}) is left out, since the name is taken")
        else:
            classes[point.name] = loaded
    return classes


def names_of(listed: str | None) -> list[str]:
    """The names in a list with commas between them."""
    return listed.split(",") if listed else []


def choose(added: Iterable[str], without: Iterable[str]) -> list[type[Component]]:
    """The components of these names.

    Raises:
        InputError: there is none of this name.
    """
    added, without = list(added), list(without)
    for flag, names in (("--with", added), ("--without", without)):
        for name in names:
            if name not in registry():
                raise InputError(not_one_of(name, registry()) if registry() else f"{name!r}: there are none", flag)
    return [registry()[name] for name in dict.fromkeys(added) if name not in without]


class Components(list[Component]):
    """Those of one run, in the order in which they were chosen.

    Args:
        named: whether --with names them, so that one without its flags would be a mistake.

    Raises:
        InputError: an option is out of range; a flag would do nothing; or OpenCLIP does not keep the contract of a
            component that is needed.
    """

    def __init__(self, classes: Iterable[type[Component]], args: Namespace, named: bool = False):
        super().__init__(component for component in self._wanted(classes, args, named) if self._can_run(component))

    @classmethod
    def of(cls, args: Namespace) -> "Components":
        """All but those of --without."""
        return cls(choose(registry(), names_of(args.without)), args)

    @staticmethod
    def _wanted(classes: Iterable[type[Component]], args: Namespace, named: bool) -> Iterator[Component]:
        for kind in classes:
            component = kind(args)
            if component.wanted():
                component.check()
                yield component
                continue
            needed = flag_of(kind.switch or kind.name)
            for option in kind.options:
                if getattr(args, option.name, None) is not None:
                    raise InputError(f"has no effect without {needed}", option.flag)
            if named and kind.options:
                flags = ", ".join(option.flag for option in kind.options)
                raise InputError(f"{kind.name} has no effect without its flags: {flags}", "--with")

    @staticmethod
    def _can_run(component: Component) -> bool:
        for seam in component.seams:
            if (broken := seam.broken()) is None:
                continue
            if component.may_be_off and component.switch is None:
                warn_early(f"Without {component.name}: {broken} in this OpenCLIP; {seam.why}")
                return False
            switch = component.switch
            remedy = f"give --without {component.name}" if switch is None else f"leave out {flag_of(switch)}"
            raise InputError(f"{component.name} cannot run with this OpenCLIP: {broken}; {remedy}")
        return True
