"""Our entry in OpenCLIP's checkpoints, and how they are written."""

import io
import shlex

import pytest
import torch
from conftest import LOSSES

from training_ext.checkpoint import KEY, atomic_save, read_entry, take_entry

MOST_RECENT = "--save-most-recent --save-frequency 0"


def half(content, file):
    file.write(b"half")
    raise OSError("No space left on device")


def test_a_save_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "epoch_1.pt"
    atomic_save(torch.save, {"a": 1}, path)
    with pytest.raises(OSError, match="No space left"):
        atomic_save(half, {"a": 2}, path)
    assert torch.load(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
    atomic_save(torch.save, {"a": 3}, str(path))
    assert torch.load(path) == {"a": 3}


def test_a_kill_while_saving_leaves_no_torn_checkpoint(tmp_path):
    def look(content, file):
        file.write(b"half")
        file.flush()
        seen.extend(tmp_path.glob("*.pt"))

    seen = []
    atomic_save(look, {}, tmp_path / "epoch_1.pt")
    assert seen == []


def test_other_targets_are_saved_as_ever():
    buffer = io.BytesIO()
    atomic_save(torch.save, {"a": 1}, buffer)
    buffer.seek(0)
    assert torch.load(buffer) == {"a": 1}


@pytest.mark.parametrize("loss, extra", [("clip", ""), ("neuclip", ""), ("neuclip", MOST_RECENT)])
def test_a_run_whose_save_fails_keeps_the_checkpoint_before(run, datasets, monkeypatch, loss, extra):
    save, paths = torch.save, []

    def full_disk(content, file):
        paths.append(None)
        return save(content, file) if len(paths) == 1 else half(content, file)

    monkeypatch.setattr(torch, "save", full_disk)
    common = f"{datasets['shapes']} {LOSSES[loss]} --workers 0 --epochs 2 {extra}"
    with pytest.raises(OSError, match="No space left"):
        run("x", common)
    monkeypatch.undo()
    experiment = run("x", f"{common} --resume latest")
    assert "(epoch 1)" in experiment.log


@pytest.mark.parametrize(
    "extra, names",
    [
        ("--save-frequency 2", {"epoch_2.pt": 2, "epoch_3.pt": 3}),
        ("--save-frequency 0", {"epoch_3.pt": 3}),
        ("--save-frequency 2 --save-most-recent", {"epoch_2.pt": 2, "epoch_3.pt": 3, "epoch_latest.pt": 3}),
    ],
)
def test_every_checkpoint_carries_the_state_of_its_epoch(run, datasets, extra, names):
    experiment = run("x", f"{datasets['shapes']} {LOSSES['fastclip-v3']} --workers 0 --epochs 3 {extra}")
    folder = experiment.path / "checkpoints"
    assert {path.name for path in folder.iterdir()} == set(names)
    for name, epochs in names.items():
        entry = torch.load(folder / name)["optimizer"][KEY]
        assert entry["state"]["steps"] == 6 * epochs
        assert (entry["loss"], entry["normalizer"], entry["num_rows"]) == ("fastclip-v3", "table", 48)


def test_the_entry_is_taken_out(tmp_path):
    assert take_entry({"optimizer": {KEY: 1, "state": 2}}) == 1
    for other in ({"optimizer": {"state": 2}}, {"layer.weight": torch.zeros(1)}, torch.zeros(1)):
        assert take_entry(other) is None
    checkpoint = {"epoch": 1, "optimizer": {KEY: {"loss": "x"}, "state": 2}}
    assert take_entry(checkpoint) == {"loss": "x"} and checkpoint["optimizer"] == {"state": 2}


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_every_form_are_read(tmp_path, zipped):
    path = str(tmp_path / "x.pt")
    for content, expected in (
        ({"epoch": 1, "optimizer": {KEY: {"loss": "x"}}}, (True, {"loss": "x"})),
        ({"epoch": 1, "optimizer": {}}, (True, None)),
        ({"layer.weight": torch.zeros(1)}, (False, None)),
    ):
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        assert read_entry(path) == expected


def test_weights_alone_start_a_training(run, datasets, tmp_path):
    common = f"{datasets['shapes']} {LOSSES['neuclip']} --workers 0 --epochs 1"
    torch.save(run("a", common).checkpoint(1)["state_dict"], tmp_path / "weights.pt")
    assert len(run("b", f"{common} --resume {tmp_path}/weights.pt").logged()) == 6


@pytest.mark.parametrize(
    "trained, evaluated", [("neuclip", ""), ("neuclip", "--loss fastclip-v3"), ("clip", "--loss neuclip")]
)
def test_any_loss_evaluates_any_checkpoint(run, datasets, trained, evaluated):
    saved = run("a", f"{datasets['csv']} {LOSSES[trained]} --workers 0 --epochs 1").path / "checkpoints" / "epoch_1.pt"
    path = shlex.split(datasets["csv"])[1]
    experiment = run("b", f"{evaluated} --val-data {path} --workers 0 --resume {saved}")
    assert "image_to_text_R@1" in experiment.log and not experiment.logged()
