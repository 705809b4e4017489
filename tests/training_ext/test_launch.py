"""Ranks in the environment count only where OpenCLIP starts a process group."""

import os
import subprocess
import sys

import pytest
from conftest import LOSSES, ext_main, run_main
from open_clip_train.distributed import is_using_distributed

from open_clip_ext.errors import InputError
from open_clip_ext.main import exit_code
from training_ext.core import hosts
from training_ext.core.plan import world_info
from training_ext.openclip.machine import processes_here

NAMES = (
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID",
    "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
)  # fmt: skip


@pytest.mark.parametrize(
    "variables, info, here",
    [
        ("", (0, 0, 1), 1),
        ("WORLD_SIZE=4 RANK=3 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", (1, 3, 4), 2),
        ("SLURM_NTASKS=4 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS_PER_NODE=2", (1, 3, 4), 2),
        # Independent runs
        ("WORLD_SIZE=1 SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NTASKS_PER_NODE=2", (0, 0, 1), 1),
        ("OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1", (0, 0, 1), 1),
        ("RANK=1", (0, 0, 1), 1),
    ],
)
def test_processes(variables, info, here, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert world_info() == info and processes_here() == here
    assert is_using_distributed() == (info[2] > 1)


@pytest.mark.slow
def test_output_that_nobody_reads():
    """As into `head`, which ends after its lines."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "open_clip_ext.main", "--list-losses"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_training_whose_output_nobody_reads_has_failed(datasets, tmp_path, monkeypatch, capfd):
    """The second epoch's progress bar writes to a closed pipe."""

    def evaluate(model, data, epoch, *more, **settings):
        if epoch == 2:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(hosts.installed().main(), "evaluate", evaluate)
    flags = f"{datasets['shapes']} {LOSSES['fastclip-v3']} --val-num-samples 8 --workers 0 --epochs 3 --name x"
    assert run_main(ext_main, flags, tmp_path) == 75
    line = capfd.readouterr().err.splitlines()[-1]
    assert "whoever read this output, or another pipe of the process, has ended; the last complete checkpoint" in line


def test_an_error_that_nobody_reads_has_its_code(monkeypatch):
    read, write = os.pipe()
    os.close(read)

    def command():
        raise InputError("wrong", "--lr")

    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        assert exit_code(command) == 2


def test_a_missing_address(monkeypatch, capsys):
    def command():
        raise ValueError("Error initializing torch.distributed: environment variable MASTER_ADDR expected, but not set")

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert exit_code(command) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("open_clip_ext: error: SLURM_NTASKS: 2 processes, but no MASTER_ADDR")
