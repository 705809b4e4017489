"""`Component`: one capability of a training with its flags, seams, hooks and state; and those of a run.

A component is a class in a module of `training_ext.components`, or in `component` of a folder there, or in another
package that names it as an entry point of the group `open_clip_ext.components`.
"""

import importlib
import logging
import pkgutil
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar

from torch import Tensor, nn

from open_clip_ext.errors import InputError, not_one_of
from open_clip_ext.losses import Loss
from open_clip_ext.options import WithOptions, flag_of
from training_ext import components
from training_ext.core.epoch import Epoch, Evaluation
from training_ext.core.events import of_host
from training_ext.core.plan import Plan
from training_ext.core.seam import Seam
from training_ext.core.training import Training

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
        condition: what else asks for it, in words, where `wanted` says so.
        may_be_off: whether a run without its flags goes on without it, after a warning, where OpenCLIP no longer keeps
            a seam's contract; else the run is refused until --without names it.
        state_is_needed: whether a checkpoint with its state is resumed with it only, and one without it without it.
        counts_rows: whether it uses `training.data.rows`, for which the rows of the train data are counted before the
            start.
        needs_loss: whether its flags are refused without --loss.
        needs_ext_loss: whether they are refused with OpenCLIP's own losses, too.
        topic: heading of its flags in --help, if not its name.
        layer: hooks are called in this order, and of equal layers by name.

    Attributes:
        training: what the run trains with.
        plan: processes, sizes, folder, and when it saves.
    """

    name: ClassVar[str]
    switch: ClassVar[str | None] = None
    condition: ClassVar[str | None] = None
    seams: ClassVar[tuple[Seam, ...]] = ()
    may_be_off: ClassVar[bool] = True
    state_is_needed: bool = True
    counts_rows: ClassVar[bool] = False
    needs_loss: ClassVar[bool] = False
    needs_ext_loss: ClassVar[bool] = False
    topic: ClassVar[str | None] = None
    layer: ClassVar[int] = 0

    training: Training

    def __init__(self, args: Namespace):
        super().__init__(**{option.name: getattr(args, option.name, None) for option in self.options})
        self.args = args
        self.plan = Plan(args)

    def __getstate__(self) -> dict[str, Any]:
        """Loader workers that get a copy get it without what is trained."""
        return {name: value for name, value in vars(self).items() if name != "training"}

    @classmethod
    def answers(cls, hook: str) -> bool:
        """Whether the class overrides the method `hook` of `Component`, so that a run has to call it."""
        return getattr(cls, hook) is not getattr(Component, hook)

    @classmethod
    def is_resumed(cls) -> bool:
        """Whether a checkpoint needs it to be resumed: it changes the model or its groups, or has a state."""
        return any(map(cls.answers, ("wrap_model", "param_groups", "state_dict")))

    def state_in(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Its state in our entry of a checkpoint; {}: it has none."""
        return self.older_state(entry["older"]) if "older" in entry else entry.get("components", {}).get(self.name, {})

    def check_writes(self, name: str) -> None:
        """Raise InputError for the option of this name, by which a training writes a file, if the run writes none."""
        value, flag = getattr(self, name), flag_of(name)
        if not self.plan.trains:
            raise InputError(f"{value!r} without training; give --train-data", flag)
        if not self.plan.keeps_files:
            raise InputError(f"{value!r} with --logs {self.args.logs}, which writes no files; give a folder", flag)

    # Before anything is written

    @classmethod
    def resolve(cls, args: Namespace) -> None:
        """Fill in settings in `args`, of a run with --loss; raise InputError for those that have no effect.

        Settings of the loss are those given until then. `args.epochs_before` epochs, 0.0 here, count for its schedules.
        """

    def wanted(self) -> bool:
        """Whether the run has it."""
        return self.switch is None or bool(getattr(self, self.switch))

    def check(self) -> None:
        """Raise InputError for flags that do not go together."""

    def metrics(self) -> Sequence[str]:
        """Names of the metrics that it adds to an evaluation."""
        return ()

    def check_plan(self, metrics: list[str]) -> None:
        """Process 0: raise InputError for what cannot work.

        Args:
            metrics: names of all that the run evaluates.
        """

    def check_rows(self, rows: Any, resumes: bool) -> None:
        """The same for the train data, as `DataRows`; `resumes`: a training goes on."""

    def prepare(self, until: ExitStack) -> None:
        """Every process, before anything is read or written: take what the run needs for itself until `until` ends."""

    # In the order in which they are called

    def wrap_model(self, model: nn.Module) -> None:
        """Change the model that OpenCLIP has built, in place, before its optimizer and its wrappers."""

    def model_built(self, model: nn.Module) -> None:
        """The model to train is as it will be, and the log is set up."""

    def param_groups(self, groups: list[dict[str, Any]], names: dict[nn.Parameter, str]) -> list[dict[str, Any]]:
        """The optimizer's groups, before its first step; a group's `lr_scale` multiplies OpenCLIP's learning rate.

        Args:
            groups: OpenCLIP's, complete with all settings.
            names: of the parameters in the model without its wrappers.
        """
        return groups

    def columns(self) -> Sequence[str]:
        """Names of the int64 numbers that samples of shards carry besides their row, see `tags.Tags`."""
        return ()

    def raw_sample(self, sample: dict[str, Any]) -> dict[str, int] | None:
        """In a loader worker: a sample of train shards is read, bytes by suffix, and may be changed.

        Returns:
            Those of its `columns` that are known by now; None to leave the sample out.
        """
        return {}

    def for_loss(self, tokens: Tensor, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a loss of this package gets of a batch's samples besides their rows, by argument, (b,) int64 each.

        Args:
            tokens: of the captions, (b, L).
            numbers: rows and `columns` of the samples, by name, (b,) each.
        """
        return {}

    def data_built(self, data: dict[str, Any]) -> None:
        """Every process has OpenCLIP's data sets, by name; the `loader` of the train loader may be replaced."""

    def begin(self, resumed: bool) -> None:
        """The first epoch of this run is about to begin; `resumed`: an earlier run has begun the training."""

    def epoch(self, epoch: Epoch, train: Callable[[Epoch], None]) -> None:
        """Run an epoch by calling `train`, with what it needs before and after."""
        train(epoch)

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

    def step_done(self, step: int) -> None:
        """`step` steps of the epoch are done."""

    def scores(self, evaluation: Evaluation) -> dict[str, float]:
        """Process 0, within an evaluation: values of `metrics`."""
        return {}

    def evaluated(self, evaluation: Evaluation, metrics: dict[str, Any]) -> None:
        """Process 0: OpenCLIP has evaluated the model; epoch 0 is before the first step."""

    def saving(self) -> None:
        """Every process: a checkpoint is about to be written."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings to resume from, the same on every process, each of which calls it."""
        return {}

    def check_state(self, state: dict[str, Any], path: str) -> None:
        """Raise InputError unless the run can go on from this state in the checkpoint `path`; {}: it has none."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`, before the first epoch."""

    def older_state(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Its state in a checkpoint's entry from before version 0.1."""
        return {}

    def save_rows(self, loss: Loss, file: str) -> dict[str, Any] | None:
        """Write the loss's rows per sample beside the checkpoint `file`, without its end, and return the rest of its
        state; None: it is written whole. Every process calls this."""
        return None

    def load_rows(self, loss: Loss, rest: dict[str, Any], state: dict[str, Any], path: str) -> bool:
        """Load what `save_rows` wrote; False: `rest` is the whole. `state` is the component's in `path`."""
        return False

    def saved(self, path: str) -> None:
        """On the processes that write it: the checkpoint is complete."""

    def end(self, completed: bool) -> None:
        """The run ends, after an error or not; `completed`: OpenCLIP's main has come to its end."""

    def export(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights as plain `open_clip.create_model(pretrained=)` loads them: merged, without what it lacks."""
        return weights


warn_early = cache(LOG.warning)  # once, before OpenCLIP sets up the log


@cache
def registry() -> dict[str, type[Component]]:
    """Every component by name; one of another package that cannot be imported is left out with a warning."""
    classes: dict[str, type[Component]] = {}
    for module in pkgutil.iter_modules(components.__path__):
        name = f"{components.__name__}.{module.name}{'.component' if module.ispkg else ''}"
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and issubclass(value, Component) and value.__module__ == name:
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
        wanted = self._wanted(sorted(classes, key=lambda kind: kind.layer), args, named)
        super().__init__(component for component in wanted if self._can_run(component))

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
            needed = kind.condition or flag_of(kind.switch or kind.name)
            for option in kind.options:
                if getattr(args, option.name, None) is not None:
                    raise InputError(f"has no effect without {needed}", option.flag)
            if named and kind.options:
                flags = ", ".join(option.flag for option in kind.options)
                raise InputError(f"{kind.name} has no effect without its flags: {flags}", "--with")

    @staticmethod
    def _can_run(component: Component) -> bool:
        asked_by = component.condition or (component.switch and flag_of(component.switch))
        events = (seam for hook, seam in of_host().EVENTS.items() if component.answers(hook))
        for seam in (*component.seams, *events):
            if (broken := seam.broken()) is None:
                continue
            if component.may_be_off and asked_by is None:
                warn_early(f"Without {component.name}: {broken} in this OpenCLIP; {seam.why}")
                return False
            remedy = f"give --without {component.name}" if asked_by is None else f"leave out {asked_by}"
            raise InputError(f"{component.name} cannot run with this OpenCLIP: {broken}; {remedy}")
        return True
