"""--same-key and --same-caption: what the loss is told of the samples that are not one another's negatives."""

import shlex

import pandas as pd
import pytest
import torch
from conftest import LOSSES

from open_clip_ext.losses import GlobalContrastiveLoss
from training_ext.keys import keys_of_captions, keys_of_cells

COMMON = f"{LOSSES['fastclip-v3']} --epochs 1 --workers 0"


@pytest.fixture
def told(monkeypatch):
    """Rows and keys of every call of the loss."""
    calls, forward = [], GlobalContrastiveLoss.forward

    def call(self, *args, index=None, key=None, **kwargs):
        calls.append((index, key))
        return forward(self, *args, index=index, key=key, **kwargs)

    monkeypatch.setattr(GlobalContrastiveLoss, "forward", call)
    return lambda: [torch.cat(parts) for parts in zip(*calls, strict=True)]


@pytest.fixture
def repeated(datasets, tmp_path):
    """A csv of 48 lines whose captions repeat after 6, with a column of other groups, one of them empty."""
    path = shlex.split(datasets["csv"])[1]
    table = pd.read_csv(path, sep="\t")
    table["title"] = [table["title"][row % 6] for row in range(len(table))]
    table["group"] = [None if row % 8 == 7 else f"g{row % 8}" for row in range(len(table))]
    table.to_csv(tmp_path / "repeated.csv", sep="\t", index=False)
    return f"--train-data {tmp_path}/repeated.csv"


def same(keys):
    return keys[:, None] == keys


@pytest.mark.parametrize("flag, period", [("--same-caption", 6), ("--same-key group", 8)])
def test_csv(run, told, repeated, flag, period):
    run("x", f"{repeated} {COMMON} {flag}")
    rows, keys = told()
    expected = same(rows % period)
    if period == 8:  # an empty cell is like no other
        empty = rows % 8 == 7
        expected[empty] = same(rows)[empty]
    assert torch.equal(same(keys), expected) and len(rows) == 48


def test_captions_of_shards_with_accumulation(run, told, datasets):
    """Over the same tokens, the same keys; the generated captions of these few pairs differ."""
    run("x", f"{datasets['shards']} {COMMON} --same-caption --batch-size 4 --accum-freq 2 --workers 2")
    rows, keys = told()
    assert torch.equal(same(keys), same(rows))


def test_it_changes_the_training(run, repeated):
    """Of a pair whose captions are equal the gap is 0, which is one of the larger terms of g."""
    data = f"{repeated} {COMMON}"
    values = [run(name, f"{data} {flag}").logged()[0][1] for name, flag in (("a", "--same-caption"), ("b", ""))]
    assert values[0] != values[1]


def test_keys():
    tokens = torch.randint(49408, (3, 77), generator=torch.Generator().manual_seed(0))
    more = tokens.clone()
    more[0, -1] += 1
    more[1, :2] = more[1, :2].flip(0)
    keys = keys_of_captions(torch.cat([tokens, tokens, more]))
    assert keys.dtype == torch.int64
    assert torch.equal(keys[:3], keys[3:6]) and len(keys.unique()) == 5
    assert keys_of_cells(pd.Series(["a", None, "b", "a", None])).tolist() == [0, -2, 1, 0, -5]


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ("{csv} --loss fastclip-v3 --same-key nope", ["--same-key", "'nope'", "'group'"]),
        ("{csv} --loss fastclip-v3 --same-key group --same-caption", ["--same-caption", "one of the two"]),
        ("{csv} --loss neuclip --same-caption", ["--same-caption", "--loss neuclip", "--normalizer table"]),
        ("{csv} --loss clip --same-caption", ["--same-caption", "clip"]),
        ("{csv} --same-key group", ["--same-key", "needs --loss"]),
        ("{shards} --loss fastclip-v3 --same-key group", ["--same-key", "webdataset", "--same-caption"]),
    ],
)
def test_wrong_flags(refused, repeated, datasets, arguments, parts):
    line = refused(arguments.format(csv=repeated, shards=datasets["shards"]) + " --epochs 1 --workers 1")
    assert all(part in line for part in parts), line
