"""Rows per sample in files: written by some processes, read by others."""

import json
import math
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from numerics import unit
from ports import free_ports
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from open_clip_ext import InputError, create_loss, row_files, row_state, rows_in_files
from open_clip_ext.errors import MachineError
from open_clip_ext.row_files import check_row_files
from open_clip_ext.row_state import ShardedRows

ROWS, BATCH = 23, 6  # 23 rows divide by no number of processes
WRITERS = 3
# sogclr: a table; fastclip-v2: a table, temperatures and Adam's two moments of each; neuclip: nothing per sample.
LOSSES = ("sogclr", "fastclip-v2", "neuclip")


def make(name):
    return create_loss(name, num_samples=ROWS, epochs=2, **({"npn_prototypes": 6} if name == "neuclip" else {}))


def stepped(name, own=slice(None)):
    """A loss after two steps; `own`: of this process."""
    loss = make(name)
    loss.set_epoch(0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        image, text = (unit(generator, BATCH, 4).float() for _ in range(2))
        index = torch.randperm(ROWS, generator=generator)[:BATCH]
        loss(image[own], text[own], torch.tensor(10.0), index=index[own])
    return loss


def save(loss, folder, name, rank=0):
    with rows_in_files(folder / f"{name}.rows"):
        state = loss.state_dict()
    if rank == 0:
        torch.save(state, folder / f"{name}.pt")


def load(folder, name):
    loss = make(name)
    with rows_in_files(folder / f"{name}.rows"):
        loss.load_state_dict(torch.load(folder / f"{name}.pt", weights_only=True))
    return loss


def tables(loss):
    return [module.rows[:-1] for module in loss.modules() if isinstance(module, ShardedRows)]


def process(rank, port, folder):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WRITERS))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    row_files.CHUNK_ROWS = 2
    for name in LOSSES:
        part = BATCH // WRITERS
        loss = stepped(name, slice(rank * part, (rank + 1) * part))
        save(loss, folder / "by_3", name, rank)
        torch.save(loss.state_dict(), folder / f"{name}_{rank}.pt")
        read = load(folder / "by_1", name)  # what one process has written
        for ours, whole in zip(tables(read), tables_of_one(folder, name), strict=True):
            assert torch.equal(ours, whole[rank::WRITERS])
        if name == "sogclr":
            assert read.normalizer._unvisited == torch.load(folder / "unvisited.pt")
    # A disk that is full on one process alone ends all of them alike, and leaves nothing.
    if rank == 1:
        row_files.RowFiles._write_part = full
    with pytest.raises(MachineError, match="table_0_part_1_of_3.safetensors' cannot be written: No space left"):
        save(loss := stepped("sogclr", slice(2 * rank, 2 * rank + 2)), folder / "by_3", f"full_on_{rank}", rank)
    dist.barrier()  # process 0 removes it
    assert not (folder / "by_3/full_on_0.rows").exists() and loss.state_dict()
    dist.destroy_process_group()
    os._exit(0)  # at the interpreter's end gloo's threads abort now and then


def full(*_):
    raise OSError(28, "No space left on device")


def tables_of_one(folder, name):
    return torch.load(folder / f"{name}_whole.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What one process and three processes have saved."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "by_1").mkdir()
    (folder / "by_3").mkdir()
    for name in LOSSES:
        loss = stepped(name)
        save(loss, folder / "by_1", name)
        torch.save([rows.clone() for rows in tables(loss)], folder / f"{name}_whole.pt")
        if name == "sogclr":
            torch.save(loss.normalizer._unvisited, folder / "unvisited.pt")
    mp.start_processes(process, (free_ports(), folder), nprocs=WRITERS, start_method="fork")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("readers", [1, 2, 4, 6])
def test_any_number_of_processes_reads_what_three_wrote(saved, monkeypatch, name, readers):
    """Reading asks no other process, so that one can take the place of each."""
    plain = make(name)
    plain.load_state_dict(torch.load(saved / f"{name}_0.pt"))
    monkeypatch.setattr(row_files, "CHUNK_ROWS", 2)
    for rank in range(readers):
        for module in (row_state, row_files):
            monkeypatch.setattr(module, "world_size", lambda: readers)
            monkeypatch.setattr(module, "rank", lambda rank=rank: rank)
        read = load(saved / "by_3", name)
        for ours, whole in zip(tables(read), tables(plain), strict=True):
            assert torch.equal(ours, whole[rank::readers])
        assert read.diagnostics().keys() == plain.diagnostics().keys() and read.steps == 2


def test_each_process_writes_its_own_rows(saved):
    """A loss without rows makes no folder, and without the context the state is plain."""
    folder = saved / "by_3/fastclip-v2.rows"
    names = {f"table_{table}_part_{part}_of_3.safetensors" for table in range(2) for part in range(3)}
    assert {path.name for path in folder.iterdir()} == {*names, "index.json"}
    shapes = [load_file(folder / f"table_1_part_{part}_of_3.safetensors")["rows"].shape for part in range(3)]
    assert shapes == [(8, 6), (8, 6), (7, 6)]
    assert json.loads((folder / "index.json").read_text())["tables"] == [[ROWS, 2], [ROWS, 6]]
    assert not (saved / "by_3/neuclip.rows").exists()
    state = torch.load(saved / "sogclr_0.pt", weights_only=True)["_extra_state"]
    assert state["state.log_u"].shape == (ROWS, 2) and (state["state.log_u"][:, 0] > -math.inf).sum() > BATCH
    assert all(not isinstance(value, dict) for value in state.values())


