"""Retrieval on one's own pairs: a csv, shards and folders give the scores of the task with the same pairs."""

import csv
import gzip
import json
import math
import re
import resource
import shutil
from itertools import starmap
from pathlib import Path

import pytest
import torch
from json_shards import tar
from PIL import Image

from open_clip_ext.evaluate import main as evaluate
from training_ext.scoring.folders import Shards
from training_ext.tools.evaluation.models import find_checkpoint, load_model


@pytest.fixture(scope="module")
def pairs(evalset, tmp_path_factory) -> Path:
    """The shards' pairs, two captions an image, as a csv with commas; lines of an image are apart."""
    folder = tmp_path_factory.mktemp("pairs")
    lines = []
    for number, sample in Shards("--data", str(evalset / "wds_evalset-retrieval_test")).samples(lambda number: True):
        path = folder / f"{number}.png"
        path.write_bytes(sample.image)
        lines += [(place, path, caption) for place, caption in enumerate(sample.target)]
    with open(folder / "pairs.csv", "w", newline="") as file:
        csv.writer(file).writerows([("image", "text"), *(line[1:] for line in sorted(lines, key=lambda line: line[0]))])
    return folder / "pairs.csv"


COLUMNS = ["--csv-separator", ",", "--csv-img-key", "image", "--csv-caption-key", "text"]


def scored(arguments: list[object], out: Path) -> dict:
    flags = ["--device", "cpu", "--workers", "0", "--batch-size", "16", "--out", out]
    assert not evaluate([str(one) for one in (*arguments, *flags)])
    (line,) = map(json.loads, out.read_text().splitlines())
    return line


def test_each_form_has_the_scores_of_the_task(evalset, pairs, checkpoints, tmp_path, capsys):
    """Also shards with a sample for each caption, compressed ones, and a csv with a name in capitals."""
    given = ["--checkpoint", checkpoints[0]]
    folder = evalset / "wds_evalset-retrieval_test"
    task = scored([*given, "--data", evalset, "--tasks", "evalset/retrieval"], tmp_path / "task.jsonl")["metrics"]
    members: list[tuple[str, bytes]] = []
    with open(pairs, newline="") as file:
        for number, line in enumerate(csv.DictReader(file)):
            members += [(f"{number}.png", Path(line["image"]).read_bytes()), (f"{number}.txt", line["text"].encode())]
    tar(tmp_path / "pairs.tar", members)
    own = tmp_path / "own"
    own.mkdir()
    for sample in Shards("--data", str(folder)).samples(lambda number: True):
        stem = own / Path(sample[1].place.rpartition(": ")[2]).stem
        stem.with_suffix(".png").write_bytes(sample[1].image)
        stem.with_suffix(".txt").write_text("\n".join(sample[1].target))
    (own / "README.txt").write_text("no caption")
    shards = f"{folder}/test/{{0..{len(list(folder.glob('test/*.tar'))) - 1}}}.tar"
    (tmp_path / "pairs.TAR.gz").write_bytes(gzip.compress((tmp_path / "pairs.tar").read_bytes()))
    shutil.copy(pairs, tmp_path / "PAIRS.CSV")
    tables = [[path, *COLUMNS] for path in (pairs, tmp_path / "PAIRS.CSV")]
    tars = [[shards], [tmp_path / "pairs.tar"], [tmp_path / "pairs.TAR.gz"]]
    for number, data in enumerate((*tables, *tars, [own], [folder])):
        capsys.readouterr()
        line = scored([*given, "--val-data", *data], tmp_path / f"{number}.jsonl")
        assert line["samples"] == 42 and line["key"].startswith("val-data/")
        assert line["metrics"] == pytest.approx({**task, "main_metric": None})  # in no average
    shown = capsys.readouterr().out
    recall, error = (100 * task[f"text_retrieval_recall@10{end}"] for end in ("", "_error"))
    assert "_test, 42 images: recall in %, ± standard error\n" in shown and f" {recall:.2f} ± {error:.2f} " in shown
    share = (task["image_retrieval_recall@5"] * 42 + 1) / 44  # of 42 images, with two captions each
    assert task["image_retrieval_recall@5_error"] == pytest.approx(math.sqrt(share * (1 - share) / 42))


def naive_hits(checkpoint: Path, of: dict[str, list[str]]) -> list[list[list[float]]]:
    """By recall and image, 1 for each query that finds a positive: the image, or its captions."""
    model, transform, tokenizer = load_model(find_checkpoint(str(checkpoint), None))
    with torch.inference_mode():
        images = model.encode_image(torch.stack([transform(Image.open(path)) for path in of]), normalize=True).double()
        texts = [model.encode_text(tokenizer(captions), normalize=True).double() for captions in of.values()]
    ranks_of_images, ranks_of_texts = [], []
    for number, (image, captions) in enumerate(zip(images, texts, strict=True)):
        others = torch.cat([some for other, some in enumerate(texts) if other != number])
        ranks_of_images.append([sum(float(image @ other) > float((captions @ image).max()) for other in others)])
        ranks_of_texts.append([sum(float(text @ other) > float(text @ image) for other in images) for text in captions])
    sides = (ranks_of_images, ranks_of_texts)
    return [[[float(rank < k) for rank in ranks] for ranks in side] for side in sides for k in (1, 5, 10)]


