"""One's own pairs as shards: what is in them and what is left out, a run that is stopped, and that they train."""

import io
import json
import re
import shlex
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import open_clip_train.main
import pandas as pd
import pytest
import webdataset
from conftest import LOSSES
from open_clip import get_tokenizer
from open_clip_train.data import get_dataset_size
from PIL import Image
from test_captions import of_epochs

from open_clip_ext.data import Scenes
from open_clip_ext.errors import InputError
from open_clip_ext.make_shards import main as make_shards
from training_ext.components.advice import advise
from training_ext.core.loss import build_loss
from training_ext.core.plan import global_batch
from training_ext.data.epochs import check_steps
from training_ext.data.pair_folders import NO_PICTURE, NO_TEXT
from training_ext.data.sample_keys import keys_of_captions
from training_ext.data.settings import setting_for
from training_ext.flags.params import parse_args
from training_ext.flags.preflight import check_batch
from training_ext.tools.pairs import command, writing
from training_ext.tools.pairs.sources import EMPTY_CAPTION, EMPTY_IMAGE, HELD_OUT, Pair, find_sources
from training_ext.tools.pairs.writing import OTHER_FORMAT, UNREADABLE

CAPTIONS = [Scenes(80)[row][1] for row in range(80)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """40 pairs, each with two captions, as png or jpg."""
    folder = tmp_path / "pairs"
    (folder / "b").mkdir(parents=True)
    for row, (image, _) in enumerate(Scenes(40, image_size=48)):
        path = folder / ("b" if row % 2 else "") / f"{row:02d}"
        image.save(f"{path}.{'jpg' if row % 3 else 'png'}")
        Path(f"{path}.txt").write_text("\n".join(CAPTIONS[2 * row : 2 * row + 2]))
    return folder


@pytest.fixture(autouse=True)
def few_shown(monkeypatch):
    monkeypatch.setattr(command, "SHOWN", 4)  # drawing 40 takes seconds


@pytest.fixture
def written(tmp_path, capsys):
    """written(*arguments) -> the folder of the shards, once the command has ended well."""

    def written(*arguments, out: str = "shards") -> Path:
        assert not make_shards([*map(str, arguments), "--out", str(tmp_path / out)])
        written.out = capsys.readouterr().out
        return tmp_path / out

    return written


def samples(folder: Path, split: str) -> list[dict]:
    return list(webdataset.WebDataset(sorted(map(str, folder.glob(f"{split}-*.tar"))), shardshuffle=False))


def left_out(folder: Path) -> dict[str, int]:
    return {why: entry["number"] for why, entry in json.loads((folder / "report.json").read_text())["left_out"].items()}


def test_a_folder_with_surplus_files(folder, written):
    for name in ("alone.png", "bad.jpg"):
        (folder / name).write_bytes(b"no image")
    (folder / "bad.txt").write_text("a bad one")
    (folder / "README.txt").write_text("about")
    cut = folder / "b" / "01.jpg"
    cut.write_bytes(cut.read_bytes()[:-200])
    shards = written(folder, "--val-share", "0.1", "--per-shard", "10")
    assert left_out(shards) == {NO_TEXT: 1, NO_PICTURE: 1, UNREADABLE: 2}
    assert f"2 {UNREADABLE}: " in written.out and "bad.jpg (cannot identify image file)" in written.out
    assert (shards / "samples.png").stat().st_size > 5_000
    train, val = samples(shards, "train"), samples(shards, "val")
    by_source = {json.loads(sample["json"])["source"]: sample for sample in (*train, *val)}
    assert len(by_source) == 39 and len(val) == 2 * (41 - len(train) - 2)  # one of each caption
    for name, sample in by_source.items():
        suffix = name.rpartition(".")[2]
        row = int(Path(name).stem)
        assert sample[suffix] == (folder / name).read_bytes()
        assert json.loads(sample["json"])["captions"] == CAPTIONS[2 * row : 2 * row + 2]
    assert {sample["txt"].decode() for sample in train} <= set(CAPTIONS[::2])
    assert {sample["txt"].decode() for sample in val} & set(CAPTIONS[1::2])
    assert list(by_source) != sorted(by_source)
    last = len(list(shards.glob("train-*.tar"))) - 1
    assert get_dataset_size(f"{shards}/train-{{000000..00000{last}}}.tar") == (len(train), last + 1)
    other = written(folder, "--val-share", "0.1", "--per-shard", "10", "--seed", "1", out="other")
    assert [sample["txt"] for sample in samples(other, "val")] != [sample["txt"] for sample in val]


def test_a_stopped_run_resumes(folder, written, tmp_path, monkeypatch, capsys):
    given = (folder, "--val-share", "0.1", "--per-shard", "8")
    whole = written(*given)
    stored, seen = writing.stored, []

    def stopping(data, size):
        seen.append(data)
        if len(seen) == 21:  # within the third shard
            raise KeyboardInterrupt
        return stored(data, size)

    monkeypatch.setattr(writing, "stored", stopping)
    words = [*map(str, given), "--out", str(tmp_path / "stopped")]
    assert make_shards(words) == 130
    tars = sorted((tmp_path / "stopped").glob("*.tar"))
    assert [path.name for path in tars] == ["train-000000.tar", "train-000001.tar"]
    assert {*(tmp_path / "stopped").iterdir()} == {tmp_path / "stopped" / "report.json", *tars}
    tars.pop().write_bytes(b"killed")  # before the report had it
    report = json.loads((tmp_path / "stopped" / "report.json").read_text())
    del report["shards"]["train-000001.tar"]
    (tmp_path / "stopped" / "report.json").write_text(json.dumps(report))
    stamps = [path.stat().st_mtime_ns for path in tars]
    assert not make_shards(words)
    assert [path.stat().st_mtime_ns for path in tars] == stamps and len(seen) <= 24 + 32 + 4
    contents = [
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (whole, tmp_path / "stopped")
    ]
    assert contents[0] == contents[1]
    capsys.readouterr()
    (folder / "00.txt").write_text("another")
    assert make_shards(words) == 2
    assert "--out: " in (line := capsys.readouterr().err) and "of other pairs or settings" in line


def test_images_that_are_repaired_are_looked_at_again(folder, written, tmp_path, capsys):
    whole = {path: path.read_bytes() for path in folder.rglob("*.[pj]*")}
    for path in whole:
        path.write_bytes(b"no image")
    assert make_shards([str(folder), "--out", str(tmp_path / "shards")]) == 2
    assert "none of the images can be used" in capsys.readouterr().err and not (tmp_path / "shards").exists()
    for path in list(whole)[1:]:
        path.write_bytes(whole[path])
    assert left_out(written(folder)) == {UNREADABLE: 1}
    next(iter(whole)).write_bytes(next(iter(whole.values())))
    assert make_shards([str(folder), "--out", str(tmp_path / "shards")]) == 2
    assert "of other pairs or settings; give another folder" in capsys.readouterr().err


def test_a_folder_that_goes_away_while_it_is_written(folder, tmp_path, monkeypatch, capsys):
    stored, out = writing.stored, tmp_path / "shards"
    monkeypatch.setattr(writing, "stored", lambda *given: shutil.rmtree(out, ignore_errors=True) or stored(*given))
    assert make_shards([str(folder), "--out", str(out)]) == 2
    error = capsys.readouterr().err.replace("\r", "\n").splitlines()[-1]
    assert error.startswith("open_clip_ext: error: --out: ") and "No such file or directory" in error


def test_shards_that_are_lost_are_written_again(folder, written, capsys):
    given = (folder, "--val-share", "0.1", "--per-shard", "8")
    (folder / "00.png").write_bytes(b"no image")
    shards = written(*given)
    before, report = ({path.name: path.read_bytes() for path in shards.iterdir()}, left_out(shards))
    (shards / "train-000000.tar").unlink()
    (shards / "train-000002.tar").write_bytes(before["train-000002.tar"][:-2000])
    (shards / "val-000000.tar").write_bytes(b"")
    written(*given)
    assert "written again: train-000000.tar, train-000002.tar, val-000000.tar\n" in written.out
    assert {path.name: path.read_bytes() for path in shards.iterdir()} == before
    written(*given)
    assert "written again" not in written.out and left_out(shards) == report == {UNREADABLE: 1}


def test_a_share_has_a_pair_to_validate_on_and_leaves_one_to_train_on():
    pairs = [Pair(str(number), ["a"], "") for number in range(9)]
    assert [len(command.split(pairs, share, 0)[1]) for share in (0, 0.01, 0.3, 0.99)] == [0, 1, 3, 8]
    train, val = command.split(pairs, 0.3, 0)
    assert sorted([*train, *val], key=pairs.index) == pairs and command.split(pairs, 0.3, 1)[1] != val


@pytest.mark.parametrize("pairs", [60, 267, 1700, 1800, 9900, 25_000, 99_000, 3_000_000])
def test_the_printed_command_fits_its_own_dry_run(pairs, monkeypatch):
    sizes = {f"train-{number:06d}.tar": pairs // 10 for number in range(10)}
    jobs = [command.Job("train", number, [Pair("a", ["a"], "")]) for number in range(10)]
    words = shlex.split(command.training(Path("shards"), sizes, jobs))
    args = parse_args(words[words.index("open_clip_ext.main") + 1 :])
    setting, steps = setting_for(pairs), check_steps(args, "webdataset", pairs, 1)
    assert setting.command(pairs, args.epochs * steps) in " ".join(words)
    assert setting.batch[0] <= global_batch(args) <= setting.largest_batch(pairs)
    loss = build_loss(args, 1, "cpu")
    loss.limit_to(pairs)
    check_batch(loss, args)
    assert advise(args, pairs, steps) == []


def test_at_least_thirty_images_are_held_out_or_the_output_says_so(folder, written, capsys):
    for number, held_out in ((40, 8), (149, 30), (297, 30), (9_000, 90)):
        assert round(command.default_share(number) * number) == held_out
    written(folder)
    line = "fewer than 30 validation images measure nothing, as a recall's standard error is up to 18 points"
    assert line in written.out and "16 validation samples" in written.out
    written(folder, "--val-share", "0.75", out="more")
    assert "measure nothing" not in written.out


def test_they_train_by_the_printed_command(folder, written, run):
    """Also by OpenCLIP's own main, which finds their sizes."""
    written(folder, "--val-share", "0.1")
    words = shlex.split(written.out.splitlines()[-1])
    assert words[words.index("--captions-field") + 1] == "captions"
    data = [flag for name in ("train", "val") for flag in (f"--{name}-data", words[words.index(f"--{name}-data") + 1])]
    more = "--epochs 1 --batch-size 4 --workers 2"
    log = run("ours", f"{' '.join(data)} --captions-field captions {more} {LOSSES['neuclip']}").log
    assert "One of the captions in the field 'captions' is drawn each epoch" in log and "R@1" in log
    assert "Left out of the train data" not in log
    theirs = run("theirs", f"{' '.join(data)} {more}", main=open_clip_train.main.main)
    assert "Train Epoch: 0" in theirs.log and "Eval Epoch: 1" in theirs.log


def test_all_captions_reach_the_loss(folder, written, run, told, tmp_path):
    """From a csv with a line for each, whose paths are relative to it."""
    names = [str(next(folder.rglob(f"{row:02d}.[pj]*")).relative_to(folder)) for row in range(40)]
    lines = [(names[line % 40], CAPTIONS[2 * (line % 40) + line // 40]) for line in range(80)]
    lines += [(None, "no image"), ("b/nothing.png", " "), ("b/gone.png", "gone")]
    pd.DataFrame(lines, columns=["image", "text"]).to_csv(folder / "list.csv", index=False)
    columns = ["--csv-separator", ",", "--image-key", "image", "--csv-caption-key", "text"]
    shards = written(folder / "list.csv", *columns, "--val-share", "0", "--per-shard", "41")
    assert left_out(shards) == {EMPTY_IMAGE: 1, EMPTY_CAPTION: 1, UNREADABLE: 1}
    common = f"{LOSSES['fastclip-v3']} --same-caption --epochs 3 --workers 1 --batch-size 8"
    run("x", f"--train-data {shards}/train-000000.tar --captions-field captions {common}")
    keys = keys_of_captions(get_tokenizer("ViT-test")(CAPTIONS)).tolist()
    epochs = of_epochs(told, {key: number for number, key in enumerate(keys)}, 40)
    pairs = [json.loads(sample["json"])["captions"] for sample in samples(shards, "train")]
    assert len(epochs) == 3 and all(CAPTIONS[number] in pairs[row] for epoch in epochs for row, number in epoch.items())
    assert any(first[row] != second[row] for first, second in zip(epochs, epochs[1:], strict=False) for row in first)


def test_a_parquet_with_images_or_paths(folder, written, tmp_path):
    pytest.importorskip("pyarrow")
    paths = sorted(folder.rglob("*.[pj]*"))
    data = [path.read_bytes() for path in paths]
    forms = {
        "bytes": {"jpg": data, "caption": [CAPTIONS[n] for n in range(40)]},
        "dicts": {"jpg": [{"bytes": one, "path": None} for one in data], "caption": [CAPTIONS[:2]] * 39 + [[]]},
        "paths": {"jpg": list(map(str, paths)), "caption": [CAPTIONS[n] for n in range(39)] + [None]},
        "dicts of paths": {
            "jpg": [{"bytes": None, "path": str(path)} for path in paths[:-1]] + [None],
            "caption": [CAPTIONS[n] for n in range(40)],
        },
    }
    for name, columns in forms.items():
        pd.DataFrame(columns).to_parquet(tmp_path / f"{name}.parquet")
        given = ("--image-key", "jpg", "--caption-key", "caption", "--val-share", "0")
        shards = written(tmp_path / f"{name}.parquet", *given, out=name)
        found = samples(shards, "train")
        assert sorted(sample.get("png") or sample["jpg"] for sample in found) == sorted(data[: len(found)])
        assert len(found) == 40 - sum(left_out(shards).values()) >= 39
    rows = [int(json.loads(sample["json"])["source"].split(":")[1]) for sample in samples(tmp_path / "bytes", "train")]
    assert sorted(rows) == [*range(40)] != rows  # shuffled, like the images of a folder


def coco(number: int) -> dict:
    return {"raw": f"a dog {number}", "tokens": ["a", "dog"], "sentid": number}


# Of a column, and the captions in them; None if it is refused.
CELLS: dict[str, tuple[Any, list[list[str]] | None]] = {
    "structs": ([coco(0), coco(1)], [["a dog 0"], ["a dog 1"]]),
    "lists of structs": ([[coco(0), coco(1)], None], [["a dog 0", "a dog 1"]]),
    "structs of lists": ([{"id": [1, 2], "raw": ["x", "y"]}, {"id": [], "raw": []}], [["x", "y"]]),
    "integers": (pd.array([7, None], dtype="Int64"), [["7"]]),
    "categories": (pd.Categorical(["x", "y"]), [["x"], ["y"]]),
    "two texts": ([{"en": "a dog", "de": "ein Hund"}] * 2, None),
    "bytes": ([b"a dog"] * 2, None),
    "tokens": ([[1, 2]] * 2, None),
}


@pytest.mark.parametrize("name", CELLS)
def test_captions_in_a_parquet_are_texts(name, tmp_path):
    pytest.importorskip("pyarrow")
    cells, captions = CELLS[name]
    image = [str(number) for number in range(2)]
    pd.DataFrame({"image": image, "text": cells}).to_parquet(tmp_path / "x.parquet")
    args = Namespace(csv_img_key="image", csv_caption_key="text", seed=0)
    if captions is None:
        with pytest.raises(InputError, match="^--csv-caption-key: .* has .* in column 'text'; give one of texts"):
            find_sources([str(tmp_path / "x.parquet")], args, None, {})
        return
    pairs = find_sources([str(tmp_path / "x.parquet")], args, None, {})
    assert sorted(pair.captions for pair in pairs) == captions


def test_an_image_is_on_one_side(folder, written, tmp_path):
    """Of sources that lie in one another."""
    shards = written(folder, folder / "b", "--val", folder / "b")
    assert left_out(shards) == {HELD_OUT: 20} and len(samples(shards, "val")) == 40  # one for each caption
    train, val = ({(one.get("png") or one["jpg"]) for one in samples(shards, split)} for split in ("train", "val"))
    assert (len(train), len(val), train & val) == (20, 20, set())


def test_lines_of_a_parquet_with_the_same_image_are_its_captions(folder, written, tmp_path):
    pytest.importorskip("pyarrow")
    data = [path.read_bytes() for path in sorted(folder.rglob("*.[pj]*"))] * 2
    pd.DataFrame({"jpg": data, "caption": CAPTIONS}).to_parquet(tmp_path / "lines.parquet")
    columns = ("--image-key", "jpg", "--caption-key", "caption")
    shards = written(tmp_path / "lines.parquet", *columns, "--val-share", "0.01", out="lines")
    assert len(samples(shards, "train")) == 39 and len(samples(shards, "val")) == 2
    captions = [json.loads(sample["json"])["captions"] for sample in samples(shards, "train")]
    assert [CAPTIONS[1], CAPTIONS[41]] in captions and "--captions-field captions" in written.out


def test_images_are_encoded_again_only_with_size(written, tmp_path, monkeypatch):
    """Without, those that the model sees otherwise than they look are counted, and drawn as it sees them."""
    sheets: list[dict] = []
    monkeypatch.setattr(command, "draw", lambda drawn, *_: sheets.append({name: image for image, name in drawn}))
    monkeypatch.setattr(command, "SHOWN", 9)
    folder = tmp_path / "pairs"
    folder.mkdir()
    turned = Image.Exif()
    turned[0x0112] = 6
    for name, mode in (("large.jpg", "RGB"), ("clear.png", "RGBA"), ("bitmap.bmp", "RGB"), ("small.png", "L")):
        image = Image.new(mode, (20, 10) if name == "small.png" else (200, 100))
        image.save(folder / name, **({"exif": turned} if name == "large.jpg" else {}))
        (folder / name).with_suffix(".txt").write_text(name)
    glyph = Image.new("RGBA", (200, 100))
    glyph.paste((0, 0, 0, 255), (50, 25, 150, 75))
    ramp = np.linspace(1000, 60000, 20000).reshape(100, 200)
    others = {"glyph.png": glyph, "deep.png": Image.fromarray(ramp.astype("u2"))}
    others |= {"float.tif": Image.fromarray((ramp / 60000).astype("f4"))}
    for name, image in others.items():
        image.save(folder / name)
        (folder / name).with_suffix(".txt").write_text(name)
    kept = {sample["txt"].decode(): sample for sample in samples(written(folder, "--val-share", "0"), "train")}
    assert kept.keys() == {"large.jpg", "clear.png", "small.png", "glyph.png", "deep.png"}
    assert left_out(tmp_path / "shards") == {OTHER_FORMAT: 2}
    changed = json.loads((tmp_path / "shards" / "report.json").read_text())["changed"]
    told = {why.partition(" in RGB")[0]: entry for why, entry in changed.items()}
    assert told.pop("lose values") == {"number": 1, "first": ["deep.png"]}
    assert told.pop("become one colour") == {"number": 1, "first": ["glyph.png"]}
    assert [entry["first"] for entry in told.values()] == [["large.jpg"]] and "(--size mends them)" in written.out
    assert sheets[0]["glyph.png"].getextrema() == ((0, 0),) * 3 and sheets[0]["large.jpg"].size == (200, 100)
    assert all(sample[name[-3:]] == (folder / name).read_bytes() for name, sample in kept.items())
    scaled = samples(written(folder, "--val-share", "0", "--size", "50", out="scaled"), "train")
    images = {sample["txt"].decode(): Image.open(io.BytesIO(sample.get("jpg") or sample["png"])) for sample in scaled}
    sizes = {"large.jpg": (50, 100), "small.png": (20, 10)}
    assert {name: image.size for name, image in images.items() if image.size != (100, 50)} == sizes and len(images) == 7
    assert "mends" not in written.out and images["glyph.png"].getextrema() == ((0, 255),) * 3
    for name in ("deep.png", "float.tif"):
        values = np.asarray(sheets[1][name], int)
        assert values.min() <= 3 and values.max() >= 252 and (np.diff(values[:, :, 0].mean(1)) > 0).all()
    assert images["clear.png"].getpixel((5, 5)) == (255, 255, 255) and images["large.jpg"].format == "JPEG"


@pytest.mark.parametrize(
    "arguments, line",
    [
        ("{folder}", "--out"),
        ("{folder} --out {folder}/shards", "--out: .* is in the source"),
        ("{folder} --out {tmp}/a{{b", "--out: must be a folder's name"),
        ("{folder} --out {tmp}/x --val-share 1", "--val-share: 1.0 is out of range"),
        ("{folder} --out {tmp}/x --val {tmp}/none", "--val: .* does not exist"),
        ("{folder} --out {tmp}/x --size 0", "--size: 0 is out of range"),
        ("{tmp}/none --out {tmp}/x", "error: .* does not exist"),
        ("{tmp}/empty --out {tmp}/x", "error: there are no pairs: no image with a .txt beside it"),
        ("{tmp}/t.csv --out {tmp}/x", "--csv-separator: .* give ','"),
        ("{tmp}/t.csv --out {tmp}/x --csv-separator ,", "--csv-img-key: .* has no column 'filepath'; .* 'a', 'b'"),
        ("{tmp}/t.xls --out {tmp}/x", "error: .* is no folder, .csv, .tsv or .parquet"),
    ],
)
def test_wrong_input(folder, tmp_path, capsys, arguments, line):
    (tmp_path / "empty").mkdir()
    for name in ("t.csv", "t.xls"):
        (tmp_path / name).write_text("a,b\n1,2\n")
    before = set(tmp_path.rglob("*"))
    assert make_shards(shlex.split(arguments.format(folder=folder, tmp=tmp_path))) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(line, error), error
    assert set(tmp_path.rglob("*")) == before
