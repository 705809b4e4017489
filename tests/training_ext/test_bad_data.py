"""Data that cannot be used: refused at the start, or skipped and counted, or the run ends in one line."""

import gzip
import importlib
import io
import json
import logging
import os
import pickle
import re
import shlex
import shutil
import tarfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import webdataset as wds
from conftest import LOSSES, ext_main, run_main
from json_shards import tar
from PIL import Image
from stop import StopAt

from open_clip_ext.data import Scenes
from open_clip_ext.errors import InputError, MachineError
from training_ext.components.bad_samples import columns, usable
from training_ext.components.bad_samples import component as skips
from training_ext.core import hosts
from training_ext.core.epoch import Epoch
from training_ext.core.rows import RowLoader
from training_ext.core.training import Training
from training_ext.data.csv_rows import look_at_lines, read_csv
from training_ext.data.first_look import look_at_shards
from training_ext.data.shard_rows import rows_of_shards
from training_ext.data.tables import read_table
from training_ext.scoring.pairs import PairShards, TablePairs
from training_ext.tools.pairs.sources import find_sources

PER_SHARD, SHARDS = 8, 4
WORKERS = pytest.mark.parametrize("workers", [0, 2])
COMMON = "--epochs 1 --workers 0"


@pytest.fixture(scope="module")
def pairs() -> list[tuple[bytes, bytes]]:
    made = []
    for image, caption in Scenes(PER_SHARD * SHARDS, image_size=48):
        png = io.BytesIO()
        image.save(png, "png")
        made.append((png.getvalue(), caption.encode()))
    return made


@pytest.fixture
def shards(tmp_path, pairs):
    """shards(change) -> the command line of four shards of eight pairs, each member being change(...)."""

    def write(change=lambda row, name, content: (name, content)) -> str:
        (tmp_path / "shards").mkdir(exist_ok=True)
        for shard in range(SHARDS):
            members = []
            for row in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
                for suffix, content in zip(("png", "txt"), pairs[row], strict=True):
                    members.append(change(row, f"{row:03}.{suffix}", content))
            tar(tmp_path / f"shards/{shard}.tar", [member for member in members if member is not None])
        return (
            f"--train-data {tmp_path}/shards/{{0..{SHARDS - 1}}}.tar --dataset-type webdataset --train-num-samples "
            f"{PER_SHARD * SHARDS}"
        )

    return write


@pytest.fixture
def csv(tmp_path, pairs):
    """csv(change) -> the command line of 32 lines, each (path, caption) as change(row, path, caption) is."""

    def write(change=lambda row, path, caption: (path, caption)) -> str:
        lines = ["filepath\ttitle"]
        for row, (image, caption) in enumerate(pairs):
            path = tmp_path / f"{row}.png"
            path.write_bytes(image)
            lines.append("\t".join(map(str, change(row, path, caption.decode()))))
        (tmp_path / "train.csv").write_text("\n".join(lines) + "\n")
        return f"--train-data {tmp_path}/train.csv"

    return write


def zero_header(path: Path, member: int) -> None:
    with tarfile.open(path) as file:
        offset = file.getmembers()[member].offset
    content = bytearray(path.read_bytes())
    content[offset : offset + 512] = bytes(512)
    path.write_bytes(content)


# Before the start


@pytest.mark.parametrize("loss", ["clip", "fastclip-v3"])
def test_shards_that_are_missing(refused, shards, tmp_path, loss):
    data = f"{COMMON} {LOSSES[loss]} {shards()}"
    line = refused(data.replace("{0..3}", "*"))
    assert "--train-data: 1 of 1 shards cannot be read" in line and "* is not expanded" in line
    (tmp_path / "shards/2.tar").unlink()
    line = refused(data)
    assert all(part in line for part in ("1 of 4", f"{tmp_path}/shards/2.tar", "--max-bad-samples 0.25")), line
    assert "1 of 4" in refused(f"{data} --max-bad-samples 0.24")
    shutil.rmtree(tmp_path / "shards")
    line = refused(data)
    assert "4 of 4 shards" in line and "3.tar" not in line and "and 1 more" in line and "--max-bad" not in line


