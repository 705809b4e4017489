"""The task loop of OpenCLIP 4.x, in DistributedDataParallel and FSDP2, too."""

from argparse import Namespace

import pytest
import torch
from conftest import LOSSES, Experiment, ext_main, run_main
from test_training import same
from torch.nn.functional import normalize

from open_clip_ext import create_loss, list_losses
from open_clip_ext.metrics_file import read_metrics
from training_ext.core import hosts
from training_ext.core.loss import LossItems
from training_ext.core.state import KEY
from training_ext.data import checkpoint_files
from training_ext.data.checkpoint import SHARDED
from training_ext.data.checkpoint_files import bring_up_to_date, resumed_path

in_tasks = pytest.mark.skipif(not hosts.installed().HAS_TASKS, reason="this OpenCLIP has no task loop")
# Each epoch is one step of all samples, so that their order and what a process gets of them do not matter.
ONE_STEP = "--dataset-type shapes --train-num-samples 16 --workers 0 --epochs 4 --warmup 1 --loss fastclip-v3"
# Adam divides gradients by themselves, rounding by rounding; this one shows the gradients.
BY_GRADIENTS = f"{ONE_STEP} --opt timm/sgd --momentum 0.9 --lr 0.1"


def weights_of(checkpoint: dict) -> dict[str, torch.Tensor]:
    return {name: tensor.double().flatten() for name, tensor in checkpoint["state_dict"].items()}


@in_tasks
@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--fsdp", "--fsdp --accum-freq 2 --batch-size 4"])
def test_two_processes_move_the_weights_of_one(pair, run, tmp_path, flags):
    ended = pair(f"{BY_GRADIENTS} {flags} --name two", tmp_path)
    assert [process.code for process in ended] == [0, 0], ended
    two, one = Experiment(tmp_path, "two"), run("one", f"{BY_GRADIENTS} --batch-size 16")
    before, after = weights_of(one.checkpoint(1)), weights_of(one.checkpoint(4))
    moved = max((after[name] - before[name]).abs().max() for name in after)
    for name, tensor in weights_of(two.checkpoint(4)).items():
        # Float32 encoders' similarities err by some 1e-6, and a gradient's weights, exponentials, by that over tau.
        assert (tensor - after[name]).abs().max() < 1e-4 * moved, name
    (table, expected) = (e.checkpoint(4)[KEY]["state"]["state.log_u"] for e in (two, one))
    assert torch.allclose(table, expected, rtol=1e-4, atol=1e-4) and table.shape == (16, 2)


@in_tasks
@pytest.mark.slow
@pytest.mark.parametrize("form, extra", [("full", ""), ("sharded", ""), ("sharded", "--split-rows-above 0")])
def test_fsdp_resumes(pair, tmp_path, form, extra):
    command = f"{ONE_STEP} --lr 1e-3 --fsdp --fsdp-checkpoint {form} {extra}"
    saved = tmp_path / "whole/checkpoints" / ("epoch_2" if form == "sharded" else "epoch_2.pt")
    for flags in ("--name whole", f"--name resumed --resume {saved}"):
        ended = pair(f"{command} {flags}", tmp_path)
        assert [process.code for process in ended] == [0, 0], ended
    whole, resumed = (Experiment(tmp_path, name) for name in ("whole", "resumed"))
    assert len(resumed.logged()) == 2 and resumed.logged() == whole.logged()[2:]
    if form == "full":
        ours, theirs = resumed.checkpoint(4), whole.checkpoint(4)
        same(ours["state_dict"], theirs["state_dict"])
        same(ours["optimizer"]["state"], theirs["optimizer"]["state"])
        same(ours[KEY], theirs[KEY])
        return
    entries = [torch.load(e.path / "checkpoints/epoch_4" / SHARDED, weights_only=True) for e in (resumed, whole)]
    if not extra:
        same(*entries)
    for experiment, entry in zip((resumed, whole), entries, strict=True):
        rows = entry["components"].get("row_files")
        assert (rows is not None) == bool(extra)
        assert not extra or (experiment.path / "checkpoints" / rows["folder"] / "index.json").exists()


@in_tasks
@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--fsdp --osr-epochs 1", ["--osr-epochs: 1 with --fsdp"]),
        ("--use-naflex", ["--use-naflex", "not followed"]),
    ],
)
def test_what_cannot_be_carried_is_refused(refused, monkeypatch, datasets, flags, parts):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    loss = "" if "--loss" in flags else LOSSES["fastclip-v3"]
    line = refused(f"{datasets['shapes']} {loss} --workers 0 {flags}")
    assert all(part in line for part in parts), line


@in_tasks
def test_ones_own_zero_shot_evaluation(run, datasets):
    """With validation data and without ImageNet, for which alone the task loop has an evaluation of its own."""
    flags = f"{datasets['shapes']} {LOSSES['fastclip-v3']} --workers 0 --epochs 1 --val-num-samples 16"
    experiment = run("x", f"{flags} --keep-best shapes-zeroshot-top1")
    (evaluated,) = read_metrics(experiment.path, "eval")
    assert "shapes-zeroshot-top1" in evaluated and (experiment.path / "best.pt").exists()


