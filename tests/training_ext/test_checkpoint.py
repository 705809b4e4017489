"""Our entry in OpenCLIP's checkpoints, and how they are written."""

import errno
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import LOSSES, ext_main, run_main
from torch.utils.data import get_worker_info

from open_clip_ext.data import Scenes
from open_clip_ext.errors import InputError, MachineError
from open_clip_ext.main import exit_code
from training_ext.components.same_data import SameData, is_same
from training_ext.core.component import Components
from training_ext.core.files import atomic_save
from training_ext.core.state import KEY, State, entry_of, take_entry
from training_ext.data.rows import DataRows
from training_ext.flags.params import parse_args
from training_ext.flags.resumed import find_resumed
from training_ext.launch import build

MOST_RECENT = "--save-most-recent --save-frequency 0"


def half(content, file):
    file.write(b"half")
    raise OSError(errno.EIO, "No space left")


def test_a_save_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "epoch_1.pt"
    atomic_save(torch.save, {"a": 1}, path)
    with pytest.raises(OSError, match="No space left"):
        atomic_save(half, {"a": 2}, path)
    assert torch.load(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
    atomic_save(torch.save, {"a": 3}, str(path))
    assert torch.load(path) == {"a": 3}


@pytest.mark.parametrize("loss, extra", [("clip", ""), ("neuclip", MOST_RECENT)])
def test_a_run_whose_save_fails_names_the_checkpoint_before(run, datasets, monkeypatch, tmp_path, ends, loss, extra):
    save, paths = torch.save, []

    def full_disk(content, file):
        paths.append(None)
        return save(content, file) if len(paths) == 1 else half(content, file)

    monkeypatch.setattr(torch, "save", full_disk)
    common = f"{datasets['shapes']} {LOSSES[loss]} --workers 0 --epochs 2 {extra}"
    error = ends(f"{common} --name x", code=MachineError.code)
    monkeypatch.undo()
    folder, name = tmp_path / "logs/x/checkpoints", "epoch_latest" if extra else "epoch_1"
    assert error.startswith(f"'{folder}/epoch_")
    assert error.endswith(f" cannot be written: No space left; the last complete checkpoint is '{folder}/{name}.pt'")
    experiment = run("x", f"{common} --resume latest")
    assert "(epoch 1)" in experiment.log


@pytest.mark.parametrize(
    "extra, names",
    [
        ("--save-frequency 0", {"epoch_3.pt": 3}),
        ("--save-frequency 2 --save-most-recent", {"epoch_2.pt": 2, "epoch_3.pt": 3, "epoch_latest.pt": 3}),
    ],
)
def test_every_checkpoint_carries_the_state_of_its_epoch(run, datasets, extra, names):
    experiment = run("x", f"{datasets['shapes']} {LOSSES['fastclip-v3']} --workers 0 --epochs 3 {extra}")
    folder = experiment.path / "checkpoints"
    assert {path.name for path in folder.iterdir()} == set(names)
    for name, epochs in names.items():
        entry = torch.load(folder / name)[KEY]
        assert entry["state"]["steps"] == 6 * epochs
        assert (entry["loss"], entry["parts"]["normalizer"], entry["num_rows"]) == ("fastclip-v3", "table", 48)


def test_the_entry_is_taken_out():
    for other in ({"optimizer": {"state": 2}}, {"layer.weight": torch.zeros(1)}, torch.zeros(1)):
        assert entry_of(other) is None
    checkpoint = {"epoch": 1, "optimizer": {"state": 2}, KEY: {"loss": "x"}}
    assert take_entry(checkpoint) == {"loss": "x"} and checkpoint == {"epoch": 1, "optimizer": {"state": 2}}
    checkpoint["optimizer"][KEY] = {"loss": "x"}  # from before version 0.1
    assert take_entry(checkpoint)["loss"] == "x" and checkpoint == {"epoch": 1, "optimizer": {"state": 2}}


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_every_form_are_read(tmp_path, zipped):
    path, run = str(tmp_path / "x.pt"), build(parse_args([]))
    for content, expected in (
        ({"epoch": 1, "optimizer": {}, KEY: {"loss": "x"}}, (path, {"loss": "x"})),
        ({"epoch": 1, "optimizer": {}}, (path, None)),
        ({"layer.weight": torch.zeros(1)}, None),
    ):
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        assert find_resumed(run, path) == expected


@pytest.mark.parametrize("wrapped", [False, True])
def test_names_fit_any_number_of_processes(wrapped):
    names = ["module.visual.proj", "module.logit_scale"] if wrapped else ["visual.proj", "logit_scale"]
    args = parse_args([])
    args.distributed = wrapped
    state = State(args, Components([], args), has_tasks=False)
    for other in (["visual.proj", "logit_scale"], ["module.visual.proj", "module.logit_scale"]):
        weights = dict.fromkeys(other, torch.zeros(1))
        for content in (weights, {"state_dict": dict(weights)}, {"epoch": 1, "state_dict": dict(weights)}):
            loaded = state.load(lambda path, content=content: content, "x.pt")
            assert list(loaded.get("state_dict", loaded)) == names


def test_a_fixed_temperature_is_that_of_the_command_line(run, datasets, tmp_path, refused):
    common = f"{datasets['csv']} --loss sogclr --workers 0"
    first = run("first", f"{common} --tau-init 0.05 --epochs 1")
    torch.save(first.checkpoint(1)["state_dict"], tmp_path / "weights.pt")
    second = run("second", f"{common} --tau-init 0.01 --epochs 1 --resume {tmp_path}/weights.pt")
    assert [tau for _, tau in second.logged("tau")] == pytest.approx([0.01] * 6)
    message = refused(f"{common} --tau-init 0.01 --epochs 2 --name first --resume latest")
    assert "--tau-init: 0.01, but" in message and message.endswith("has 0.05; give 0.05")
    assert len(run("first", f"{common} --tau-init 0.05 --epochs 2 --resume latest").logged()) == 12


def test_a_temperature_is_learned_in_float32(run, datasets):
    common = f"{datasets['csv']} {LOSSES['neuclip']} --workers 0 --epochs 1 --lr 1e-3"
    trained = run("x", f"{common} --precision pure_bf16")
    taus = [tau for _, tau in trained.logged("tau")]
    assert len(set(taus)) == len(taus) == 6
    weights = trained.checkpoint(1)["state_dict"]
    assert weights["logit_scale"].dtype == torch.float32 and weights["text_projection"].itemsize == 2


def test_another_number_of_generated_samples_is_named(run, datasets, refused):
    common = f"--dataset-type synthetic {LOSSES['neuclip']} --workers 0 --name x --epochs"
    run("x", f"{common} 1 --train-num-samples 48")
    message = refused(f"{common} 2 --train-num-samples 64 --resume latest")
    assert "--train-num-samples: 64, but" in message and message.endswith("has 48; give 48")


def test_a_run_without_anything_left_keeps_its_recipe_and_names_no_files(run, datasets):
    common = f"{datasets['shapes']} {LOSSES['neuclip']} --workers 0"
    run("x", f"{common} --epochs 2")
    again = run("x", f"{common} --epochs 1 --resume latest")
    assert "has completed 2 of 1 epochs" in again.log and again.log.count("Done: ") == 1
    assert yaml.safe_load((again.path / "recipe.yaml").read_text())["flags"]["epochs"] == 2


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="a device of Linux")
def test_a_disk_that_is_full_in_an_evaluation_loses_no_step(datasets, tmp_path, capsys):
    (tmp_path / "logs/x/checkpoints").mkdir(parents=True)
    (tmp_path / "logs/x/checkpoints/results.jsonl").symlink_to(FULL)
    val = shutil.copy(shlex.split(datasets["csv"])[1], tmp_path / "val.csv")
    flags = f"{datasets['csv']} --val-data {val} {LOSSES['neuclip']} --workers 0 --epochs 1 --name x --resume latest"
    assert run_main(ext_main, flags, tmp_path / "logs") == 75
    assert "the last complete checkpoint is" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "logs/x/checkpoints").glob("*.pt")] == ["epoch_0_step_6.pt"]


