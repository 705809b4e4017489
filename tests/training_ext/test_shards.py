import gzip
import io
import json
import logging
import lzma
import os
import pickle
import shutil
import tarfile
from functools import partial

import pytest
import torch
from open_clip_train.data import tarfile_to_samples_nothrow

from open_clip_ext.errors import InputError
from training_ext.components.exact_resume.order import NUMBER
from training_ext.components.same_key import KEY
from training_ext.core.tags import ROW, SEPARATOR, Tags, TagsTokenizer
from training_ext.data import shard_scan
from training_ext.data.shard_rows import rows_of_shards
from training_ext.data.shards import Shards, check_missing, find_shards
from training_ext.data.tars import read_samples, scan


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    home = tmp_path / "cache-home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


def member(name, data=b"x", kind=tarfile.REGTYPE):
    info = tarfile.TarInfo(name)
    info.type = kind
    if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        info.linkname = "000.txt"
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    return info, data


def tar_bytes(members, form=tarfile.PAX_FORMAT):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def pairs(count, size=10):
    """Members of `count` plain samples."""
    suffixes = ("jpg", "txt")
    return [member(f"{i:03d}.{suffix}", suffix.encode() * size) for i in range(count) for suffix in suffixes]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else tar_bytes(content))
    return str(path)


def openclips(url):
    return list(tarfile_to_samples_nothrow([{"url": url}]))


def one_line_error(call, *parts):
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message
    return message


NASTY = {
    "plain": (pairs(3), 3),
    "empty": ([], 0),
    "no extension": ([member("000"), member("a/b"), *pairs(2)], 2),
    "directories": ([member("d.x", kind=tarfile.DIRTYPE), member("d.x/1.jpg"), member("d.x/1.txt")], 1),
    "links": ([*pairs(1), member("z.txt", kind=tarfile.SYMTYPE), member("y.txt", kind=tarfile.LNKTYPE)], 1),
    "meta names": (
        [member(name) for name in ("__m__", "__m__/a.jpg", "__m__.jpg__", "d/__m__")]
        + [member(name) for name in ("__m.jpg", "__m__.jpg", "d/__m__/a.jpg")],
        3,
    ),
    "repeated suffix": ([member("a.jpg"), member("a.txt"), member("a.jpg"), member("a.txt")], 2),
    "repeated suffix in another case": ([member("a.jpg"), member("a.JPG"), member("a.Txt")], 2),
    "dotted names": ([member("a.b.jpg"), member("a.c.jpg"), member("a.d/b.jpg"), member("a.d/b.txt")], 2),
    "hidden and bare dots": ([member(".jpg"), member("d/.jpg"), member("a."), member("b..jpg")], 3),
    "key that comes back": ([member("a.jpg"), member("b.jpg"), member("a.txt"), member("b.txt")], 4),
    "no txt": ([member("a.jpg"), member("b.jpg"), member("b.txt"), member("c.json")], 3),
    "key as a suffix": ([member("a.jpg"), member("a.__key__"), member("a.txt"), member("b.jpg")], 4),
    "bad flag": ([member("a.jpg"), member("a.__bad__"), member("b.jpg"), member("b.__bad__", b"")], 1),
    "other alphabets": ([member("café/é.jpg"), member("café/é.txt"), member("日本.jpg")], 2),
    "long names": ([member("d" * 150 + f"/{i}" + "k" * 150 + ".jpg") for i in range(3)], 3),
    "payload of blocks": ([member("a.jpg", b"\0" * 5120), member("b.jpg", b"y" * 4097)], 2),
}


@pytest.mark.parametrize(
    "pack, form",
    [(bytes, tarfile.PAX_FORMAT), (gzip.compress, tarfile.GNU_FORMAT), (lzma.compress, tarfile.PAX_FORMAT)],
    ids=["tar", "gz", "xz"],
)
@pytest.mark.parametrize("name", NASTY)
def test_samples_and_their_count_are_openclips(tmp_path, name, pack, form):
    members, expected = NASTY[name]
    url = write(tmp_path / "x.tar", pack(tar_bytes(members, form)))
    other = write(tmp_path / "other.tar", pairs(1))
    theirs = openclips(url)
    assert len(theirs) == expected and list(read_samples(url)) == theirs
    shards = find_shards(f"{url}::{other}")
    assert shards.sizes == (expected, 1)
    *_, last = read(rows_of_shards(shards, reraise), url, other)
    assert split_row(last["txt"].decode())[0] == expected


