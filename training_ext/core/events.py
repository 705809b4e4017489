"""`Events`: the functions that replace OpenCLIP's where hooks of components are called, see `hosts`."""

import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from open_clip_ext.files import is_full
from training_ext.core.epoch import Epoch, Evaluation

if TYPE_CHECKING:
    from training_ext.core.run import Run

IMAGENET_V2 = "imagenet-v2"  # OpenCLIP's name of the data


class Events:
    """OpenCLIP's data, epochs and evaluations, with the hooks of the run's components."""

    def __init__(self, run: "Run"):
        self.run = run

    def get_data(self, original: Callable, args: Namespace, transforms: Any, *rest: Any, **kwargs: Any) -> Any:
        self.run.training.transform, self.run.training.tokenizer = transforms[1], kwargs.get("tokenizer")
        data = original(args, transforms, *rest, **kwargs)
        for component in self.run.components:
            component.data_built(data)
        if any(component.metrics() for component in self.run.components):
            need_evaluation(data)
        return data

    def train_one_epoch(self, train: Callable[[Epoch], Any], epoch: Epoch) -> None:
        """An epoch of OpenCLIP's, run by `train`, within the components' `epoch`."""

        def train_alone(epoch: Epoch) -> None:
            self.run.is_besides = not epoch.is_training
            train(epoch)

        run: Callable[[Epoch], Any] = train_alone
        for component in reversed(self.run.components):
            run = partial(component.epoch, train=run)
        self.run.begin()
        run(replace(epoch, run=run))

    def evaluate(
        self, original: Callable, model: Any, data: dict[str, Any], epoch: int, args: Namespace, **kwargs: Any
    ) -> dict[str, Any]:
        try:
            metrics = original(model, data, epoch, args, **kwargs)
        except OSError as error:  # do not lose the training for a log
            if not is_full(error):
                raise
            logging.warning(f"The evaluation after epoch {epoch} is lost: {error.strerror}: {error.filename or ''}")
            return {}
        if metrics:
            self.run.by_epoch.append({name: float(value) for name, value in metrics.items()})
            evaluation = Evaluation(epoch, self.run.host.without_wrapper(model), data, kwargs.get("tokenizer"))
            for component in self.run.components:
                component.evaluated(evaluation, metrics)
        return metrics

    def zero_shot(
        self, original: Callable, model: Any, data: dict[str, Any], epoch: int, args: Namespace, tokenizer: Any = None
    ) -> dict[str, float]:
        data = {name: info for name, info in data.items() if info is not None}  # see `need_evaluation`
        metrics = original(model, data, epoch, args, tokenizer=tokenizer)
        evaluation = Evaluation(epoch, self.run.host.without_wrapper(model), data, tokenizer)
        for component in self.run.components:
            metrics = metrics | component.scores(evaluation)
        return metrics


def need_evaluation(data: dict[str, Any]) -> None:
    """Let OpenCLIP evaluate, which it does only with validation data or ImageNet."""
    if not data.keys() & {"val", "imagenet-val", IMAGENET_V2}:
        data[IMAGENET_V2] = None
