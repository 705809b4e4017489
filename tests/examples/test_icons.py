import errno
import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import icons
import make_shards
import pytest
from icons import (
    CONCEPT_TEMPLATES,
    HELD_OUT_EMOJI,
    Icon,
    Icons,
    IconSet,
    describe_icon,
    render_icon,
    split_icons,
    split_name,
)
from PIL import Image

wds = pytest.importorskip("webdataset")
pytest.importorskip("resvg_py")

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" viewBox="0 0 16 16">{}</svg>'


def drawing(number, colour="currentColor"):
    """A picture of its own for every number below 4,096."""
    squares = [f"M{bit % 4 * 4} {bit // 4 * 4}h4v4h-4z" for bit in range(12) if number >> bit & 1]
    return {"body": f'<path fill="{colour}" d="M0 12h16v4H0z{"".join(squares)}"/>'}


def icon_set(prefix, drawings, author="Ann", licence="MIT", category="UI 24px", palette=False, **more):
    licence = {"title": licence, "spdx": licence, "url": f"https://licence.example/{licence}"}
    info = {
        "name": f"{prefix.title()} Icons",
        "author": {"name": author, "url": "https://author.example"},
        "license": licence,
        "category": category,
        "palette": palette,
    }
    return {"prefix": prefix, "info": info, "icons": drawings, "width": 16, "height": 16, **more}


HELD_OUT_AUTHOR = next(f"Author {i}" for i in range(1000) if icons.number_of(0, f"Author {i}") < 1 / 8)


def icon_sets():
    # "Ann" and the vendors are not held out; the test of the parts would see it.
    plain = {f"thing-{i}": drawing(i) for i in range(1, 601)}
    plain["thing-601"] = drawing(5)
    plain["nothing"] = {"body": '<path fill="#fff" d="M0 0h16v16H0z"/>'}
    plain["old"] = {**drawing(2000), "hidden": True}
    plain["moving"] = {"body": '<path d="M0 0h9v9H0z"><animate attributeName="d" to="M0 0" dur="1s"/></path>'}
    plain["wide"] = {"body": '<path d="M0 0h32v16H0z"/>', "width": 32}
    homes = {f"home-{i}-outline": drawing(2048 + i) for i in range(12)}
    # The pictures of a held-out set, in one that is trained on.
    plain |= {f"leaked-{i}": drawing(2048 + i) for i in range(12)}
    emoji = {f"cat-{word}": drawing(2200 + i, "#c00") for i, word in enumerate(("face", "tail"))}
    vendors = []
    for v in range(5):
        drawings = {name: drawing(2300 + 9 * v + i, "#a40") for i, name in enumerate(emoji)}
        vendors.append(icon_set(f"moji{v}", drawings, f"Vendor {v}", category="Emoji"))
    return [
        icon_set("plain", plain, categories={"Things & Stuff": ["thing-1"]}),
        icon_set("closed", {f"shut-{i}": drawing(2500 + i) for i in range(50)}, licence="CC-BY-NC-4.0"),
        icon_set("painted", {f"paint-{i}": drawing(i, "#0a0") for i in range(1, 101)}, palette=True),
        icon_set("apart", homes, HELD_OUT_AUTHOR, "CC-BY-4.0", suffixes={"outline": "Outline"}),
        icon_set("apart-too", {f"paint-{i}": drawing(i, "#00a") for i in range(9)}, HELD_OUT_AUTHOR, palette=True),
        icon_set(HELD_OUT_EMOJI[0], {**emoji, "only-here": drawing(2250, "#c00")}, "Vendor G", category="Emoji"),
        *vendors,
    ]


def write_package(folder, sets):
    (folder / "json").mkdir(parents=True)
    for data in sets:
        (folder / "json" / f"{data['prefix']}.json").write_text(json.dumps(data))
        (folder / "json" / f"._{data['prefix']}.json").write_bytes(b"\0\5\x16\7")  # as macOS leaves them
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return write_package(tmp_path_factory.mktemp("iconify") / "package", icon_sets())


def write(package, out, *extra):
    argv = ["icons", "--iconify", package, "--out", out, "--image-size", 16, "--samples-per-shard", 400, "--jobs", 1]
    return make_shards.main([str(word) for word in (*argv, *extra)])