def naive_difference(hits: list[list[float]], baseline: list[list[float]]) -> str:
    gaps = [sum(own) - sum(other) for own, other in zip(hits, baseline, strict=True)]
    counts = [len(own) for own in hits]
    mean, per_image = sum(gaps) / sum(counts), sum(counts) / len(counts)
    squares = sum(((gap - mean * count) / per_image) ** 2 for gap, count in zip(gaps, counts, strict=True))
    return f"{100 * mean:+.2f} ± {196 * math.sqrt((squares + 1 + 1) / (len(gaps) + 2) / len(gaps)):.2f}"


def test_checkpoints_are_compared_on_the_same_images(pairs, checkpoints, tmp_path, capsys):
    """With the captions of an image as one, and also with what an earlier command left."""
    lines = pairs.read_text().splitlines()[:-9]  # the last images have one caption
    (tmp_path / "few.csv").write_text("\n".join(lines))
    of: dict[str, list[str]] = {}
    for path, caption in csv.reader(lines[1:]):
        of.setdefault(path, []).append(caption)
    torch.save({"state_dict": torch.load(checkpoints[0])["state_dict"]}, copy := tmp_path / "copy.pt")
    given = ["--model", "ViT-test", "--val-data", tmp_path / "few.csv", *COLUMNS, "--out", tmp_path / "out"]

    def shown(*files: Path) -> list[str]:
        capsys.readouterr()
        assert not evaluate(list(map(str, [*given, "--workers", "0", "--device", "cpu", "--checkpoint", *files])))
        return capsys.readouterr().out.partition("few.csv, 42 images")[2].splitlines()

    table = shown(checkpoints[0], copy, checkpoints[1])
    (place,) = [number for number, line in enumerate(table) if line.startswith("difference to run/epoch_1 on the same")]
    assert table[place + 1].split() == ["copy", "the", "same", "weights"]
    both = (naive_hits(checkpoint, of) for checkpoint in (checkpoints[1], checkpoints[0]))
    assert re.split("  +", table[place + 2]) == ["run/epoch_2", *starmap(naive_difference, zip(*both, strict=True))]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/run*")}
    (damaged,) = tmp_path.glob("out/copy*.npz")
    damaged.write_bytes(b"PK")
    assert shown(checkpoints[0], copy, checkpoints[1]) == table and len(before) == 4
    assert before == {path: path.stat().st_mtime_ns for path in before}  # scored once


def test_another_column_is_other_data(pairs, checkpoints, tmp_path, caplog):
    """And the result that it replaces is named."""
    with open(pairs, newline="") as file:
        lines = list(csv.DictReader(file))
    with open(tmp_path / "two.csv", "w", newline="") as file:
        moved = [line["text"] for line in lines[1:] + lines[:1]]
        csv.writer(file).writerows(
            [("image", "text", "other"), *((*line.values(), text) for line, text in zip(lines, moved, strict=True))]
        )
    given = ["--checkpoint", checkpoints[0], "--val-data", tmp_path / "two.csv", *COLUMNS[:-1]]
    own, again, other = (scored([*given, text], tmp_path / "one.jsonl") for text in ("text", "text", "other"))
    assert own == again and other["data"] != own["data"]
    assert caplog.text.count(f"'{tmp_path}/one.jsonl' has 'two.csv' of other data, or of an earlier version") == 1


def test_the_best_of_interpolated_weights(pairs, checkpoints, tmp_path, capsys):
    given = ["--checkpoint", checkpoints[1], "--interpolate", checkpoints[0], "--val-data", pairs, *COLUMNS]
    best = tmp_path / "new" / "best.pt"
    more = ["--alphas", "0,1", "--save-best", best, "--out", tmp_path / "out", "--device", "cpu", "--workers", "0"]
    assert not evaluate([str(one) for one in (*given, *more)])
    assert f"{best}: run/epoch_2@" in capsys.readouterr().out
    best.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))  # a disk that fills up while the file is written
    try:
        assert evaluate([str(one) for one in (*given, *more)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err.endswith("the disk or the quota is full; make room\n") and not best.exists()


def test_what_is_wrong(evalset, pairs, checkpoints, tmp_path, refused):
    good = f"--checkpoint {checkpoints[0]} --out {tmp_path}/out.jsonl {' '.join(COLUMNS)} --val-data"
    assert "--csv-separator: ';' does not separate 'image,text'" in refused(f"{good} {pairs} --csv-separator ;")
    assert "--val-data: " in refused(f"{good} {tmp_path}/no.csv")
    assert "has neither images with a .txt" in refused(f"{good} {tmp_path}")
    for name in ("t.parquet", "t.jsonl"):
        assert f"{name}' is neither a folder, a .csv, " in refused(f"{good} {tmp_path}/{name}")
    assert "no.tar' is not a file on this machine" in refused(f"{good} {tmp_path}/no.tar")
    assert "s3://x/0.tar' is not a file on this machine" in refused(f"{good} s3://x/0.tar")
    assert "is of type classification; give images" in refused(f"{good} {evalset}/wds_evalset-background_test")
    (tmp_path / "empty.csv").write_text(pairs.read_text() + f"{pairs.parent}/0.png,\n")
    assert "has no text in line 86" in refused(f"{good} {tmp_path}/empty.csv")
    (tmp_path / "gone.csv").write_text(f"image,text\n{tmp_path}/gone.png,a\n")
    assert f"'{tmp_path}/gone.png' cannot be read" in refused(f"{good} {tmp_path}/gone.csv")
