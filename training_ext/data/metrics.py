"""The metrics of OpenCLIP's evaluation: their names, which of two values is better, and a fraction's standard error."""

import math
import re
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from open_clip_ext.retrieval import ANY_CAPTION, NUM_IMAGES, SIDES, VALIDATION
from training_ext.core.epoch import Epoch
from training_ext.core.plan import Plan
from training_ext.data.rows import kind_of
from training_ext.openclip.loading import CAPTIONING, beyond_towers

# Of the user's own classes, with DataComp's names for them; and the number of images.
OWN_CLASSES = {"zeroshot-data-top1": "acc1", "zeroshot-data-balanced": "mean_per_class_recall"}
OWN_IMAGES = "zeroshot-data-images"
SCENES = "shapes-zeroshot-top1"
COUNTS = ("epoch", "num_samples", OWN_IMAGES, NUM_IMAGES)
IMAGENET = ("imagenet-zeroshot-val-top1", "imagenet-zeroshot-val-top5")
RECALL = re.compile(r"_R@(\d+)$")
IMAGENET_V2 = ("imagenetv2-zeroshot-val-top1", "imagenetv2-zeroshot-val-top5")


def is_due(args: Namespace, epoch: int | None = None, flag: str = "val_frequency") -> bool:
    """Whether the run evaluates, by the frequency in `flag`; after `epoch` epochs, if given."""
    frequency = getattr(args, flag)
    return frequency > 0 and (epoch is None or epoch % frequency == 0 or epoch == args.epochs)


def open_clip_metrics(args: Namespace, epoch: int | None = None) -> list[str]:
    """Names of the metrics of OpenCLIP's evaluation; after `epoch` epochs, if given."""
    names = []
    if args.val_data and is_due(args, epoch):
        names += [*VALIDATION, "clip_val_loss"]
        names += ["val_generative_loss"] if beyond_towers(args.model) == CAPTIONING else []
        names += ANY_CAPTION if kind_of(args, args.val_data, "--val-data") in ("csv", "webdataset") else ()
    if is_due(args, epoch, "zeroshot_frequency"):
        names += [*(IMAGENET if args.imagenet_val else ()), *(IMAGENET_V2 if args.imagenet_v2 else ())]
    return names


def evaluated_metrics(args: Namespace, components: Iterable[Any], epoch: int | None = None) -> list[str]:
    """Names of the metrics that the run evaluates; after `epoch` epochs, if given."""
    added = [name for component in components for name in component.metrics()]
    return open_clip_metrics(args, epoch) + (added if is_due(args, epoch) else [])


def saves_before_evaluation(plan: Plan, components: Iterable[Any], epoch: Epoch) -> bool:
    """Whether an epoch's checkpoint is needed before its evaluation, which may fail; OpenCLIP saves after it."""
    done = epoch.number + 1
    return epoch.is_training and plan.saves_after(done) and bool(evaluated_metrics(plan.args, components, done))


def smaller_is_better(metric: str) -> bool:
    return metric.endswith(("loss", "rank"))


def is_better(metric: str, value: float, other: float) -> bool:
    return value < other if smaller_is_better(metric) else value > other


def num_items(metric: str, metrics: dict[str, Any], data: dict[str, Any]) -> int | None:
    """Number of images that a metric is a fraction of, also of their captions, which are not independent; None if
    unknown, or if it is not one."""
    if metric in OWN_CLASSES:
        return metrics.get(OWN_IMAGES) if OWN_CLASSES[metric] == "acc1" else None  # the other is a mean over classes
    for names, key in ((IMAGENET, "imagenet-val"), (IMAGENET_V2, "imagenet-v2")):
        if metric in names:
            return len(data[key].dataloader.dataset)
    return metrics.get(NUM_IMAGES, metrics.get("num_samples"))


def standard_error(share: float, items: int) -> float:
    """Standard error of a fraction of `items`, with one more success and failure so that it is not zero at 0 or 1."""
    share = (share * items + 1) / (items + 2)
    return math.sqrt(share * (1 - share) / items)


def uncertainty(metric: str, metrics: dict[str, Any]) -> tuple[float, float] | None:
    """The standard error of a recall, and its value by chance; None for other metrics."""
    recall, value = RECALL.search(metric), metrics.get(metric)
    pairs = metrics.get(NUM_IMAGES if metric in ANY_CAPTION else "num_samples")
    if recall is None or value is None or not pairs:
        return None
    return standard_error(value, metrics.get(NUM_IMAGES, pairs)), min(1.0, int(recall[1]) / pairs)


def recalls(metrics: dict[str, Any]) -> str:
    """The recalls at 1 as a sentence, with any caption of an image as right where it has several; "" without any."""
    recall = "any_R@1" if NUM_IMAGES in metrics else "R@1"
    found = {side: uncertainty(f"{side}_{recall}", metrics) for side in SIDES}
    values = [f"{side} {metrics[f'{side}_{recall}']:.3f} ± {one[0]:.3f}" for side, one in found.items() if one]
    chance = next((one[1] for one in found.values() if one), None)
    return "" if chance is None else f"{recall} {', '.join(values)}, chance {chance:.2g}"


def ranks_at_chance(metrics: dict[str, Any]) -> str:
    """The mean ranks as a sentence if both are those of chance; "" if not, or if there are none.

    By chance each of n ranks is one of 1 to n: their mean is (n + 1) / 2, with the standard error
    sqrt((n^2 - 1) / 12 n); two of these are allowed. A recall at 1 of a few hundred pairs is too coarse.
    """
    ranks = [float(metrics[name]) for side in SIDES if (name := f"{side}_mean_rank") in metrics]
    pairs = metrics.get("num_samples", 0)
    chance, error = (pairs + 1) / 2, math.sqrt(max(0, pairs**2 - 1) / (12 * max(1, pairs)))
    if pairs < 2 or not ranks or min(ranks) < chance - 2 * error:
        return ""
    return f"the mean ranks among {pairs} pairs are {' and '.join(f'{rank:.1f}' for rank in ranks)}, chance {chance:g}"


def duration(seconds: float) -> str:
    """A duration as short text: 45s, 12m05s, 34h02m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes}m{seconds:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"