def test_rows_in_files_need_the_context_and_as_many_rows(saved):
    state = torch.load(saved / "by_1/sogclr.pt")
    with pytest.raises(ValueError, match=r"table: its rows are in files; load it within rows_in_files\(folder\)"):
        create_loss("sogclr", num_samples=ROWS).load_state_dict(state)
    with rows_in_files(saved / "by_1/sogclr.rows"), pytest.raises(ValueError, match=r"shape \(23, 2\) where \(5, 2\)"):
        create_loss("sogclr", num_samples=5).load_state_dict(state)
    rows = ShardedRows(3, 1, 0.0)
    rows.assign(torch.tensor([1]), torch.tensor([[5.0]]))
    with pytest.raises(ValueError, match=r"shape \(4, 1\)"):
        rows.load(torch.zeros(4, 1))
    assert rows.gather().tolist() == [[0.0], [5.0], [0.0]]


def test_a_folder_that_exists_is_left_alone(tmp_path):
    (tmp_path / "sogclr.rows").mkdir()
    (tmp_path / "sogclr.rows/mine").write_text("mine")
    with pytest.raises(InputError, match="sogclr.rows' cannot be made: File exists; give a new folder"):
        save(stepped("sogclr"), tmp_path, "sogclr")
    assert (tmp_path / "sogclr.rows/mine").read_text() == "mine" and row_files.current() is None


def cut(path: Path):
    os.truncate(path, path.stat().st_size - 1)


def scribble(path: Path):
    path.write_bytes(b"\xff" * path.stat().st_size)


def of_another_save(path: Path):
    """The same sizes, written at another time."""
    other = path.parent.parent / "other"
    other.mkdir()
    save(stepped("sogclr"), other, "sogclr")
    path.write_bytes((other / "sogclr.rows" / path.name).read_bytes())


def shorter(path: Path):
    """A part of the same save, with fewer rows."""
    with safe_open(path, "pt") as file:
        save_file({"rows": file.get_tensor("rows")[1:]}, path, file.metadata())


def newer(path: Path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))


PART, INDEX = "table_0_part_0_of_1.safetensors", "index.json"
DAMAGES = [
    (PART, Path.unlink, "is missing"),
    (PART, cut, "is damaged"),
    (PART, scribble, "is damaged"),
    (PART, shorter, r"is damaged: it has rows and columns \[22, 2\]"),
    (PART, of_another_save, "is of another save"),
    (INDEX, Path.unlink, "is missing"),
    (INDEX, cut, "is damaged"),
    (INDEX, of_another_save, "is of another save"),
    (INDEX, newer, r"was written by another open_clip_ext \(format 2\)"),
]


@pytest.mark.parametrize("name, damage, message", DAMAGES)
def test_damage_is_found_without_reading_the_rows(tmp_path, name, damage, message):
    save(stepped("sogclr"), tmp_path, "sogclr")
    state = torch.load(tmp_path / "sogclr.pt")["_extra_state"]
    check_row_files(tmp_path / "sogclr.rows", state)
    damage(tmp_path / "sogclr.rows" / name)
    with pytest.raises(InputError, match=f"{name}' {message}") as found:
        check_row_files(tmp_path / "sogclr.rows", state)
    assert "\n" not in str(found.value)
    with pytest.raises(InputError, match=f"{name}' {message}"):
        load(tmp_path, "sogclr")


def test_a_changed_bit_is_found_as_the_rows_are_read(tmp_path):
    save(stepped("sogclr"), tmp_path, "sogclr")
    index, part = (tmp_path / "sogclr.rows" / name for name in (INDEX, PART))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with pytest.raises(InputError, match=f"{PART}' is damaged: its bytes have changed"):
        load(tmp_path, "sogclr")
    entries = json.loads(index.read_text())
    index.write_text(json.dumps({**entries, "crc32": [[]]}))
    with pytest.raises(InputError, match=f"{INDEX}' is damaged"):
        load(tmp_path, "sogclr")
    del entries["crc32"]  # as an older save
    index.write_text(json.dumps(entries))
    load(tmp_path, "sogclr")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("place", range(3))
def test_a_kill_or_a_full_disk_leaves_no_index(tmp_path, monkeypatch, place):
    """fastclip-v2 writes two parts and the index, each under another name and then renamed."""
    renamed, replace = [], os.replace

    def killing(source, target):
        if len(renamed) == place:
            raise Killed
        renamed.append(target)
        replace(source, target)

    loss = stepped("fastclip-v2")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", killing)
        save(loss, tmp_path, "fastclip-v2")
    assert len(renamed) == place and not (tmp_path / "fastclip-v2.rows/index.json").exists()
    assert not (tmp_path / "fastclip-v2.pt").exists()
    names, whole_file = ("table_0", "table_1", "index.json"), row_files.whole_file
    monkeypatch.setattr(
        row_files, "whole_file", lambda path, **more: full() if names[place] in str(path) else whole_file(path, **more)
    )
    with pytest.raises(MachineError, match=f"{names[place]}.*' cannot be written: No space left"):
        save(loss, tmp_path, "full")
    assert not (tmp_path / "full.rows").exists()
