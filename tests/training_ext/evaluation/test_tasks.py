"""The table of tasks and the averages over it."""

import json
from dataclasses import asdict

import pytest

from open_clip_ext import InputError
from training_ext.scoring.tasks import DATACOMP, DATACOMP_TASKS, Task, averages, read_tasks

SCORES = {task.key: index / 100 for index, task in enumerate(DATACOMP_TASKS)}


def test_the_38_tasks():
    assert len(DATACOMP_TASKS) == len({task.key for task in DATACOMP_TASKS}) == 38
    assert len({name for task in DATACOMP_TASKS for name in task.folder_names()}) == sum(
        len(task.folder_names()) for task in DATACOMP_TASKS
    )
    named = {task.name: task for task in DATACOMP_TASKS}
    others = {task.name: task.main_metric for task in DATACOMP_TASKS if task.main_metric != "acc1"}
    assert others == {
        **dict.fromkeys(
            ("Caltech-101", "FGVC Aircraft", "Oxford Flowers-102", "Oxford-IIIT Pet"), "mean_per_class_recall"
        ),
        "Flickr": "mean_recall@1", "MSCOCO": "mean_recall@1", "WinoGAViL": "jaccard_score_10-12",
        "iWildCam": "F1-macro_all", "FMoW": "acc_worst_region", "Dollar Street": "acc_top5_wg", "GeoDE": "acc_wg",
    }
    assert named["GeoDE"].folder_names()[0] == "wds_geode_test"
    assert named["FMoW"].folder_names() == ["wds_wilds-fmow_test", "wds_wilds-fmow", "wilds-fmow"]
    assert named["Caltech-101"].folder_names()[:2] == ["wds_vtab-caltech101_test", "wds_vtab-caltech101"]


def test_averages_are_those_of_the_papers_and_of_datacomp():
    found = {name: value for name, (value,) in averages(DATACOMP, DATACOMP_TASKS, [SCORES])}
    by_name = {task.name: SCORES[task.key] for task in DATACOMP_TASKS}

    def mean(names):
        return pytest.approx(sum(by_name[name] for name in names) / len(names))

    shifts = ["ImageNet Sketch", "ImageNet v2", "ImageNet-A", "ImageNet-O", "ImageNet-R", "ObjectNet"]
    assert found["Papers and DataComp: average of 38"] == mean(list(by_name))
    assert found["Papers: ImageNet & variants"] == mean(["ImageNet 1k", *shifts])
    assert found["Papers: retrieval (Flickr, MSCOCO)"] == mean(["Flickr", "MSCOCO"])
    assert found["DataComp: ImageNet"] == by_name["ImageNet 1k"]
    assert found["DataComp: ImageNet dist. shifts"] == mean(shifts)
    assert found["DataComp: retrieval (and WinoGAViL)"] == mean(["Flickr", "MSCOCO", "WinoGAViL"])
    assert found["DataComp: VTAB"] == mean([
        "Caltech-101", "CIFAR-100", "CLEVR Counts", "CLEVR Distance", "Describable Textures", "EuroSAT",
        "KITTI Vehicle Distance", "Oxford Flowers-102", "Oxford-IIIT Pet", "PatchCamelyon", "RESISC45", "SVHN",
        "SUN397",
    ])
    assert not any(name.startswith("[") for name in found)


def test_an_average_over_fewer_tasks_says_so():
    some = {key: SCORES[key] for key in ("imagenet1k", "objectnet")}
    (every, all_tasks), (variants, seven), *others = averages(DATACOMP, DATACOMP_TASKS, [some])
    assert every == "[2 of 38 tasks] Papers and DataComp: average of 38"
    assert variants == "[2 of 7 tasks] Papers: ImageNet & variants"
    assert all_tasks == seven == [pytest.approx(sum(some.values()) / 2)]
    assert not any("etrieval" in name for name, _ in others)


def test_a_table_of_ones_own(tmp_path):
    tasks = (
        Task("a", "A", 5, folders=("x",)), Task("b", "B", 2, "acc_wg", fields=("place", "age"), group_by=("age",))
    )
    assert read_tasks(str(tmp_path)) == (DATACOMP, DATACOMP_TASKS)
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"name": "mine", "tasks": [asdict(task) for task in tasks]}))
    assert read_tasks(str(tmp_path)) == ("mine", tasks)
    assert averages("mine", tasks, [{"a": 0.5, "b": 1.0}]) == [("mine: average of 2", [0.75])]
    for content in (
        "no json", '{"name": "mine"}', '{"name": "mine", "tasks": [{}]}', '{"name": "mine", "tasks": []}',
        '{"name": "DataComp", "tasks": [{"key": "a", "name": "A"}]}',
        '{"name": "mine", "tasks": [{"key": "a", "name": "A", "group_by": ["age"]}]}',
        json.dumps({"name": "mine", "tasks": [{"key": "a", "name": "A"}] * 2}),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match="--data: .*tasks.json"):
            read_tasks(str(tmp_path))


def test_what_folders_tell_needs_no_field(evalset, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    for name in ("background", "colours", "retrieval"):
        (folder / f"wds_{name}_test").symlink_to(evalset / f"wds_evalset-{name}_test")
    (folder / "association").symlink_to(evalset / "evalset-association")
    keys = ["background", "colours", "retrieval", "association"]
    (folder / "tasks.json").write_text(json.dumps({"tasks": [*keys, "none"]}))
    name, tasks = read_tasks(str(folder))
    every = {task["name"]: task for task in json.loads((evalset / "tasks.json").read_text())["tasks"]}
    assert name == "own" and [(task.key, task.name) for task in tasks] == [(key, key) for key in (*keys, "none")]
    for task, same in zip(tasks, ("Background", "Both colours", "Retrieval", "Association", "Background"), strict=True):
        given = every[same]
        assert (task.kind, task.main_metric) == (given.get("kind", "classification"), given.get("main_metric", "acc1"))
    (folder / "tasks.json").write_text(json.dumps({"tasks": [{"key": "colours", "main_metric": "acc1"}]}))
    assert read_tasks(str(folder))[1][0].main_metric == "acc1"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"key": 5}, "key of 5 is 5, not <class 'str'>"),
        ({"size": "24"}, "size of 'a' is '24', not int | None"),
        ({"top_k": "5"}, "top_k of 'a' is '5', not <class 'int'>"),
        ({"group_by": None}, "group_by of 'a' is None, not <class 'tuple'>"),
        ({"macro": "yes"}, "macro of 'a' is 'yes', not <class 'bool'>"),
    ],
)
def test_a_table_with_wrong_types(tmp_path, wrong, message):
    task = {"key": "a", "name": "A"} | wrong
    (tmp_path / "tasks.json").write_text(json.dumps({"name": "own", "tasks": [task]}))
    with pytest.raises(InputError, match="is not a table of tasks") as error:
        read_tasks(str(tmp_path))
    assert message in str(error.value).replace('\\"', '"')