@pytest.mark.parametrize(
    "change, part",
    [
        (lambda row, name, content: (name.replace(".txt", ".json"), content), "no caption .txt but .png, .json"),
        (lambda row, name, content: (name, content) if ".png" in name else None, "no caption .txt but .png"),
        (lambda row, name, content: (name, content) if ".txt" in name else None, "no image"),
        (lambda row, name, content: (name, b"nothing"), "cannot be decoded (cannot identify image file"),
        (lambda row, name, content: (name, b"" if ".txt" in name else content), "a caption .txt is empty"),
        (lambda row, name, content: (name, " \u3000\n".encode() if ".txt" in name else content), ".txt is empty"),
    ],
    ids=["json", "no captions", "no images", "broken images", "empty captions", "white space"],
)
def test_shards_without_a_pair(refused, shards, change, part):
    line = refused(f"{COMMON} --loss clip {shards(change)}")
    assert "--train-data: none of the first 32 samples can be used" in line and part in line, line


def test_a_csv_that_cannot_be_used(refused, csv, tmp_path):
    common = f"{COMMON} --loss clip"
    line = refused(f"{common} {csv(lambda row, path, caption: (path, '' if row in (5, 9) else caption))}")
    assert all(part in line for part in ("2 of 32 lines", f"{tmp_path}/train.csv", "line 7", "'title'")), line
    line = refused(f"{common} {csv(lambda row, path, caption: ('' if row == 31 else path, caption))}")
    assert "line 33 in column 'filepath'" in line
    line = refused(f"{common} {csv(lambda row, path, caption: (f'{path}.gone', caption))}")
    assert "none of the first 32 images" in line and "0.png.gone': No such file" in line


# In the run


def epochs(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / skips.FILE).read_text().splitlines()]


@pytest.mark.parametrize("loss, workers", [("clip", 0), ("fastclip-v3", 0), ("neuclip", 2)])
def test_bad_samples_are_counted_and_named_once(run, shards, loss, workers):
    """In every shard two samples without a caption, one without an image and one that is broken, of eight."""

    def change(row, name, content):
        kind = row % PER_SHARD
        if kind in (2, 3) and ".txt" in name or kind == 4 and ".png" in name:
            return None
        return name, b"nothing" if kind == 5 and ".png" in name else content

    experiment = run("x", f"--epochs 2 --workers {workers} {LOSSES[loss]} {shards(change)}")
    first, second = epochs(experiment.path)
    for counts in (first, second):
        # A batch is yielded when the next sample comes, so a loader reads one sample more than it uses, at most.
        assert 32 <= counts["used"] <= 34
        assert counts["no_caption"] > counts["no_image"] > 0 and counts["unreadable"] > 0
        assert counts["lost"] == counts["shards_damaged"] == counts["shards_missing"] == 0
        bad = counts["no_caption"] + counts["no_image"] + counts["unreadable"]
        assert counts["skipped_by_process"] == [bad] == [16]  # once, though each worker goes over its shards twice
    assert (first["epoch"], second["epoch"]) == (0, 1)
    log = experiment.log
    for part in ("no caption .txt but .png", "no image .jpg, .png, .jpeg, .webp but .txt", "cannot identify image"):
        assert log.count(part) == 1, log
    assert f"Epoch 1 data: used {second['used']} samples, left out {second['no_caption']} sample(s) with" in log


@pytest.mark.parametrize("loss", ["clip", "fastclip-v3"])
def test_empty_captions_are_counted(run, shards, loss):
    """And those that are not UTF-8; the numbers that are put in front of captions hide neither."""
    texts = {2: b"", 3: " \u3000\n".encode(), 4: b"\xff"}
    data = shards(lambda row, name, text: (name, texts.get(row % PER_SHARD, text) if ".txt" in name else text))
    experiment = run("x", f"{COMMON} {LOSSES[loss]} {data}")
    (counts,) = epochs(experiment.path)
    assert (counts["no_caption"], counts["unreadable"], counts["no_image"]) == (8, 4, 0)
    assert experiment.log.count("its caption is empty") == experiment.log.count("its caption is not UTF-8") == 1


