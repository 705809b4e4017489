"""What is wrong with a folder ends the command in one line, before a score is made of it."""

import io
import os
import pickle
import shutil
from argparse import Namespace

import numpy as np
import pytest
from json_shards import tar
from PIL import Image

from open_clip_ext import InputError
from training_ext.components.own_classes import OwnClasses
from training_ext.scoring.class_folders import open_own_classes
from training_ext.scoring.folders import Candidates, Images, Shards
from training_ext.scoring.scores import prompt_of


def png() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def shards(tmp_path):
    """shards(*members of a sample) -> the samples of a folder that has one good sample before it."""

    def shards(*members: tuple[str, bytes], kind: str | None = None, templates: str = "a {c}\n") -> list:
        folder = tmp_path / "folder"
        (folder / "test").mkdir(parents=True, exist_ok=True)
        (folder / "classnames.txt").write_text("red\nblue\n")
        (folder / "zeroshot_classification_templates.txt").write_text(templates)
        (folder / "test" / "nshards.txt").write_text("1\n")
        if kind is not None:
            (folder / "dataset_type.txt").write_text(kind + "\n")
        first = ("s0.png", png()), ("s0.cls", b"1"), ("s0.txt", b"one\ntwo\n")
        tar(folder / "test" / "0.tar", [*first, *members])
        source = Shards("--data", str(folder))
        return [sample for _, sample in source.samples(lambda number: True)]

    return shards


def test_labels_and_captions(shards):
    first, second = shards(("s1.cls", b"0\n"), ("s1.PNG", png()), ("s1.extra.pickle", b"not read"))
    assert (first.target, second.target) == (1, 0)
    (first,) = shards(kind="retrieval")
    assert first.target == ["one", "two"]
    captions = "a red\u2028circle\r\n\n a blue\x85square\n".encode()
    *_, last = shards(("s1.png", png()), ("s1.txt", captions), kind="retrieval")
    assert last.target == ["a red\u2028circle", "a blue\x85square"]


def test_names_and_templates_are_lines(shards, tmp_path):
    shards()
    source, names = tmp_path / "folder", tmp_path / "folder/classnames.txt"
    names.write_text("red\nblue\n\n", encoding="utf-8-sig")
    assert Shards("--data", str(source)).classes == ["red", "blue"]
    for text, message in (("red\n\nblue\n", "classnames.txt' has no name in line 2"), ("\n", "is missing or empty")):
        names.write_text(text)
        with pytest.raises(InputError, match=message):
            Shards("--data", str(source))
    for template in ("a photo", "a {c.__class__}"):
        with pytest.raises(InputError, match="has no {c}"):
            shards(templates=f"{template}\n")


def test_what_is_wrong_with_a_sample(shards):
    for members, message in (
        ((("s1.cls", b"0"),), r"'.*0.tar: s1.cls' has no .jpg beside it"),
        ((("s1.png", png()),), r"s1.png' has no .cls beside it"),
        ((("s1.png", png()), ("s1.cls", b"2")), r"s1.png' has the class b'2'; classnames.txt has 0 to 1"),
        ((("s1.png", png()), ("s1.cls", b"-1")), r"has the class b'-1'"),
        ((("s1.png", png()), ("s1.cls", b"1" * 5000)), r"has the class b'1111"),
        ((("s1.png", png()), ("s1.cls", b"0"), ("s1.npy", b"PK\x03\x04")), r"the .npy of .* cannot be read"),
        ((("s1.png", png()), ("s1.cls", b"0"), ("s1.npy", pickle.dumps([1]))), r"the .npy of .* cannot be read"),
    ):
        with pytest.raises(InputError, match=message):
            shards(*members)
    stream = io.BytesIO()
    np.save(stream, np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="allow_pickle=False"):
        shards(("s1.png", png()), ("s1.cls", b"0"), ("s1.npy", stream.getvalue()))
    for shape, kind in ((10**12, "<i8"), (10**30, "<i8"), (2, "|V0")):  # their contents are missing
        stream = io.BytesIO()
        np.lib.format.write_array_header_1_0(stream, {"shape": (shape,), "descr": kind, "fortran_order": False})
        with pytest.raises(InputError, match="the .npy of .* cannot be read"):
            shards(("s1.png", png()), ("s1.cls", b"0"), ("s1.npy", stream.getvalue()))
    with pytest.raises(InputError, match="needs an .npy of 2 numbers"):
        shards(kind="multilabel")
    with pytest.raises(InputError, match="'segmentation', which is not one of classification"):
        shards(kind="segmentation")


def test_a_corrected_label_is_another_digest(shards, tmp_path):
    """Tars are padded, so that their size stays; a copy that keeps the times, as cp -p makes it, is the same data."""
    shards(("s1.png", png()), ("s1.cls", b"0"))
    folder, copy = tmp_path / "folder", tmp_path / "copy"
    path = folder / "test" / "0.tar"
    os.utime(path, ns=(10**18, 10**18))  # not the clock's, which may stand still between two writes
    size, digest = path.stat().st_size, Shards("--data", str(folder)).digest()
    shutil.copytree(folder, copy)
    shards(("s1.png", png()), ("s1.cls", b"1"))
    assert path.stat().st_size == size and Shards("--data", str(folder)).digest() != digest
    assert Shards("--data", str(copy)).digest() == digest


