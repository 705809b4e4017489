"""Files that somebody else has planted: whatever a command reads, nothing in it is executed.

Every payload makes a marker when it is unpickled, imported or run. Each case ends in one refused line or in a run that
leaves the payload aside, also where the environment asks torch to unpickle what it is given.
"""

import gzip
import io
import json
import os
import pickle
import re
from collections import OrderedDict
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from conftest import LOSSES, ext_main, run_main
from json_shards import tar

import open_clip_ext
from open_clip_ext.data import Scenes
from open_clip_ext.files import whole_file
from open_clip_ext.normalizers_report import main as report_main
from training_ext.components.keep_best import BEST

ROWS = 16
CAPTION = "<script>alert('caption')</script>"
SHAPES = f"--dataset-type shapes --train-num-samples {ROWS} --workers 0 --epochs 1 --lr 1e-3"
NEUCLIP = f"{SHAPES} --loss neuclip --npn-prototypes 8"
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 48 48\n%%EndComments\nshowpage\n%%EOF\n"


class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


class OnlyPickle:
    """Pickle reads it; with weights_only it raises a TypeError, after which OpenCLIP tries again without."""

    def __reduce__(self):
        return OrderedDict, (), (None, {"name": 1})


@pytest.fixture(autouse=True)
def marker(tmp_path, monkeypatch):
    """The payloads' marker, which must not be there after any test."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    marker = tmp_path / "executed"
    yield marker
    assert not marker.exists(), "a payload was executed"


@pytest.fixture
def planted(tmp_path, marker):
    """planted(name) -> the path of a file, complete but for the payload in it."""

    def planted(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickled(marker, name))
        return path

    return planted


def pickled(marker: Path, name: str) -> bytes:
    """A payload in the form that a file of this name has."""
    payload = Payload(marker)
    stream = io.BytesIO()
    if name.endswith(".npy"):
        np.save(stream, np.array([payload], dtype=object), allow_pickle=True)
    elif name.endswith(".npz"):
        np.savez(stream, planted=np.array([payload], dtype=object), allow_pickle=True)
    elif name.endswith((".pt", ".pth", ".bin", ".state")):
        torch.save({"epoch": 1, "state_dict": {"logit_scale": torch.tensor(1.0)}, "planted": payload}, stream)
    else:
        return pickle.dumps(payload)
    return stream.getvalue()


# Checkpoints and weights


@pytest.mark.parametrize("loss, name", [("", "a.pt"), (LOSSES["neuclip"], "a.pickle")])
def test_a_checkpoint(refused, ends, planted, marker, loss, name):
    path = planted(name)
    torch.load(path, weights_only=False) if name == "a.pt" else pickle.loads(path.read_bytes())
    marker.unlink()  # so it is a payload
    assert f"--resume: {str(path)!r} is not a complete checkpoint" in refused(f"{SHAPES} {loss} --resume {path}")
    assert f"pretrained weights: {str(path)!r}" in ends(f"{SHAPES} {loss} --pretrained {path}")
    assert str(path) in ends(f"{SHAPES} --name b --distill-model ViT-shapes-tiny --distill-pretrained {path}")


@pytest.mark.parametrize("loss, scheme", [("", "file"), (LOSSES["neuclip"], "memory")])
def test_a_checkpoint_behind_a_url(ends, planted, loss, scheme):
    path = planted("a.pt")
    if scheme == "memory":
        with fsspec.open("memory://planted/a.pt", "wb") as file:
            file.write(path.read_bytes())
    url = f"file://{path}" if scheme == "file" else "memory://planted/a.pt"
    assert f"--resume: {url!r}" in ends(f"{SHAPES} {loss} --resume {url}")


@pytest.mark.parametrize("loss", ["", "--loss clip"])
def test_the_latest_checkpoint(refused, ends, planted, loss):
    path = planted("logs/x/checkpoints/epoch_1.pt")
    assert str(path) in (refused if loss else ends)(f"{SHAPES} {loss} --name x --resume latest")


@pytest.mark.parametrize("weights", ["open_clip_pytorch_model.bin", "other.pth"])
def test_a_hub_folder(ends, planted, weights):
    path = hub_folder(planted(f"hub/{weights}").parent)
    assert weights in ends(f"{SHAPES} --model local-dir:{path}")
    assert "allow_pickle=False" in ends(f"{SHAPES} --loss clip --pretrained {planted('a.npy')}")


def test_weights_whose_reading_fails_in_another_way(ends, tmp_path, marker):
    torch.save({"first": OnlyPickle(), "second": Payload(marker)}, tmp_path / "a.pt")
    assert "a.pt" in ends(f"{SHAPES} --distill-model ViT-shapes-tiny --distill-pretrained {tmp_path}/a.pt")


def test_a_tokenizer_with_code_of_its_own(ends, tmp_path, marker):
    folder = hub_folder(tmp_path, hf_tokenizer_name="planted", tokenizer_kwargs={"trust_remote_code": True})
    (folder / "planted.py").write_text(
        f"open({str(marker)!r}, 'w')\n"
        "from transformers import PreTrainedTokenizer\n"
        "class Planted(PreTrainedTokenizer):\n    pass\n"
    )
    auto_map = {"AutoTokenizer": ["planted.Planted", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Planted", "auto_map": auto_map}))
    # OpenCLIP 4 does not pass the wish for it on, which transformers then refuses.
    assert re.search("trust_remote_code|contains custom code", ends(f"{SHAPES} --model local-dir:{folder}"))


def hub_folder(folder: Path, **text_cfg) -> Path:
    """Make `folder` one that `--model local-dir:` takes."""
    configs = Path(open_clip_ext.__file__).with_name("model_configs")
    config = json.loads((configs / "ViT-shapes-tiny.json").read_text())
    config["text_cfg"].update(text_cfg)
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    return folder


# What a run keeps for the next


def test_recovered_statistics(refused, planted):
    path = planted("recovered.state")
    assert f"--osr-load: {str(path)!r} cannot be read" in refused(f"{NEUCLIP} --osr-load {path}")


def test_what_a_run_compares_with(planted, tmp_path):
    """A training that resumes goes on without it."""
    common = f"{SHAPES} --val-num-samples 8 --loss clip --name x --keep-best image_to_text_R@1"
    assert not run_main(ext_main, common, tmp_path / "logs")
    planted(f"logs/x/{BEST}")
    assert not run_main(ext_main, f"{common} --epochs 2 --resume latest", tmp_path / "logs")
    log = (tmp_path / "logs/x/out.log").read_text()
    assert f"{BEST}' cannot be read" in log


# Data


@pytest.fixture
def ghostscript(tmp_path, marker, monkeypatch):
    """A `gs` that makes the marker, and the search for it not yet done."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gs").write_text(f"#!/bin/sh\ntouch {marker}\n")
    (tmp_path / "bin/gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)


@pytest.fixture
def members(tmp_path, marker, ghostscript):
    """Shards of pairs with other members that webdataset would decode; the last pair's image is PostScript."""
    payloads = {
        "pyd": pickle.dumps(Payload(marker)),
        "pickle": pickle.dumps(Payload(marker)),
        "txt.pyd": pickle.dumps(Payload(marker)),
        "pickle.gz": gzip.compress(pickle.dumps(Payload(marker))),
        "pth": pickled(marker, "a.pth"),
    }
    broken = {"npy": pickled(marker, "a.npy"), "eps": EPS, "json": b"{"}  # of one pair, which is read all the same
    (tmp_path / "shards").mkdir()
    for row, (image, _) in enumerate(Scenes(ROWS, image_size=48)):
        encoded = io.BytesIO()
        image.save(encoded, "png")
        pair = {"png": EPS if row == ROWS - 1 else encoded.getvalue(), "txt": f"{row} {CAPTION}".encode()}
        members = {**pair, **payloads, **(broken if row == 0 else {})}.items()
        tar(tmp_path / f"shards/{row % 2}.tar", [(f"{row:03d}.{suffix}", own) for suffix, own in members], mode="a")
    return f"--train-data {tmp_path}/shards/{{0..1}}.tar --dataset-type webdataset --workers 0 --epochs 1 --lr 1e-3"


def test_members_of_shards_in_open_clips_own_training(members, tmp_path):
    data = members.split()[1]
    arguments = f"{members} --train-num-samples {ROWS} --val-data {data} --val-num-samples {ROWS} --debug --name x"
    assert not run_main(ext_main, arguments, tmp_path / "logs")
    log = (tmp_path / "logs/x/out.log").read_text()
    # The pair whose image is PostScript is left out, and no other.
    for message in ("Left out of the train data", "Handling webdataset error"):
        (line,) = (line for line in log.splitlines() if message in line)
        assert "Ghostscript" in line
    assert f"num_samples: {ROWS - 1}" in log


def test_members_of_shards(ends, members, planted, tmp_path):
    """Ours, with a report; then what the report keeps for the next one."""
    arguments = f"{members} {LOSSES['isogclr']}"
    assert not run_main(ext_main, f"{arguments} --name x", tmp_path / "logs")
    out = tmp_path / "report"
    report = f"{arguments} --checkpoint {tmp_path}/logs/x/checkpoints/epoch_1.pt --out {out}"
    assert not run_main(report_main, report, tmp_path / "logs")
    assert json.loads((out / "normalizers.json").read_text())["rows_left_out"] == 1
    (block,) = out.rglob("block-000000.safetensors")
    planted(str(block.relative_to(tmp_path)))
    assert not run_main(report_main, report, tmp_path / "logs")  # it is embedded again
    path = planted("other.pt")
    assert f"--checkpoint: {str(path)!r}" in ends(f"{arguments} --checkpoint {path}", report_main)


def test_images_of_a_csv(ends, tmp_path, ghostscript):
    """Refused where there is no other, and left out of the others."""
    (tmp_path / "a.jpg").write_bytes(EPS)
    Scenes(1, image_size=48)[0][0].save(tmp_path / "b.png")
    for name, images in (("a", ["a.jpg", "a.jpg"]), ("b", ["b.png", "a.jpg"])):
        lines = [f"{tmp_path}/{image}\t{number}" for number, image in enumerate(images)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["filepath\ttitle", *lines]))
    common = "--workers 0 --batch-size 2 --epochs 1 --warmup 1"
    assert "Ghostscript" in ends(f"--train-data {tmp_path}/a.csv {common}")
    assert not run_main(ext_main, f"--train-data {tmp_path}/b.csv {common} --name x", tmp_path / "logs")
    assert (tmp_path / "logs/x/out.log").read_text().count("Ghostscript") == 1


# What a command writes


def test_a_link_under_the_temporary_name(tmp_path, monkeypatch):
    """One who could guess the name gains nothing."""
    victim, link = tmp_path / "victim", tmp_path / ".a.pt.01234567.partial"
    link.symlink_to(victim)
    monkeypatch.setattr("secrets.token_hex", lambda length: "01234567")
    with pytest.raises(FileExistsError), whole_file(tmp_path / "a.pt"):
        pass
    assert not victim.exists() and link.is_symlink()
