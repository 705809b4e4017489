"""The tables of tasks: DataComp's 38, or those in a folder's tasks.json; the averages over them as DataComp and the
papers define them; and the tasks of the user's own data."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_origin

from open_clip_ext.errors import InputError
from training_ext.scoring.folders import CLASSIFICATION, type_of

TASKS_FILE = "tasks.json"
DATACOMP = "DataComp"
OWN, OWN_PAIRS = "zeroshot-data", "val-data"  # kinds of the user's own data, after their flags


@dataclass(frozen=True)
class Task:
    """One row of a table of tasks.

    Args:
        key: DataComp's key, under which results are kept.
        name: DataComp's name; unique, too.
        size: number of samples, or of instances of WinoGAViL; None if it is not known.
        main_metric: the metric that is the score, one of the names in `scores`; "" for the user's own data, which no
            average includes.
        folders: names of its folder, see `folder_names`; derived from the key if empty.
        kind: "classification" (of one label or several, as its folder says), "retrieval", "winogavil", `OWN` or
            `OWN_PAIRS`.
        fields: names of the columns of each sample's .npy.
        group_by: the fields by whose groups accuracy is reported.
        top_k: the k of that top-k accuracy.
        macro: whether to report macro F1 and recall, too.
    """

    key: str
    name: str
    size: int | None = None
    main_metric: str = "acc1"
    folders: tuple[str, ...] = ()
    kind: str = "classification"
    fields: tuple[str, ...] = ()
    group_by: tuple[str, ...] = ()
    top_k: int = 1
    macro: bool = False

    def folder_names(self) -> list[str]:
        """Names that its folder may have: `wds_NAME_test` as DataComp downloads it, `wds_NAME` as in clip_benchmark's
        collection, or NAME."""
        names = self.folders or (self.key.removeprefix("fairness/").replace("/", "-"),)
        return [form.format(name) for name in names for form in ("wds_{}_test", "wds_{}", "{}")]

    def folder_in(self, folder: str) -> str | None:
        """Path of its folder, if there is one."""
        return next(filter(os.path.isdir, (os.path.join(folder, name) for name in self.folder_names())), None)

    def digest(self) -> str:
        """Digest of what the task measures, 16 hex digits."""
        measured = (self.kind, self.main_metric, self.fields, self.group_by, self.top_k, self.macro)
        return hashlib.sha256(repr(measured).encode()).hexdigest()[:16]


def own_task(path: str, kind: str = OWN) -> Task:
    """The task of the user's own classes or pairs."""
    name = os.path.basename(os.path.abspath(path))
    return Task(f"{kind}/{name}", name, main_metric="", kind=kind)


# Kind and usual metric by the type of a folder.
KINDS = {
    CLASSIFICATION: (CLASSIFICATION, "acc1"), "multilabel": (CLASSIFICATION, "mean_average_precision"),
    "retrieval": ("retrieval", "mean_recall@1"), "winogavil": ("winogavil", "jaccard_score_10-12"),
}
PER_CLASS = "mean_per_class_recall"
DATACOMP_TASKS = (
    Task("vtab/caltech101", "Caltech-101", 6085, PER_CLASS),
    Task("cifar10", "CIFAR-10", 10_000, folders=("cifar10", "vtab-cifar10")),
    Task("vtab/cifar100", "CIFAR-100", 10_000),
    Task("vtab/clevr_count_all", "CLEVR Counts", 15_000),
    Task("vtab/clevr_closest_object_distance", "CLEVR Distance", 15_000),
    Task("country211", "Country211", 21_100),
    Task("vtab/dtd", "Describable Textures", 1880),
    Task("vtab/eurosat", "EuroSAT", 5400),
    Task("fgvc_aircraft", "FGVC Aircraft", 3333, PER_CLASS),
    Task("food101", "Food-101", 25_250),
    Task("gtsrb", "GTSRB", 12_630),
    Task("imagenet1k", "ImageNet 1k", 50_000),
    Task("imagenet_sketch", "ImageNet Sketch", 50_889),
    Task("imagenetv2", "ImageNet v2", 10_000),
    Task("imagenet-a", "ImageNet-A", 7500),
    Task("imagenet-o", "ImageNet-O", 2000),
    Task("imagenet-r", "ImageNet-R", 30_000),
    Task("vtab/kitti_closest_vehicle_distance", "KITTI Vehicle Distance", 711),
    Task("mnist", "MNIST", 10_000),
    Task("objectnet", "ObjectNet", 18_574),
    Task("vtab/flowers", "Oxford Flowers-102", 6149, PER_CLASS),
    Task("vtab/pets", "Oxford-IIIT Pet", 3669, PER_CLASS),
    Task("voc2007", "Pascal VOC 2007", 14_976),
    Task("vtab/pcam", "PatchCamelyon", 32_768),
    Task("renderedsst2", "Rendered SST2", 1821),
    Task("vtab/resisc45", "RESISC45", 6300),
    Task("cars", "Stanford Cars", 8041),
    Task("stl10", "STL-10", 8000),
    Task("sun397", "SUN397", 108_754),
    Task("vtab/svhn", "SVHN", 26_032),
    Task(
        "retrieval/flickr_1k_test_image_text_retrieval", "Flickr", 1000, "mean_recall@1", kind="retrieval",
        folders=("flickr30k", "flickr_1k_test_image_text_retrieval"),
    ),
    Task(
        "retrieval/mscoco_2014_5k_test_image_text_retrieval", "MSCOCO", 5000, "mean_recall@1", kind="retrieval",
        folders=("mscoco_captions", "mscoco_2014_5k_test_image_text_retrieval"),
    ),
    Task("misc/winogavil", "WinoGAViL", 3563, "jaccard_score_10-12", kind="winogavil", folders=("winogavil",)),
    Task("wilds/iwildcam", "iWildCam", 42_791, "F1-macro_all", macro=True),
    Task("wilds/camelyon17", "Camelyon17", 85_054, fields=("hospital", "slide", "y"), group_by=("slide",)),
    Task(
        "wilds/fmow", "FMoW", 22_108, "acc_worst_region", fields=("region", "year", "y"), group_by=("year", "region")
    ),
    Task(
        "fairness/dollar_street", "Dollar Street", 3503, "acc_top5_wg", fields=("income_ds", "income_meta", "region"),
        group_by=("income_ds",), top_k=5,
    ),
    Task("fairness/geode", "GeoDE", 12_488, "acc_wg", fields=("region", "country"), group_by=("region",)),
)


