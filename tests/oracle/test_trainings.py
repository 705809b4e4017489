"""Every preset trains as it did when golden.json was recorded, and as well if it is stopped in mid-epoch and resumed.

No later change of the package edits this folder: what it holds fast is what users have (see docs/stability.md).
"""

import json

import pytest
import torch
import trainings

pytestmark = pytest.mark.slow
# Twelve steps of float32 on another processor or number of threads: each rounds to 6e-8, and a step amplifies it less
# than twofold. A step more, another order of the data or another schedule changes the numbers by 1e-3 and more.
TOLERANCE = 2e-4


def assert_as_recorded(found, golden):
    assert found.keys() == golden.keys()
    for key, expected in golden.items():
        # Of a tensor its norm comes first, which bounds what rounding can change in its projection.
        scale = max(map(abs, expected), default=0.0)
        assert found[key] == pytest.approx(expected, rel=0, abs=TOLERANCE * scale + 1e-9), key


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("oracle")
    trainings.run_processes(folder, request.param)
    return folder, json.loads(trainings.GOLDEN.read_text())[str(request.param)]


@pytest.mark.parametrize("name", trainings.TRAININGS)
def test_it_trains_as_recorded(trained, name):
    folder, golden = trained
    assert_as_recorded(trainings.sketch(folder, name), golden[name])


@pytest.mark.parametrize("name", trainings.RESUMABLE)
def test_it_resumes_bit_for_bit(trained, name):
    folder = trained[0]
    whole, resumed = (
        torch.load(folder / run / "checkpoints" / f"epoch_{trainings.EPOCHS}.pt", weights_only=True)
        for run in (trainings.folder_of(name), f"{trainings.folder_of(name)}-stopped")
    )
    trainings.assert_same(whole["state_dict"], resumed["state_dict"])
    trainings.assert_same(whole["optimizer"], resumed["optimizer"])