def test_a_damaged_image_is_not_left_out(shards, tmp_path):
    shards(("s1.png", png()[:45]), ("s1.cls", b"0"))
    images = Images(Shards("--data", str(tmp_path / "folder")), np.asarray, 0, 1)
    with pytest.raises(InputError, match="--data: the image of '.*s1.png' cannot be read"):
        list(images)


def test_every_sample_is_read_by_one_process(shards, tmp_path):
    shards(*((f"s{number}.{kind}", content) for number in range(1, 8) for kind, content in
             (("png", png()), ("cls", b"0"))))
    source = Shards("--data", str(tmp_path / "folder"))
    numbers = [[number for number, *_ in Images(source, np.asarray, rank, 3)] for rank in range(3)]
    assert numbers == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_a_shard_that_is_missing_or_cut(shards, tmp_path):
    shards(*((f"s{number}.{kind}", content) for number in range(1, 20) for kind, content in
             (("png", png()), ("cls", b"0"))))
    folder = tmp_path / "folder"
    path = folder / "test" / "0.tar"
    whole = path.read_bytes()
    # s0 has three members, the others two, each of a header and a block: in a header, between samples, in a content.
    for size in (3 * 1024 + 8 * 1024 + 100, 3 * 1024 + 8 * 1024, 3 * 1024 + 8 * 1024 + 600):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"0.tar' is damaged"):
            list(Shards("--data", str(folder)).samples(lambda number: number == 0))
    (folder / "test" / "nshards.txt").write_text("2")
    with pytest.raises(InputError, match=r"1.tar' is missing; nshards.txt says 2 shards"):
        Shards("--data", str(folder))
    for number, message in (("many", "must have the number of shards"), ("0", "at least 1"), ("9" * 31, "1.tar' is m")):
        (folder / "test" / "nshards.txt").write_text(number)
        with pytest.raises(InputError, match=message):
            Shards("--data", str(folder))


def test_a_file_that_is_gone(tmp_path):
    (tmp_path / "red").mkdir()
    (tmp_path / "red/x.png").write_bytes(png())
    (tmp_path / "red/y.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(InputError, match="y.png' cannot be read"):
        open_own_classes("--zeroshot-data", str(tmp_path)).digest()


def test_associations_that_are_no_candidates(tmp_path):
    path = tmp_path / "winogavil_dataset.csv"
    header = "cue,candidates,associations\n"
    for row, message in (
        ('bald,"[""eagle""]","[""ash""]"\n', "has no association, or one that is no candidate"),
        ("bald,eagle,ash\n", "cannot be read as cue, candidates, associations"),
        ("", "has no instance"),
        ('a,"' + "x" * 140_000, "cannot be read as cue, candidates, associations"),
        ('bald,"[""eagle""]","[""eagle""]"\n', "needs '.*images/eagle.jpg'"),
    ):
        path.write_text(header + row)
        with pytest.raises(InputError, match=message):
            Candidates("--data", str(tmp_path))
    assert [prompt_of(cue) for cue in ("Eagle", "bald")] == ["An eagle", "A bald"]


def test_class_folders(tmp_path):
    for name in ("red_things", "blue_things"):
        (tmp_path / name / "deeper").mkdir(parents=True)
        (tmp_path / name / "deeper" / "1.PNG").write_bytes(png())
    (tmp_path / "notes.txt").write_text("not an image")
    source = open_own_classes("--zeroshot-data", str(tmp_path))
    assert source.classes == ["blue things", "red things"] and len(source.templates) == 80
    assert [sample.target for _, sample in source.samples(lambda number: True)] == [0, 1]
    digest = source.digest()
    (tmp_path / "classnames.txt").write_text("azure\ncrimson\n")
    (tmp_path / "zeroshot_classification_templates.txt").write_text("{c}\n")
    source = open_own_classes("--zeroshot-data", str(tmp_path))
    assert (source.classes, source.templates) == (["azure", "crimson"], ["{c}"]) and source.digest() != digest
    (tmp_path / "classnames.txt").write_text("azure\n")
    with pytest.raises(InputError, match="has 1 names and there are 2 class folders"):
        open_own_classes("--zeroshot-data", str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no images .* for the classes empty"):
        open_own_classes("--zeroshot-data", str(tmp_path))
    with pytest.raises(InputError, match="neither test/nshards.txt nor folders"):
        open_own_classes("--zeroshot-data", str(tmp_path / "empty"))


def test_hidden_files_are_left_out(tmp_path):
    for name in ("red/0.png", "red/._0.png", "red/.x/0.png", "red/__MACOSX/0.png", "__MACOSX/red/0.png", ".x/0.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(png() if name == "red/0.png" else b"\0\5\x16\7")
    source = open_own_classes("--zeroshot-data", str(tmp_path))
    source.check_headers()
    assert (source.classes, len(source.images)) == (["red"], 1)


def test_numbers_in_the_order_of_text(tmp_path, caplog):
    for form, named, told in (("{}", True, True), ("{:02}", True, False), ("{}", False, False)):
        folder = tmp_path / f"{form}{named}"
        for number in range(11):
            (folder / form.format(number)).mkdir(parents=True)
            (folder / form.format(number) / "x.png").write_bytes(png())
        if named:
            (folder / "classnames.txt").write_text("\n".join(map(str, range(11))))
        caplog.clear()
        OwnClasses(Namespace(zeroshot_data=str(folder), val_frequency=1)).check_plan([])
        assert [record.message.count("line 3 of classnames.txt") for record in caplog.records] == [1] * told
        assert all("'10', not '2'" in record.message for record in caplog.records)