@pytest.mark.skipif(not FULL.exists(), reason="a device of Linux")
def test_a_disk_that_is_full_at_the_start_is_one_line(datasets, tmp_path, ends):
    (tmp_path / "logs/x").mkdir(parents=True)
    (tmp_path / "logs/x/params.txt").symlink_to(FULL)
    line = ends(f"{datasets['csv']} {LOSSES['neuclip']} --workers 0 --epochs 1 --name x")
    assert line.startswith("the disk or the quota is full")


def test_a_folder_that_is_removed_in_the_run_is_one_line(datasets, tmp_path, monkeypatch, ends):
    def removed(*_):
        shutil.rmtree(tmp_path / "logs/x/checkpoints")

    monkeypatch.setattr("training_ext.components.bad_samples.component.BadSamples._write", removed)
    error = ends(f"{datasets['shapes']} {LOSSES['queue']} --workers 0 --epochs 1 --name x", code=MachineError.code)
    path = tmp_path / "logs/x/checkpoints/epoch_1.pt"
    assert f"'{path}' cannot be written: No such file or directory; no checkpoint is complete" in error


@pytest.mark.parametrize(
    "stage, ends, last",
    [
        ("start", signal.SIGKILL, None), ("training", signal.SIGKILL, "epoch_1"),
        ("evaluation", signal.SIGBUS, "epoch_1_step_6"),
    ],
)
def test_a_loaders_worker_that_is_killed_is_one_line(datasets, tmp_path, monkeypatch, capfd, stage, ends, last):
    """By a machine without memory, or as it touches shared memory that is not there. Before the first step another try
    does not help."""
    item = Scenes.__getitem__

    def killed(scenes, index):
        held_out = scenes.first_row > 0
        if get_worker_info() is not None and held_out == (stage == "evaluation") and saved.exists() == bool(last):
            os.kill(os.getpid(), ends)
        return item(scenes, index)

    saved = tmp_path / "x/checkpoints/epoch_1.pt"
    monkeypatch.setattr(Scenes, "__getitem__", killed)
    common = f"{datasets['shapes']} --val-num-samples 8 {LOSSES['queue']} --workers 1 --epochs 2 --name x"
    assert run_main(ext_main, common, tmp_path) == (MachineError if last else InputError).code
    error = capfd.readouterr().err.splitlines()[-1]
    named = f"the last complete checkpoint is '{saved.parent}/{last}.pt'" if last else "no checkpoint is complete"
    assert re.search(r"error: DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)", error), error
    assert error.endswith(f" lower --workers, or give the container more (--shm-size); {named}")


