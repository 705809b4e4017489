"""--same-key, --same-caption and --positives: what the loss is told of samples that are not one another's negatives."""

import shlex

import json_shards
import pandas as pd
import pytest
import torch
from conftest import LOSSES

from open_clip_ext.errors import InputError
from training_ext.data.sample_keys import JsonKey, keys_of_captions, keys_of_cells

COMMON = f"{LOSSES['fastclip-v3']} --epochs 1 --workers 0"


@pytest.fixture
def repeated(datasets, tmp_path):
    """A csv of 48 lines whose captions repeat after 6, with a column of other groups, one of them empty."""
    path = shlex.split(datasets["csv"])[1]
    table = pd.read_csv(path, sep="\t")
    table["title"] = [table["title"][row % 6] for row in range(len(table))]
    table["group"] = [None if row % 8 == 7 else f"g{row % 8}" for row in range(len(table))]
    table.to_csv(tmp_path / "repeated.csv", sep="\t", index=False)
    return f"--train-data {tmp_path}/repeated.csv"


@pytest.fixture(scope="session")
def with_json(tmp_path_factory):
    """Shards of 48 samples with a .json, the last of them without its field: the flags of all, and of all but that."""

    def fields(row):
        return {"set": None if row % 8 == 7 else {"id": row % 8}} if row < 47 else {"size": 1}

    shards = json_shards.write(tmp_path_factory.mktemp("json"), 48, fields)
    return [shards.format(last=last) for last in (5, 4)]


def same(keys):
    return keys[:, None] == keys


def test_long_numbers_beside_an_empty_cell_stay_different(run, told, datasets, tmp_path):
    table = pd.read_csv(shlex.split(datasets["csv"])[1], sep="\t")
    table["id"] = [str(2**60 + row) if row else "" for row in range(len(table))]
    table.to_csv(tmp_path / "numbers.csv", sep="\t", index=False)
    run("x", f"--train-data {tmp_path}/numbers.csv {COMMON} --same-key id")
    rows, keys = told()
    assert torch.equal(same(keys), same(rows))


@pytest.mark.parametrize(
    "flag, period",
    [("--same-caption", 6), ("--same-key group", 8), ("--positives caption", 6), ("--positives group", 8)],
)
def test_csv(run, told, repeated, flag, period):
    run("x", f"{repeated} {COMMON} {flag}")
    rows, keys = told()
    expected = same(rows % period)
    if period == 8:  # an empty cell is like no other
        empty = rows % 8 == 7
        expected[empty] = same(rows)[empty]
    assert torch.equal(same(keys), expected) and len(rows) == 48
    assert told.positives == {"--positives" in flag}


@pytest.mark.parametrize(
    "loss, flag", [("fastclip-v3", "--same-key"), ("queue", "--same-key"), ("queue", "--positives")]
)
def test_a_field_in_shards(run, told, with_json, loss, flag):
    """With rows beside the keys, and without."""
    flags = f"{LOSSES[loss]} --train-num-samples 40 --epochs 1 --workers 1 --batch-size 4"
    run("x", f"{with_json[1]} {flags} {flag} set")
    rows, keys = told()
    groups = torch.arange(40) % 8
    expected = same(groups)
    expected[groups == 7] = torch.eye(40, dtype=torch.bool)[groups == 7]  # null is like no other
    if rows is None:
        assert torch.equal(same(keys).sum(1).sort().values, expected.sum(1).sort().values)
    else:
        assert torch.equal(same(keys), expected[rows][:, rows]) and len(rows) == 40


def test_a_sample_without_the_field_ends_the_run(with_json, ends):
    line = ends(f"{with_json[0]} {COMMON} --same-key set --workers 1")
    assert "--same-key: sample '000000047' of shard" in line and "train-000005.tar" in line and "'size'" in line


def test_keys_of_json():
    key = JsonKey("set")

    def key_of(text, name="a"):
        return key({"__key__": name, "__url__": "0.tar", "json": text.encode()})

    assert key_of('{"set": {"a": 1, "b": [2]}}') == key_of('{"more": 0, "set": {"b": [2], "a": 1}}', name="b")
    keys = [key_of(f'{{"set": {value}}}') for value in ("1", '"1"', "2", "[1]", "true", '""', "null")]
    assert len({*keys}) == len(keys) - 1 and keys[-1] == keys[-2] != key_of('{"set": null}', name="b")
    assert key_of('{"set": NaN}') == keys[-1]
    assert all(-(2**63) <= value < 2**63 for value in keys)
    for text, part in (("{", "cannot be read"), ("[]", "no object"), ('{"a": 1}', "fields are 'a'")):
        with pytest.raises(InputError, match=part) as refused:
            key_of(text)
        assert "--same-key: sample 'a' of shard '0.tar'" in str(refused.value)


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
        ("{csv} --loss amorlip --same-caption", ["--same-caption", "--loss amorlip", "--normalizer table"]),
        ("{csv} --loss clip --same-caption", ["--same-caption", "clip"]),
        ("{json} --loss fastclip-v3 --same-key sett", ["--same-key", "no field 'sett'", "'set'"]),
        ("{json} --loss clip-chunked --positives sett", ["--positives", "no field 'sett'", "'set'"]),
        ("{csv} --loss clip-chunked --positives sett", ["--positives", "no column 'sett'", "'group'"]),
        ("{csv} --loss clip --positives caption", ["--positives", "clip"]),
    ],
)
def test_wrong_flags(refused, repeated, datasets, with_json, arguments, parts):
    data = {**datasets, "csv": repeated, "json": with_json[0]}
    line = refused(arguments.format(**data) + " --epochs 1 --workers 1")
    assert all(part in line for part in parts), line
