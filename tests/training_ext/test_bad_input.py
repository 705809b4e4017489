"""What a user can get wrong ends with exit code 2 and one line that names it, before anything is written."""

import errno
import math
import multiprocessing
import multiprocessing.heap
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import json_shards
import open_clip
import open_clip_train.main
import pytest
import torch
from conftest import LOSSES, SHIPPED, ext_main, run_main

from open_clip_ext import main
from open_clip_ext.errors import MachineError
from training_ext.core import hosts
from training_ext.data.counting import check_num_samples
from training_ext.data.rows import DataRows
from training_ext.data.usual import likely_cause
from training_ext.flags.params import parse_args
from training_ext.flags.val_data import check_imagenet, shared_data

SHAPES = "--dataset-type shapes --train-num-samples 16 --workers 0 --epochs 1"
ROWS = DataRows("webdataset", 480, "", listing="")  # of shards that were not counted
NEUCLIP, FASTCLIP = f"{SHAPES} --loss neuclip", f"{SHAPES} --loss fastclip-v3"


def test_a_table_larger_than_memory(refused, run, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 255, "SC_PAGE_SIZE": 1}[name])
    line = refused(f"{FASTCLIP}")  # 16 rows: 128 bytes here and 128 while a checkpoint is written
    assert "--normalizer" in line and "16 rows" in line
    assert "--npn-prototypes: 8" in refused(f"{NEUCLIP} --npn-prototypes 8")
    run("batch", f"{NEUCLIP} --normalizer batch --encoder-objective compositional")


def test_class_folders_of_imagenet(refused, tmp_path):
    """OpenCLIP takes the folders' alphabetical numbers for those of its 1000 class names."""
    folder = tmp_path / "val"
    for number in range(1000):
        (folder / f"n{number:08}" / "deeper").mkdir(parents=True)
        (folder / f"n{number:08}" / "deeper" / "x.JPEG").touch()
    check_imagenet(Namespace(imagenet_val=str(folder)))
    arguments = f"{NEUCLIP} --imagenet-val {folder}"
    shutil.rmtree(folder / "n00000007")
    assert f"--imagenet-val: '{folder}' has 999 class folders; " in refused(arguments)


# Data


@pytest.mark.slow
def test_shards_for_every_loader(refused, run, datasets, monkeypatch):
    common = f"{datasets['shards']} --loss neuclip --npn-prototypes 8 --epochs 1"
    line = refused(f"{common} --workers 7")
    assert all(part in line for part in ("--workers", "7", "6", "--dataset-resampled"))
    # 3 shards of 8 samples in each of two workers; OpenCLIP would wait forever for a batch of 25.
    line = refused(f"{common} --workers 2 --batch-size 25")
    assert all(part in line for part in ("--workers", "2", "24 samples", "--batch-size is 25"))
    run("whole-batches", f"{common} --workers 2 --batch-size 24")
    run("resampled", f"{common} --workers 2 --batch-size 25 --dataset-resampled")
    monkeypatch.setenv("WORLD_SIZE", "4")
    line = refused(f"{common} --workers 2")
    assert "2 in each of 4 process(es) get 0 of the 6 shards each" in line
    monkeypatch.setenv("WORLD_SIZE", "7")
    line = refused(f"{common} --workers 0")
    assert "0 in each of 7 process(es) get 0 of the 6 shards each" in line


