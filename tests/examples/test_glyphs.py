"""examples/data/glyphs: whole characters are held out, whose words are seen and whose looks are not; equal bytes."""

from pathlib import Path

import glyphs
import matplotlib
import pytest
from icon_pairs import reduced

from training_ext.data.tars import read_samples


@pytest.fixture(scope="module")
def fonts(tmp_path_factory):
    """Two faces with latin, greek and cyrillic letters, which matplotlib brings."""
    folder = tmp_path_factory.mktemp("fonts")
    for name in ("DejaVuSans-Bold.ttf", "DejaVuSerif.ttf"):
        (folder / name).symlink_to(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name)
    (folder / "NotoSans-Thin.ttf").write_bytes(b"not read")
    return folder


def pairs(path) -> dict[str, tuple[bytes, str]]:
    return {sample["__key__"]: (sample["png"], sample["txt"].decode()) for sample in read_samples(str(path))}


def test_pairs_splits_and_checksum(fonts, tmp_path, capsys, monkeypatch):
    usual = glyphs.name_of
    monkeypatch.setattr(glyphs, "name_of", lambda code: usual(code) if code < 0x180 or code in (0x391, 0x410) else "")
    told = []
    for out in ("one", "two"):
        arguments = f"--fonts {fonts} --out {tmp_path / out} --held-out 40 --samples-per-shard 5000"
        glyphs.main(arguments.split())
        told.append(capsys.readouterr().out.splitlines())
    assert told[0][-1] == told[1][-1] and told[0][-1].startswith("checksum ")
    assert told[0][2:4] == [f"{split}: 40 pictures of 40 characters" for split in ("val", "test")]
    train, val, test = (pairs(tmp_path / "one" / f"{split}-000000.tar") for split in ("train", "val", "test"))
    assert "latin small letter o with circumflex, serif" in {caption for _, caption in (train | val | test).values()}
    characters = {key[:5] for key in train}
    words = {word for _, caption in train.values() for word in caption.replace(",", "").split()}
    looks = {reduced(picture) for picture, _ in train.values()}
    for key, (picture, caption) in (val | test).items():
        assert key[:5] not in characters and set(caption.replace(",", "").split()) <= words, caption
        assert reduced(picture) not in looks
    assert len({picture for picture, _ in train.values()}) == len(train) > len(characters) > 200
    # In one face the latin, the greek and the cyrillic A are the same picture: it is there once, and none is held out.
    letters = [key for key in train | val | test if key[:5] in ("00041", "00391", "00410")]
    assert len([key for key in letters if "Sans" in key]) == 1 and set(letters) <= train.keys()


def test_faces_are_held_out_and_pictures_of_a_character_share_its_caption(fonts, tmp_path, capsys, monkeypatch):
    usual = glyphs.name_of
    monkeypatch.setattr(glyphs, "name_of", lambda code: usual(code) if code < 0x180 or code in (0x391, 0x410) else "")
    more = tmp_path / "more"
    more.mkdir()
    for name in ("DejaVuSans.ttf", "DejaVuSansMono.ttf"):
        (more / name).symlink_to(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name)
    arguments = f"--fonts {fonts} {more} --out {tmp_path / 'out'} --characters"
    glyphs.main([*arguments.split(), "50"])
    train, val, test = (pairs(tmp_path / "out" / f"{split}-000000.tar") for split in ("train", "val", "test"))
    captions = {caption for _, caption in train.values()}
    for gallery in (val, test):
        assert len(gallery) == 50 and {caption for _, caption in gallery.values()} == captions
    everything = train | val | test
    assert len(everything) == len(train) + 100 == len({reduced(picture) for picture, _ in everything.values()})
    assert all(caption == usual(int(key[:5], 16)) for key, (_, caption) in everything.items())
    assert not {key[:5] for key in everything} & {"00041", "00391", "00410"}  # alike in the sans
    with pytest.raises(SystemExit, match="2"):
        glyphs.main([*arguments.split(), "5000", "--overwrite"])
    assert "error: argument --characters: 5000 of " in capsys.readouterr().err


def test_what_are_no_fonts_ends_in_one_line(fonts, tmp_path, capsys):
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    for given, message in ((tmp_path / "none", "no .ttf or .otf file in"), (tmp_path, "broken.ttf' cannot be read")):
        with pytest.raises(SystemExit, match="2"):
            glyphs.main(["--fonts", str(given), "--out", str(tmp_path / "out")])
        assert "error: argument --fonts: " in (told := capsys.readouterr().err) and message in told