def test_count_without_end_mark_and_after_it(tmp_path):
    whole = tar_bytes(pairs(2))
    bare = whole[: 4 * 1024]  # four members of a header and a block of payload
    for content in (bare + b"\0" * 512, whole + b"\0" * 100_000):
        url = write(tmp_path / "x.tar", content)
        assert len(openclips(url)) == 2
        assert find_shards(url).sizes == (2,)
    # Of several gzip members OpenCLIP reads the first.
    for content in (bare, gzip.compress(bare), gzip.compress(bare) + gzip.compress(whole[len(bare) :])):
        url = write(tmp_path / "x.tar", content)
        assert len(openclips(url)) == scan(url).samples == 2  # and nothing is said of what followed
        one_line_error(partial(find_shards, url), url, "it has no end mark, as if it were cut")
    url = write(tmp_path / "x.tar", whole + tar_bytes(pairs(3)))
    assert len(openclips(url)) == 2  # and nothing is said of the other three
    one_line_error(lambda: find_shards(url), url, "data after the end of the archive")


def test_scan_seeks_over_payloads(tmp_path, monkeypatch):
    url = write(tmp_path / "x.tar", pairs(2, size=1_000_000))
    read = 0

    class Counting(io.FileIO):
        def readinto(self, buffer):
            nonlocal read
            count = super().readinto(buffer)
            read += count
            return count

    monkeypatch.setattr(tarfile, "bltn_open", lambda path, mode: io.BufferedReader(Counting(path)))
    assert scan(url).samples == 2
    assert 0 < read < 200_000


def test_urls_expand_as_openclips_and_count_once(tmp_path):
    for source, size in (("a", 1), ("b", 4)):
        for shard in range(2):
            write(tmp_path / source / f"{shard}.tar", pairs(size + shard))
    (tmp_path / "b/sizes.json").write_text(json.dumps({"0.tar": 4, "1.tar": 5}))  # of its own folder alone
    shards = find_shards(f"file:{tmp_path}/a/1.tar::{tmp_path}/{{b/0,b/1,a/0,b/0}}.tar")
    assert shards.urls == (f"file:{tmp_path}/a/1.tar", *(f"{tmp_path}/{name}.tar" for name in ("b/0", "b/1", "a/0")))
    assert shards.sizes == (2, 4, 5, 1) and [*shards.offsets.values()] == [0, 2, 6, 11] and shards.num_rows == 12
    assert shards.size_of[shards.urls[1]] == 4


def test_sizes_come_from_flag_then_sizes_json_then_scan(tmp_path):
    urls = [write(tmp_path / f"{i}.tar", pairs(size)) for i, size in enumerate((30, 32, 22, 1))]
    (tmp_path / "sizes.json").write_text('{"0.tar": 20, "1.tar": 21, "2.tar": 22}')
    given = tmp_path / "given.json"
    given.write_text(json.dumps({urls[0]: 30, "0.tar": 31, "1.tar": 32}))
    shards = find_shards(f"{tmp_path}/{{0..3}}.tar", str(given))
    assert shards.sizes == (30, 32, 22, 1)


def test_file_name_that_fits_two_shards(tmp_path):
    given = tmp_path / "given.json"
    given.write_text('{"0.tar": 1}')
    train_data = "s3://a/0.tar::s3://b/0.tar"
    one_line_error(lambda: find_shards(train_data, str(given)), "--shard-sizes", given, "'0.tar'", "full url")
    given.write_text('{"0.tar": 1, "s3://a/0.tar": 5}')
    assert find_shards(train_data, str(given)).sizes == (5, 1)


@pytest.mark.parametrize(
    "url, name",
    [
        ("https://host/x/00001.tar", "00001.tar"),
        ("https://host/x/00001.tar?sig=a/b", "00001.tar"),
        ("s3://bucket/x/00001.tar.gz", "00001.tar.gz"),
        ("pipe:aws s3 cp s3://b/x/00001.tar -", "00001.tar"),
        ("pipe:cat /a.tar/list 'x/00001.tgz' | tee", "00001.tgz"),
        ("gs://b/00001", "00001"),
    ],
)
def test_remote_shards_need_sizes(tmp_path, url, name):
    one_line_error(lambda: find_shards(url), url, "--shard-sizes", f'"{name}": 10000')
    given = tmp_path / "given.json"
    given.write_text(json.dumps({name: 5}))
    assert find_shards(url, str(given)).sizes == (5,)
    given.write_text(json.dumps({url: 6, name: 5}))
    assert find_shards(url, str(given)).sizes == (6,)
    given.write_text("{}")
    one_line_error(lambda: find_shards(url, str(given)), url, "--shard-sizes")