def test_workers_that_are_not_forked(refused, run, datasets, monkeypatch):
    """Python 3.14's default: they are forked all the same on Linux, and elsewhere shards are refused."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        common = f"{datasets['shards']} --loss fastclip-v3 --epochs 1"
        run("forked", f"{common} --workers 1")
        assert multiprocessing.get_start_method() == "forkserver"
        monkeypatch.setattr(main, "_forked_workers", nullcontext)
        line = refused(f"{common} --workers 1")
        assert "--workers: 1 processes that read shards must be forked" in line and line.endswith("; give 0")
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_shared_memory_that_cannot_be_written(ends, run, datasets, monkeypatch):
    """Without workers a csv needs none; OpenCLIP itself shares the epoch of shards."""

    def read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system", "/dev/shm/pym-1")

    monkeypatch.setattr(multiprocessing.heap.Heap, "malloc", read_only)
    monkeypatch.setattr(torch.UntypedStorage, "share_memory_", read_only)
    common = "--loss fastclip-v3 --epochs 1"
    if not hosts.installed().HAS_TASKS:  # whose data set of a csv shares the epoch, too
        run("csv", f"{datasets['csv']} {common} --workers 0 --several-captions")
    for data, workers in (("csv", 1), ("shards", 0)):
        assert "/dev/shm cannot be written: Read-only" in ends(f"{datasets[data]} {common} --workers {workers}")


def test_validation_data_that_are_trained_on(tmp_path, monkeypatch):
    """By whatever path: another spelling, a link, a folder in the other, a shard of several."""
    monkeypatch.chdir(tmp_path)
    for folder in ("pairs/inner", "others"):
        Path(folder).mkdir(parents=True)
    for file in ("a.csv", "b.csv", "0.tar", "1.tar"):
        Path(file).touch()
    Path("linked").symlink_to("pairs/inner")
    Path("linked.csv").symlink_to("a.csv")
    os.link("1.tar", "hard.tar")
    for train, val, shared in (
        ("a.csv", "others/../a.csv", "others/../a.csv"),
        ("a.csv", "linked.csv", "linked.csv"),
        ("a.csv", "b.csv", None),
        ("pairs", "linked", "linked"),
        ("linked", "pairs", "linked"),
        ("pairs", "others", None),
        ("{0..1}.tar", "hard.tar", "hard.tar"),
        ("0.tar", "1.tar", None),
        ("https://a.example/{0..1}.tar", "https://a.example/1.tar", "https://a.example/1.tar"),
    ):
        args = Namespace(train_data=train, val_data=val, dataset_type="auto")
        assert shared_data(args) == shared, (train, val)


@pytest.mark.parametrize("loss", ["clip", "neuclip", "fastclip-v3"])
def test_more_samples_than_there_are(ends, datasets, tmp_path, loss):
    """Counted or not: in one epoch OpenCLIP would go ten times over the shards."""
    line = ends(f"{datasets['shards']} --loss {loss} --workers 1 --train-num-samples 480")
    assert "--train-num-samples: 480, but " in line and "has 48; leave it out" in line
    assert not (tmp_path / "logs").exists()
    check_num_samples(parse_args(f"{datasets['resampled']} --train-num-samples 480".split()), ROWS)
    check_num_samples(parse_args(f"{datasets['shards']} --train-num-samples 240".split()), ROWS)


def test_validation_shards_without_a_pair(refused, datasets, tmp_path):
    with tarfile.open(tmp_path / "val.tar", "w") as tar:
        for name in ("0.json", "1.json"):
            (tmp_path / name).write_text('{"caption": "a"}')
            tar.add(tmp_path / name, name)
    line = refused(f"{datasets['shards']} --loss neuclip --workers 1 --val-data {tmp_path}/val.tar --val-num-samples 2")
    assert "--val-data: none of the first 2 samples can be used" in line and "no caption .txt but .json" in line


@pytest.mark.parametrize(
    "text, flags, parts",
    [
        ("filepath,title\na.png,a\n", "", [r"--csv-separator: '\t' does not separate 'filepath,title'", "give ','"]),
        ("filepath,title\na.png,a\n", "--csv-separator , --csv-caption-key text", ["has no column 'text'"]),
        ("filepath\ttitle\na.png\ta\n", "--csv-separator ((", ["--csv-separator '(('"]),
        ("filepath\ttitle\n", "", ["no "]),
        ("filepath\ttitle\na.png\té\n", "", ["is not in UTF-8 (", "; save it as UTF-8"]),
        ("", "", []),
    ],
)
@pytest.mark.parametrize("flag", ["--train-data", "--val-data"])
def test_csv(refused, datasets, tmp_path, flag, text, flags, parts):
    (tmp_path / "x.csv").write_text(text, encoding="latin-1")
    if flag == "--val-data" and "((" not in flags and "key" not in flags:
        flags += f" {datasets['shapes']} --dataset-type csv {datasets['csv']}"
    line = refused(f"--loss neuclip --workers 0 {flags} {flag} {tmp_path}/x.csv")
    assert all(part in line for part in [*parts, f"{tmp_path}/x.csv"]), line


# Experiments and checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, datasets):
    """Path of a checkpoint by the loss that it was trained with."""
    folder = tmp_path_factory.mktemp("trained")
    paths = {}
    for name in ("fastclip-v3", "siglip"):
        loss = LOSSES.get(name, f"--loss {name}")
        assert not run_main(ext_main, f"{datasets['csv']} {loss} --workers 0 --epochs 1 --name {name}", folder)
        paths[name] = f"{folder}/{name}/checkpoints/epoch_1.pt"
    return paths


def test_an_experiment_that_exists(refused, tmp_path):
    (tmp_path / "logs/old").mkdir(parents=True)
    (tmp_path / "logs/old/out.log").touch()
    for flags in ("", "--loss neuclip", "--dry-run"):
        line = refused(f"{SHAPES} --name old {flags}")
        assert all(part in line for part in ("--name", "'old'", "--resume latest"))
    for flags in ("", "--loss neuclip"):  # a name that is mistyped comes first
        assert "--resume" in (line := refused(f"{SHAPES} --name old {flags} --resume x.pt")) and "'x.pt'" in line


@pytest.mark.parametrize(
    "saved, arguments, parts",
    [
        ("fastclip-v3", LOSSES["neuclip"], ["--loss fastclip-v3 --normalizer table", "--loss neuclip"]),
        ("fastclip-v3", "--loss neuclip --normalizer table --encoder-objective compositional", ["--loss fastclip-v3"]),
        ("fastclip-v3", f"{LOSSES['fastclip-v3']} --negatives both", ["--negatives: both, but"]),
        ("fastclip-v3", "", ["--loss fastclip-v3", "not with OpenCLIP's own loss"]),
        # Whose model trains other tensors
        ("siglip", LOSSES["neuclip"], ["with OpenCLIP's own loss, not with --loss neuclip"]),
    ],
)
def test_a_checkpoint_of_another_loss(refused, datasets, checkpoints, saved, arguments, parts):
    line = refused(f"{datasets['csv']} --workers 0 {arguments} --epochs 2 --resume {checkpoints[saved]}")
    assert all(part in line for part in [checkpoints[saved], *parts]), line


def test_a_dry_run_refuses_other_data(refused, datasets, checkpoints):
    common = f"{datasets['csv']} --workers 0 {LOSSES['fastclip-v3']} --epochs 2 --csv-caption-key filepath"
    for last in ("--name x", "--dry-run"):
        line = refused(f"{common} --resume {checkpoints['fastclip-v3']} {last}")
        assert f"--resume: '{checkpoints['fastclip-v3']}' was trained on other data (as many rows, 48, with" in line


@pytest.mark.parametrize("saved", ["fastclip-v3", "siglip"])
def test_a_dry_run_refuses_another_model(refused, tmp_path, datasets, checkpoints, saved):
    """And other locked towers, which the run refuses, too; not what it accepts."""
    path = checkpoints[saved]
    common = f"{datasets['csv']} --workers 0 {LOSSES.get(saved, '--loss siglip')} --epochs 2 --resume {path} --dry-run"
    assert f"--resume: '{path}' has positional_embedding of (" in refused(f"{common} --model ViT-shapes-tiny")
    assert "trained parameters, not" in refused(f"{common} --lock-image")
    assert not run_main(ext_main, common, tmp_path)


def test_the_bias_that_siglip_adds(fails, datasets, checkpoints):
    line = fails(f"{datasets['csv']} --workers 0 --epochs 2 --loss clip --resume {checkpoints['siglip']}")
    assert f"--resume: {checkpoints['siglip']}: OpenCLIP could not load the checkpoint" in line and "logit_bias" in line
    line = fails(f"{datasets['csv']} --workers 0 {LOSSES['neuclip']} --pretrained {checkpoints['siglip']}")
    assert f"--pretrained: {checkpoints['siglip']}: OpenCLIP could not load weights" in line


def test_a_checkpoint_of_shards_that_were_written_anew(run, refused, tmp_path):
    """Of the same names and sizes; the rows of a table would be those of other samples."""
    data = json_shards.write(tmp_path, 16, lambda row: {}).format(last=1)
    common = f"{data} --workers 0 --epochs 2"
    for loss in ("fastclip-v3", "neuclip"):
        run(loss, f"{common} {LOSSES[loss]}")
    saved = {loss: tmp_path / f"logs/{loss}/checkpoints/epoch_1.pt" for loss in ("fastclip-v3", "neuclip")}
    first, second = (tmp_path / f"train-00000{number}.tar" for number in (0, 1))
    names = first.read_bytes(), second.read_bytes()
    second.write_bytes(names[0])
    first.write_bytes(names[1])
    line = refused(f"{common} {LOSSES['fastclip-v3']} --resume {saved['fastclip-v3']}")
    assert "--resume: " in line and "those in shard 'train-000000.tar' have other keys now" in line
    run("again", f"{common} {LOSSES['neuclip']} --resume {saved['neuclip']}")


@pytest.mark.parametrize("loss", ["neuclip", "queue", "cyclip"])
def test_a_loss_without_rows_resumes_with_more_shards(run, killed, datasets, loss):
    common = f"{LOSSES[loss]} --workers 1 --epochs 1 --name x --save-every-steps 2"
    killed("x", f"{datasets['shards'].replace('000005', '000003')} {common}", 3)
    resumed = run("x", f"{datasets['shards']} {common} --resume latest")
    assert "epoch_0_step_2.pt' was trained on other data (32 rows; --train-data has 48); the order" in resumed.log
    assert "=> resuming after step 2 of 6" in resumed.log and len(resumed.logged()) == 6


def test_a_checkpoint_of_another_reference_model(run, stopped, tmp_path):
    """A table holds normalizers of the reference's similarity gaps."""
    for name in ("first", "second"):
        torch.save(open_clip.create_model("ViT-test").state_dict(), tmp_path / f"{name}.pt")
    shutil.copy(tmp_path / "first.pt", tmp_path / "copy.pt")
    common = f"{SHAPES} --loss drrho-clip --workers 0 --distill-model ViT-test --distill-pretrained {tmp_path}"
    path = f"{run('first', f'{common}/first.pt --epochs 1').path}/checkpoints/epoch_1.pt"
    line, _ = stopped(f"{common}/second.pt --epochs 2 --resume {path}")
    assert f"--distill-pretrained: '{tmp_path}/second.pt' has other weights" in line and path in line
    assert run("copy", f"{common}/copy.pt --epochs 2 --resume {path}").checkpoint(2)


