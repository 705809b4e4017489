"""The rows that reach the loss are those of the samples that the model saw."""

import hashlib
import io
import shlex
import tarfile
from pathlib import Path
from types import SimpleNamespace

import open_clip
import open_clip_train.data
import pandas as pd
import pytest
import torch
from conftest import LOSSES
from json_shards import tar
from PIL import Image

from open_clip_ext.data import Scenes
from open_clip_ext.errors import InputError
from open_clip_ext.losses import GlobalContrastiveLoss
from training_ext.components.exact_resume.order import NUMBER, ResumableLoader, Start
from training_ext.components.recovery import recovered
from training_ext.core.rows import RowLoader
from training_ext.core.state import KEY
from training_ext.core.tags import ROW, Tags
from training_ext.data.rows import find_rows, kind_of
from training_ext.data.seeding import AT_BATCH, AT_EPOCH
from training_ext.flags.params import parse_args


@pytest.fixture
def seen(monkeypatch):
    """Per call of the loss: its `index`, and the tokens of the batches of that optimiser step, in one tensor."""
    calls, batches = [], []
    model, loss = open_clip.CLIP.forward, GlobalContrastiveLoss.forward

    def forward(self, image=None, text=None):
        # With gradient accumulation the first pass over a step's batches is the one without gradients.
        if not torch.is_grad_enabled() or seen.accum_freq == 1:
            batches.append(text.clone())
        return model(self, image, text)

    def call(self, *args, index=None, **kwargs):
        calls.append((index.tolist(), torch.cat(batches[-seen.accum_freq :])))
        return loss(self, *args, index=index, **kwargs)

    monkeypatch.setattr(open_clip.CLIP, "forward", forward)
    monkeypatch.setattr(GlobalContrastiveLoss, "forward", call)

    class seen:
        accum_freq = 1

        @staticmethod
        def rows(captions: list[str | None]) -> list[int]:
            """Every row that the loss got, once each was compared with its caption."""
            tokens = open_clip.get_tokenizer("ViT-test")([caption or "" for caption in captions])
            assert tokens.unique(dim=0).shape[0] == len(captions)
            rows = []
            for index, texts in calls:
                assert len(index) == len(texts) == 8 * seen.accum_freq
                assert torch.equal(texts, tokens[index])
                rows += index
            return rows

    return seen


def read_captions(*shards: str) -> list[str | None]:
    """The caption of every sample in order, None where there is none."""
    samples = {}
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, kind = member.name.partition(".")
                samples.setdefault((shard, key), None)
                if kind == "txt":
                    samples[shard, key] = tar.extractfile(member).read().decode()
    return list(samples.values())


def shard_list(datasets: dict[str, str]) -> list[str]:
    return open_clip_train.data.expand_urls(shlex.split(datasets["shards"])[1])[0]


COMMON = f"{LOSSES['fastclip-v3']} --epochs 2"
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", ["csv", "shapes", "shards"])
def test_every_row_comes_once_an_epoch(run, datasets, seen, data, workers):
    run("x", f"{datasets[data]} {COMMON} --workers {workers} {'--shapes-seed 3' if data == 'shapes' else ''}")
    captions = {
        "csv": lambda: pd.read_csv(shlex.split(datasets["csv"])[1], sep="\t").title.tolist(),
        "shapes": lambda: [caption for _, caption in Scenes(48, seed=3)],
        "shards": lambda: read_captions(*shard_list(datasets)),
    }
    rows = seen.rows(captions[data]())
    assert sorted(rows[:48]) == sorted(rows[48:]) == list(range(48))
    assert rows[:48] != rows[48:] and rows[:48] != sorted(rows[:48])


@pytest.mark.parametrize("workers, accum_freq", [(0, 3), (2, 1)])
def test_resampled(run, datasets, seen, workers, accum_freq):
    seen.accum_freq = accum_freq
    run("x", f"{datasets['resampled']} {COMMON} --workers {workers} --accum-freq {accum_freq}")
    rows = seen.rows(read_captions(*shard_list(datasets)))
    assert len(rows) == 96 * accum_freq and len(set(rows)) > 16


@pytest.fixture
def sources(tmp_path, datasets) -> list[str]:
    """Two folders whose shards have the same names and other samples; some samples lack their image or caption."""
    scenes = Scenes(60, seed=9, image_size=48)
    row, urls = 0, []
    for source, count in (("a", 13), ("b", 17)):
        (tmp_path / source).mkdir()
        for shard in range(2):
            urls.append(str(tmp_path / source / f"{shard}.tar"))
            members = []
            for position in range(count):
                image, caption = scenes[row]
                png = io.BytesIO()
                image.save(png, "png")
                for kind, content in (("png", png.getvalue()), ("txt", caption.encode())):
                    if (position, kind) not in ((2, "png"), (5, "txt")):
                        members.append((f"{position:03}.{kind}", content))
                row += 1
            tar(urls[-1], members)
    return urls


