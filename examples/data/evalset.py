"""A small evaluation set of generated scenes in the formats of DataComp's and clip_benchmark's data.

Its tasks use every metric of the DataComp tasks: classification with 5 and with 8 classes, with groups, and with
several labels; retrieval with two captions per image; WinoGAViL's association of images with a cue.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from open_clip_ext.data.scenes import BACKGROUNDS, COLOURS, RELATIONS, TEMPLATES, Scene, describe_scene
from open_clip_ext.files import whole_file
from training_ext.tools.pairs.shards import write_shard

NUM_SAMPLES, SAMPLES_PER_SHARD = 400, 200
TASKS_FILE = "tasks.json"  # written last: if it exists, all files do
FIRST_ROW = 1 << 50  # beyond the rows of any training data
POOL = 60  # images that the associations choose from
CANDIDATES = (5, 6, 10, 12)

_BY = {"folders": ["evalset-colour"], "fields": ["background", "relation"]}
TASKS: list[dict[str, Any]] = [
    {"key": "evalset/background", "name": "Background"},
    {"key": "evalset/colour", "name": "Colour", "main_metric": "mean_per_class_recall"},
    {"key": "evalset/colour-f1", "name": "Colour, F1", "main_metric": "F1-macro_all", "macro": True, **_BY},
    {
        "key": "evalset/colour-worst-background", "name": "Colour, worst background", "main_metric": "acc_wg",
        "group_by": ["background"], **_BY,
    },
    {
        "key": "evalset/colour-worst-relation", "name": "Colour, worst relation", "main_metric": "acc_worst_relation",
        "group_by": ["background", "relation"], **_BY,
    },
    {
        "key": "evalset/colour-top5", "name": "Colour, worst background's top 5", "main_metric": "acc_top5_wg",
        "group_by": ["background"], "top_k": 5, **_BY,
    },
    {"key": "evalset/colours", "name": "Both colours", "main_metric": "mean_average_precision"},
    {"key": "evalset/retrieval", "name": "Retrieval", "main_metric": "mean_recall@1", "kind": "retrieval"},
    {
        "key": "evalset/association", "name": "Association", "main_metric": "jaccard_score_10-12", "kind": "winogavil"
    },
]

Members = dict[str, bytes]


def write_evalset(folder: Path, num_samples: int, samples_per_shard: int, seed: int, image_size: int) -> None:
    """Write the evaluation set to `folder`; the same arguments and the same Pillow give the same bytes."""

    def scenes(part: int) -> Iterator[Scene]:
        return (describe_scene(seed, FIRST_ROW + part * num_samples + i) for i in range(num_samples))

    def png(scene: Scene) -> bytes:
        return _encode(scene.render(image_size), "PNG")

    def classification(name: str, classes: list[str], templates: list[str], samples: Iterator[Members]) -> None:
        place = folder / f"wds_evalset-{name}_test"
        _write_lines(place / "classnames.txt", classes)
        _write_lines(place / "zeroshot_classification_templates.txt", templates)
        _write_shards(place, samples, num_samples, samples_per_shard)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / TASKS_FILE).unlink(missing_ok=True)
    colours, grounds, relations = list(COLOURS), list(BACKGROUNDS), list(RELATIONS)
    examples = [describe_scene(seed, FIRST_ROW - 1 - i) for i in range(8)]
    classification(
        "background", grounds, [replace(scene, background="{c}").caption for scene in examples],
        ({"png": png(scene), "cls": str(grounds.index(scene.background)).encode()} for scene in scenes(0)),
    )

    def of_one_colour(scene: Scene, colour: str) -> Scene:
        return replace(
            scene, first=replace(scene.first, colour=colour), second=replace(scene.second, colour=colour)
        )

    classification(
        "colour", colours, [of_one_colour(scene, "{c}").caption for scene in examples],
        (
            {
                "png": png(of_one_colour(scene, scene.first.colour)),
                "cls": str(colours.index(scene.first.colour)).encode(),
                "npy": _array([grounds.index(scene.background), relations.index(scene.relation)]),
            }
            for scene in scenes(1)
        ),
    )
    classification(
        "colours", colours, ["a {c} circle", "a {c} square", "a {c} star"],
        (
            {"png": png(scene), "npy": _array([colour in _colours(scene) for colour in colours])}
            for scene in scenes(2)
        ),
    )
    _write_lines(folder / "wds_evalset-colours_test" / "dataset_type.txt", ["multilabel"])
    retrieval = folder / "wds_evalset-retrieval_test"
    _write_lines(retrieval / "dataset_type.txt", ["retrieval"])
    pairs = ({"png": png(scene), "txt": "\n".join(_captions(scene)).encode()} for scene in scenes(3))
    _write_shards(retrieval, pairs, num_samples, samples_per_shard)
    pool = [describe_scene(seed, FIRST_ROW + 4 * num_samples + i) for i in range(POOL)]
    instances = max(len(CANDIDATES), num_samples // 4)
    _write_associations(folder / "evalset-association", pool, instances, seed, image_size)
    sizes = {"winogavil": instances}
    tasks = [{**task, "size": sizes.get(task.get("kind", ""), num_samples)} for task in TASKS]
    with whole_file(folder / TASKS_FILE, text=True) as file:
        file.write(json.dumps({"name": "evalset", "tasks": tasks}, indent=1) + "\n")


def _colours(scene: Scene) -> tuple[str, str]:
    return scene.first.colour, scene.second.colour


def _captions(scene: Scene) -> list[str]:
    other = (scene.template + 1) % len(TEMPLATES)
    return [scene.caption, replace(scene, template=other).caption]


def _write_associations(folder: Path, pool: list[Scene], instances: int, seed: int, image_size: int) -> None:
    """Write the association task: the cue is a colour; at least one candidate image has it, and not all do."""
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    for number, scene in enumerate(pool):
        with whole_file(images / f"scene-{number}.jpg") as file:
            file.write(_encode(scene.render(image_size), "JPEG"))
    draw = random.Random(seed).random
    with whole_file(folder / "winogavil_dataset.csv", text=True) as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["candidates", "cue", "associations"])
        done = 0
        while done < instances:
            order = sorted(range(POOL), key=[draw() for _ in range(POOL)].__getitem__)
            chosen = order[: CANDIDATES[done % len(CANDIDATES)]]
            cue = list(COLOURS)[int(draw() * len(COLOURS))]
            fitting = [number for number in chosen if cue in _colours(pool[number])]
            if 0 < len(fitting) < len(chosen):
                names = ([f"scene-{number}" for number in part] for part in (chosen, fitting))
                candidates, associations = (json.dumps(part) for part in names)
                writer.writerow([candidates, cue, associations])
                done += 1


def _write_shards(folder: Path, samples: Iterator[Members], num_samples: int, per_shard: int) -> None:
    (folder / "test").mkdir(parents=True, exist_ok=True)
    for earlier in (folder / "test").glob("*.tar"):
        if earlier.stem.isdecimal():  # of a larger set
            earlier.unlink()
    shards = -(-num_samples // per_shard)
    with tqdm(total=num_samples, desc=folder.name, unit="sample") as bar:
        for shard in range(shards):
            numbers = range(shard * per_shard, min((shard + 1) * per_shard, num_samples))
            named = ({"__key__": f"s{number:07d}", **next(samples)} for number in numbers)
            bar.update(write_shard(folder / "test" / f"{shard}.tar", named))
    _write_lines(folder / "test" / "nshards.txt", [str(shards)])


def _write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, text=True) as file:
        file.write("".join(f"{line}\n" for line in lines))


def _array(numbers: list) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array(numbers, dtype=np.int64), allow_pickle=False)
    return stream.getvalue()


def _encode(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()
