"""Compare every evaluation with the one before the first step, and keep the best weights (`--keep-best`)."""

import json
import logging
import math
import os
import shutil
from argparse import Namespace
from typing import Any

import torch

from open_clip_ext.distributed import plain_name
from open_clip_ext.errors import InputError
from open_clip_ext.files import whole_file
from open_clip_ext.retrieval import ANY_CAPTION, NUM_IMAGES, VALIDATION
from training_ext.core.checkpoint import atomic_save, keeps_files
from training_ext.core.rows import kind_of, trains
from training_ext.evaluation.scores import OWN_CLASSES, OWN_IMAGES
from training_ext.features import scenes as zero_shot
from training_ext.openclip.loading import load_mapped, one_line

START, BEST = "starting_point.json", "best.pt"  # in the experiment's folder, where `--resume latest` does not look
COUNTS = ("epoch", "num_samples", OWN_IMAGES, NUM_IMAGES)
IMAGENET = ("imagenet-zeroshot-val-top1", "imagenet-zeroshot-val-top5")
IMAGENET_V2 = ("imagenetv2-zeroshot-val-top1", "imagenetv2-zeroshot-val-top5")


def known_metrics(args: Namespace, epoch: int | None = None) -> list[str]:
    """Names of the metrics that this command line evaluates; after `epoch` epochs, if given."""

    def due(frequency: int) -> bool:
        return frequency > 0 and (epoch is None or epoch % frequency == 0 or epoch == args.epochs)

    names = []
    if args.val_data and due(args.val_frequency):
        names += [*VALIDATION, "clip_val_loss", *([zero_shot.METRIC] if args.dataset_type == "shapes" else [])]
        names += ANY_CAPTION if kind_of(args, args.val_data, "--val-data") in ("csv", "webdataset") else ()
    if args.zeroshot_data and due(args.val_frequency):
        names += OWN_CLASSES
    if due(args.zeroshot_frequency):
        names += [*(IMAGENET if args.imagenet_val else ()), *(IMAGENET_V2 if args.imagenet_v2 else ())]
    return names


def check_metric(args: Namespace) -> None:
    """Raise InputError unless --keep-best names a metric of the evaluation."""
    if args.keep_best is None:
        return
    names = known_metrics(args)
    given = f"--keep-best: {args.keep_best!r}"
    if not trains(args):
        raise InputError(f"{given} without training; give --train-data")
    if not keeps_files(args):
        raise InputError(f"{given} with --logs {args.logs}, which writes no files; give a folder")
    if args.keep_best in names:
        return
    if not names:
        raise InputError(f"{given} needs an evaluation; give --val-data or --imagenet-val, with a frequency above 0")
    raise InputError(f"{given} is not one of {', '.join(names)}")


def smaller_is_better(metric: str) -> bool:
    return metric.endswith(("loss", "rank"))


def is_better(metric: str, value: float, other: float) -> bool:
    return value < other if smaller_is_better(metric) else value > other


def num_items(metric: str, metrics: dict[str, Any], data: dict[str, Any]) -> int | None:
    """Number of images or captions that a metric is a fraction of; None if unknown, or if it is not one."""
    if metric in OWN_CLASSES:
        return metrics.get(OWN_IMAGES) if OWN_CLASSES[metric] == "acc1" else None  # the other is a mean over classes
    for names, key in ((IMAGENET, "imagenet-val"), (IMAGENET_V2, "imagenet-v2")):
        if metric in names:
            return len(data[key].dataloader.dataset)
    return metrics.get(NUM_IMAGES if metric in ANY_CAPTION and metric.startswith("image") else "num_samples")


def standard_error(share: float, items: int) -> float:
    """Standard error of a fraction of `items`, with one more success and failure so that it is not zero at 0 or 1."""
    share = (share * items + 1) / (items + 2)
    return math.sqrt(share * (1 - share) / items)