# OpenCLIP


def test_an_unsupported_open_clip(refused, monkeypatch):
    monkeypatch.setattr(hosts, "open_clip_version", lambda: "4.0.0")
    assert "open_clip_torch 4.0.0 is " in (line := refused(NEUCLIP)) and ">=2.26,<4.0 or >=4.2,<4.3" in line


def test_a_missing_seam(refused, monkeypatch):
    seam = next(seam for seam in hosts.installed().SEAMS if seam.path in ("create_loss", "create_task"))
    monkeypatch.delattr(f"{seam.module}.{seam.path}")
    assert f"open_clip_torch {open_clip.__version__} is installed, where there is no {seam.name}" in refused(NEUCLIP)


def test_training_code_that_cannot_be_imported(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, open_clip_train.main.__name__, None)
    for flags in ("", "--bare"):
        line = refused(f"{NEUCLIP} {flags}")
        assert all(part in line for part in (open_clip.__version__, "open_clip_train.main", "pip install")), line


@pytest.mark.parametrize(
    "environment, line",
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc' in the environment must be a whole number"),
        ({"SLURM_NTASKS": "2(x3)"}, "SLURM_NTASKS='2(x3)' in the environment must be"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "RANK='' in the environment must be"),
        ({"WORLD_SIZE": "2", "RANK": "5"}, "process 5 of 2, by the environment; ranks are from 0 to 1"),
    ],
)
@pytest.mark.parametrize("loss", ["", "--loss clip", "--loss clip --dry-run"])
def test_what_a_launcher_cannot_mean(refused, monkeypatch, environment, line, loss):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert refused(f"{SHAPES} {loss}").startswith(line)


