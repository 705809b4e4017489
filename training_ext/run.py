"""FEATURES, what a training can do besides training, and their events."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from open_clip_ext.options import Option
from training_ext.context import Run
from training_ext.data.flags import RowFlags, SceneFlags
from training_ext.data.metrics import is_due, open_clip_metrics
from training_ext.feature import Epoch, Feature
from training_ext.features.advice import Advice
from training_ext.features.bad_samples import BadSamples
from training_ext.features.keep_best import KeepBest
from training_ext.features.log import Log
from training_ext.features.own_classes import OwnClasses
from training_ext.features.recovery.feature import Recovery
from training_ext.features.resume import Resume
from training_ext.features.scenes import SceneClasses
from training_ext.features.summary import Summary

FEATURES: tuple[type[Feature], ...] = (
    Log, Advice, BadSamples, Resume, Recovery, SceneClasses, OwnClasses, KeepBest, Summary
)
"""An event reaches them in this order: a step is logged before the run ends at it, and the summary is last."""


def owners() -> tuple[Any, ...]:
    """What has options: the core's and the features' classes."""
    return (RowFlags, SceneFlags, *FEATURES)


def options(needing_loss: bool = False) -> Iterator[Option]:
    """The options of the core and of all features, or only those that are refused without --loss."""
    for owner in owners():
        if owner.needs_loss or not needing_loss:
            yield from owner.options


class Features(list[Feature]):
    """The features of one run.

    Raises:
        InputError: an option is out of range.
    """

    def __init__(self, run: Run):
        super().__init__(feature(run) for feature in FEATURES)
        self.run = run

    def tell(self, event: Any, *args: Any) -> None:
        """Pass an event, a method of `Feature`, to each feature."""
        for feature in self:
            getattr(feature, event.__name__)(*args)

    def metrics(self, epoch: int | None = None) -> list[str]:
        """Names of the metrics that the run evaluates; after `epoch` epochs, if given."""
        added = [name for feature in self for name in feature.metrics()]
        return open_clip_metrics(self.run.args, epoch) + (added if is_due(self.run.args, epoch) else [])

    @contextmanager
    def epoch(self, epoch: Epoch) -> Iterator[None]:
        with ExitStack() as stack:
            for feature in self:
                stack.enter_context(feature.epoch(epoch))
            yield
