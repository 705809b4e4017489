"""Metrics of validation pairs: OpenCLIP's, and those that know the other captions of an image."""

import json
import os
import shlex
import shutil
import tarfile
from pathlib import Path

import pandas as pd
import pytest
import torch
from open_clip_train import train as open_clip_train

from open_clip_ext.retrieval import ANY_CAPTION, validation_metrics
from training_ext.components import retrieval
from training_ext.components.advice import advise_on_captions
from training_ext.components.keep_best import BEST
from training_ext.data.metrics import num_items
from training_ext.data.rows import find_rows
from training_ext.flags import val_data
from training_ext.flags.params import parse_args

FLAGS = "--epochs 1 --workers 0 --lr 1e-3"
SIDES = ("image_to_text", "text_to_image")


def test_open_clips_numbers_where_no_two_similarities_are_equal():
    draws = torch.Generator().manual_seed(0)
    text = torch.nn.functional.normalize(torch.randn(700, 16, generator=draws, dtype=torch.float64), dim=1)
    image = torch.nn.functional.normalize(text + torch.randn(700, 16, generator=draws, dtype=torch.float64) / 3, dim=1)
    for size in (700, 699):
        features = {"image_features": image[:size], "text_features": text[:size]}
        expected = open_clip_train.get_clip_metrics(**features, logit_scale=torch.tensor(100.0))
        found = validation_metrics(image[:size], text[:size], None, image.device)
        assert found == pytest.approx({name: float(value) for name, value in expected.items()}, abs=1e-12)
        assert 0.1 < found["image_to_text_R@1"] < found["text_to_image_R@10"] < 1


@pytest.fixture(scope="module")
def lines(datasets, tmp_path_factory) -> pd.DataFrame:
    """48 lines of 12 pictures, whose lines are not beside one another."""
    table = pd.read_csv(shlex.split(datasets["csv"])[1], sep="\t")
    table["filepath"] = [table["filepath"][row % 12] for row in range(len(table))]
    return table


def evaluated(experiment) -> dict:
    return json.loads((experiment.path / "checkpoints/results.jsonl").read_text().splitlines()[-1])


def written(lines: pd.DataFrame, kind: str, folder: Path, workers: int) -> tuple[str, list[int]]:
    """Flags of the lines as validation data, of which shards have 24 each, and the lines in their loader's order."""
    order = list(range(len(lines)))
    if kind == "csv":
        lines.to_csv(folder / "val.csv", sep="\t", index=False)
        return f"{folder}/val.csv", order
    for shard in (0, 1):
        with tarfile.open(folder / f"val-{shard}.tar", "w") as tar:
            for row in order[24 * shard : 24 * shard + 24]:
                (folder / "caption").write_text(lines["title"][row])
                tar.add(lines["filepath"][row], f"{row:03}.png")
                tar.add(folder / "caption", f"{row:03}.txt")
    if workers == 2:  # take turns with a batch of 8
        order = [row for start in (0, 8, 16) for shard in (0, 24) for row in range(start + shard, start + shard + 8)]
    return f"{folder}/val-{{0..1}}.tar --val-num-samples 48", order


@pytest.mark.parametrize(
    "kind, loss, workers", [("csv", "", 0), ("shards", "--loss clip", 0), ("shards", "--loss queue --queue-size 20", 2)]
)
def test_any_caption_of_an_image_counts(run, datasets, lines, tmp_path, monkeypatch, kind, loss, workers):
    path, order = written(lines, kind, tmp_path, workers)
    flags = f"{datasets[kind]} {FLAGS} --train-num-samples 48 {loss} --workers {workers}"
    features = []

    def recorded(image, text, *rest):
        features[:] = image.double(), text.double()
        return validation_metrics(image, text, *rest)

    monkeypatch.setattr(retrieval, "validation_metrics", recorded)
    found = evaluated(run("x", f"{flags} --val-data {path}"))
    assert found["num_images"] == 12 and found["num_samples"] == 48
    image, text = (rows[torch.tensor(order).argsort()] for rows in features)
    similarities = image[:12] @ text.T
    for k in (1, 5, 10):
        images = [{t % 12 for t in row.topk(k).indices.tolist()} for row in similarities]
        texts = [row.topk(k).indices.tolist() for row in similarities.T]
        hits = [i in own for i, own in enumerate(images)], [t % 12 in own for t, own in enumerate(texts)]
        for side, own in zip(SIDES, hits, strict=True):
            assert found[f"{side}_any_R@{k}"] == pytest.approx(sum(own) / len(own))
        for side in SIDES:
            assert found[f"{side}_R@{k}"] <= found[f"{side}_any_R@{k}"]


def test_the_best_weights_by_a_recall_that_knows_all_captions(run, datasets, lines, tmp_path):
    lines[:12].to_csv(tmp_path / "val.csv", sep="\t", index=False)
    flags = f"{datasets['csv']} {FLAGS} --val-data {tmp_path}/val.csv --loss clip"
    found = evaluated(run("x", flags))
    assert not found.keys() & set(ANY_CAPTION)  # one caption an image
    metric = "text_to_image_any_R@5"
    experiment = run("y", f"{flags} --keep-best {metric}")
    found = evaluated(experiment)
    assert found[metric] == found["text_to_image_R@5"]
    assert torch.load(experiment.path / BEST, weights_only=True)["metrics"][metric] == found[metric]


@pytest.mark.parametrize("flags, told", [("", 1), ("--same-key filepath", 0), ("--several-captions", 0)])
def test_lines_of_one_image_are_told(lines, tmp_path, caplog, flags, told):
    """As false negatives, and as the limit of a recall."""
    lines.to_csv(tmp_path / "x.csv", sep="\t", index=False)
    args = parse_args(f"--loss queue --train-data {tmp_path}/x.csv {flags}".split())
    sentences = advise_on_captions(args, find_rows(args).seen)
    assert sum(line.startswith("--same-key: 48 lines have the image of another") for line in sentences) == told
    args.val_data = args.train_data
    val_data.check(args)
    assert "x.csv' have 12 images, so that image_to_text_R@1 is at most 25 %; " in caplog.text


def test_images_that_are_trained_on(datasets, tmp_path, monkeypatch, caplog):
    """By any path, with any caption."""
    train = Path(shlex.split(datasets["csv"])[1])
    (image, _), (other, _) = (line.split("\t") for line in train.read_text().splitlines()[1:3])
    monkeypatch.chdir(tmp_path)
    copied = shutil.copy(other, "other.png")
    flags = f"{datasets['csv']} --loss clip --val-data val.csv"
    warning = f"--val-data: 1 of 2 images of 'val.csv' are trained on, too, such as {image!r}, so that its metrics are "
    for images, warned in (([copied], False), ([os.path.relpath(image), image, copied], True)):
        Path("val.csv").write_text("\n".join(["filepath\ttitle", *(f"{path}\ta new caption" for path in images)]))
        find_rows(parse_args(flags.split()))
        assert (warning in caplog.text) == warned


def test_standard_errors_count_images():
    metrics = {"num_samples": 48, "num_images": 12}
    names = ("image_to_text_any_R@1", "text_to_image_any_R@1", "image_to_text_R@1")
    assert [num_items(name, metrics, {}) for name in names] == [12] * 3
    assert num_items("image_to_text_R@1", {"num_samples": 48}, {}) == 48
