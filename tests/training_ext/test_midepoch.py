"""A run that is stopped at any step and resumed equals an uninterrupted one."""

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import LOSSES, Experiment, ext_main, run_main
from stop import ITERATE, Killed, StopAt, kill
from test_training import same
from torch.utils.data import DataLoader, IterableDataset

from open_clip_ext.errors import STOPS, InputError
from open_clip_ext.metrics_file import read_metrics
from training_ext.components import retrieval
from training_ext.components.exact_resume import stopping
from training_ext.components.exact_resume.stopping import StopRequest
from training_ext.components.loader_workers import LoaderWorkers
from training_ext.components.remote_sync import RemoteSync
from training_ext.core.rows import RowLoader
from training_ext.core.state import KEY

TIMES = {"time", "throughput", "data_time", "batch_time", "samples_per_second", "samples_per_second_per_gpu"}


@pytest.fixture
def logs(tmp_path):
    return tmp_path / "logs"


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C has its usual handler; a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def stopped(logs, monkeypatch, capsys):
    """stopped(name, arguments, stop) -> the experiment, stopped by the signal."""

    def stopped(name: str, arguments: str, stop: StopAt) -> Experiment:
        with monkeypatch.context() as patch:
            patch.setattr(RowLoader, "__iter__", stop)
            capsys.readouterr()
            assert run_main(ext_main, f"{arguments} --name {name}", logs) == 128 + stop.signal
            error = capsys.readouterr().err
            assert f"stopped by {stop.signal.name} after step" in error
            assert f"--name {name} --resume latest resumes there" in error
        assert stop.seen >= stop.batch
        return Experiment(logs, name)

    return stopped


def steps_of(experiment: Experiment) -> list[dict]:
    """All numbers of every step but what takes time."""
    lines = read_metrics(experiment.path)
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def equal(resumed: Experiment, whole: Experiment) -> None:
    lines = steps_of(resumed)
    assert lines == steps_of(whole) and {"stage", "samples", "lr", "tau"} <= lines[0].keys()
    same(resumed.checkpoint(2), whole.checkpoint(2))
    names = {path.name for path in (resumed.path / "checkpoints").iterdir()}
    assert names == {path.name for path in (whole.path / "checkpoints").iterdir()}


RESUMED = [
    ("neuclip", "csv", 0, "--precision bf16", 8),
    ("fastclip-v3", "csv", 2, "", 9),
    ("neuclip", "shards", 2, "", 3),
    ("neuclip", "resampled", 2, "--accum-freq 2", 7),
    ("fastclip-v3", "resampled", 0, "", 1),
    ("fastclip-v3", "shapes", 0, "--accum-freq 2 --lr-tau-scheduler model", 9),
    ("fastclip-v3", "shapes", 0, "--batch-size 4", 4),  # normalizer_mse is shown from the 10th step on, of 12
    ("sogclr", "shards", 0, "--train-num-samples 144", 14),  # in the third pass over the shards
    ("amorlip", "shapes", 0, "--accum-freq 2", 10),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("queue", "shards", 0, "", 4),
            ("isogclr", "csv", 0, "--accum-freq 2", 7),
            ("fastclip-v2", "shards", 1, "--save-most-recent", 10),
            ("joint", "shapes", 0, "", 9),
            ("cyclip", "shapes", 0, "--precision amp", 9),
            ("fastclip-v3", "synthetic", 0, "--opt timm/sgd --momentum 0.9 --lr 0.1", 9),
        )
    ),
]


@pytest.mark.parametrize("loss, data, workers, extra, batch", RESUMED)
def test_a_run_stopped_at_a_step_equals_an_uninterrupted_one(run, stopped, datasets, loss, data, workers, extra, batch):
    """Stopped by SIGTERM, or by Ctrl-C; and one that goes on from the file of an epoch."""
    common = f"{datasets[data]} {LOSSES[loss]} --workers {workers} --epochs 2 --force-patch-dropout 0.25 {extra}"
    whole = run("whole", common)
    stopped("resumed", common, StopAt(batch, signal=signal.SIGINT if data == "csv" else signal.SIGTERM))
    resumed = run("resumed", f"{common} --resume latest")
    assert "=> resuming after step" in resumed.log and "order of the data" not in resumed.log
    equal(resumed, whole)
    assert len(whole.logged("normalizer_mse")) == 6 or "--batch-size" not in extra
    again = run("again", f"{common} --resume {whole.path}/checkpoints/epoch_1.pt")
    assert again.logged() == [line for line in whole.logged() if line[0] == 1]
    same(again.checkpoint(2), whole.checkpoint(2))


