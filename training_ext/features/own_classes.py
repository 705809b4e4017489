"""`--zeroshot-data` in the training: zero-shot classification of the user's own classes after each epoch."""

import logging
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from open_clip_ext.errors import InputError, last_line
from training_ext.evaluation.folders import ClassFolders, open_own_classes, warn_of_contents
from training_ext.evaluation.inference import Encoder
from training_ext.evaluation.own_classes import IMAGES, METRICS, score_own_classes, write_confusion

FLAG = "--zeroshot-data"
VALIDATION = ("val", "imagenet-val", "imagenet-v2")
PICTURES = "confusion"  # folder of the experiment


def check_own_classes(args: Namespace) -> None:
    """Raise InputError if the images of --zeroshot-data cannot be found or would never be evaluated."""
    if args.zeroshot_data is None:
        return
    if not args.val_frequency:
        raise InputError(f"{FLAG}: has no effect with --val-frequency 0; leave out one of the two")
    source = open_own_classes(FLAG, args.zeroshot_data)
    warn_of_contents(source)
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
    try:
        source = open_own_classes(FLAG, args.zeroshot_data)
        scores = score_own_classes(encoder, source)
    except InputError as error:  # do not lose the training now
        logging.error(f"{FLAG} was not evaluated after epoch {epoch}: {last_line(error)}")
        return {}
    assert scores is not None
    if args.save_logs:
        folder = os.path.join(args.logs, args.name, PICTURES)
        try:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"epoch_{epoch}.png")
            write_confusion(path, source, scores, f"epoch {epoch}")
            logging.info(f"Confusion matrix of {FLAG}: {path}")
        except Exception as error:
            logging.warning(f"The confusion matrix was not drawn: {error!r}")
    return dict(zip((*METRICS, IMAGES), (scores.top1, scores.balanced, int(scores.counts.sum())), strict=True))
