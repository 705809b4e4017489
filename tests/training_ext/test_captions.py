"""Several captions a picture: which one a sample has in each epoch, and what is a sample."""

import json
import math
import shlex
import shutil
from collections import Counter
from types import SimpleNamespace

import json_shards
import pandas as pd
import pytest
import torch
from conftest import LOSSES
from open_clip import get_tokenizer
from open_clip_train import data as open_clip_data

from open_clip_ext.data import Scenes
from training_ext.core import hosts
from training_ext.data.captions import JsonCaptions, Pictures, draw_from_lines, drawn
from training_ext.data.sample_keys import keys_of_captions
from training_ext.data.seeding import SharedEpoch
from training_ext.data.tables import read_table

# Keys of captions tell which ones the loss has met.
COMMON = f"{LOSSES['fastclip-v3']} --epochs 2 --batch-size 4 --same-caption"
UNUSABLE = {5, 6, 17, 18}
CAPTIONS = [Scenes(48)[row][1] for row in range(48)]


@pytest.fixture(scope="module")
def lines(datasets, tmp_path_factory):
    """A csv of 48 lines of 12 pictures, whose lines are not beside one another; the flags of the data."""
    table = pd.read_csv(shlex.split(datasets["csv"])[1], sep="\t")
    table["filepath"] = [table["filepath"][row % 12] for row in range(len(table))]
    table["group"] = [row % 6 for row in range(len(table))]
    table["line"] = range(len(table))
    path = tmp_path_factory.mktemp("lines") / "lines.csv"
    table.to_csv(path, sep="\t", index=False)
    return f"--train-data {path}"


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """Shards of 20 pictures without .txt: lists of captions, one caption, and what cannot be used, `UNUSABLE`."""

    def fields(row):
        captions = CAPTIONS[2 * row : 2 * row + 2]
        few = {3: captions[0], 4: ["", " ", 5, *captions], 5: [], 6: None, 17: [7]}
        return {"captions": few.get(row, captions)} if row != 18 else {"other": captions}

    return json_shards.write(tmp_path_factory.mktemp("lists"), 20, fields, has_text=False).format(last=2)


@pytest.fixture(scope="module")
def captions():
    """By the keys of captions, their numbers."""
    keys = keys_of_captions(get_tokenizer("ViT-test")(CAPTIONS))
    return {key: number for number, key in enumerate(keys.tolist())}


def of_epochs(told, captions, per_epoch):
    """For each epoch the number of the caption by row."""
    rows, keys = told()
    pairs = [(row, captions[key]) for row, key in zip(rows.tolist(), keys.tolist(), strict=True)]
    told.clear()
    return [dict(sorted(pairs[start : start + per_epoch])) for start in range(0, len(pairs), per_epoch)]


def test_lines_of_a_picture_are_one_sample(run, told, lines, captions):
    first = run("x", f"{lines} {COMMON} --workers 0 --several-captions")
    log = first.log
    assert "48 captions of 12 pictures: one of each picture's is drawn each epoch" in log
    epochs = of_epochs(told, captions, 12)
    assert len(epochs) == 2 and epochs[0] != epochs[1]
    for epoch, numbers in enumerate(epochs):
        # Every picture once, with one of its own captions
        assert numbers == {row: drawn([row, row + 12, row + 24, row + 36], 0, epoch, row) for row in range(12)}
    run("two", f"{lines} {COMMON} --workers 2 --several-captions")
    assert of_epochs(told, captions, 12) == epochs
    run("resumed", f"{lines} {COMMON} --workers 1 --several-captions --resume {first.path}/checkpoints/epoch_1.pt")
    assert of_epochs(told, captions, 12) == epochs[1:]
    run("seed", f"{lines} {COMMON} --workers 0 --several-captions --seed 1")
    assert of_epochs(told, captions, 12) not in (epochs, epochs[::-1])