BAD_VALUES = [b'{"0.tar": %s}' % value for value in (b'"5"', b"1.5", b"-1", b"true", b"null")]


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\x80", *BAD_VALUES])
def test_bad_sizes_files(tmp_path, content):
    url = write(tmp_path / "d/0.tar", pairs(1))
    given = tmp_path / "given.json"
    given.write_bytes(content)
    one_line_error(lambda: find_shards(url, str(given)), "--shard-sizes", given)
    beside = tmp_path / "d/sizes.json"
    shutil.move(given, beside)
    one_line_error(lambda: find_shards(url), "--train-data", beside)
    one_line_error(lambda: find_shards(url, str(given)), "--shard-sizes", given)  # is gone


@pytest.mark.parametrize("train_data", ["", None, "a.tar::", "{0..1.tar::${NOT_SET}"])
def test_no_shards(train_data):
    one_line_error(lambda: find_shards(train_data), f"--train-data: {train_data!r}")


def test_shards_without_a_sample_or_that_are_none(tmp_path):
    empty = write(tmp_path / "0.tar", [])
    (tmp_path / "folder.tar").mkdir()
    for url, part in ((empty, "no samples"), (f"{tmp_path}/1.tar", ""), (f"{tmp_path}/folder.tar", "not a regular")):
        one_line_error(lambda url=url: find_shards(url), "--train-data", url, part)


def test_unreadable_shard(tmp_path, monkeypatch):
    url = write(tmp_path / "0.tar", pairs(1))

    def denied(*_):
        raise PermissionError(13, "Permission denied", url)

    monkeypatch.setattr(tarfile, "bltn_open", denied)
    one_line_error(lambda: find_shards(url), "--train-data", url, "Permission denied")


PLAIN = tar_bytes(pairs(4, size=300))  # eight members: a header and two blocks of payload each
ZIPPED = gzip.compress(tar_bytes([member(f"{i}.jpg", os.urandom(5000)) for i in range(4)]))
DAMAGED = {
    "zeroed header": PLAIN[: 3 * 1536] + bytes(512) + PLAIN[3 * 1536 + 512 :],
    "zero bytes": b"",
    "not a tar": b"hello " * 1000,
    "cut in a payload": PLAIN[: 3 * 1536 + 700],
    "cut in a header": PLAIN[: 3 * 1536 + 100],
    "broken header": PLAIN[: 3 * 1536] + b"#" * 512 + PLAIN[3 * 1536 + 512 :],
    "cut gzip": ZIPPED[:12000],
    "broken gzip": ZIPPED[:10] + b"\xff" * 100 + ZIPPED[110:],  # the first block's type is invalid
}


def test_the_same_shards_at_another_path():
    here = Shards(("a/0.tar", "a/1.tar"), (3, 5), {"a/1.tar": 7})
    there = here.at(["b/c/0.tar", "b/c/1.tar"])
    assert there.offsets == {"b/c/0.tar": 0, "b/c/1.tar": 3} and there.keys == {"b/c/1.tar": 7}
    assert there.digest == here.digest
    with pytest.raises(ValueError):
        here.at(["b/0.tar"])


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_shard(tmp_path, cache_home, name):
    good = write(tmp_path / "0.tar", pairs(2))
    url = write(tmp_path / "1.tar", DAMAGED[name])
    train_data = f"{tmp_path}/{{0..1}}.tar"
    one_line_error(lambda: find_shards(train_data), "--train-data", url)
    assert list(json.loads((cache_home / "open_clip_ext/shard_sizes.json").read_text())) == [good]


def forbid_scan(monkeypatch):
    def scan(path):
        raise RuntimeError(f"scanned {path}")

    monkeypatch.setattr(shard_scan, "scan", scan)


