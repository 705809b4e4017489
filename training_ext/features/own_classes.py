"""`--zeroshot-data` in the training: zero-shot classification of the user's own classes after each epoch."""

import logging
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from open_clip_ext.errors import InputError, last_line
from training_ext.core.metrics import OWN_CLASSES, OWN_IMAGES
from training_ext.evaluation.class_folders import ClassFolders, open_own_classes
from training_ext.evaluation.inference import Encoder
from training_ext.evaluation.pictures import write_confusion
from training_ext.evaluation.scores import open_task, score
from training_ext.evaluation.tasks import own_task

FLAG = "--zeroshot-data"
VALIDATION = ("val", "imagenet-val", "imagenet-v2")
PICTURES = "confusion"  # folder of the experiment


def check_own_classes(args: Namespace) -> None:
    """Raise InputError if the images of --zeroshot-data cannot be found or would never be evaluated."""
    if args.zeroshot_data is None:
        return
    if not args.val_frequency:
        raise InputError("has no effect with --val-frequency 0; leave out one of the two", FLAG)
    source = open_own_classes(FLAG, args.zeroshot_data)
    source.warn()
    if isinstance(source, ClassFolders):
        source.check_headers()


def marked(data: dict[str, Any], args: Namespace) -> dict[str, Any]:
    """Add an empty entry to `data` if OpenCLIP, which evaluates validation data and ImageNet only, has none of them."""
    if args.zeroshot_data is None or set(data) & set(VALIDATION):
        return data
    return {**data, VALIDATION[-1]: None}


def unmarked(data: dict[str, Any]) -> dict[str, Any]:
    """`data` without the empty entry of `marked`."""
    return {name: info for name, info in data.items() if info is not None}


def score_epoch(
    model: torch.nn.Module, transform: Any, tokenizer: Any, epoch: int, args: Namespace,
    worker_init_fn: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Accuracy and balanced accuracy in [0, 1] and the number of images; draws the confusion. On process 0 only.

    Args:
        model: without wrappers, in evaluation mode.
        worker_init_fn: of the loader.
    """
    encoder = Encoder(
        model, transform, tokenizer, torch.device(args.device), args.precision, args.batch_size, args.workers,
        worker_init_fn=worker_init_fn,
    )
    task = own_task(args.zeroshot_data)
    try:
        source = open_task(task, args.zeroshot_data)
        found = score(encoder, task, source)
    except InputError as error:  # do not lose the training now
        logging.error(f"{FLAG} was not evaluated after epoch {epoch}: {last_line(error)}")
        return {}
    assert found is not None and found.confusion is not None
    if args.save_logs:
        path = os.path.join(args.logs, args.name, PICTURES, f"epoch_{epoch}.png")
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_confusion(path, f"{task.name}, epoch {epoch}", source.classes, found.metrics, found.confusion)
            logging.info(f"Confusion matrix of {FLAG}: {path}")
        except Exception as error:
            logging.warning(f"The confusion matrix was not drawn: {error!r}")
    return {log_name: found.metrics[name] for log_name, name in OWN_CLASSES.items()} | {OWN_IMAGES: found.samples}
