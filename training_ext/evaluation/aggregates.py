"""Averages over tasks as DataComp and the papers define them."""

from collections.abc import Mapping, Sequence

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


def aggregates(table: str, tasks: Sequence[Task]) -> dict[str, tuple[str, ...]]:
    """By name the keys of the tasks that each average is over: those of DataComp and the papers, or one over all tasks
    of another table."""
    every = tuple(task.key for task in tasks)
    if table != DATACOMP:
        return {f"{table}: average of {len(every)}": every}
    return {
        "Papers and DataComp: average of 38": every,
        "Papers: ImageNet & variants": ("imagenet1k", *SHIFTS),
        "Papers: retrieval (Flickr, MSCOCO)": PAIRS,
        "DataComp: ImageNet": ("imagenet1k",),
        "DataComp: ImageNet dist. shifts": SHIFTS,
        "DataComp: VTAB": VTAB,
        "DataComp: retrieval (and WinoGAViL)": (*PAIRS, "misc/winogavil"),
    }


def averages(table: str, tasks: Sequence[Task], scores: Sequence[Mapping[str, float]]) -> list[tuple[str, list[float]]]:
    """Name and values of each average, over the tasks that all of `scores` have, so that the values compare.

    The name of one over fewer tasks says how many there are; one over none is left out.

    Args:
        scores: of each checkpoint, by task key, in [0, 1].
    """
    found = []
    for name, keys in aggregates(table, tasks).items():
        there = [key for key in keys if all(key in own for own in scores)]
        if there:
            part = "" if len(there) == len(keys) else f"[{len(there)} of {len(keys)} tasks] "
            found.append((part + name, [sum(own[key] for key in there) / len(there) for own in scores]))
    return found