def test_pairs_with_the_name_of_another_up_to_a_dot(run, shards):
    def change(row, name, content):
        return (name if row % 2 == 0 else f"{row - 1:03}.2.{name.partition('.')[2]}"), content

    experiment = run("x", f"{COMMON} --loss clip {shards(change)}")
    (counts,) = epochs(experiment.path)
    assert counts["surplus"] == 16 and counts["no_caption"] == counts["no_image"] == 0
    assert experiment.log.count("it has another pair of an image and a .2.txt, as a name ends at its first dot") == 1


def counter(share=None, workers=2, **args) -> skips.BadSamples:
    defaults = {"rank": 0, "batch_size": 8, "save_logs": False}
    return skips.BadSamples(Namespace(max_bad_samples=share, workers=workers, **(defaults | args)))


def count_epoch(counts: skips.BadSamples, train, number: int, **loader) -> None:
    data = {"train": SimpleNamespace(dataloader=SimpleNamespace(**loader))}
    epoch = Epoch(train, number, 3, number, data, 0, 0, *(None,) * 5, counts.args, None, None)
    counts.epoch(epoch, lambda epoch: train())


def test_a_resumed_epoch_is_judged_by_its_whole_length(monkeypatch):
    """One bad sample of 49 is less than 5 %, though only the last batch of 8 was counted."""
    counts = counter(0.05, 1)
    counts.set_sizes(48, 0)

    def train():
        for _ in range(8):
            counts.use()
        counts.skip(columns.UNREADABLE, "a sample", "not an image")

    count_epoch(counts, train, 0, num_batches=6, first=5)
    with pytest.raises(InputError, match="more than 0.05 of the train data"):
        count_epoch(counts, train, 0, num_batches=6, first=1)


def test_a_run_that_resumes_near_the_end_of_an_epoch_has_no_more_bad_samples(run, shards, tmp_path, monkeypatch):
    """2 of the rest, of 32 in the epoch; the loss has no rows, so nothing else says how many there are."""
    data = shards(lambda row, name, content: (name, b"no" if row % PER_SHARD == 5 and ".png" in name else content))
    common = f"{COMMON} {LOSSES['neuclip']} {data} --max-bad-samples 0.2 --name x"
    with monkeypatch.context() as patch:
        patch.setattr(RowLoader, "__iter__", StopAt(3))
        assert run_main(ext_main, common, tmp_path / "logs") == 143
    assert epochs(run("x", f"{common} --resume latest").path)[0]["unreadable"] == 2


def test_a_shard_counts_once_however_often_it_is_read(tmp_path):
    """As resampled shards are, by any worker of any process."""
    counts = counter(0.25)
    counts.set_sizes(0, 0, [str(number) for number in range(4)])
    for _ in range(5):
        counts.skip_shard("2", OSError("not there"), 0, 7)
    found = counts.totals()
    assert (found[columns.MISSING], found[columns.DAMAGED], found[columns.LOST]) == (1, 0, 7)
    assert columns.with_shards(found, {2: columns.MISSING, 3: columns.DAMAGED})[-2:] == [1, 1]
    with pytest.raises(InputError, match="more than 0.25 of the train data"):
        counts.skip_shard("3", ValueError("damaged"), 0, None)


def test_a_damaged_shard_for_validation(refused, shards, tmp_path):
    data = shards()
    shutil.copy(tmp_path / "shards/1.tar", tmp_path / "val.tar")
    zero_header(tmp_path / "val.tar", 6)
    line = refused(f"{COMMON} --loss clip {data} --val-data {tmp_path}/val.tar")
    assert f"--val-data: shard '{tmp_path}/val.tar' is damaged: " in line and "repair or remove it" in line