@pytest.mark.parametrize("workers, extra", [(0, ""), (2, ""), (0, "--dataset-resampled")])
def test_sources_of_equal_file_names(run, seen, sources, workers, extra):
    a, b = (url.removesuffix("0.tar") for url in sources[::2])
    shards = f"--train-data {a}{{0..1}}.tar::{b}{{0..1}}.tar --dataset-type webdataset"
    run("x", f"{shards} {COMMON} --workers {workers} {extra}")
    captions = read_captions(*sources)
    assert len(captions) == 60
    # Captions that are missing take the place of one that no sample has.
    rows = seen.rows([caption or f"nothing {row}" for row, caption in enumerate(captions)])
    incomplete = {row for start in (0, 13, 26, 43) for row in (start + 2, start + 5)}
    assert len(rows) >= 120 and not incomplete & set(rows)
    if not extra:
        assert len(set(rows)) > 40 and {row // 30 for row in rows} == {0, 1}


PETS = ["cat/1.png", "cat/2.png", "dog/1.png"]


def rows_of(folder: Path, images: list[str], captions: list[str] = ("a cat", "a cat", "a dog"), flags: str = ""):
    """The rows of a csv of these images, which are written below the folder."""
    for image in filter(None, images):
        (folder / image).parent.mkdir(parents=True, exist_ok=True)
        Scenes(1, image_size=48)[0][0].save(folder / image)
    lines = [f"{image and folder / image}\t{caption}" for image, caption in zip(images, captions, strict=True)]
    (folder / "train.csv").write_text("\n".join(["filepath\ttitle", *lines]))
    return find_rows(parse_args(f"--loss neuclip --train-data {folder}/train.csv {flags}".split()))


def test_the_digest_of_a_csv_is_that_of_its_captions_and_images_in_order(tmp_path):
    rows = rows_of(tmp_path / "a", PETS)
    assert (rows.kind, rows.num_rows, rows.shards) == ("csv", 3, None)
    assert rows.captions == hashlib.sha256(b"a cat\x1fa cat\x1fa dog").hexdigest()  # in earlier checkpoints
    moved = rows_of(tmp_path / "elsewhere" / "cat", PETS)
    assert moved == rows
    empty, flags = ["cat/1.png", "", "dog/1.png"], "--max-bad-samples 0.5"
    assert rows_of(tmp_path / "a", empty, flags=flags) == rows_of(tmp_path / "b" / "c", empty, flags=flags)
    others = [
        rows_of(tmp_path / "a", PETS, ["a cat", "a dog", "a cat"]),
        rows_of(tmp_path / "a", ["cat/2.png", "cat/1.png", "dog/1.png"]),
        rows_of(tmp_path / "a", ["dog/1.png", "dog/2.png", "cat/1.png"]),
        rows_of(tmp_path / "a", PETS, flags="--several-captions"),
    ]
    assert len({rows.digest, *(other.digest for other in others)}) == 5
    assert [other.captions == rows.captions for other in others] == [False, True, True, False]


def test_statistics_are_not_loaded_for_exchanged_images(tmp_path):
    args = parse_args(f"--loss fastclip-v3 --train-data {tmp_path}/train.csv".split())
    saved = {"identity": recovered.identity(args, rows_of(tmp_path, PETS))}
    own = recovered.identity(args, rows_of(tmp_path, ["cat/2.png", "cat/1.png", "dog/1.png"]))
    with pytest.raises(InputError, match="was recovered with another set of image paths: digest"):
        recovered.check(saved, own, "x.state")
    del saved["identity"]["set of image paths"]  # as an earlier version
    recovered.check(saved, own, "x.state")


def test_a_training_does_not_resume_on_exchanged_images(run, refused, tmp_path):
    """Of class names as captions, so that the captions alone are the same."""
    flags = f"{LOSSES['isogclr']} --batch-size 3 --epochs 2 --workers 0 --train-data {tmp_path}/train.csv"
    captions = rows_of(tmp_path, PETS).captions
    path = run("a", flags).path / "checkpoints/epoch_1.pt"
    rows_of(tmp_path, ["cat/2.png", "cat/1.png", "dog/1.png"])
    assert "other captions, or images below the folder of all" in refused(f"{flags} --resume {path} --name b")
    saved = torch.load(path, weights_only=True)
    saved[KEY]["components"]["same_data"]["digest"] = captions  # as an earlier version
    torch.save(saved, path)
    assert run("b", f"{flags} --resume {path}").log.count("does not say which images its captions had") == 1


def test_cells_of_digits_keep_their_zeros(run, tmp_path, monkeypatch):
    """Captions and names of images, where they are read, trained on, validated with and shown."""
    texts, paths = set(), set()
    tokenizer, opened = open_clip.SimpleTokenizer.__call__, Image.open
    for number in range(8):
        Scenes(1, image_size=48)[0][0].save(tmp_path / f"{number:03}", "png")
    for name in ("pairs", "others"):
        (tmp_path / f"{name}.csv").write_text("\n".join(["filepath\ttitle", *(f"{n:03}\t{n:06}" for n in range(8))]))
    monkeypatch.chdir(tmp_path)

    def seen(self, text, *more):
        texts.update([text] if isinstance(text, str) else text)
        return tokenizer(self, text, *more)

    def open_image(path, *more, **kwargs):
        paths.add(path)
        return opened(path, *more, **kwargs)

    monkeypatch.setattr(open_clip.SimpleTokenizer, "__call__", seen)
    monkeypatch.setattr(Image, "open", open_image)
    pairs = "--train-data pairs.csv --val-data others.csv --dataset-type csv --workers 0 --epochs 2"
    run("a", f"{LOSSES['isogclr']} {pairs}")
    assert texts == {f"{number:06}" for number in range(8)} and paths == {f"{number:03}" for number in range(8)}


def batch(*rows):
    tokens = torch.arange(4, dtype=torch.int32)
    return torch.zeros(len(rows), 3), torch.stack([Tags((ROW,)).append(tokens, row) for row in rows])


class Batches(list):
    num_batches = property(len)


def test_row_loader_keeps_the_rows_of_the_latest_batches():
    batches, steps = Batches([batch(5, 1), batch(2**40, 0), batch(7, 7)]), []
    loader = RowLoader(batches, 2, Tags((ROW,)), lambda tokens, numbers: numbers, steps.append, lambda: steps.append(0))
    latest = []
    for images, tokens in loader:
        assert images.shape == (2, 3) and tokens.tolist() == [[0, 1, 2, 3]] * 2
        latest.append(loader.latest()[ROW].tolist())
    assert latest == [[5, 1], [5, 1, 2**40, 0]] and steps == [1, 0]  # the third batch is no whole step
    next(iter(loader))
    assert loader.latest()[ROW].tolist() == [5, 1]  # none of the epoch before
    assert loader.count(None) == 0  # the rest is the loader's


def test_a_resumable_loader_tells_where_every_stream_is():
    """Five batches of two workers, of which an earlier run had three: worker 1 comes next, and 0 gives an empty one."""
    seeds, numbers = [], []
    order = SimpleNamespace(start_at=lambda start: None)
    batches = [(), batch(4, 5), batch(9, 12)]
    loader = ResumableLoader(batches, order.start_at, 2, Tags((NUMBER,)), lambda *place: seeds.append(place))
    loader.start_at(Start(epoch=0, batches=3, of=5, samples=[8, 3]))
    for _, tokens in loader:
        assert tokens[:, :-1].tolist() == [[0, 1, 2, 3]] * 2
        numbers.append(list(loader.numbers))
    assert numbers == [[8, 5], [12, 5]]
    assert seeds == [(AT_EPOCH,), (AT_BATCH, 4), (AT_BATCH, 5)]
    loader.start_at(None)
    assert (loader.first, loader.numbers) == (0, [0, 0])


def test_shards_without_a_table_are_not_looked_into(run, datasets):
    """Remote shards of a recipe that gives --train-num-samples need no sizes for a loss without state per sample."""
    remote = "--dataset-type webdataset --train-data https://a.example/{00..03}.tar --train-num-samples 1000"
    rows = find_rows(parse_args(f"--loss neuclip {remote}".split()))
    assert (rows.num_rows, rows.shards) == (1000, None)
    other = find_rows(parse_args(f"--loss neuclip {remote.replace('03', '04')}".split()))
    assert other.digest != rows.digest
    with pytest.raises(InputError, match="--shard-sizes"):
        find_rows(parse_args(f"--loss fastclip-v3 {remote}".split()))
    # The tokens then have no row at their end to take off.
    given, unknown = (
        run(name, f"{datasets['shards']} {LOSSES['neuclip']} --workers 0 --epochs 1 {count}")
        for name, count in (("given", "--train-num-samples 48"), ("unknown", ""))
    )
    assert given.logged() == unknown.logged()


@pytest.mark.parametrize("path", ["a.csv", "b/a.tsv", "s3://b/{00..12}.tar", "a.tar.gz", "a", "csv"])
def test_the_kind_of_data_is_open_clips(path):
    kinds = {open_clip_train.data.get_wds_dataset: "webdataset", open_clip_train.data.get_csv_dataset: "csv"}
    args = SimpleNamespace(dataset_type="auto")
    try:
        kind = kinds[open_clip_train.data.get_dataset_fn(path, "auto")]
    except ValueError:
        with pytest.raises(InputError, match="^--train-data: "):
            kind_of(args, path)
    else:
        assert kind_of(args, path) == kind
