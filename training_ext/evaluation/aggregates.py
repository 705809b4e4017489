"""Averages over tasks, each with the name of those who define it so."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training_ext.evaluation.tasks import DATACOMP, Task

SHIFTS = ("imagenet_sketch", "imagenetv2", "imagenet-a", "imagenet-o", "imagenet-r", "objectnet")
VTAB = tuple(
    f"vtab/{name}"
    for name in (
        "caltech101", "cifar100", "clevr_count_all", "clevr_closest_object_distance", "dtd", "eurosat",
        "kitti_closest_vehicle_distance", "flowers", "pets", "pcam", "resisc45", "svhn",
    )
) + ("sun397",)
PAIRS = ("retrieval/flickr_1k_test_image_text_retrieval", "retrieval/mscoco_2014_5k_test_image_text_retrieval")


@dataclass(frozen=True)
class Aggregate:
    """The mean of the tasks with these keys."""

    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Average:
    """Of an aggregate: its name, or one that says how much of it is there; None if nothing is."""

    name: str
    value: float | None
    complete: bool


def aggregates(table: str, tasks: Sequence[Task]) -> list[Aggregate]:
    """What is averaged over a table of tasks."""
    every = tuple(task.key for task in tasks)
    if table != DATACOMP:
        return [Aggregate(f"{table}: average of {len(every)}", every)]
    return [
        Aggregate("Papers and DataComp: average of 38", every),
        Aggregate("Papers: ImageNet & variants", ("imagenet1k", *SHIFTS)),
        Aggregate("Papers: retrieval (Flickr, MSCOCO)", PAIRS),
        Aggregate("DataComp: ImageNet", ("imagenet1k",)),
        Aggregate("DataComp: ImageNet dist. shifts", SHIFTS),
        Aggregate("DataComp: VTAB", VTAB),
        Aggregate("DataComp: retrieval (and WinoGAViL)", (*PAIRS, "misc/winogavil")),
    ]


def average(aggregate: Aggregate, scores: Mapping[str, float]) -> Average:
    """The mean of the scores by key; of fewer tasks than it is defined over, it does not bear the aggregate's name."""
    there = [scores[key] for key in aggregate.keys if key in scores]
    complete = len(there) == len(aggregate.keys)
    name = aggregate.name if complete else f"[{len(there)} of {len(aggregate.keys)} tasks] {aggregate.name}"
    return Average(name, sum(there) / len(there) if there else None, complete)
