"""Checkpoints whose rows per sample lie in a folder beside them."""

import os
import shutil
from argparse import Namespace

import pytest
import torch
from conftest import LOSSES, Experiment, ext_main, run_main
from stop import Killed, StopAt
from test_training import same

from open_clip_ext import create_loss, normalizers_report, row_files
from training_ext.core.rows import RowLoader
from training_ext.data import checkpoint_files, row_folders

SPLIT = "--split-rows-above 0"


def folders(experiment):
    return {path for path in (experiment.path / "checkpoints").iterdir() if path.is_dir()}


def named(experiment):
    """The folders that the checkpoints name."""
    files = (experiment.path / "checkpoints").glob("*.pt")
    components = {path: torch.load(path, weights_only=True)["open_clip_ext"]["components"] for path in files}
    return {path.with_name(component["row_files"]["folder"]) for path, component in components.items()}


def whole(experiment, epoch):
    """The checkpoint as if its rows were in the file."""
    checkpoint = experiment.checkpoint(epoch)
    entry = checkpoint["open_clip_ext"]
    folder = experiment.path / "checkpoints" / entry["components"].pop("row_files")["folder"]
    for name, value in [*entry["state"].items()]:
        if isinstance(value, dict):
            files = row_files.RowFiles(folder)
            parts, shape, _ = files._find(value)
            entry["state"][name] = table = torch.zeros(shape)
            for part in range(parts):
                with files._open(value, part, parts, shape) as rows:
                    table[part::parts] = rows[:]
    if (rows := entry["state"].pop("temperature.rows", None)) is not None:
        names = ("tau", "first_moment", "second_moment")
        entry["state"] |= {f"temperature.{name}": part for name, part in zip(names, rows.split(2, dim=1), strict=False)}
    entry["state"].pop("state.unvisited", None)
    return checkpoint


def test_a_resumed_run_equals_one_with_plain_files(run, datasets, tmp_path, monkeypatch):
    common = f"{datasets['shapes']} {LOSSES['fastclip-v2']} --workers 0 --epochs 2"
    plain = run("plain", common)
    assert folders(plain) == set() and "temperature.tau" in plain.checkpoint(2)["open_clip_ext"]["state"]
    # Stopped after step 8 of 12; the folder of epoch_1_step_2.pt goes once epoch_2.pt is there.
    with monkeypatch.context() as patch:
        patch.setattr(RowLoader, "__iter__", StopAt(8))
        assert run_main(ext_main, f"{common} {SPLIT} --name split", tmp_path / "logs") == 143
    split = Experiment(tmp_path / "logs", "split")
    assert {path.name.partition(".rows-")[0] for path in folders(split)} == {"epoch_1", "epoch_1_step_2"}
    split = run("split", f"{common} {SPLIT} --resume latest")
    assert {path.name.partition(".rows-")[0] for path in folders(split)} == {"epoch_1", "epoch_2"}
    assert folders(split) == named(split)
    same(whole(split, 2), plain.checkpoint(2))


@pytest.fixture(scope="module")
def plain(datasets, tmp_path_factory) -> Experiment:
    """Two epochs with plain files."""
    folder = tmp_path_factory.mktemp("plain")
    common = f"{datasets['shapes']} {LOSSES['fastclip-v3']} --workers 0 --epochs 2"
    assert not run_main(ext_main, f"{common} --name plain", folder)
    return Experiment(folder, "plain")


def test_either_form_resumes_into_the_other(run, plain, datasets):
    common = f"{datasets['shapes']} {LOSSES['fastclip-v3']} --workers 0 --epochs 2"
    split = run("split", f"{common} {SPLIT} --resume {plain.path}/checkpoints/epoch_1.pt")
    same(whole(split, 2), plain.checkpoint(2))
    shutil.move(split.path / "checkpoints/epoch_2.pt", split.path / "x.pt")
    (folder,) = folders(split)
    shutil.move(folder, split.path)
    again = run("again", f"{common.replace('epochs 2', 'epochs 3')} --resume {split.path}/x.pt --save-frequency 3")
    longer = run("longer", f"{common.replace('epochs 2', 'epochs 3')} --resume {plain.path}/checkpoints/epoch_2.pt")
    same(again.checkpoint(3), longer.checkpoint(3))