def seen_otherwise() -> dict[str, tuple[Image.Image, str]]:
    """Images by name and format, with what they lose on their way to the model, if anything."""
    gray = np.linspace(1000, 60000, 64).reshape(8, 8)
    glyph, red = Image.new("RGBA", (8, 8)), Image.new("RGB", (8, 8), "red")
    glyph.putpixel((3, 3), (0, 0, 0, 255))
    values, alpha = "lose values in RGB", "become one colour in RGB"
    return {
        "red.PNG": (red, ""), "ghost.PNG": (Image.new("RGBA", (8, 8), (0, 0, 0, 9)), ""), "turned.TIFF": (red, ""),
        "labels.TIFF": (Image.fromarray(np.eye(8, dtype="i4") * 200), ""), "turned.JPEG": (red, "are turned by"),
        "glyph.PNG": (glyph, alpha), "la.PNG": (glyph.convert("LA"), alpha), "palette.PNG": (glyph.convert("P"), alpha),
        "gray.PNG": (Image.fromarray(gray.astype("u2")), values),
        "integers.TIFF": (Image.fromarray(gray.astype("i4")), values),
        "big-endian.TIFF": (Image.fromarray(gray.astype(">u2")), values),
        "float.TIFF": (Image.fromarray((gray / 65535).astype("f4")), values),
    }


@pytest.mark.parametrize("name, image, loses", [(name, *of) for name, of in seen_otherwise().items()])
def test_images_that_the_model_sees_otherwise_are_told_once(name, image, loses, tmp_path, caplog):
    """Of a csv, shards, and an evaluation's, also if the first hundreds are as they look."""
    paths = [tmp_path / f"{number:03d}.png" for number in range(300)]  # Pillow goes by the contents
    Image.new("RGB", (8, 8), "blue").save(paths[0])
    orientation = Image.Exif()
    orientation[0x0112] = 6 if "turned" in name else 1
    image.save(paths[-1], name.partition(".")[2], exif=orientation)
    for number, path in enumerate(paths[1:-1], 1):
        os.link(paths[-1] if number >= 200 else paths[0], path)
    pairs = [((path.name, path.read_bytes()), (f"{path.stem}.txt", b"a caption")) for path in paths]
    tar(tmp_path / "0.tar", [member for pair in pairs for member in pair])
    tar(tmp_path / "1.tar", [member for pair in pairs[200:] for member in pair])
    (tmp_path / "1.tar.gz").write_bytes(gzip.compress((tmp_path / "1.tar").read_bytes()))
    table = pd.DataFrame({"filepath": ["gone.png", *map(str, paths)], "title": "a caption"})
    table.iloc[1:].to_csv(tmp_path / "x.csv", sep="\t", index=False)
    columns = {"csv_separator": "\t", "csv_img_key": "filepath", "csv_caption_key": "title"}
    for _ in range(2):
        look_at_lines(table, "filepath", "x.csv")
        look_at_shards([f"{tmp_path}/0.tar"])
        look_at_shards([f"{tmp_path}/1.tar.gz"])
        TablePairs(Namespace(val_data=f"{tmp_path}/x.csv", **columns)).warn()
        PairShards(f"{tmp_path}/0.tar").warn()
    places = ("", "0.tar: ", "1.tar.gz: ", "", "0.tar: ") if loses else ()
    for record, flag, place in zip(caplog.records, ("train",) * 3 + ("val",) * 2 if loses else (), places, strict=True):
        first = rf"The first is '{tmp_path}/{place}2\d\d.png'"
        assert re.fullmatch(
            rf"--{flag}-data: \d+ of \d+ images that were looked at {loses}.* {first}", record.message
        )