def test_cache_hit_and_invalidation(tmp_path, monkeypatch):
    path = tmp_path / "0.tar"
    url = write(path, pairs(2))
    first = os.stat(path)
    assert find_shards(url).sizes == (2,)
    with monkeypatch.context() as patch:
        forbid_scan(patch)
        assert find_shards(url).sizes == (2,)
        patch.chdir(tmp_path)
        assert find_shards("0.tar").sizes == (2,)
        os.utime(path, ns=(first.st_atime_ns, first.st_mtime_ns + 1))
        with pytest.raises(RuntimeError, match="scanned"):
            find_shards(url)
    write(path, pairs(30))
    os.utime(path, ns=(first.st_atime_ns, first.st_mtime_ns))
    assert os.stat(path).st_size != first.st_size
    assert find_shards(url).sizes == (30,)


BAD_ENTRIES = [b'{"%s": 3}', b'{"%s": [1, 2]}', b'{"%s": [1, 2, "x"]}']


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", *BAD_ENTRIES])
def test_corrupt_cache_is_ignored(tmp_path, monkeypatch, cache_home, content):
    url = write(tmp_path / "0.tar", pairs(2))
    write(cache_home / "open_clip_ext/shard_sizes.json", content.replace(b"%s", url.encode()))
    assert find_shards(url).sizes == (2,)
    forbid_scan(monkeypatch)
    assert find_shards(url).sizes == (2,)


def test_cache_write_that_fails_leaves_the_old_one(tmp_path, monkeypatch, cache_home):
    cache_home.write_text("a file where the directory would go")
    assert find_shards(write(tmp_path / "0.tar", pairs(2))).sizes == (2,)
    cache_home.unlink()
    find_shards(write(tmp_path / "0.tar", pairs(2)))
    file = cache_home / "open_clip_ext/shard_sizes.json"
    before = file.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    assert find_shards(write(tmp_path / "1.tar", pairs(3))).sizes == (3,)
    assert file.read_text() == before
    assert os.listdir(file.parent) == [file.name]


