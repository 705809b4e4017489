"""Averages over tasks as DataComp and the papers define them."""

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
    """An average by its name, and the keys of the tasks that it is over."""

    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Average:
    """The value of an aggregate, in [0, 1], or None without any of its tasks; an incomplete one has another name."""

    name: str
    value: float | None


def aggregates(table: str, tasks: Sequence[Task]) -> list[Aggregate]:
    """The averages for a table of tasks: those of DataComp and the papers, or one over all tasks of another table."""
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


def averages(table: str, tasks: Sequence[Task], scores: Sequence[Mapping[str, float]]) -> list[tuple[str, list[float]]]:
    """Name and values of each aggregate, over the tasks that all of `scores` have, so that the values compare.

    Args:
        scores: of each checkpoint, by task key, in [0, 1].
    """
    shared = set.intersection(*(set(own) for own in scores))
    found = []
    for aggregate in aggregates(table, tasks):
        own = [average(aggregate, {key: one[key] for key in shared}) for one in scores]
        if values := [one.value for one in own if one.value is not None]:
            found.append((own[0].name, values))
    return found


def average(aggregate: Aggregate, scores: Mapping[str, float]) -> Average:
    """The mean of the aggregate's scores; if some are missing, its name says how many there are.

    Args:
        scores: by task key, in [0, 1].
    """
    there = [scores[key] for key in aggregate.keys if key in scores]
    complete = len(there) == len(aggregate.keys)
    name = aggregate.name if complete else f"[{len(there)} of {len(aggregate.keys)} tasks] {aggregate.name}"
    return Average(name, sum(there) / len(there) if there else None)