@pytest.mark.parametrize("compression", ["zip", "gz", "tar"])
def test_a_csv_in_a_damaged_archive(datasets, tmp_path, compression):
    path = tmp_path / f"train.csv.{compression}"
    pd.read_csv(shlex.split(datasets["csv"])[1], sep="\t").to_csv(path, sep="\t", index=False)
    content = path.read_bytes()
    broken = content[: len(content) // 2] + bytes(20) + content[len(content) // 2 + 20 :]
    # The header is not a tar's, and the end of a zip is missing.
    path.write_bytes(b"x" * 600 + content[600:] if compression == "tar" else broken[:-30])
    args = Namespace(csv_separator="\t", csv_img_key="filepath", csv_caption_key="title", same_key=None, loss="clip")
    with pytest.raises(InputError, match=rf"^--train-data: '.*train.csv.{compression}' cannot be read with [^\n]*$"):
        read_csv(args, str(path))


def readers_of(path: str) -> dict:
    """Each function that reads a csv with tabs between `filepath` and `title`."""
    columns = {"csv_separator": "\t", "csv_img_key": "filepath", "csv_caption_key": "title"}
    own, training = Namespace(**columns, seed=0, val_data=path), Namespace(**columns, same_key=None, loss="clip")
    return {
        "training": lambda: read_csv(training, path),
        "validation": lambda: read_csv(training, path, "--val-data"),
        "plain": lambda: read_table(Namespace(**{**vars(training), "loss": None}), path, sep="\t"),
        "make_shards": lambda: find_sources([path], own, None, {}),
        "evaluate": lambda: TablePairs(own),
    }


@pytest.mark.parametrize("reader", readers_of(""))
def test_a_quote_that_joins_lines_is_told_by_every_reader_of_a_csv(reader, tmp_path, caplog):
    """To pandas a cell that begins with one ends at the next."""
    path = str(tmp_path / "x.csv")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    titles = ["a", "b", '"c', "d", 'an "e"', "f"]
    Path(path).write_text("\n".join(["filepath\ttitle", *(f"{tmp_path}/a.png\t{title}" for title in titles)]))
    readers_of(path)[reader]()
    assert [record.message for record in caplog.records] == [
        f"{path!r} gives 4 pairs. 1 of their captions have line breaks, the first in line 4, up to 2 in one: if none "
        "should have, a quote that begins a caption has joined the lines up to the next quote; remove such quotes"
    ]


@pytest.mark.parametrize("folder", ["", "images/"])
def test_images_are_from_the_current_folder_or_else_from_that_of_the_csv(folder, tmp_path, monkeypatch):
    """To every reader but OpenCLIP's own training."""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / folder / "a.png")
    (tmp_path / "images/x.csv").write_text("filepath\ttitle\na.png\tone\n \ttwo\na.png\tthree\n")
    monkeypatch.chdir(tmp_path)
    own = Namespace(csv_separator="\t", csv_img_key="filepath", csv_caption_key="title", seed=0, same_key=None)
    for loss in ("clip", None):
        named = read_table(Namespace(**vars(own), loss=loss), "images/x.csv", sep="\t")["filepath"].tolist()
        assert named == [("" if loss is None else folder) + "a.png", " ", ("" if loss is None else folder) + "a.png"]
    (pair,) = find_sources(["images/x.csv"], own, None, {})
    assert (pair.name, pair.path, pair.captions) == ("a.png", f"{folder}a.png", ["one", "three"])


def test_a_csv_with_numbered_lines_and_no_name_for_them(run, datasets, tmp_path):
    """As R and pandas write it; pandas makes labels of the numbers."""
    header, *lines = Path(shlex.split(datasets["csv"])[1]).read_text().splitlines()
    numbered = [header, *(f"{100 - number}\t{line}" for number, line in enumerate(lines))]
    (tmp_path / "numbered.csv").write_text("\n".join(numbered) + "\n")
    flags = f"{LOSSES['fastclip-v3']} --workers 0 --epochs 1 --several-captions --same-key title"
    assert len(run("x", f"--train-data {tmp_path}/numbered.csv {flags}").logged()) == 6


