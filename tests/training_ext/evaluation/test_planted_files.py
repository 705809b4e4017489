"""Files that somebody else has planted among those of an evaluation: nothing in them is executed."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from json_shards import tar
from test_planted import Payload


@pytest.fixture(autouse=True)
def marker(tmp_path_factory, monkeypatch):
    """The payloads' marker, which must not be there after any test."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    marker = tmp_path_factory.mktemp("marker") / "executed"
    yield marker
    assert not marker.exists(), "a payload was executed"


def replace_member(path: Path, extension: str, content: bytes) -> None:
    """Put `content` in place of the shard's first member with this extension."""
    with tarfile.open(path) as shard:
        members = [(member.name, shard.extractfile(member).read()) for member in shard]
    first = next(number for number, (name, _) in enumerate(members) if name.endswith(extension))
    members[first] = members[first][0], content
    tar(path, members)


def test_a_checkpoint(evalset, tmp_path, marker, refused):
    path = tmp_path / "a.pt"
    torch.save({"state_dict": {"logit_scale": torch.tensor(1.0)}, "planted": Payload(marker)}, path)
    error = refused(f"--checkpoint {path} --model ViT-test --data {evalset} --out {tmp_path}/out.jsonl")
    assert error.startswith("--checkpoint: ") and "is not a complete checkpoint" in error


def test_the_parameters_beside_it(evalset, checkpoints, tmp_path, marker, refused):
    path = tmp_path / "a.pt"
    path.write_bytes(checkpoints[0].read_bytes())
    code = f"open({str(marker)!r}, 'w')"
    (tmp_path / "params.txt").write_text(f"model: {code}\nforce_quick_gelu: {code}\n")
    error = refused(f"--checkpoint {path} --data {evalset} --out {tmp_path}/out.jsonl")
    assert error.startswith("--model: ") and error.endswith("OpenCLIP does not know it")


def test_numbers_and_images(tasks, checkpoints, tmp_path, marker, refused):
    good = f"--checkpoint {checkpoints[0]} --data {tasks} --out {tmp_path}/out.jsonl --tasks"
    stream = io.BytesIO()
    np.save(stream, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    replace_member(tasks / "wds_evalset-colours_test" / "test" / "0.tar", ".npy", stream.getvalue())
    assert "allow_pickle=False" in refused(f"{good} evalset/colours")
    for wrong in (np.zeros((1, 2)), np.array([0.5, 1.0]), np.array([np.nan, 1.0])):
        stream = io.BytesIO()
        np.save(stream, wrong)
        replace_member(tasks / "wds_evalset-colour_test" / "test" / "0.tar", ".npy", stream.getvalue())
        error = refused(f"{good} evalset/colour-worst-background --batch-size 1")
        assert "a .npy has something other than one row of whole numbers" in error
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 48 48\n%%EndComments\nshowpage\n%%EOF\n"
    replace_member(tasks / "wds_evalset-background_test" / "test" / "0.tar", ".png", program)
    assert "it is not one of JPEG, PNG" in refused(f"{good} Background")