@pytest.mark.slow
def test_other_numbers_of_processes(run, pair, datasets, tmp_path, monkeypatch):
    """Two processes write what one reads, and the other way round: at learning rate 0 nothing moves, and a third save
    is of the same rows."""
    logs = tmp_path / "logs"
    common = f"{datasets['shapes']} {LOSSES['fastclip-v2']} --workers 0 {SPLIT} --name x"
    assert [process.code for process in pair(f"{common} --epochs 1", logs)] == [0, 0]
    experiment = Experiment(logs, "x")
    (folder,) = folders(experiment)
    assert {path.name[-14:] for path in folder.glob("*.safetensors")} == {"0_of_2.safetensors"[-14:]}
    tables = whole(experiment, 1)["open_clip_ext"]["state"]
    seen = []
    load = row_folders.load_state

    def look(loss, state, *more):
        load(loss, state, *more)
        seen.append(loss.full_state())

    with monkeypatch.context() as patch:
        patch.setattr(row_folders, "load_state", look)
        assert run_main(ext_main, f"{common} --epochs 2 --resume latest", logs) == 0
    for name in ("state.log_u", "temperature.tau", "temperature.second_moment"):
        assert torch.equal(seen[0][name], tables[name])
    patches = {"training_ext.data.row_folders.load_state": Gathered(str(logs / "seen.pt"))}
    assert [process.code for process in pair(f"{common} --epochs 3 --resume latest", logs, **patches)] == [0, 0]
    read, tables = torch.load(logs / "seen.pt"), whole(experiment, 2)["open_clip_ext"]["state"]
    for name in ("state.log_u", "temperature.tau", "temperature.second_moment"):
        assert torch.equal(read[name], tables[name])


class Gathered:
    """In place of `load_state` in two processes: process 0 writes what both have read."""

    def __init__(self, path):
        self.path = path

    def __call__(self, loss, state, folder, *more):
        with row_files.rows_in_files(folder):
            loss.load_full_state(state)
        gathered = loss.full_state()
        if gathered.get("state.log_u") is not None:
            torch.save(gathered, self.path)


def test_open_clip_s_flags_take_folders_along(run, datasets):
    common = f"{datasets['shapes']} {LOSSES['sogclr']} --workers 0 --epochs 3 {SPLIT}"
    deleted = run("deleted", f"{common} --delete-previous-checkpoint --val-num-samples 8 --keep-best clip_val_loss")
    assert [path.name for path in (deleted.path / "checkpoints").glob("*.pt")] == ["epoch_3.pt"]
    assert folders(deleted) == named(deleted) and len(folders(deleted)) == 1
    assert (deleted.path / "best.pt").exists()
    recent = run("recent", f"{common} --save-most-recent --save-frequency 2 --save-every-steps 4")
    names = {path.name for path in (recent.path / "checkpoints").glob("*.pt")}
    assert names == {"epoch_2.pt", "epoch_3.pt", "epoch_latest.pt"}
    assert folders(recent) == named(recent) and len(folders(recent)) == 2


MOST_RECENT = "--save-most-recent --save-frequency 0"
STEPS = [
    ("open_clip_ext.row_files.RowFiles._write_part", "", "no part, so the older"),
    ("open_clip_ext.row_files.RowFiles.finish", MOST_RECENT, "no index, so the older"),
    ("training_ext.core.state.atomic_save", "", "no file, so the older"),
    ("training_ext.core.state.atomic_save", MOST_RECENT, "the older under the same name"),
    ("training_ext.data.checkpoint_files.remove_unnamed", "", "both folders, and the newer file"),
]