def test_missing_and_damaged_shards_that_are_allowed(run, shards, tmp_path):
    """With recorded sizes the lost samples are counted."""
    data = f"{shards()} --epochs 1 --workers 0 {LOSSES['fastclip-v3']}"
    (tmp_path / "shards/sizes.json").write_text(json.dumps({f"{i}.tar": PER_SHARD for i in range(SHARDS)}))
    zero_header(tmp_path / "shards/1.tar", 6)
    (tmp_path / "shards/2.tar").unlink()
    experiment = run("x", f"{data} --max-bad-samples 0.5")
    (counts,) = epochs(experiment.path)
    assert counts["lost"] == 5 * counts["shards_damaged"] + 8 * counts["shards_missing"]
    assert counts["shards_missing"] > 0 and counts["shards_damaged"] > 0


@WORKERS
def test_bad_lines_of_a_csv_are_replaced_and_counted(run, csv, tmp_path, workers):
    def change(row, path, caption):
        if row == 3:
            path = f"{path}.gone"
        if row == 20:
            path.write_bytes(b"nothing")
        return path, {10: " ", 30: ""}.get(row, caption)

    data = f"{csv(change)} --max-bad-samples 0.125"
    for loss in ("clip", "fastclip-v3"):
        experiment = run(f"x-{loss}", f"--epochs 2 --workers {workers} {LOSSES[loss]} {data}")
        for counts in epochs(experiment.path):
            assert counts["used"] == 32  # another line in the place of each
            # Each once, also where it is drawn to replace another.
            assert counts["unreadable"] == 2 and counts["no_caption"] == 2 and counts["no_image"] == 0
        assert experiment.log.count("Others like it are counted") == 2
        assert re.search(f"line (12|32) of '{tmp_path}/train.csv': its caption is empty", experiment.log)
        assert "No such file" in experiment.log or "cannot identify image file" in experiment.log


@pytest.fixture
def ended(tmp_path, capfd):
    """ended(arguments) -> the one line in which a run ends after it has begun, and its log."""

    def ended(arguments: str, code: int = 2) -> tuple[str, str]:
        capfd.readouterr()
        assert run_main(ext_main, f"{arguments} --name ended", tmp_path / "logs") == code
        error = capfd.readouterr().err
        assert "Traceback" not in error and error.count("open_clip_ext: error: ") == 1, error
        return error.strip().splitlines()[-1], error

    return ended


def test_a_bad_line_of_a_csv_for_validation(ended, csv, tmp_path):
    """That begins as an image; others are found before the start."""
    data = csv(lambda row, path, caption: (f"{path}.cut" if row == 9 else path, caption))
    (tmp_path / "9.png.cut").write_bytes((tmp_path / "9.png").read_bytes()[:200])
    val = shutil.copy(tmp_path / "train.csv", tmp_path / "val.csv")
    line, log = ended(f"{COMMON} --loss clip {data} --val-data {val}")
    assert f"--val-data: line 11 of '{val}' cannot be used" in line and "9.png.cut" in line
    assert "Epoch 0 data: used" in log


def test_a_missing_image_of_a_csv_for_validation(refused, csv, tmp_path):
    csv(lambda row, path, caption: (f"{path}.gone" if row == 9 else path, caption))
    val = shutil.copy(tmp_path / "train.csv", tmp_path / "val.csv")
    line = refused(f"{COMMON} --loss clip {csv()} --val-data {val}")
    assert f"--val-data: line 11 of '{val}' cannot be used: '{tmp_path}/9.png.gone': No such file" in line


def test_what_loader_workers_get_can_be_pickled(tmp_path):
    """As under the start methods spawn and forkserver."""
    counts = counter()
    counts.training = Training([counts], lambda: None)
    stage = usable.Decode(wds.decode, counts, 0)("pilrgb", handler=wds.warn_and_continue)
    data = importlib.import_module("open_clip_train.data")
    accepts = data.FilterValidSample() if hosts.installed().HAS_TASKS else data.filter_no_caption_or_no_image
    complete = usable.CountIncomplete(accepts, counts)
    stages = pickle.loads(pickle.dumps([stage, complete, rows_of_shards(None, counts.skip_shard, counts.end_shard)]))
    tar(tmp_path / "0.tar", [("0.txt", b"a"), ("1.jpg", b"b"), ("1.txt", b"c")])
    decode, complete, shard_rows = stages
    assert not list(decode(filter(complete, shard_rows([{"url": str(tmp_path / "0.tar")}]))))
    own = complete.counts.totals()
    assert (own[columns.NO_IMAGE], own[columns.UNREADABLE]) == (1, 1)


