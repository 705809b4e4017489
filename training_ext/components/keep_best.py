"""Keep the weights of the best evaluation in best.pt (`--keep-best METRIC`).

A training with --loss that starts from weights is also evaluated before its first step, and later evaluations tell
which metrics are worse than that.
"""

import logging
import math
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from open_clip_ext.distributed import plain_name
from open_clip_ext.errors import InputError, not_one_of
from open_clip_ext.metrics_file import EVAL, read_metrics
from open_clip_ext.options import option
from training_ext.core import hosts
from training_ext.core.component import Component
from training_ext.core.epoch import Epoch, Evaluation
from training_ext.core.files import atomic_save
from training_ext.data.metrics import COUNTS, evaluated_metrics, is_better, num_items, smaller_is_better, standard_error
from training_ext.data.seeding import kept_random_state
from training_ext.openclip.hosts import starts_from_weights
from training_ext.openclip.loading import load_mapped, one_line

BEST = "best.pt"  # in the run's folder, where `--resume latest` does not look


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
        self._start: dict[str, Any] = {}  # metrics before the first step
        self._best: float | None = None

    def check_plan(self, metrics: list[str]) -> None:
        if self.keep_best is None:
            return
        self.check_writes("keep_best")
        if self.keep_best not in metrics:
            how = "needs an evaluation; give --val-data or --imagenet-val, with a frequency above 0"
            wrong = not_one_of(self.keep_best, metrics) if metrics else f"{self.keep_best!r} {how}"
            raise InputError(wrong, "--keep-best")

    def begin(self, resumed: bool) -> None:
        self._evaluates_start = not resumed and self.args.loss is not None
        folder = self.plan.folder
        if not resumed or not self.plan.is_first or folder is None:
            return
        self._start = next((line for line in read_metrics(folder, EVAL) if line["epoch"] == 0), {})
        path = os.path.join(folder, BEST)
        earlier = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(self.args.resume))), BEST)
        if self.keep_best is None:
            return
        if os.path.exists(path):
            try:
                self._best = load_mapped(path)["metrics"].get(self.keep_best)
            except Exception as error:
                logging.warning(f"The best weights in '{path}' cannot be read: {one_line(error)}")
        elif os.path.exists(earlier):
            logging.warning(f"'{path}' will have the best weights from here on; earlier ones stay in '{earlier}'")

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
        if epoch > 0:
            self._compare(epoch, values, metrics, data)
        else:
            self._start = values
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

    def _compare(
        self, epoch: int, values: dict[str, float], metrics: dict[str, Any], data: dict[str, Any]
    ) -> None:
        """Log which metrics are worse than before the first step by more than a standard error."""
        deviations = {
            name: standard_error(self._start[name], items)
            for name in values
            if self._start.get(name) is not None
            and not smaller_is_better(name)
            and (items := num_items(name, metrics, data))
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