@pytest.fixture(scope="module")
def written(package, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "icons"
    assert write(package, out) == 0
    return out


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def samples(*shards):
    return list(wds.WebDataset([str(shard) for shard in shards], shardshuffle=False))


def split(folder, name):
    shards = sorted(folder.glob(f"{name}-*.tar"))
    return samples(*shards) if shards else []


def keys_of(folder):
    return {sample["__key__"] for name in ("train", "val", "test") for sample in split(folder, name)}


def test_galleries_hold_no_caption_twice_and_no_more_than_asked():
    def icon(name, caption, rank):
        return Icon(f"a_{name}", "a", name, caption, rank, name.encode(), 0, 1)

    twice = [icon("a", "same", 0.001), icon("b", "same", 0.002), icon("c", "same", 0.02), icon("d", "other", 0.021)]
    trained = [icon("e", "same", 0.5), icon("f", "same", 0.4)]
    found = Icons({"a": IconSet("a", "A", "", "", "MIT", "", "mono", "", 6)}, twice[::-1] + trained)
    for num_test, test in ((5, "cd"), (1, "c")):
        parts = split_icons(found, num_test=num_test)
        assert ["".join(i.name for i in part) for part in (parts.val, parts.test, parts.train)] == ["a", test, "fe"]


def test_files_and_what_is_left_out(written):
    zero_shot = ("classnames.txt", "zeroshot_classification_templates.txt", "test/nshards.txt", "test/0.tar")
    assert set(contents(written)) == {
        "train-000000.tar", "train-000001.tar", "val-000000.tar", "test-000000.tar", "sizes.json", "licenses.tsv",
        *(f"zeroshot-{name}/{file}" for name in ("concepts", "emoji") for file in zero_shot),
    }
    sizes = json.loads((written / "sizes.json").read_text())
    assert sizes == {path.name: len(samples(path)) for path in written.glob("*.tar")}
    keys = keys_of(written)
    assert {key.split("_")[0] for key in keys} == {"plain", "painted", *(f"moji{v}" for v in range(5))}
    assert keys.isdisjoint(f"plain_{name}" for name in ("nothing", "old", "moving"))
    assert not any("leaked" in key for key in keys)
    # Of two icons with the same picture one is left.
    assert len(keys & {"plain_thing-5", "plain_thing-601"}) == 1 and len(keys) == 600 + 1 + 100 + 10
    everything = samples(*written.glob("*.tar"), *written.glob("zeroshot-*/test/0.tar"))
    pictures = [sample["png"] for sample in everything]
    assert len(pictures) == len(set(pictures)) > 700
    for name in ("val", "test"):
        captions = [sample["txt"] for sample in split(written, name)]
        assert len(captions) == len(set(captions)) > 3
    header, *lines = (written / "licenses.tsv").read_text().splitlines()
    rows = {line.split("\t")[0]: dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines}
    assert rows["apart"]["licence"] == "CC-BY-4.0" and rows["apart"]["author"] == HELD_OUT_AUTHOR
    sets = [sample["__key__"].split("_")[0] for sample in everything]
    assert {prefix: int(row["icons"]) for prefix, row in rows.items()} == {key: sets.count(key) for key in set(sets)}


def test_images_are_on_white(written):
    by_key = {sample["__key__"]: sample for sample in split(written, "train")}
    for name, dark in (("plain_wide", (0, 0, 0)), ("painted_paint-9", (0, 170, 0))):
        image = Image.open(io.BytesIO(by_key[name]["png"]))
        assert image.mode == "RGB" and image.size == (16, 16)
        assert {colour for _, colour in image.getcolors()} == {dark, (255, 255, 255)}
    wide = Image.open(io.BytesIO(by_key["plain_wide"]["png"]))
    assert [wide.getpixel((8, y)) for y in (0, 8, 15)] == [(255, 255, 255), (0, 0, 0), (255, 255, 255)]


def test_zero_shot_folders_are_as_clip_benchmark_reads_them(written):
    for folder, classes, templates, count in (
        ("concepts", ["home"], list(CONCEPT_TEMPLATES), 12),
        ("emoji", ["cat face", "cat tail"], ["{c} emoji", "a {c} emoji"], 2),
    ):
        root = written / f"zeroshot-{folder}"
        assert (root / "classnames.txt").read_text().splitlines() == classes
        assert (root / "zeroshot_classification_templates.txt").read_text().splitlines() == templates
        assert int((root / "test" / "nshards.txt").read_text()) == 1
        data = wds.WebDataset(str(root / "test" / "0.tar"), shardshuffle=False)
        data = data.decode(wds.autodecode.ImageHandler("pil", extensions=["png"])).to_tuple("png", "cls")
        labels = [label for image, label in data if image.size == (16, 16)]
        assert len(labels) == count and set(labels) == set(range(len(classes)))
    home = samples(written / "zeroshot-concepts" / "test" / "0.tar")[0]
    assert home["__key__"].startswith("apart_home-") and "outlined home" in home["txt"].decode()


def test_tgz_on_two_processes_gives_the_same_bytes(package, written, tmp_path):
    with tarfile.open(tmp_path / "iconify.tgz", "w:gz") as tar:
        for path in sorted((package / "json").iterdir(), reverse=True):
            tar.add(path, f"package/json/{path.name}")
        tar.add(__file__, "package/json/notes.txt")
    assert write(tmp_path / "iconify.tgz", tmp_path / "out", "--jobs", 2) == 0
    assert contents(tmp_path / "out") == contents(written)


def test_fewer_samples_are_the_first_and_share_the_galleries(package, written, tmp_path):
    assert write(package, tmp_path, "--num-samples", 300, "--val-samples", 2) == 0
    names = ("__key__", "png", "txt")
    for name, count in (("train", 300), ("val", 2), ("test", None)):
        few, all_of_them = split(tmp_path, name), split(written, name)[:count]
        assert [[sample[n] for n in names] for sample in few] == [[sample[n] for n in names] for sample in all_of_them]
    assert contents(tmp_path / "zeroshot-emoji") == contents(written / "zeroshot-emoji")


def test_kinds_divide_the_sets(package, written, tmp_path):
    found = set()
    for kind, zero_shot in (("mono", ["concepts"]), ("colour", []), ("emoji", ["emoji"])):
        assert write(package, tmp_path / kind, "--kinds", kind) == 0
        keys = keys_of(tmp_path / kind)
        assert keys and keys.isdisjoint(found)
        found |= keys
        assert [path.name for path in (tmp_path / kind).glob("zeroshot-*")] == [f"zeroshot-{z}" for z in zero_shot]
    assert found == keys_of(written)


def test_overwrite_takes_away_what_icons_wrote(package, written, tmp_path):
    assert write(package, tmp_path, "--kinds", "emoji") == 0
    (tmp_path / "zeroshot-emoji" / "mine.txt").write_text("mine")
    argv = f"shapes --out {tmp_path} --num-samples 2 --val-samples 0 --image-size 16 --overwrite"
    assert make_shards.main(argv.split()) == 0
    assert set(contents(tmp_path)) == {"train-000000.tar", "sizes.json", "zeroshot-emoji/mine.txt"}


@pytest.mark.parametrize(
    "body",
    [
        '<image href="file:///etc/hostname" width="16" height="16"/>{}', "<text>a</text>{}",
        "<style>path{fill:url(http://a.example)}</style>{}", '<g fill="url(http://a.example/#a)"/>{}',
        "<use xlink:href='/etc/a.svg#a'/>{}", '<use href = "a.svg#a"/>{}', '<g fill="&#117;rl(a)"/>{}', "<!-- a -->{}",
    ],
)  # fmt: skip
def test_what_could_read_another_file_is_no_picture(body):
    assert icons.svg_document({"body": body.replace("{}", '<path d="M0 0h9v9H0z"/>')}, {}, 16) is None


def test_references_within_the_icon_are_drawn():
    body = '<defs><g id="a"><path d="M0 0h9v9H0z"/></g></defs><use href="#a"/><g mask="url(#b)"/>'
    assert render_icon(icons.svg_document({"body": body}, {}, 16)) is not None


@pytest.mark.parametrize("body", ["<path", "", '<path fill="#fefefe" d="M0 0h9v9H0z"/>'])
def test_blank(body):
    assert render_icon(SVG.format(body)) is None


@pytest.mark.parametrize(
    "name, prefixes, suffixes, expected",
    [
        ("star-24-filled", {}, {"24-filled": "24 Filled", "filled": "Filled"}, ("star", ["filled"])),
        ("arrow-left-outline", {}, {}, ("left arrow", ["outlined"])),
        ("traffic-light", {}, {}, ("traffic light", [])),
        ("bell", {}, {"": "Two-Tone", "x": "X"}, ("bell", ["two-tone"])),
        ("home-two-tone", {}, {"two-tone": "Two Tone"}, ("home", ["two-tone"])),
        ("fill", {}, {}, ("fill", [])),
        ("outline-home", {"outline": "Outline"}, {}, ("home", ["outlined"])),
    ],
)
def test_names_in_words(name, prefixes, suffixes, expected):
    assert split_name(name, prefixes, suffixes) == expected


def test_captions():
    tabler = IconSet("tabler", "Tabler Icons", "", "", "MIT", "", "mono", "UI 24px", 1)
    assert [describe_icon(tabler, "eye-filled", {}, {}, "HealthCare", draw / 6) for draw in range(6)] == [
        "filled eye icon",
        "a filled eye icon",
        "filled eye icon, Tabler",
        "a filled eye icon from Tabler",
        "filled eye icon, health care",
        "filled eye icon, health care, Tabler",
    ]
    flags = IconSet("flag", "Flag Icons", "", "", "MIT", "", "colour", "Flags / Maps", 1)
    assert describe_icon(flags, "it", {}, {}, "", 0.3) == "an it flag"


def refused(capsys, argv):
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        make_shards.main([str(word) for word in argv])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.replace("\r", "\n").splitlines() if "rendering" not in line and line.strip()]
    assert captured.out == "" and len(lines) == 1 and lines[0].startswith("make_shards: "), captured
    return lines[0]