# What is found while training: logs are there already


@pytest.fixture
def stopped(ends, tmp_path):
    """stopped(arguments) -> the line after which a run ends, and the names of its checkpoints."""

    def stopped(arguments: str, code: int = 2) -> tuple[str, list[str]]:
        line = ends(f"{arguments} --name stopped", code=code)
        return line, [path.name for path in (tmp_path / "logs/stopped/checkpoints").glob("*")]

    return stopped


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_beyond_the_recorded_size(refused, stopped, datasets, tmp_path, workers, monkeypatch):
    (tmp_path / "sizes.json").write_text('{"train-000003.tar": 7}')
    common = f"{datasets['shards']} {LOSSES['fastclip-v3']} --shard-sizes {tmp_path}/sizes.json --workers {workers}"
    assert "train-000003.tar' holds 8 samples where" in refused(common)
    monkeypatch.setattr("training_ext.data.shards._to_check", lambda paths, recorded: set())  # as of remote shards
    line, saved = stopped(f"{common} --epochs 1")
    assert all(part in line for part in ("--train-data", "train-000003.tar", "recorded size of 7", "--shard-sizes"))
    assert not saved


@pytest.fixture
def encode_text(monkeypatch):
    """encode_text(change): from now on the text tower's features are `change(features, number of the call)`."""

    def replace(change):
        forward, calls = open_clip.CLIP.forward, []

        def changed(self, *args, **kwargs):
            output = forward(self, *args, **kwargs)
            features = output["text_features"]
            if features is not None and not features.is_meta:  # as in the trial before the run
                calls.append(None)
                output["text_features"] = change(features, len(calls))
            return output

        monkeypatch.setattr(open_clip.CLIP, "forward", changed)
        return calls

    return replace