def test_cache_keeps_what_an_interrupted_scan_had(tmp_path, monkeypatch):
    for i in range(3):
        write(tmp_path / f"{i}.tar", pairs(1))

    def interrupted(path):
        if path.endswith("2.tar"):
            raise KeyboardInterrupt
        return scan(path)

    monkeypatch.setattr(shard_scan, "scan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find_shards(f"{tmp_path}/{{0..2}}.tar")
    forbid_scan(monkeypatch)
    assert find_shards(f"{tmp_path}/{{0..1}}.tar").sizes == (1, 1)


def test_several_processes_scan_alike(tmp_path, monkeypatch):
    for i in range(5):
        write(tmp_path / f"{i}.tar", pairs(i + 1) if i != 2 else DAMAGED[next(iter(DAMAGED))])
    paths = {f"{i}.tar": str(tmp_path / f"{i}.tar") for i in range(5)}
    alone = shard_scan.scan_all(paths)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    monkeypatch.setattr(shard_scan, "_PARALLEL_ABOVE", 0)
    monkeypatch.setattr(shard_scan, "usable_cores", lambda: 2)
    scanned_by = tmp_path / "processes"
    scanned_by.mkdir()

    def look(path):
        (scanned_by / str(os.getpid())).touch()
        return scan(path)

    monkeypatch.setattr(shard_scan, "scan", look)
    before = torch.random.get_rng_state()
    assert shard_scan.scan_all(paths) == alone
    assert torch.equal(torch.random.get_rng_state(), before)
    processes = {int(name) for name in os.listdir(scanned_by)}
    assert len(processes) == 2 and os.getpid() not in processes
    assert [contents.damage is None for contents in alone.values()] == [True, True, False, True, True]


def test_digest():
    def digest(*listing):
        return Shards(tuple(url for url, _ in listing), tuple(size for _, size in listing)).digest

    base = digest(("/data/a/0.tar", 3), ("/data/b/0.tar", 5))
    assert len(base) == 64 and int(base, 16)
    assert base == digest(("/elsewhere/x/a/0.tar", 3), ("/elsewhere/x/b/0.tar", 5))
    assert base == digest(("a/0.tar", 3), ("b/0.tar", 5))
    others = [
        digest(("/data/b/0.tar", 5), ("/data/a/0.tar", 3)),
        digest(("/data/a/0.tar", 5), ("/data/b/0.tar", 3)),
        digest(("/data/a/0.tar", 3), ("/data/c/0.tar", 5)),
        digest(("/data/a/0.tar", 3), ("/data/b/0.tar", 5), ("/data/c/0.tar", 0)),
    ]
    assert len({base, *others}) == 5
    whole_names = digest(("/data/ab/0.tar", 1), ("/data/ac/0.tar", 1))
    assert whole_names != digest(("/data/b/0.tar", 1), ("/data/c/0.tar", 1))
    assert digest(("/data/a/0.tar", 3)) == digest(("/other/0.tar", 3)) != digest(("/other/1.tar", 3))


def split_row(text):
    (row,), caption = Tags((ROW,)).split(text)
    return row, caption


def reraise(url, error, position, size):
    raise error


def read(stage, *urls):
    return list(stage(iter([{"url": url} for url in urls])))


def test_rows_of_every_sample(tmp_path):
    first = write(tmp_path / "a/0.tar", pairs(3))
    second = write(tmp_path / "b/0.tar", [member("a.jpg"), member("b.jpg"), member("b.txt", b"two\x1fparts")])
    shards = find_shards(f"{first}::{second}")
    samples = read(rows_of_shards(shards, reraise), second, first, first)
    assert "txt" not in samples[0]
    texts = [split_row(sample["txt"].decode()) for sample in samples[1:]]
    assert texts[0] == (4, "two\x1fparts")
    assert texts[1:] == [(row, "txt" * 10) for row in (0, 1, 2, 0, 1, 2)]
    original = list(tarfile_to_samples_nothrow([{"url": second}, {"url": first}]))
    assert [sample["jpg"] for sample in samples[:5]] == [sample["jpg"] for sample in original]
    assert [sample["__key__"] for sample in samples[:5]] == [sample["__key__"] for sample in original]


@pytest.mark.parametrize("name", DAMAGED)
def test_samples_before_a_damage_are_openclips(tmp_path, name, caplog):
    url = write(tmp_path / "x.tar", DAMAGED[name])
    caplog.set_level(logging.DEBUG, "open_clip_train.data")  # as OpenCLIP 4 logs most
    expected = list(tarfile_to_samples_nothrow([{"url": url}]))
    # Of a zeroed or broken header OpenCLIP's reader does not say a word.
    assert ("Handling webdataset error" in caplog.text) == ("header" not in name)
    errors = []
    stage = rows_of_shards(None, lambda *told: errors.append(told[1]))
    found = read(stage, url)
    assert found == expected[: len(found)] and len(errors) == 1
    assert not any("txt" in sample for sample in expected[len(found) :])  # at most the one that has the damage


def test_a_shard_that_breaks_off_is_told_and_left(tmp_path):
    cut = write(tmp_path / "0.tar", PLAIN[: 3 * 1536 + 700])
    good = write(tmp_path / "1.tar", pairs(2))
    failed, ended = [], []
    both = Shards((cut, good), (4, 2))
    stage = rows_of_shards(both, lambda *told: failed.append(told), lambda *told: ended.append(told))
    samples = read(stage, cut, good)
    assert [split_row(sample["txt"].decode())[0] for sample in samples] == [0, 4, 5]
    ((url, error, position, size),) = failed
    assert (url, position, size) == (cut, 1, 4) and "unexpected end of data" in str(error)
    assert ended == [(good, 2)]


def test_shards_that_are_not_as_they_were_counted(tmp_path):
    url, other = (write(tmp_path / f"{i}.tar", pairs(3)) for i in range(2))
    assert len(read(rows_of_shards(Shards((url,), (3,)), reraise), url)) == 3
    one_line_error(lambda: read(rows_of_shards(Shards((url,), (4,)), reraise), url), url, "only 3 samples", "size of 4")
    one_line_error(lambda: read(rows_of_shards(Shards((url,), (3,)), reraise), other), other, "--train-data")
    two = [write(tmp_path / "a.tar", [member("a.jpg")]), write(tmp_path / "b.tar", [member("a.txt")])]
    samples = read(rows_of_shards(Shards(tuple(two), (1, 1)), reraise), *two)
    assert len(samples) == 2 and samples[1]["txt"] == b"row=1\x1fx"  # OpenCLIP's reader joins equal keys of two shards


def test_a_shard_that_was_replaced_since_it_was_counted(tmp_path):
    url = write(tmp_path / "0.tar", pairs(3))
    stage = rows_of_shards(find_shards(url), reraise)
    assert len(read(stage, url)) == 3
    write(tmp_path / "0.tar", [*pairs(2), member("new.jpg"), member("new.txt")])
    one_line_error(lambda: read(stage, url), url, "other samples")


def sizes_file(folder, sizes):
    folder.joinpath("sizes.json").write_text(json.dumps({f"{i}.tar": size for i, size in enumerate(sizes)}))


def test_recorded_sizes_are_checked(tmp_path, monkeypatch):
    """The first shard and the last, others as far as the budget goes, and all that were scanned before."""
    for i in range(4):
        write(tmp_path / f"{i}.tar", pairs(5))
    train_data = f"{tmp_path}/{{0..3}}.tar"
    monkeypatch.setattr("training_ext.data.shards._CHECKED_SAMPLES", 4)
    for wrong in (0, 3):
        sizes_file(tmp_path, [4 if i == wrong else 5 for i in range(4)])
        one_line_error(lambda: find_shards(train_data), tmp_path / f"{wrong}.tar", "holds 5", "sizes.json' says 4")
    sizes_file(tmp_path, [5, 50, 5, 5])
    assert find_shards(train_data).sizes == (5, 50, 5, 5)
    monkeypatch.setattr("training_ext.data.shards._CHECKED_SAMPLES", 100)
    one_line_error(lambda: find_shards(train_data), tmp_path / "1.tar", "holds 5", "sizes.json' says 50")
    monkeypatch.setattr("training_ext.data.shards._CHECKED_SAMPLES", 10)
    forbid_scan(monkeypatch)
    one_line_error(lambda: find_shards(train_data), tmp_path / "1.tar", "holds 5", "sizes.json' says 50")


def test_missing_and_damaged_shards_up_to_a_share(tmp_path):
    whole = write(tmp_path / "0.tar", pairs(5))
    write(tmp_path / "1.tar", DAMAGED["broken header"])
    train_data = f"{tmp_path}/{{0..3}}.tar"
    for share in (None, 0, 0.5, 0.74):
        missing = one_line_error(lambda share=share: find_shards(train_data, max_bad=share))
        assert ("2 of 4" if share in (None, 0) else "3 of 4") in missing
    shards = find_shards(train_data, max_bad=0.75)
    assert shards.sizes == (5, 2, 0, 0) and list(shards.keys) == [whole]
    sizes_file(tmp_path, [5, 4, 7, 8])
    assert find_shards(train_data, max_bad=0.75).sizes == (5, 4, 7, 8)
    os.remove(whole)
    one_line_error(lambda: find_shards(f"{tmp_path}/{{2..3}}.tar", max_bad=1), "2 of 2", "No such file")


def test_the_share_that_is_named_is_enough(tmp_path):
    """Rounding apart: 0.29 x 100 is less than 29."""
    for number in range(71):
        write(tmp_path / f"{number}.tar", b"")
    urls = [f"{tmp_path}/{number}.tar" for number in range(100)]
    one_line_error(lambda: check_missing(urls), "29 of 100", "--max-bad-samples 0.29 to train")
    assert len(check_missing(urls, max_bad=0.29)) == 29
    one_line_error(lambda: check_missing(urls, max_bad=0.289), "29 of 100")


def test_numbers_come_back():
    assert split_row(f"row=12{SEPARATOR}a{SEPARATOR}b") == (12, f"a{SEPARATOR}b")
    assert split_row(f"row=0{SEPARATOR}") == (0, "")
    for text in ("a caption", "row=12", f"row=x{SEPARATOR}a", f"number=1{SEPARATOR}a"):
        with pytest.raises(ValueError):
            split_row(text)
    tags = Tags((KEY, NUMBER, ROW))
    text = Tags.write(Tags.write(b"a", key=-(2**63), row=2**40), number=7).decode()
    assert tags.split(text) == ([-(2**63), 7, 2**40], "a")
    batch = pickle.loads(pickle.dumps(TagsTokenizer(letters, tags)))(text)
    tokens, numbers = tags.take(torch.cat([batch, batch]))
    assert tokens.tolist() == [[97], [97]] and tokens.is_contiguous()
    assert {name: column.tolist() for name, column in numbers.items()} == {
        KEY: 2 * [-(2**63)], ROW: 2 * [2**40], NUMBER: [7, 7]
    }


def letters(text):
    """A tokenizer that can be pickled."""
    return torch.tensor([[ord(letter) for letter in text]], dtype=torch.int32)