@pytest.mark.parametrize(
    "more, named",
    [
        ("", "npm pack @iconify/json"), ("--iconify missing.tgz", "missing.tgz"),
        ("--iconify x.tgz --kinds big", "'big'"), ("--iconify x.tgz --jobs 0", "--jobs"),
        ("--iconify x.tgz --image-format jpg", "--image-format"), ("--iconify x.tgz --shifted", "--shifted"),
    ],
)  # fmt: skip
def test_wrong_arguments_write_nothing(tmp_path, capsys, more, named):
    assert named in refused(capsys, ["icons", *more.split(), "--out", tmp_path / "new"])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda data: data.pop("info"), ["set.json", "info"]),
        (lambda data: data["icons"]["a"].pop("body"), ["set.json", "body"]),
        (lambda data: data["icons"].update({"../b": {"body": ""}}), ["set.json", "../b"]),
        (lambda data: data["icons"]["a"].update(width="wide"), ["set.json", "wide"]),
        (lambda data: data.update(icons=[]), ["set.json"]),
    ],
)
def test_a_damaged_set_is_named(tmp_path, capsys, damage, named):
    data = icon_set("set", {"a": drawing(1)})
    damage(data)
    package = write_package(tmp_path / "package", [data])
    message = refused(capsys, ["icons", "--jobs", "1", "--iconify", package, "--out", tmp_path / "new"])
    assert "--iconify" in message and all(words in message for words in named)
    assert os.listdir(tmp_path) == ["package"]