@pytest.mark.parametrize("target, extra", [step[:2] for step in STEPS], ids=[step[2] for step in STEPS])
def test_a_kill_at_any_step_of_a_save_leaves_a_whole_checkpoint(
    run, plain, datasets, tmp_path, monkeypatch, target, extra
):
    """The save after step 3 is complete, that after step 6 is killed before `target`; the run goes on from the older
    one, or from the newer if that was complete, and removes what is left over."""
    common = f"{datasets['shapes']} {LOSSES['fastclip-v3']} --workers 0 --epochs 2 --save-every-steps 3 {SPLIT} {extra}"
    steps = []

    class Loader:
        def __get__(self, loader, owner):
            def iterate():
                for item in StopAt.__get__(StopAt(0), loader, owner)():
                    steps.append(None)
                    if len(steps) == 6:
                        patch.setattr(target, kill_now)
                    yield item

            return iterate

    def kill_now(*_, **__):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RowLoader, "__iter__", Loader())
        run_main(ext_main, f"{common} --name x", tmp_path / "logs")
    killed = Experiment(tmp_path / "logs", "x")
    assert named(killed) < folders(killed) and len(named(killed)) == 1
    resumed = run("x", f"{common} --resume latest")
    assert folders(resumed) == named(resumed)
    same(whole(resumed, 2), plain.checkpoint(2))


def test_folders_of_others_are_left_alone(run, datasets):
    common = f"{datasets['shapes']} {LOSSES['sogclr']} --workers 0 {SPLIT}"
    path = run("x", f"{common} --epochs 1").path / "checkpoints"
    others = ["epoch_9.rows-0123", "mine", "epoch_9.rows-01234567x", "mine.rows"]
    for name in [*others, "epoch_9.rows-01234567", "epoch_3_step_4.rows-89abcdef"]:
        (path / name).mkdir()
    shutil.copy(path / "epoch_1.pt", path / "kept.pt")  # under another name it names its folder, too
    run("x", f"{common} --epochs 2 --save-frequency 2 --resume latest --delete-previous-checkpoint")
    left = {entry.name for entry in path.iterdir() if entry.is_dir()}
    assert left == {*others, *(folder.name for folder in named(Experiment(path.parent.parent, "x")))} and len(left) == 6


def test_nothing_is_removed_where_a_checkpoint_cannot_be_read(tmp_path, caplog):
    (tmp_path / "epoch_1.rows-01234567").mkdir()
    (tmp_path / "epoch_1.pt").write_text("torn")
    row_folders.remove_unnamed(str(tmp_path), [str(tmp_path / "epoch_1.pt")])
    assert (tmp_path / "epoch_1.rows-01234567").exists() and "cannot be read" in caplog.text
    (tmp_path / "epoch_1.pt").unlink()
    row_folders.remove_unnamed(str(tmp_path), [str(tmp_path / "epoch_1.pt")])
    assert not (tmp_path / "epoch_1.rows-01234567").exists()


def test_rows_of_recovered_statistics_stay_beside_checkpoints(tmp_path):
    for name in ("epoch_1.rows-01234567", "x.state.rows-01234567"):
        (tmp_path / name).mkdir()
    (tmp_path / "epoch_2.state.rows-01234567").mkdir()
    torch.save({"rows": "epoch_2.state.rows-01234567"}, tmp_path / "epoch_2.state")
    checkpoint_files.remove_folders(str(tmp_path))
    left = {"epoch_2.state", "epoch_2.state.rows-01234567", "x.state.rows-01234567"}
    assert {path.name for path in tmp_path.iterdir()} == left


@pytest.fixture
def split(run, datasets):
    return run("x", f"{datasets['shapes']} {LOSSES['fastclip-v3']} --workers 0 --epochs 1 {SPLIT}")