def test_what_the_machine_did_is_one_line_of_any_command(capsys):
    def raises(error):
        def command():
            raise error

        return command

    full = OSError(errno.ENOSPC, "No space left on device", "out.jsonl")
    assert exit_code(raises(full)) == 2
    line = "open_clip_ext: error: 'out.jsonl' cannot be written: the disk or the quota is full; make room\n"
    assert capsys.readouterr().err == line  # no advice to --resume, which an evaluation does not have
    text = "Caught RuntimeError in DataLoader worker process 0.\nunable to write to file </torch_12_3_4>: "
    assert exit_code(raises(RuntimeError(f"{text}No space left on device (28)"))) == 2
    assert "error: </torch_12_3_4>: No space left on device; where nobody ended it" in capsys.readouterr().err
    text = "unable to open shared memory object </torch_1_2_0> in read-write mode: Read-only file system (30)"
    no_shared_memory = [
        RuntimeError(text),
        OSError(errno.EROFS, "Read-only file system", "/dev/shm/pym-1"), OSError(errno.EROFS, "Read-only file system"),
    ]  # fmt: skip
    for error in no_shared_memory:
        assert exit_code(raises(error)) == 2
        assert "error: /dev/shm cannot be written: Read-only file system" in capsys.readouterr().err
    on_gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 79 GiB")
    no_memory = {
        "you tried to allocate": lambda: torch.empty(1 << 50), "Unable to allocate": lambda: np.empty(1 << 50),
        "error: CUDA out of memory. Tried to allocate 2.00 GiB; lower": raises(on_gpu),
        "Cannot allocate memory": raises(OSError(errno.ENOMEM, "Cannot allocate memory")),
        "error: out of memory": raises(MemoryError()),
    }
    for part, command in no_memory.items():
        assert exit_code(command) == 2
        error = capsys.readouterr().err
        assert part in error and error.count("\n") == 1 and error.endswith("; lower --batch-size or --workers\n")
    for other in (RuntimeError("a bug"), PermissionError(errno.EACCES, "Permission denied", "x")):
        with pytest.raises(type(other)):
            exit_code(raises(other))


@pytest.mark.parametrize("trained, evaluated", [("neuclip", ""), ("clip", "--loss neuclip --val-frequency 2")])
def test_any_loss_evaluates_any_checkpoint(run, datasets, trained, evaluated):
    """Whatever the frequency; 0 means never."""
    saved = run("a", f"{datasets['csv']} {LOSSES[trained]} --workers 0 --epochs 1").path / "checkpoints" / "epoch_1.pt"
    common = f"{evaluated} --val-data {shlex.split(datasets['csv'])[1]} --workers 0 --resume {saved}"
    experiment = run("b", common)
    assert "image_to_text_R@1" in experiment.log and not experiment.logged()
    if trained == "clip":
        assert "image_to_text_R@1" not in run("c", f"{common} --val-frequency 0").log


COUNTED = DataRows("webdataset", 96, "rows", object(), listing="names")
EPOCH = DataRows("webdataset", 48, "names", listing="names")  # --train-num-samples 48


@pytest.mark.parametrize(
    "saved, now, same",
    [
        (COUNTED, COUNTED, True), (COUNTED, EPOCH, True), (EPOCH, COUNTED, True),
        (EPOCH, DataRows("webdataset", 96, "names", listing="names"), True),
        (COUNTED, DataRows("webdataset", 97, "others", object(), listing="names"), False),
        (EPOCH, DataRows("webdataset", 48, "other names", listing="other names"), False),
        (COUNTED, DataRows("webdataset", 96, "others", object(), listing="other names"), False),
        (DataRows("csv", 96, "lines"), DataRows("csv", 96, "lines"), True),
        (DataRows("csv", 96, "lines"), DataRows("csv", 96, "other lines"), False),
        (DataRows("csv", 96, "lines"), DataRows("csv", 96, "lines and images", captions="lines"), True),
    ],
)
@pytest.mark.parametrize("older", [False, True])
def test_shards_that_were_not_counted_are_compared_by_name(saved, now, same, older):
    state = {"num_rows": saved.num_rows, "digest": saved.digest, "listing": saved.listing}
    if older:  # by their names only where it has no others
        state = SameData(parse_args([])).older_state({"num_rows": saved.num_rows, "data_digest": saved.digest})
        same = same and not (saved is COUNTED and now is EPOCH)
    assert is_same(state, now) == same