def test_an_evaluation_that_is_killed_is_repeated_and_no_step(run, datasets, logs, monkeypatch):
    """After the last epoch, too; one after which nothing is saved or evaluated is saved at its end only."""
    often = "--epochs 3 --save-frequency 2 --val-num-samples 8 --val-frequency 3"
    common = f"{datasets['shapes']} {LOSSES['fastclip-v3']} --workers 0 {often}"
    whole = run("whole", common)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(retrieval, "validation_metrics", kill)
        run_main(ext_main, f"{common} --name resumed", logs)
    resumed = run("resumed", f"{common} --resume latest")
    assert resumed.log.count("Saved after step") == resumed.log.count("=> resuming after step 6 of 6") == 1
    assert steps_of(resumed) == steps_of(whole)
    same(resumed.checkpoint(3), whole.checkpoint(3))


@pytest.mark.parametrize(
    "loss, schedule", [("fastclip-v3", ""), ("clip", "--lr-scheduler const-cooldown --epochs-cooldown 0")]
)
def test_a_schedule_that_ends_at_the_last_step(run, datasets, loss, schedule):
    """Two batches of each epoch are left over, which after the last one are beyond the schedule."""
    common = f"{datasets['shapes']} {LOSSES[loss]} --workers 0 --epochs 2 --accum-freq 4"  # as many steps as --warmup
    experiment = run("x", f"{common} {schedule}")
    assert len(experiment.logged()) == 2 and experiment.checkpoint(2)["epoch"] == 2


@pytest.mark.parametrize("data, workers", [("shapes", 0), ("shards", 1)])
def test_a_recovery_goes_on_at_its_step(run, stopped, datasets, data, workers):
    """9 batches of recovery, in epochs of 6 and 3, and 12 of training, stopped in each part and at its last batch."""
    flags = f"--loss tuneclip --osr-epochs 1.5 --tau-init 0.05 --lr 1e-3 --workers {workers}"
    common = f"{datasets[data]} {flags} --epochs 2"
    whole = run("whole", common)
    for batch in (3, 3, 2, 1, 4):
        stop = StopAt(batch)
        (saved,) = (stopped("resumed", f"{common} --resume latest", stop).path / "checkpoints").iterdir()
        state = torch.load(saved, weights_only=True)[KEY]["components"]["recovery"]
        assert stop.seen == batch
        assert ("done" in state) == (batch < 4)  # then the training has begun
    resumed = run("resumed", f"{common} --resume latest")
    equal(resumed, whole)


def test_checkpoints_of_steps(run, killed, stopped, datasets, logs):
    """Saved after every fifth step of the training; the newest stays until its epoch's file is there."""
    common = f"{datasets['shapes']} {LOSSES['neuclip']} --workers 0 --epochs 2 --save-every-steps 5"
    whole = run("whole", common)
    folder = killed("resumed", common, 6).path / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["epoch_0_step_5.pt"]
    # It goes on with step 6; the tenth is step 4 of epoch 1, and the eleventh dies.
    killed("resumed", f"{common} --resume latest", 6)
    assert {path.name for path in folder.iterdir()} == {"epoch_1.pt", "epoch_1_step_4.pt"}
    stopped("resumed", f"{common} --resume latest", StopAt(1))
    assert {path.name for path in folder.iterdir()} == {"epoch_1.pt", "epoch_1_step_5.pt"}
    resumed = run("resumed", f"{common} --resume latest")
    equal(resumed, whole)
    *_, last = re.findall(r"\| Saved .*: (\S+\.pt)", resumed.log)
    assert Path(last) == folder / "epoch_2.pt"


def test_the_workers_of_an_evaluation_outlive_a_signal(logs, datasets, monkeypatch, capfd):
    """They persist; Ctrl-C comes to the whole process group in the epoch after it."""
    number = signal.SIGINT
    val = datasets["shards"].split()[1].replace("train-{000000..000005}", "val-000000")
    common = f"{datasets['shards']} --val-data {val} {LOSSES['fastclip-v3']} --workers 1 --epochs 2 --name x"
    others = set(multiprocessing.active_children())

    def iterate(loader):
        for item in ITERATE(loader):
            workers = set(multiprocessing.active_children()) - others
            if len(workers) == 2:  # of both loaders
                # From another process: torch's workers take one from their parent for the usual end.
                subprocess.run(["kill", f"-{number}", *(str(worker.pid) for worker in workers)], check=True)
                time.sleep(0.5)
                os.kill(os.getpid(), number)
            yield item

    with monkeypatch.context() as patch:
        patch.setattr(RowLoader, "__iter__", iterate)
        assert run_main(ext_main, common, logs) == 128 + number
    assert capfd.readouterr().err.count("Ctrl-C again ends at once") == 1  # not by workers
    assert (logs / "x/checkpoints/epoch_1_step_1.pt").exists()