def test_the_name_of_a_folder(tmp_path):
    """Of a remote checkpoint, of one whose name was planted, of one behind a link."""
    for name in ("../x.rows-01234567", "x", "/x.rows-01234567", 3):
        with pytest.raises(ValueError, match="--resume: 'x.pt' names .* which is not such a name"):
            row_folders.folder_of("x.pt", name, "--resume")
    name = "x.rows-01234567"
    with pytest.raises(ValueError, match="--resume: 's3://x/x.pt' .* copy both there"):
        row_folders.folder_of("s3://x/x.pt", name, "--resume")
    (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run/x.pt").touch()
    (tmp_path / "latest.pt").symlink_to("run/x.pt")
    assert row_folders.folder_of(f"{tmp_path}/run/x.pt", name, "--resume") == f"{tmp_path}/run/{name}"
    assert row_folders.folder_of(f"{tmp_path}/latest.pt", name, "--resume") == f"{tmp_path}/run/{name}"
    (tmp_path / name).mkdir()
    assert row_folders.folder_of(f"{tmp_path}/latest.pt", name, "--resume") == f"{tmp_path}/{name}"


def test_damage_ends_in_one_line(split, refused, datasets):
    (folder,) = folders(split)
    part, moved = folder / "table_0_part_0_of_1.safetensors", folder / "moved"
    common = f"{datasets['shapes']} {LOSSES['fastclip-v3']} --workers 0 --epochs 2"
    for given in (f"--name x --resume latest {SPLIT}", f"--resume {split.path}/checkpoints/epoch_1.pt"):
        part.rename(moved)
        assert f"--resume: '{part}' is missing" in refused(f"{common} {given}")
        shutil.copy(moved, part)
        os.truncate(part, part.stat().st_size - 4)
        assert f"--resume: '{part}' is damaged" in refused(f"{common} {given}")
        moved.rename(part)
    folder.rename(folder.with_name("elsewhere"))
    assert f"--resume: '{folder / 'index.json'}' is missing" in refused(f"{common} --name x --resume latest")


def test_the_report_reads_them(split, datasets, run, capsys):
    out = split.path / "normalizers/epoch_1"
    flags = ["--checkpoint", f"{split.path}/checkpoints/epoch_1.pt", "--workers", "0"]
    assert normalizers_report.main(flags) == 0
    values = [path.read_bytes() for path in sorted(out.rglob("*.json"))]
    shutil.rmtree(out)
    checkpoint = whole(split, 1)
    torch.save(checkpoint, split.path / "checkpoints/epoch_1.pt")
    assert normalizers_report.main(flags) == 0
    assert values and values == [path.read_bytes() for path in sorted(out.rglob("*.json"))]


def test_a_recovery_and_its_file(run, killed, datasets, tmp_path):
    common = f"{datasets['shapes']} --loss tuneclip --osr-epochs 2 --tau-init 0.05 --lr 1e-3 --workers 0 --epochs 1"
    plain = run("plain", f"{common} --osr-save {tmp_path}/plain.state")
    experiment = killed("x", f"{common} {SPLIT} --osr-save {tmp_path}/x.state", 8)
    (unfinished,) = (experiment.path / "checkpoints").glob("epoch_0_step_0.rows-*")
    experiment = run("x", f"{common} {SPLIT} --osr-save {tmp_path}/x.state --resume latest")
    assert not unfinished.exists() and len([*tmp_path.glob("x.state.rows-*")]) == 1
    same(whole(experiment, 1), plain.checkpoint(1))
    other = run("other", f"{common.replace('--osr-epochs 2', '')} --osr-load {tmp_path}/x.state --split-rows-above 1e6")
    same(other.checkpoint(1), plain.checkpoint(1))


def test_a_gib_is_gathered_and_more_is_not():
    above = {"split_rows_above": None, "remote_sync": None}
    assert not row_folders.splits(Namespace(**above), 2**30) and row_folders.splits(Namespace(**above), 2**30 + 1)
    assert not row_folders.splits(Namespace(split_rows_above=None, remote_sync="s3://x"), 2**40)


def test_without_a_shared_folder_the_rows_are_gathered(tmp_path, monkeypatch, caplog):
    args = Namespace(split_rows_above=0, remote_sync=None)
    loss = create_loss("sogclr", num_samples=5)
    with monkeypatch.context() as patch:
        patch.setattr(row_files.os.path, "isdir", lambda path: False)  # as on another machine
        state, folder = row_folders.save_state(args, loss, f"{tmp_path}/epoch_1")
    assert folder is None and not list(tmp_path.iterdir())
    assert torch.equal(state["state.log_u"], loss.full_state()["state.log_u"])
    assert f"process 0 does not see '{tmp_path}/epoch_1.rows-" in caplog.text