class Monitor:
    """Compares the evaluations of one run and keeps the best weights, on process 0.

    Args:
        args: the command line, completed by OpenCLIP.
        begun: whether an earlier run started this training.
    """

    def __init__(self, args: Namespace, begun: bool):
        self.folder = os.path.join(args.logs, args.name) if args.save_logs else None
        self.metric = args.keep_best
        self.start: dict[str, float] = {}
        self._best: float | None = None
        if self.folder is None:
            return
        folders = [self.folder] if begun else []  # a training that starts anew in this folder has its own best
        if args.resume and begun:  # with another --name, the files are beside the checkpoint
            folders.append(os.path.dirname(os.path.dirname(os.path.abspath(args.resume))))
        for folder in folders:
            self.start = self.start or _read_start(os.path.join(folder, START))
            if self._best is None:
                self._best = _read_best(os.path.join(folder, BEST), self.metric)
                if self._best is not None and folder != self.folder:
                    old, new = (os.path.join(place, BEST) for place in (folder, self.folder))
                    with open(old, "rb") as source, whole_file(new) as target:
                        shutil.copyfileobj(source, target)

    def _path(self, name: str) -> str | None:
        return None if self.folder is None else os.path.join(self.folder, name)

    def begin(self, metrics: dict[str, Any]) -> None:
        """Keep `metrics` as those before the first step."""
        self.start = {name: float(value) for name, value in metrics.items() if name not in COUNTS}
        if path := self._path(START):
            try:
                with whole_file(path, text=True) as file:
                    json.dump(self.start, file, indent=1)
            except OSError as error:  # do not lose the training for a log
                logging.warning(f"{path} was not written: {error.strerror}")

    def after(self, metrics: dict[str, Any], epoch: int, model: torch.nn.Module, data: dict[str, Any]) -> None:
        """Compare with the metrics before the first step, and keep the weights if they are the best so far.

        Args:
            metrics: by name, of the evaluation after `epoch` epochs.
            model: without wrappers.
            data: OpenCLIP's, by name, for the number of ImageNet images.
        """
        values = {name: float(value) for name, value in metrics.items() if name not in COUNTS}
        deviations = {
            name: standard_error(self.start[name], items)
            for name in values
            if name in self.start and not smaller_is_better(name) and (items := num_items(name, metrics, data))
        }
        worse = [name for name, deviation in deviations.items() if values[name] < self.start[name] - deviation]
        if worse and epoch > 0:
            changes = ", ".join(
                f"{name} {values[name]:.4f} (was {self.start[name]:.4f} +- {deviations[name]:.4f})" for name in worse
            )
            logging.warning(
                f"After epoch {epoch} these are worse than before training by more than a standard error: {changes}"
            )
        elif deviations and epoch > 0:
            logging.info(f"After epoch {epoch} no metric is worse than before training by more than a standard error")
        self._keep(values, epoch, model)

    def _keep(self, values: dict[str, float], epoch: int, model: torch.nn.Module) -> None:
        value = values.get(self.metric)
        if value is None or math.isnan(value):
            return
        if self._best is not None and not is_better(self.metric, value, self._best):
            return
        self._best = value
        if path := self._path(BEST):
            weights = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
            atomic_save(torch.save, {"state_dict": weights, "metrics": {"epoch": epoch, **values}}, path)
            logging.info(f"Best {self.metric} so far: {value:.4f}, kept in {path}")

    def check_unchanged(self, metrics: dict[str, Any]) -> None:
        """Log whether the evaluation after the recovery of statistics gives the same metrics as before."""
        values = {name: float(value) for name, value in metrics.items() if name in self.start}
        other = [name for name, value in values.items() if value != self.start[name]]
        if other:
            changes = ", ".join(f"{name} {values[name]!r} (was {self.start[name]!r})" for name in other)
            logging.warning(f"The evaluation differs after the recovery, though the weights are the same: {changes}")
        elif values:
            logging.info("The evaluation after the recovery of statistics equals that before, to the last digit")


def _read_start(path: str) -> dict[str, float]:
    try:
        with open(path) as file:
            return {name: float(value) for name, value in json.load(file).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logging.warning(f"The metrics before training in '{path}' cannot be read: {error}")
        return {}


def _read_best(path: str, metric: str | None) -> float | None:
    if metric is None or not os.path.exists(path):
        return None
    try:
        kept = load_mapped(path)
        value = kept["metrics"].get(metric)
        return None if value is None else float(value)
    except Exception as error:
        logging.warning(f"The best weights in '{path}' cannot be read: {one_line(error)}")
        return None