@pytest.mark.slow
def test_lists_in_shards(run, told, lists, captions):
    log = run("x", f"{lists} {COMMON} --workers 1 --captions-field captions --train-num-samples 16").log
    assert "One of the captions in the field 'captions' is drawn each epoch" in log
    assert "no captions in the field 'captions' of a .json (--captions-field) but .json, .png" in log
    epochs = of_epochs(told, captions, 16)
    assert len(epochs) == 2 and epochs[0] != epochs[1]
    for numbers in epochs:
        assert numbers.keys() == {*range(20)} - UNUSABLE
        assert all(number // 2 == row for row, number in numbers.items()) and numbers[3] == 6
        assert len({number % 2 for number in numbers.values()}) == 2
    run("two", f"{lists} {COMMON} --workers 2 --captions-field captions --train-num-samples 16 --batch-size 2")
    rows, keys = told()
    by_sample = {(row, captions[key]) for row, key in zip(rows.tolist(), keys.tolist(), strict=True)}
    assert by_sample <= {pair for numbers in epochs for pair in numbers.items()}


FIELDS = ("long", "short", "other")


@pytest.mark.parametrize("weights, likely", [((3, 1), (0.75, 0.25, 0)), ((0, 0, 2), (0, 0, 1)), ((), (1, 0, 0))])
def test_fields_with_weights(weights, likely):
    """OpenCLIP 4's --json-text-key and --json-text-key-probs: each field in proportion to its weight, the first if none
    has one; among those that have a caption."""
    epoch = SharedEpoch(workers=0)
    recaption = JsonCaptions(" long; short;other", 0, epoch, weights)

    def count(fields, epochs=400):
        counts = Counter()
        for number in range(epochs):
            epoch.set_value(number)
            sample = {"__key__": "a", "txt": b"not this", "json": json.dumps(fields).encode()}
            recaption(sample)
            counts[sample.get("txt", b"").decode()] += 1
        return counts

    counts = count({name: name for name in FIELDS})
    for name, probability in zip(FIELDS, likely, strict=True):  # within five standard deviations
        assert abs(counts[name] - 400 * probability) <= 5 * math.sqrt(400 * probability * (1 - probability))
    assert count({"long": " ", "short": 5, "other": "x"}, 20) == {"x": 20}
    assert count({"text": "x"}, 1) == {"": 1}
    if hosts.installed().HAS_TASKS:
        open_clip_data.random.seed(0)
        theirs = open_clip_data.JsonCaptionExtractor("long;short;other", weights or None)
        drawn_by_open_clip = Counter(theirs({name: name for name in FIELDS}) for _ in range(400))
        difference = [abs(drawn_by_open_clip[name] - counts[name]) for name in FIELDS]
        assert max(difference) <= 5 * math.sqrt(2 * 400 * 0.75 * 0.25) and drawn_by_open_clip.keys() == counts.keys()


def test_fields_of_openclip_in_shards(run, told, captions, tmp_path):
    """In a training as in `test_lists_in_shards`; OpenCLIP itself reads the captions of the validation shards."""
    if not hosts.installed().HAS_TASKS:
        pytest.skip("this OpenCLIP has no such flag")
    of_row = lambda row: dict(zip(("long", "short"), CAPTIONS[2 * row : 2 * row + 2], strict=True))  # noqa: E731
    shards = json_shards.write(tmp_path, 16, of_row, has_text=False).format(last=1)
    held_out = shutil.copy(tmp_path / "train-000001.tar", tmp_path / "val.tar")
    flags = f"{shards} --val-data {held_out} --json-text-key long;short --json-text-key-probs 1 1"
    flags = f"{flags} {COMMON} --train-num-samples 16"
    first = run("x", f"{flags} --workers 1")
    epochs = of_epochs(told, captions, 16)
    assert all([number // 2 for number in numbers.values()] == [*range(16)] for numbers in epochs)
    assert epochs[0] != epochs[1] and len({number % 2 for number in epochs[0].values()}) == 2
    run("resumed", f"{flags} --workers 2 --resume {first.path}/checkpoints/epoch_1.pt")
    assert of_epochs(told, captions, 16) == epochs[1:]
    assert first.log.count("clip_val_loss: ") == 2


def test_empty_captions_are_not_drawn(run, told, lines, captions, tmp_path):
    """Of picture 0 every caption but the third is empty; picture 1 has none and is left out, with its first line."""
    table = pd.read_csv(shlex.split(lines)[1], sep="\t")
    table.loc[[0, 12, *range(1, 48, 12)], "title"] = None
    table.loc[36, "title"] = " "
    table.to_csv(tmp_path / "few.csv", sep="\t", index=False)
    more = "--workers 0 --several-captions --max-bad-samples 0.5"
    log = run("x", f"--train-data {tmp_path}/few.csv {COMMON} {more}").log
    assert f"Left out of the train data: line 3 of '{tmp_path}/few.csv': its caption is empty" in log
    rows, keys = told()
    pairs = [(row, captions[key]) for row, key in zip(rows.tolist(), keys.tolist(), strict=True)]
    assert pairs.count((0, 24)) >= 2 and {number for row, number in pairs if row == 0} == {24}
    assert {row for row, _ in pairs} == {*range(12)} - {1} and len(pairs) == 24


def test_pictures():
    images = ["b", "a", None, "b", "c", "a", "b"]
    pictures = Pictures(images)
    assert pictures.first.tolist() == [0, 1, 2, 4] and [pictures.lines(n) for n in range(4)][:2] == [[0, 3, 6], [1, 5]]
    assert len(Pictures([])) == 0
    counts = torch.bincount(torch.tensor([drawn(range(4), 0, epoch, 5) for epoch in range(400)]))
    # Each of 4 with probability 1/4: within 5 standard deviations, of 8.7
    assert (counts - 100).abs().max() < 44
    assert len({tuple(drawn(range(4), 0, epoch, picture) for epoch in range(20)) for picture in range(50)}) == 50


def test_columns_that_are_series(tmp_path):
    """As in OpenCLIP 4.2, whose data set reads a Series by position; the header lacks the name of the first column."""
    (tmp_path / "x.csv").write_text("image,text\n2,b,\n0,a,of a\n7,b,of b\n1,c,\n")
    args = SimpleNamespace(loss="neuclip", csv_img_key="image", csv_caption_key="text", same_key=None)
    table = read_table(args, tmp_path / "x.csv", sep=",")
    csv = SimpleNamespace(images=table["image"], captions=table["text"])
    assert list(csv.images) == ["b", "a", "b", "c"] and csv.images[0] == csv.images.iloc[2] == "b"
    pictures = draw_from_lines(csv, 0, SharedEpoch(workers=0))
    assert pictures.first.tolist() == [0, 1, 3] and len(csv.images) == len(csv.captions) == 3
    assert [csv.images.iloc[picture] for picture in range(3)] == ["b", "a", "c"]
    assert [csv.captions.iloc[picture] for picture in range(2)] == ["of b", "of a"] and pd.isna(csv.captions[2])


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ("{lists} --loss clip --several-captions", ["--several-captions", "webdataset", "--captions-field"]),
        ("{lists} --loss fastclip-v3 --captions-field nope", ["--train-data", "field 'nope' of a .json"]),
        ("{lists} --loss fastclip-v3", ["--train-data", "no caption .txt but .json, .png"]),
        ("{lines} --loss fastclip-v3 --several-captions --same-key line", ["--same-key", "0.png", "'line'"]),
    ],
)
def test_wrong_flags(refused, datasets, lines, lists, arguments, parts):
    line = refused(arguments.format(**datasets, lines=lines, lists=lists) + " --epochs 1 --workers 1")
    assert all(part in line for part in parts), line


def test_one_entry_of_a_column_for_all_lines_of_a_picture(run, told, lines):
    arguments = f"{lines} {LOSSES['fastclip-v3']} --epochs 1 --batch-size 4 --workers 0 --several-captions"
    run("x", f"{arguments} --same-key group")
    rows, keys = told()
    groups = rows % 6
    assert torch.equal(keys[:, None] == keys, groups[:, None] == groups)