@WORKERS
def test_a_resumed_run_skips_what_an_uninterrupted_one_does(run, csv, workers, tmp_path):
    data = csv(lambda row, path, caption: (f"{path}.gone" if row % 8 == 5 else path, caption))
    common = f"{LOSSES['fastclip-v3']} --workers {workers} {data}"
    whole = run("whole", f"{common} --epochs 2")
    part = run("part", f"{common} --epochs 2 --resume {whole.path}/checkpoints/epoch_1.pt")
    assert epochs(part.path) == epochs(whole.path)[1:]
    for name, tensor in whole.checkpoint(2)["state_dict"].items():
        assert tensor.equal(part.checkpoint(2)["state_dict"][name])


def test_a_run_resumes_without_what_became_unusable_in_it(run, refused, shards, tmp_path, monkeypatch):
    """The sizes are those of the last count, or given."""
    data = f"{LOSSES['fastclip-v3']} --workers 0 {shards().partition(' --train-num')[0]}"
    saved = run("x", f"{data} --epochs 1").path / "checkpoints/epoch_1.pt"
    zero_header(tmp_path / "shards/1.tar", 6)
    (tmp_path / "shards/2.tar").unlink()
    resumed = f"{data} --epochs 2 --resume {saved} --max-bad-samples 0.5"
    (_, counts) = epochs(run("x", resumed.replace(str(saved), "latest")).path)
    assert counts["lost"] == 5 * counts["shards_damaged"] + 8 * counts["shards_missing"]
    assert counts["shards_missing"] > 0 and counts["shards_damaged"] > 0
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    line = refused(f"{resumed} --name y")
    assert "(32 rows; --train-data has 19; if shards are missing or damaged, give their sizes by --shard-sizes)" in line


# Its end


ENDS = pytest.mark.parametrize(
    "loss, workers, resampled",
    [
        ("clip", 0, ""), ("fastclip-v3", 0, "--dataset-resampled"),
        ("fastclip-v3", 2, ""), ("clip", 2, "--dataset-resampled"),
    ],
)


@ENDS
def test_shards_without_a_pair_that_nobody_could_see(ended, shards, monkeypatch, loss, workers, resampled):
    """As the look at the first samples sees nothing of remote shards."""
    monkeypatch.setattr("training_ext.data.counting.look_at_shards", lambda urls, *fields: None)
    monkeypatch.setattr(skips, "IN_A_ROW", 500)
    data = shards(lambda row, name, content: (name, b"nothing" if ".png" in name else content))
    line, log = ended(f"--epochs 1 --workers {workers} {LOSSES[loss]} {data} {resampled}")
    assert ("500 samples, or 5 shards, in a row" if resampled else "have 0 usable samples") in line, line
    assert line.startswith("open_clip_ext: error: --train-data: "), line  # also of a worker's error
    assert "cannot identify image" in line or "whose image or caption cannot be read" in line
    assert log.count("Others like it are counted") == 1


def test_fewer_samples_than_a_batch(ended, shards):
    line, _ = ended(f"{COMMON} --loss clip {shards()} --batch-size 33 --warmup 1")
    assert "a loader worker's shards have 32 usable samples, but --batch-size is 33" in line