def read_tasks(folder: str) -> tuple[str, tuple[Task, ...]]:
    """Name and tasks of the table: that of FOLDER/tasks.json if it exists, else DataComp's.

    Raises:
        InputError: the file is not such a table.
    """
    path = os.path.join(folder, TASKS_FILE)
    if not os.path.exists(path):
        return DATACOMP, DATACOMP_TASKS
    try:
        with open(path, encoding="utf-8-sig") as file:
            content = json.load(file)
        name = str(content.get("name", os.path.basename(os.path.abspath(folder))))
        tasks = tuple(task_of(row, folder) for row in content["tasks"])
        if name == DATACOMP or len({task.key for task in tasks}) < len(tasks) or not tasks:
            raise ValueError(f"it needs a name other than {DATACOMP} and tasks of different keys")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        names = ", ".join(field.name for field in fields(Task))
        raise InputError(
            f"{path!r} is not a table of tasks: {error!r}; give a name and tasks with {names}", "--data"
        ) from None
    for task in tasks:
        if task.kind not in ("classification", "retrieval", "winogavil") or not set(task.group_by) <= set(task.fields):
            raise InputError(f"{path!r}: {task.key!r} has an unknown kind, or group_by is not in its fields", "--data")
    return name, tasks


def task_of(row: str | dict[str, Any], folder: str) -> Task:
    """A task of tasks.json: its key, or fields of `Task`, of which its folder tells the kind and so the metric.

    Raises:
        AttributeError, TypeError, ValueError: it is not as `Task` says.
    """
    row = {"key": row} if isinstance(row, str) else row
    row = {"name": row.get("key"), **row}
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    task = Task(**values)
    for field in fields(Task):
        kind: Any = tuple if get_origin(field.type) is tuple else field.type
        if not isinstance(getattr(task, field.name), kind):
            raise ValueError(f"{field.name} of {task.key!r} is {getattr(task, field.name)!r}, not {kind}")
    task_folder = task.folder_in(folder)
    kind, main_metric = KINDS.get(type_of(task_folder) if task_folder else CLASSIFICATION, KINDS[CLASSIFICATION])
    return replace(task, **{"kind": kind, "main_metric": main_metric} | values)


SHIFTS = ("imagenet_sketch", "imagenetv2", "imagenet-a", "imagenet-o", "imagenet-r", "objectnet")
VTAB = (*(task.key for task in DATACOMP_TASKS if task.key.startswith("vtab/")), "sun397")
PAIRS = tuple(task.key for task in DATACOMP_TASKS if task.kind == "retrieval")


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
    rows = []
    for name, keys in aggregates(table, tasks).items():
        there = [key for key in keys if all(key in task_scores for task_scores in scores)]
        if there:
            part = "" if len(there) == len(keys) else f"[{len(there)} of {len(keys)} tasks] "
            rows.append((part + name, [sum(task_scores[key] for key in there) / len(there) for task_scores in scores]))
    return rows