@pytest.mark.parametrize("log_every, accumulated", [(1, 1), (100, 2)])
def test_a_batch_that_is_not_finite(stopped, datasets, encode_text, log_every, accumulated):
    """The text of the second step of the second of three epochs."""
    steps = 6 // accumulated
    bad = (steps + 1) * accumulated * (1 if accumulated == 1 else 2) + 1
    calls = encode_text(lambda features, call: features * (float("nan") if call == bad else 1))
    line, saved = stopped(
        f"{datasets['shapes']} {LOSSES['fastclip-v3']} --workers 0 --epochs 3 --log-every-n-steps {log_every} "
        f"--accum-freq {accumulated}"
    )
    assert f"step {steps + 2}: text_features is not finite" in line and saved == ["epoch_1.pt"]
    assert log_every != 1 or len(calls) == bad


@pytest.mark.parametrize(
    "loss, logged",
    [
        ("clip", [4, 6, 5]), ("neuclip", [4, 6, 5]),
        ("sogclr --osr-epochs 1 --log-every-n-steps 4 --save-every-steps 2", [3, 3, 3]),
    ],
)
def test_steps_that_the_gradient_scaler_skips(run, stopped, datasets, encode_text, monkeypatch, loss, logged):
    """Within an epoch or a recovery of statistics, and the last of one; at a save; then all, which ends the run."""
    factors = {2: math.inf, 6: math.nan, 14: math.nan}
    calls = encode_text(lambda features, call: features * (math.nan if call > last else factors.get(call, 1)))
    last = 24 if "osr" in loss else 18
    flags = f"{datasets['shapes']} --loss {loss} --precision amp --workers 0 --epochs 3"
    experiment = run("skips", flags)
    name = "the loss is nan" if loss == "clip" else "text_features is not finite"
    for step in (2, 6, 14):
        assert experiment.log.count(f"step {step}: {name}; the gradient scaler has skipped it") == 1
    assert experiment.log.count("the gradient scaler has skipped it") == 3
    assert [epoch for epoch, _ in experiment.logged()] == [epoch for epoch in range(3) for _ in range(logged[epoch])]
    assert "mean loss nan" not in experiment.log
    assert all(weights.isfinite().all() for weights in experiment.checkpoint(3)["state_dict"].values())
    line, saved = stopped(flags)
    assert re.match(rf"step \d: {name}; lower --lr", line) and len(calls) == last + 5 and not saved


def test_gradients_that_no_scale_helps(run, stopped, datasets, encode_text, monkeypatch):
    def broken(features, call):
        if features.requires_grad:
            features.register_hook(lambda gradient: gradient * math.inf)
        return features

    encode_text(broken)
    flags = f"{datasets['shapes']} {LOSSES['neuclip']} --precision amp --workers 0 --epochs 3 --log-every-n-steps 100"
    line, saved = stopped(flags)
    assert line.startswith("the gradient scaler has skipped the last 18 step(s); its scale is 0.25; lower --lr")
    assert line.endswith("/checkpoints/epoch_2.pt'") and sorted(saved) == ["epoch_1.pt", "epoch_2.pt"]
    monkeypatch.setattr("training_ext.core.skipped_step.LEAST_SCALE", 0)
    log = run("skips", flags).log
    assert "Epoch 2: the gradient scaler has skipped 6 of 6 steps, whose gradients were not finite; its scale is" in log
    assert " of 2 logged step(s) (" in log