@in_tasks
@pytest.mark.parametrize("name", [preset.name for preset in list_losses() if not preset.is_open_clip])
def test_logged_values_are_on_the_device_of_the_loss(name):
    """The loop reduces them by the group's backend, which may be for a GPU only; meta is in place of one."""
    loss = create_loss(name, num_samples=16, epochs=2)
    loss.set_epoch(0)
    image, text = normalize(torch.randn(2, 8, 4), dim=2)
    reference = {"dist_image_features": image, "dist_text_features": text} if loss.takes_reference else {}
    loss(image.requires_grad_(), text, torch.tensor(14.0), index=torch.arange(8), **reference)
    losses = LossItems(torch.zeros((), device="meta"), "objective", loss.diagnostics)
    losses["loss"] = losses["contrastive_loss"]
    assert {value.device.type for _, value in losses.items()} == {"meta"}


def shards(folder, name: str, epoch: int) -> str:
    """Write a folder of shards without any shard in it."""
    (folder / name).mkdir(parents=True)
    (folder / name / ".metadata").touch()
    torch.save({"epoch": epoch, "name": "x"}, folder / name / "_metadata_extra.pt")
    return str(folder / name)


@in_tasks
def test_latest_of_folders_of_shards(tmp_path):
    folder = tmp_path / "x/checkpoints"
    shards(folder, "epoch_2", 2)
    newest = shards(folder, "epoch_10", 10)
    (folder / "epoch_11").mkdir()  # torn
    args = Namespace(resume="latest", name="x", logs=str(tmp_path), remote_sync=None, save_most_recent=False)
    assert resumed_path(args) == newest
    shards(folder, "epoch_latest", 4)
    assert resumed_path(args) == newest


POSITION = {"position": {"batches": 5}}


@in_tasks
@pytest.mark.parametrize(
    "entry", [{KEY: {"components": {"exact_resume": POSITION}}}, {"optimizer": {KEY: POSITION}}], ids=["", "0.1"]
)
def test_latest_of_a_file_within_an_epoch_and_folders_of_shards(tmp_path, entry):
    """OpenCLIP prefers the file of --save-most-recent, however old."""
    folder = tmp_path / "x/checkpoints"
    latest = shards(folder, "epoch_latest", 9)
    file = folder / "epoch_latest.pt"
    args = Namespace(resume="latest", name="x", logs=str(tmp_path), remote_sync=None, save_most_recent=True)
    for epoch, path in ((9, file), (0, folder / "epoch_latest")):
        torch.save({"epoch": epoch, "optimizer": {}, **entry}, file)
        assert checkpoint_files.progress(str(file)) == (epoch, 5)
        assert resumed_path(args) == str(path)
        bring_up_to_date(args)
        assert file.exists() == (epoch == 9)
    torch.save({"epoch": 0, "optimizer": {}}, file)
    checkpoint_files.remove_folders(str(folder))
    assert not file.exists()
    # The folder of an epoch is newer, after a run without the flag or a kill.
    newest = shards(folder, "epoch_10", 10)
    assert resumed_path(args) == newest
    bring_up_to_date(args)
    assert checkpoint_files.progress(latest) == checkpoint_files.progress(newest) == (10, 0)
    assert {path.name for path in folder.iterdir()} == {"epoch_10", "epoch_latest"}


@in_tasks
@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--opt-fallback-list x", ["--opt-fallback-list", "timm"]),
        ("--opt-kwargs nonsense=1", ["--opt-kwargs", "unexpected keyword"]),
    ],
)
def test_flags_of_the_optimizer_that_cannot_work(fails, datasets, flags, parts):
    line = fails(f"{datasets['shapes']} {LOSSES['fastclip-v3']} --workers 0 {flags}")
    assert all(part in line for part in parts), line


@in_tasks
@pytest.mark.parametrize("flags", ["--opt nadamw", "--opt timm/adamw"])
def test_optimizers_of_open_clip_4(datasets, tmp_path, flags):
    command = f"--dataset-type shapes --train-num-samples 16 --loss fastclip-v3 --workers 0 --lr 1e-3 --name x {flags}"
    assert not run_main(ext_main, f"{command} --epochs 1", tmp_path)
    assert not run_main(ext_main, f"{command} --epochs 2 --resume latest", tmp_path)


@in_tasks
def test_a_folder_of_shards_that_is_not_complete(refused, datasets, tmp_path, monkeypatch):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    (tmp_path / "epoch_1").mkdir()
    (tmp_path / "epoch_1/.metadata").touch()
    common = f"{datasets['shapes']} {LOSSES['fastclip-v3']} --workers 0 --resume {tmp_path}/epoch_1"
    assert "is not a complete checkpoint: it has no _metadata_extra.pt" in refused(f"{common} --fsdp")
    assert "is a folder of shards" in refused(common)