@ENDS
def test_shards_that_are_deleted_in_the_run(ended, shards, tmp_path, monkeypatch, loss, workers, resampled):
    data = shards()
    logged = logging.info

    def info(message, *args):
        logged(message, *args)
        if message.startswith("Epoch 0 "):
            shutil.rmtree(tmp_path / "shards", ignore_errors=True)

    monkeypatch.setattr(logging, "info", info)
    code = MachineError.code if resampled else 2
    line, log = ended(f"--epochs 50 --workers {workers} {LOSSES[loss]} {data} {resampled}", code)
    assert ("100 shards, in a row cannot be used" if resampled else "shard(s) that cannot be opened") in line, line
    # Two workers that meet it at the same time both say so.
    assert 1 <= log.count("Others like it are counted") <= max(1, workers)


@WORKERS
@pytest.mark.parametrize("kind", ["csv", "shards"])
def test_more_bad_samples_than_allowed(ended, shards, csv, kind, workers):
    """A quarter of them: 4 of 16, or of 32 used."""
    if kind == "csv":
        data = csv(lambda row, path, caption: (f"{path}.gone" if row % 4 == 3 else path, caption))
    else:
        data = shards(lambda row, name, content: (name, b"no" if row % 4 == 3 and ".png" in name else content))
    common = f"--epochs 1 --workers {workers} --loss clip {data}"
    line, log = ended(f"{common} --max-bad-samples 0.1")
    # Two workers may each find one more than there may be.
    assert re.search("--max-bad-samples: more than 0.1 of the train data cannot be used: [45] sample.s. whose", line)
    assert "Epoch 0 data" not in log  # known before the epoch ended


@pytest.mark.parametrize("workers, kind", [(0, "cut"), (2, "missing"), (0, "missing, and a bad image")])
def test_the_share_that_a_refusal_names_is_enough(refused, run, shards, tmp_path, workers, kind):
    bad = "020.png" if "bad" in kind else None
    data = shards(lambda row, name, content: (name, b"no" if name == bad else content))
    path = tmp_path / "shards/1.tar"
    if kind == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])  # within a sample, which is lost with the rest
    else:
        path.unlink()
    command = f"--epochs 1 --workers {workers} {LOSSES['fastclip-v3']} {data.partition(' --train-num')[0]}"
    told = re.search("--max-bad-samples [0-9.]+", refused(command))
    experiment = run("x", f"{command} {told[0]}")
    (counts,) = epochs(experiment.path)
    assert counts["shards_missing"] + counts["shards_damaged"] == 1 and counts["no_caption"] == counts["no_image"] == 0
    assert counts["unreadable"] == (bad is not None)


def test_one_process_with_all_bad_samples_ends_by_the_share_over_all():
    """Of 2 x 32 samples 4 are 6 %, though 4 of this process's 32 are more than 10 %."""
    args = Namespace(
        max_bad_samples=0.1, workers=0, batch_size=8, world_size=2, train_data=None, dataset_type="synthetic"
    )
    counts = skips.BadSamples(args)
    counts.training = Training([counts], None)
    counts.data_built({"train": SimpleNamespace(dataloader=SimpleNamespace(num_batches=4))})
    for _ in range(7):
        counts.skip(columns.UNREADABLE, "a sample", "not an image")
    with pytest.raises(InputError, match="--max-bad-samples: more than 0.1 of the train data"):
        counts.skip(columns.UNREADABLE, "a sample", "not an image")


@pytest.mark.slow
def test_two_processes_end_together(pair, shards, tmp_path):
    data = shards(lambda row, name, content: (name, b"no" if row % 4 == 3 and ".png" in name else content))
    common = f"--epochs 1 --workers 0 {LOSSES['fastclip-v3']} --dist-backend gloo {data}"
    for process in pair(f"{common} --name whole", tmp_path / "logs"):
        assert process.code == 0, process
    (counts,) = epochs(tmp_path / "logs/whole")
    assert sum(counts["skipped_by_process"]) == counts["unreadable"] and min(counts["skipped_by_process"]) > 0
    ended = pair(f"{common} --name ended --max-bad-samples 0.1", tmp_path / "logs")
    assert all(process.code in (1, 2) for process in ended) and any(process.code == 2 for process in ended), ended
    assert any("--max-bad-samples: more than 0.1" in process.stderr for process in ended)
