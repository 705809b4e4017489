"""Processes that end or disagree."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import SHIPPED
from ports import free_ports

from open_clip_ext.errors import InputError, last_line
from training_ext.components import processes_alike as alike
from training_ext.flags import params
from training_ext.openclip import failure_lines

ROOT = Path(__file__).parents[2]
RUN = f"{SHIPPED} --workers 0 --rho 5 --dist-backend gloo"


@pytest.fixture
def start(tmp_path):
    """start(rank, port, arguments, program) -> a process of two; all are killed at the end."""
    started = []

    def start(rank, port, arguments, program=("-m", "open_clip_ext.main")):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2",
        }
        command = [sys.executable, *program, *f"{RUN} {arguments} --logs {tmp_path}".split()]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others_in_words(start, tmp_path):
    shapes = "--dataset-type shapes --train-num-samples 64 --epochs 1000 --loss fastclip-v3 --name dying"
    port = free_ports()
    first, second = (start(rank, port, shapes) for rank in range(2))
    log = tmp_path / "dying/out.log"
    deadline = time.monotonic() + 600
    while not (log.exists() and "Epoch 2 " in log.read_text()):
        assert time.monotonic() < deadline and first.poll() is None, first.communicate()
        time.sleep(0.2)
    second.send_signal(signal.SIGKILL)
    _, error = first.communicate(timeout=600)
    assert first.returncode == 1
    assert "open_clip_ext: error: lost another process" in error


@pytest.mark.parametrize(
    "one, other, message, local_rank",
    [
        ("--loss queue", "--loss fastclip-v3", "--loss: process 1 has 'fastclip-v3' and process 0 'queue'", 0),
        ("--loss clip", "--loss clip --batch-size 4", "--batch-size: process 1 has 4 and process 0 8", 0),
        ("--loss queue", "--loss queue SHORTER", "--train-data: process 1 has 40 rows and process 0 48", 1),
        ("--loss queue", "--loss queue OTHER", "--train-data: process 1 has 48 rows and process 0 48, or the same", 1),
        ("--loss queue", "--loss queue ABSENT", "absent.csv' does not exist", 1),
    ],
)
@pytest.mark.slow
def test_a_process_that_was_started_otherwise_is_named(pair, datasets, tmp_path, one, other, message, local_rank):
    """On the machine of process 0, or as the first on another one."""
    csv = datasets["csv"]
    header, *lines = Path(csv.split()[1]).read_text().splitlines()
    for name, chosen in (("SHORTER", lines[:40]), ("OTHER", lines[::-1]), ("ABSENT", [])):
        path = tmp_path / f"{name.lower()}.csv"
        if chosen:
            path.write_text("\n".join([header, *chosen]))
        other = other.replace(name, f"--train-data {path}")
    rho = "" if "clip" in one else "--rho 5"
    common = f"--workers 0 {rho} --dist-backend gloo --epochs 1 --name unlike"
    arguments = [f"{csv} {own} {common}" for own in (one, other)]
    for process in pair(arguments, tmp_path, local_ranks=(0, local_rank)):
        assert process.code == 2 and message in process.stderr, process
    assert not (tmp_path / "unlike").exists()


@pytest.mark.parametrize(
    "theirs, message",
    [
        ("--remote-sync s3://x", "--remote-sync: process 1 has 's3://x' and process 0 None"),
        ("--logs none", "--logs: process 1 has None and process 0 './logs/'"),
        ("--resume latest", "--resume: process 1 has 'latest' and process 0 None"),
        ("--logs elsewhere", None),
        ("--report-to tensorboard --copy-codebase --wandb-notes x", None),
    ],
)
def test_a_flag_is_equal_on_all_processes_or_of_one_machine(monkeypatch, theirs, message):
    """What steers a collective operation can then differ for no process."""
    first, second = (
        params.parse_args([*"--loss queue --dataset-type shapes --train-num-samples 48".split(), *flags.split()])
        for flags in ("--report-to wandb", theirs)
    )
    told = []
    monkeypatch.setattr(alike, "all_gather_object", lambda own: told.append(own) or told)
    alike.check_alike(first, None)
    if message is not None:
        with pytest.raises(InputError, match=message):
            alike.check_alike(second, None)
        return
    alike.check_alike(second, None)
    different = {name for name, value in vars(first).items() if vars(second)[name] != value}
    assert different <= alike.OWN | alike.PATHS and second.report_to == "wandb"


def test_the_line_of_a_loader_s_worker_is_told_by_every_process(monkeypatch):
    """Its text is a traceback, of which a command prints the last line."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(failure_lines, "_get_default_store", lambda: store)
    monkeypatch.setattr(failure_lines, "dist", SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: 1))
    name = f"{InputError.__module__}.{InputError.__name__}"
    own = InputError(f"Caught InputError in DataLoader worker process 0.\nTraceback:\n{name}: --x: bad data\n")
    assert failure_lines.agreed(own) is own
    assert last_line(failure_lines.agreed(InputError("another"))) == "--x: bad data (process 1)"


STRETCHED = """
from open_clip_ext.distributed import rank
from open_clip_ext.losses import Loss
from open_clip_ext.main import leave, main

forward = Loss.forward

def stretched(loss, text_features, **features):
    factor = 1.1 if rank() == 1 and loss.steps == 1 else 1
    return forward(loss, text_features=factor * text_features, **features)

Loss.forward = stretched
leave(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["fastclip-v3", "amorlip"])
def test_one_batch_of_other_norms_on_another_process_ends_the_run(start, tmp_path, loss):
    shapes = f"--dataset-type shapes --train-num-samples 640 --epochs 1 --loss {loss} --log-every-n-steps 4 --name off"
    port = free_ports()
    first, second = (start(rank, port, shapes, ["-c", STRETCHED]) for rank in range(2))
    _, error = second.communicate(timeout=600)
    assert second.returncode == 1 and "step 2: text_features must be unit vectors" in error
    _, error = first.communicate(timeout=600)
    assert first.returncode == 1 and "lost another process" in error
    log = (tmp_path / "off/out.log").read_text()
    assert "Epoch 0 1/40" in log and "Epoch 0 9/40" not in log
    assert not list(tmp_path.glob("off/checkpoints/*.pt"))