def test_files_that_are_no_package(tmp_path, capsys, package):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.tgz").write_text("no archive")
    with tarfile.open(tmp_path / "whole.tgz", "w:gz") as tar:
        tar.add(package / "json", "package/json")
    (tmp_path / "cut.tgz").write_bytes((tmp_path / "whole.tgz").read_bytes()[:2000])
    whole = (tmp_path / "whole.tgz").read_bytes()
    for place in (len(whole) // 2, len(whole) - 8):  # of the drawings; of the checksum
        damaged = bytearray(whole)
        damaged[place : place + 4] = bytes(byte ^ 0xFF for byte in whole[place : place + 4])
        (tmp_path / f"flipped-{place}.tgz").write_bytes(damaged)
    with tarfile.open(tmp_path / "whole.tgz") as tar:
        offset = tar.getmembers()[2].offset
    zeroed = bytearray(gzip.decompress(whole))
    zeroed[offset : offset + 512] = bytes(512)
    (tmp_path / "zeroed.tgz").write_bytes(gzip.compress(zeroed))
    for name in ("empty", "text.tgz", "cut.tgz", "zeroed.tgz", *(path.name for path in tmp_path.glob("flipped-*"))):
        argv = ["icons", "--jobs", "1", "--iconify", tmp_path / name, "--out", tmp_path / "new"]
        message = refused(capsys, argv)
        assert "--iconify" in message and name in message
    assert not (tmp_path / "new").exists()


def test_a_file_too_large_is_not_read(tmp_path, capsys, package, monkeypatch):
    monkeypatch.setattr(icons, "_MAX_FILE", 1000)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
    message = refused(capsys, ["icons", "--jobs", "1", "--iconify", package, "--out", tmp_path / "new"])
    assert "apart-too.json" in message
    assert "1000" in message


def test_more_samples_than_there_are(tmp_path, capsys, package):
    for option in ("--num-samples", "--val-samples"):
        argv = ["icons", "--jobs", 1, "--image-size", 16, "--kinds", "emoji", "--iconify", package, option, 5000]
        assert option in refused(capsys, [*argv, "--out", tmp_path / "new"])
    assert os.listdir(tmp_path) == []


def test_nothing_to_train_on_replaces_nothing(tmp_path, capsys):
    package = write_package(tmp_path / "package", [icon_set("set", {f"a-{i}": drawing(i) for i in range(1, 99)})])
    out = tmp_path / "out"
    assert write(package, out) == 0
    before = contents(out)
    again = ["icons", "--jobs", 1, "--out", out, "--overwrite", "--iconify"]
    message = refused(capsys, [*again, package, "--kinds", "emoji"])
    assert "--iconify" in message and "no icon of --kinds emoji" in message
    write_package(tmp_path / "closed", [icon_set("set", {"a": drawing(1)}, licence="secret")])
    message = refused(capsys, [*again, tmp_path / "closed"])
    assert "left out: 1 licence" in message
    assert contents(out) == before


def end_at_once(svg):
    os._exit(9)


def test_a_killed_rendering_process(tmp_path, capsys, package, monkeypatch):
    monkeypatch.setattr(icons, "render_icon", end_at_once)
    assert write(package, tmp_path / "out", "--jobs", 2) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("make_shards: ") and "fewer --jobs" in last
    assert not (tmp_path / "out").exists()


ORPHANS = """
import os, signal, time
from concurrent.futures import ProcessPoolExecutor
from icons import end_with_parent
if __name__ == "__main__":
    pool = ProcessPoolExecutor(2, initializer=end_with_parent)
    waiting = [pool.submit(time.sleep, 600) for _ in range(2)]
    while not all(future.running() for future in waiting):
        time.sleep(0.01)
    print(*pool._processes, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks into /proc")
def test_rendering_processes_end_with_their_parent(tmp_path):
    (tmp_path / "orphans.py").write_text(ORPHANS)
    command = [sys.executable, tmp_path / "orphans.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(icons.__file__).parent)}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120)
    children = ended.stdout.split()
    assert ended.returncode == -15 and len(children) == 2
    deadline = time.monotonic() + 60
    while any(is_running(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class FullDisk(io.BytesIO):
    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self):
        super().close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_temporary_folder_is_named(tmp_path, capsys, package, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", FullDisk)
    assert write(package, tmp_path / "out") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device" in last and repr(tempfile.gettempdir()) in last and "TMPDIR" in last
    assert not (tmp_path / "out").exists()


def test_missing_resvg(tmp_path, capsys, monkeypatch, package):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    message = refused(capsys, ["icons", "--iconify", package, "--out", tmp_path / "new"])
    assert "pip install open-clip-ext[data]" in message
    assert os.listdir(tmp_path) == []
