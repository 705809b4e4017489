"""Keep the weights of the best evaluation in best.pt (`--keep-best METRIC`).

A training with --loss that starts from weights is also evaluated before its first step, and later evaluations tell
which metrics are worse than that.
"""

import json
import logging
import math
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from open_clip_ext.distributed import plain_name
from open_clip_ext.errors import InputError, not_one_of
from open_clip_ext.files import whole_file
from open_clip_ext.options import option
from training_ext.core import hosts
from training_ext.core.component import Component
from training_ext.core.epoch import Epoch, Evaluation
from training_ext.core.files import atomic_save
from training_ext.data.metrics import COUNTS, evaluated_metrics, is_better, num_items, smaller_is_better, standard_error
from training_ext.data.seeding import kept_random_state
from training_ext.openclip.hosts import starts_from_weights
from training_ext.openclip.loading import load_mapped, one_line

START, BEST = "starting_point.json", "best.pt"  # in the run's folder, where `--resume latest` does not look


class KeepBest(Component):
    """Compares the evaluations of one run and keeps the best weights, on process 0."""

    name = "keep_best"
    topic = "evaluation"
    needs_loss = True
    layer = -20  # what the training starts from is evaluated before all else
    keep_best: str | None = option(
        None, "keep the best weights by a metric of the evaluation, such as image_to_text_R@1, in best.pt",
        valid=bool, expected="not empty", metavar="METRIC",
    )  # fmt: skip

    def __init__(self, args: Namespace):
        super().__init__(args)
        self._evaluates_start = False
        self._start: dict[str, float] = {}
        self._best: float | None = None
        self._misses_start = False

    def check_plan(self, metrics: list[str]) -> None:
        if self.keep_best is None:
            return
        given = repr(self.keep_best)
        if not self.plan.trains:
            wrong = f"{given} without training; give --train-data"
        elif not self.plan.keeps_files:
            wrong = f"{given} with --logs {self.args.logs}, which writes no files; give a folder"
        elif not metrics:
            wrong = f"{given} needs an evaluation; give --val-data or --imagenet-val, with a frequency above 0"
        elif self.keep_best not in metrics:
            wrong = not_one_of(self.keep_best, metrics)
        else:
            return
        raise InputError(wrong, "--keep-best")

    def begin(self, resumed: bool) -> None:
        """Read what an earlier run of this training kept; with another --name it lies beside the checkpoint."""
        folder, args = self.plan.folder, self.args
        self._evaluates_start = not resumed and args.loss is not None
        if not resumed or not self.plan.is_first:
            return
        beside = [os.path.dirname(os.path.dirname(os.path.abspath(args.resume)))] if args.resume else []
        for place in [] if folder is None else [folder, *beside]:
            self._start = self._start or _read_start(os.path.join(place, START))
            if self._best is None and self.keep_best is not None:
                # Another run's after the checkpoint are not weights that this one has had.
                last = math.inf if place == folder else self.training.state.done
                self._best = _read_best(os.path.join(place, BEST), self.keep_best, last)
                if self._best is not None and place != folder and (own := self.plan.file(BEST)):
                    with open(os.path.join(place, BEST), "rb") as source, whole_file(own) as target:
                        shutil.copyfileobj(source, target)
        self._misses_start = starts_from_weights(args) and not self._start

    def epoch(self, epoch: Epoch, train: Callable[[Epoch], None]) -> None:
        if self._evaluates_start:
            self._evaluates_start = False
            self._evaluate(epoch)
        train(epoch)

    def _evaluate(self, epoch: Epoch) -> None:
        """Evaluate the weights that the training starts from, if any; the random state stays as it is."""
        args = self.args
        if not starts_from_weights(args) and not args.resume:
            return
        if not evaluated_metrics(args, self.training.components):
            if self.plan.is_first:
                logging.warning(
                    "Nothing is evaluated, so you will not see whether the model gets worse; give --val-data"
                )
            return
        evaluate = hosts.installed().main().evaluate
        with kept_random_state(args.device):
            evaluate(epoch.task, epoch.data, 0, args, tb_writer=epoch.writer, tokenizer=self.training.tokenizer)
        if args.distributed and not args.horovod:
            dist.barrier()  # process 0 evaluates

    def evaluated(self, evaluation: Evaluation, metrics: dict[str, Any]) -> None:
        if not self.plan.trains or self.args.loss is None:
            return
        epoch, model, data = evaluation.epoch, evaluation.model, evaluation.data
        values = {name: float(value) for name, value in metrics.items() if name not in COUNTS}
        if self._misses_start:
            self._misses_start = False
            logging.warning("The metrics before training were not found, so later ones are not compared with them")
        if epoch > 0:
            self._compare(epoch, values, metrics, data)
        else:
            self._keep_start(values)
        value = values.get(str(self.keep_best), math.nan)
        if math.isnan(value) or (self._best is not None and not is_better(str(self.keep_best), value, self._best)):
            return
        self._best = value
        if path := self.plan.file(BEST):
            weights = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
            for component in self.training.components:
                weights = component.export(weights)
            atomic_save(torch.save, {"state_dict": weights, "metrics": {"epoch": epoch, **values}}, path)
            logging.info(f"Best {self.keep_best} so far: {value:.4f}, kept in {path}")

    def _keep_start(self, values: dict[str, float]) -> None:
        self._start = values
        if path := self.plan.file(START):
            try:
                with whole_file(path, text=True) as file:
                    json.dump(values, file, indent=1)
            except OSError as error:  # do not lose the training for a log
                logging.warning(f"{path} was not written: {error.strerror}")

    def _compare(
        self, epoch: int, values: dict[str, float], metrics: dict[str, Any], data: dict[str, Any]
    ) -> None:
        """Log which metrics are worse than before the first step by more than a standard error."""
        deviations = {
            name: standard_error(self._start[name], items)
            for name in values
            if name in self._start and not smaller_is_better(name) and (items := num_items(name, metrics, data))
        }
        worse = [
            f"{name} {values[name]:.4f} (was {self._start[name]:.4f} +- {deviation:.4f})"
            for name, deviation in deviations.items() if values[name] < self._start[name] - deviation
        ]
        if worse:
            logging.warning(
                f"After epoch {epoch} these are worse than before training by more than a standard error: "
                f"{', '.join(worse)}"
            )
        elif deviations:
            logging.info(f"After epoch {epoch} no metric is worse than before training by more than a standard error")


def _read_start(path: str) -> dict[str, float]:
    try:
        with open(path) as file:
            return {name: float(value) for name, value in json.load(file).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logging.warning(f"The metrics before training in '{path}' cannot be read: {error}")
        return {}


def _read_best(path: str, metric: str, last: float) -> float | None:
    """The best value of the metric; None without one, or if it is of an epoch after `last`."""
    if not os.path.exists(path):
        return None
    try:
        metrics = load_mapped(path)["metrics"]
        if metrics["epoch"] > last:
            logging.warning(f"The best weights in '{path}' are of epoch {metrics['epoch']}, after the checkpoint")
            return None
        value = metrics.get(metric)
        return None if value is None else float(value)
    except Exception as error:
        logging.warning(f"The best weights in '{path}' cannot be read: {one_line(error)}")
        return None