@pytest.mark.parametrize("to_all", [False, True])
def test_a_stopped_run_copies_the_last_checkpoint(stopped, datasets, tmp_path, monkeypatch, to_all):
    """torchrun's SIGTERM goes to the whole group, so that the process that copies has ended before, and comes again
    once another process has ended."""
    end, ends_at_once = RemoteSync.end, signal.getsignal(signal.SIGTERM)

    def end_late(component, completed):
        assert signal.getsignal(signal.SIGTERM) != ends_at_once
        component._started[0].terminate()
        component._started[0].join(60)
        end(component, completed)

    if to_all:
        monkeypatch.setattr(RemoteSync, "end", end_late)
    others = set(multiprocessing.active_children())
    remote = tmp_path / "remote"
    common = f"{datasets['shapes']} {LOSSES['neuclip']} --workers 0 --epochs 1"
    more = "--save-most-recent"  # whose file OpenCLIP does not copy
    stopped("x", f"{common} {more} --remote-sync {remote} --remote-sync-protocol fsspec", StopAt(3))
    assert (remote / "x/checkpoints/epoch_0_step_3.pt").exists()
    for process in set(multiprocessing.active_children()) - others:
        process.join(60)
        assert process.exitcode is not None


def test_latest_is_of_this_folder_whatever_its_name(run, datasets):
    common = f"{datasets['csv']} {LOSSES['sogclr']} --workers 0"
    first = run("[a]*", f"{common} --epochs 1")
    backup = first.path / "checkpoints_old"
    shutil.copytree(first.path / "checkpoints", backup)
    (backup / "epoch_1.pt").rename(backup / "epoch_9.pt")
    resumed = run("[a]*", f"{common} --epochs 2 --resume latest")
    assert f"{first.path}/checkpoints/epoch_1.pt' (epoch 1)" in resumed.log
    assert [epoch for epoch, _ in resumed.logged()] == [0] * 6 + [1] * 6


def test_a_stop_after_an_epoch_s_last_step_comes_before_its_evaluation(run, stopped, datasets):
    common = f"{datasets['shapes']} --val-num-samples 8 {LOSSES['neuclip']} --workers 0 --epochs 1"
    experiment = stopped("x", common, StopAt(6))
    assert "Eval Epoch" not in experiment.log
    assert run("x", f"{common} --resume latest").log.count("image_to_text_R@1:") == 1
    assert len(experiment.logged()) == 6


@pytest.mark.slow
def test_another_order_goes_on_at_the_same_share(run, stopped, datasets):
    common = f"{datasets['shards']} {LOSSES['fastclip-v3']} --epochs 2 --batch-size 4 --train-num-samples 48"
    stopped("x", f"{common} --workers 2", StopAt(4))  # of 12
    log = run("x", f"{common} --workers 1 --seed 1 --accum-freq 2 --resume latest").log
    assert "was written with --seed 0, now 1; --accum-freq 1, now 2; --workers 2, now 1" in log
    assert "resuming after step 2 of 6 in this epoch" in log and log.count("Epoch 1 ") == 1 + 6
    stopped("y", f"{common} --workers 2", StopAt(4))
    log = run("y", f"{common} --workers 2 --dataset-resampled --resume latest").log
    assert "was written with --dataset-resampled False, now True" in log and "resuming after step 4 of 12" in log


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["fastclip-v3", "neuclip"])
def test_another_length_of_the_epoch_goes_on_at_the_same_step(run, stopped, datasets, loss):
    """With rows, whose shards are counted, and without."""
    common = f"{datasets['shards']} {LOSSES[loss]} --epochs 1 --workers 1"
    stopped("x", f"{common} --train-num-samples 24", StopAt(2))  # of 3
    log = run("x", f"{common} --train-num-samples 48 --resume latest").log
    assert "The length of an epoch changes: 3 steps in the checkpoint, now 6" in log
    assert "resuming after step 2 of 6" in log and "The order of the data" not in log
    whole = run("y", f"{common} --train-num-samples 48")
    resumed = Experiment(whole.path.parent, "x")
    assert [line["samples"] for line in read_metrics(resumed.path, "train")] == [8, 16, 24, 32, 40, 48]
    stopped("z", f"{common} --train-num-samples 48", StopAt(4))  # beyond the new length
    assert "resuming after step 2 of 3" in run("z", f"{common} --train-num-samples 24 --resume latest").log