def test_a_model_that_only_an_evaluation_breaks(stopped, encode_text, tmp_path):
    """Its weights and its loss are finite. What ends the run is the last line of its log, too."""
    encode_text(lambda features, call: features if features.requires_grad else features * math.nan)
    line, _ = stopped(f"{SHAPES} {LOSSES['neuclip']} --val-num-samples 8 --keep-best clip_val_loss")
    assert line.startswith("after epoch 1: the model's embeddings of --val-data are not finite; lower --lr"), line
    assert line.endswith(f"; the last complete checkpoint is '{tmp_path}/logs/stopped/checkpoints/epoch_0_step_2.pt'")
    assert (tmp_path / "logs/stopped/out.log").read_text().endswith(f" | error: {line}\n")


@pytest.mark.parametrize(
    "cause, named",
    [
        ("--loss clip --lr 1e30 --warmup 0", "step 2: the loss is nan.*--lr 1e\\+30"),
        ("--loss fastclip-v3 --wd 1e29", "not finite.*--wd 1e\\+29"),
        ("--loss sogclr --tau-init 1e-39", "not finite.*--tau-init 1e-39"),
        ("--loss fastclip-v3 --image-mean 1e29", "not finite.*--image-mean 1e\\+29"),
    ],
)
def test_the_likely_cause_of_what_is_not_finite(stopped, cause, named):
    line, saved = stopped(f"{SHAPES} {cause} --epochs 3")
    assert re.search(f"{named}; usual is", line) and not saved, line


@pytest.mark.parametrize("loss, when", [("neuclip --npn-prototypes 8", "step 1"), ("clip", "epoch 0")])
def test_a_last_step_that_breaks_the_parameters(stopped, encode_text, loss, when):
    def broken(features, call):
        if features.requires_grad:
            features.register_hook(lambda gradient: gradient * float("inf"))
        return features

    encode_text(broken)
    line, saved = stopped(f"{SHAPES} --loss {loss} --batch-size 16 --warmup 0")
    assert f"{when}: positional_embedding is not finite" in line and not saved


def test_no_advice_that_is_followed_already():
    flags = f"{SHAPES} --loss sogclr --lr 1e-3"
    assert likely_cause(parse_args(flags.split())) == "lower --lr (0.001), or give --grad-clip-norm 1.0"
    assert likely_cause(parse_args(f"{flags} --grad-clip-norm 1".split())) == "lower --lr (0.001)"


def test_a_full_disk(stopped):
    """One MiB for what is more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        line, saved = stopped(NEUCLIP, code=MachineError.code)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "/epoch_1.pt' cannot be written: the disk or the quota is full; make room" in line and not saved, line


def test_an_interrupted_run(tmp_path, capsys, encode_text, monkeypatch):
    """Ctrl-C during the second step with OpenCLIP's own loss, whose order of the data cannot be repeated."""
    encode_text(lambda features, call: call == 2 and os.kill(os.getpid(), signal.SIGINT) or features)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert run_main(ext_main, f"{SHAPES} --loss clip --name stopped", tmp_path / "logs") == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.strip().splitlines()[-1].startswith("open_clip_ext: interrupted")
    assert not list((tmp_path / "logs/stopped/checkpoints").iterdir())
    end = "interrupted; what was not yet saved is lost; no checkpoint is complete\n"
    assert (tmp_path / "logs/stopped/out.log").read_text().endswith(end)


@pytest.mark.slow
def test_a_divergence_on_two_processes(tmp_path):
    """Started by torchrun, as a user does."""
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "--"]
        + f"open_clip_ext.main {SHIPPED} {NEUCLIP} --npn-prototypes 8 --lr 1e30 --batch-size 2 --epochs 100".split()
        + ["--logs", str(tmp_path), "--name", "x"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    assert result.returncode != 0
    assert "open_clip_ext: error: step 2: image_features is not finite" in result.stderr
    assert not list((tmp_path / "x" / "checkpoints").iterdir())
