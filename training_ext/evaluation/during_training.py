"""`--zeroshot-data` in the training: one's own classes after each epoch."""

import logging
import os
from argparse import Namespace
from typing import Any

import torch

from open_clip_ext.errors import InputError
from training_ext.evaluation.folders import open_own_classes
from training_ext.evaluation.inference import Encoder
from training_ext.evaluation.own_classes import IMAGES, METRICS, score_own_classes, write_confusion

FLAG = "--zeroshot-data"
VALIDATION = ("val", "imagenet-val", "imagenet-v2")
PICTURES = "confusion"  # folder of the experiment


def check_own_classes(args: Namespace) -> None:
    """Raise InputError unless the images can be found, and are evaluated; they are not read yet."""
    if args.zeroshot_data is None:
        return
    if not args.val_frequency:
        raise InputError(f"{FLAG}: has no effect with --val-frequency 0; leave one of the two out")
    open_own_classes(FLAG, args.zeroshot_data)


def marked(data: dict[str, Any], args: Namespace) -> dict[str, Any]:
    """OpenCLIP evaluates where it has validation data or ImageNet; an empty entry stands for one's own classes."""
    if args.zeroshot_data is None or set(data) & set(VALIDATION):
        return data
    return {**data, VALIDATION[-1]: None}


def unmarked(data: dict[str, Any]) -> dict[str, Any]:
    return {name: info for name, info in data.items() if info is not None}


def score_epoch(
    model: torch.nn.Module, transform: Any, tokenizer: Any, epoch: int, args: Namespace
) -> dict[str, float]:
    """Accuracy and balanced accuracy, and the picture of the confusion; on process 0 alone.

    Args:
        model: without wrappers, in evaluation mode.
    """
    encoder = Encoder(
        model, transform, tokenizer, torch.device(args.device), args.precision, args.batch_size, args.workers
    )
    try:
        source = open_own_classes(FLAG, args.zeroshot_data)
        scores = score_own_classes(encoder, source)
    except InputError as error:  # the data were good at the start: an epoch of training is worth more
        logging.error(f"No accuracy on one's own classes after epoch {epoch}: {error}")
        return {}
    assert scores is not None
    if args.save_logs:
        folder = os.path.join(args.logs, args.name, PICTURES)
        try:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"epoch_{epoch}.png")
            write_confusion(path, source, scores, f"epoch {epoch}")
            logging.info(f"Which classes are taken for which: {path}")
        except Exception as error:
            logging.warning(f"No picture of the confusion: {error!r}")
    return dict(zip((*METRICS, IMAGES), (scores.top1, scores.balanced, int(scores.counts.sum())), strict=True))