PAIRS = [
    ("fastclip-v3", "shards", "--workers 1", 4, 1),
    ("neuclip", "shapes", "--workers 0 --ddp-static-graph --use-bn-sync", 2, 0),
    ("tuneclip", "csv", "--workers 0 --osr-epochs 1 --tau-init 0.05 --lr 1e-3", 2, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize("loss, data, extra, batch, rank", PAIRS)
def test_two_processes(datasets, pair, tmp_path, loss, data, extra, batch, rank):
    """One gets the signal; both end after the same step."""
    number = signal.SIGINT if loss == "neuclip" else signal.SIGTERM
    flags = LOSSES.get(loss, f"--loss {loss}")
    common = f"{datasets[data]} {flags} --epochs 2 --force-patch-dropout 0.25 {extra}"
    place = "training_ext.core.rows.RowLoader.__iter__"
    codes = [
        [process.code for process in pair(f"{common} --name {name}", tmp_path, **patches)]
        for name, patches in (
            ("whole", {}),
            ("resumed", {place: StopAt(batch, rank, number)}),
            ("resumed --resume latest", {}),
        )
    ]
    assert codes == [[0, 0], [128 + number] * 2, [0, 0]]
    equal(Experiment(tmp_path, "resumed"), Experiment(tmp_path, "whole"))


@pytest.mark.slow
def test_other_numbers_of_processes(datasets, pair, run, stopped, logs):
    common = f"{datasets['shards']} {LOSSES['fastclip-v3']} --epochs 2 --workers 1"
    stopped("x", common, StopAt(3))
    patches = {"training_ext.core.rows.RowLoader.__iter__": StopAt(3)}
    assert [process.code for process in pair(f"{common} --name x --resume latest", logs, **patches)] == [143, 143]
    experiment = run("x", f"{common} --resume latest")
    assert "processes 1, now 2" in experiment.log and "processes 2, now 1" in experiment.log
    assert experiment.log.count("=> resuming after step") == 2
    assert experiment.checkpoint(2)["open_clip_ext"]["state"]["state.log_u"].shape == (48, 2)


class Slow(IterableDataset):
    def __iter__(self):
        for number in range(4):
            time.sleep(0.1)
            yield number


def test_workers_outlive_sigterm_while_the_run_goes_on():
    outlive = LoaderWorkers(Namespace(workers=2))
    others = set(multiprocessing.active_children())
    loader = DataLoader(Slow(), batch_size=None, num_workers=1, worker_init_fn=outlive, persistent_workers=True)
    batches = iter(loader)
    assert next(batches) == 0
    (worker,) = set(multiprocessing.active_children()) - others
    for number in STOPS:
        os.kill(worker.pid, number)
    assert list(batches) == [1, 2, 3]
    outlive.end(True)  # of no loader: this one's worker remains
    with suppress(RuntimeError):  # torch's handler of SIGCHLD misses the worker
        worker.terminate()
        worker.join(60)
    worker.join(60)
    assert worker.exitcode == -signal.SIGTERM


def test_workers_end_with_the_run():
    """In an order that the garbage collector does not choose; it takes five seconds for each."""
    outlive = LoaderWorkers(Namespace(workers=2))
    others = set(multiprocessing.active_children())
    loader = DataLoader(Slow(), batch_size=None, num_workers=2, persistent_workers=True)
    outlive.workers_of(loader)
    batches = iter(loader)  # as a frame of a traceback may hold it
    assert next(batches) == 0
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    outlive.end(True)
    assert not any(worker.is_alive() for worker in workers)
    outlive.end(True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_does_what_it_did_once_a_run_is_over(number):
    before = signal.getsignal(number)
    request = StopRequest()
    assert not request.agreed()
    os.kill(os.getpid(), number)
    assert request.agreed() == number
    request.close()
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_ends_at_once(monkeypatch, capfd):
    request = StopRequest()
    try:
        for _ in range(2):  # the terminal's and a launcher's
            os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err.count("Ctrl-C again ends at once") == 1
        monkeypatch.setattr(stopping, "SAME_KEY", 0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        request.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_run_in_the_background_ignores_ctrl_c_and_one_of_nohup_its_terminal_s_end(number):
    before = signal.signal(number, signal.SIG_IGN)
    request = StopRequest()
    os.kill(os.getpid(), number)
    assert not request.agreed()
    request.close()
    signal.signal(number, before)


def test_a_network_that_gloo_does_not_find(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # NCCL's part is played by gloo
    try:
        monkeypatch.setattr(stopping, "world_size", lambda: 2)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
        with pytest.raises(InputError, match="^GLOO_SOCKET_IFNAME: 'nowhere0' .* network interface .*eth0"):
            StopRequest()
    finally:
        dist.destroy_process_group()


def test_a_checkpoint_of_before_there_were_steps(run, datasets):
    common = f"{datasets['shapes']} {LOSSES['neuclip']} --workers 0"
    path = run("a", f"{common} --epochs 1").path / "checkpoints/epoch_1.pt"
    checkpoint = torch.load(path, weights_only=True)
    entry = checkpoint.pop("open_clip_ext")
    old = {"format": 2, "data_digest": entry["components"]["same_data"]["digest"], **entry["parts"]}
    checkpoint["optimizer"]["open_clip_ext"] = old | {name: entry[name] for name in ("loss", "num_rows", "state")}
    torch.save(checkpoint, path)
    assert len(run("b", f"{common} --epochs 2 --resume {path}").logged()) == 6
