"""What a user can get wrong ends with exit code 2 and one line that names it, before anything is written."""

import builtins
import importlib.metadata
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from argparse import Namespace

import json_shards
import open_clip
import open_clip_train.main
import pytest
import torch
from conftest import LOSSES, SHIPPED, ext_main, run_main

import training_ext
from training_ext.flags.data_checks import check_imagenet
from training_ext.flags.params import parse_args
from training_ext.flags.usual import likely_cause
from training_ext.seams import seams

SHAPES = "--dataset-type shapes --train-num-samples 16 --workers 0 --epochs 1"
AS_FASTCLIP = "--normalizer table --encoder-objective compositional"
REFERENCE = f"{SHAPES} --model ViT-B-32 --loss drrho-clip --distill-model"
NEUCLIP, FASTCLIP = f"{SHAPES} --loss neuclip", f"{SHAPES} --loss fastclip-v3"
HUGE = "--dataset-type synthetic --train-num-samples 9000000000"


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (f"{SHAPES} --loss neuclipp", ["--loss: 'neuclipp'", "clip, siglip, cyclip", "did you mean 'neuclip'?"]),
        (f"{NEUCLIP} --npn-prototyps 3", ["--npn-prototyps 3", "'--npn-prototypes'?"]),
        (f"{NEUCLIP} --zzzz", ["--zzzz", "--help"]),
        (f"{NEUCLIP} --npn-lr fast", ["--npn-lr", "float", "'fast'"]),
        (f"{NEUCLIP} --batch-size many", ["--batch-size", "int", "'many'"]),
        (f"{NEUCLIP} --npn-updates -1", ["--npn-updates", "-1", "at least 0"]),
        (f"{NEUCLIP} --npn-opt lion", ["--npn-opt", "'lion'", "adagrad, adam, adamw, sgd"]),
        (f"{NEUCLIP} --rho nan", ["--rho", "nan", "number >= 0"]),
        (f"{NEUCLIP} --gamma 0.5", ["--gamma: the loss 'neuclip'", "does not use"]),
        (f"{FASTCLIP} --npn-lr 0.1", ["--npn-lr: the loss 'fastclip-v3'", "does not use"]),
        (f"{SHAPES} --loss clip --rho 5", ["--rho: the loss 'clip'", "does not use"]),
        (f"{SHAPES} --loss siglip --shard-sizes x.json", ["--shard-sizes", "--loss siglip", "does not use"]),
        (f"{FASTCLIP} --shard-sizes x.json", ["--shard-sizes", "shapes", "does not use"]),
        (f"{SHAPES} --npn-lr 0.1", ["--npn-lr", "needs --loss"]),
        (f"{SHAPES} --normalizer table", ["--normalizer", "needs --loss"]),
        (f"{SHAPES} --shard-sizes x.json", ["--shard-sizes", "needs --loss"]),
        (f"{NEUCLIP} --siglip", ["--siglip", "--loss neuclip"]),
        (f"{SHAPES} --loss clip --siglip", ["--siglip", "--loss clip"]),
        (f"{NEUCLIP} --normalizer nope", ["--normalizer: 'nope'", "table"]),
        (f"{NEUCLIP} --encoder-objective nope", ["--encoder-objective", "'nope'", "compositional, unified"]),
        (
            f"{NEUCLIP} --epochs 4 --save-frequency 2 --delete-previous-checkpoint",
            ["--delete-previous-checkpoint", "--save-frequency 2 it removes the only checkpoint"],
        ),
        (f"{FASTCLIP} --encoder-objective unified", ["--encoder-objective", "'unified'", "table", "'compositional'"]),
        (f"{NEUCLIP} --model coca_ViT-B-32", ["--model", "'coca_ViT-B-32'", "--loss clip"]),
        (f"{NEUCLIP} --distill-model RN50", ["--distill-model", "'RN50'", "--distill-pretrained"]),
        (f"{NEUCLIP} --distill-pretrained openai", ["--distill-pretrained", "'openai'", "--distill-model"]),
        (
            f"{NEUCLIP} --distill-model RN50 --distill-pretrained openai",
            ["--distill-model", "'RN50'", "--loss clip", "drrho-clip"],
        ),
        (f"{SHAPES} --loss drrho-clip", ["--distill-model", "--loss drrho-clip needs", "--distill-pretrained"]),
        (f"{REFERENCE} ViT-L-14-336 --distill-pretrained openai", ["'ViT-L-14-336' reads", "image size"]),
        (f"{REFERENCE} ViT-B-16-SigLIP --distill-pretrained webli", ["'ViT-B-16-SigLIP' reads", "tokenizer"]),
        (
            f"{REFERENCE} ViT-B-16-SigLIP2 --distill-pretrained webli --model ViT-B-16-SigLIP",
            ["--distill-model: 'ViT-B-16-SigLIP2' reads", "tokenizer"],
        ),
        (
            f"{REFERENCE} ViT-B-16-SigLIP --distill-pretrained webli --model ViT-B-16-SigLIP",
            ["--distill-model: 'ViT-B-16-SigLIP' reads", "--image-mean"],
        ),
        (
            f"{SHAPES} --loss siglip --distill-model RN50 --distill-pretrained openai",
            ["--distill-model", "'RN50'", "SigLIP's loss (--siglip), which does not distill"],
        ),
        (f"{NEUCLIP} --reference-gap", ["--reference-gap", "'prototypes'"]),
        (f"{NEUCLIP} --horovod", ["--horovod", "torchrun"]),
        (f"{NEUCLIP} --batch-size 1", ["--batch-size", "1", "at least 2 pairs"]),
        (f"{NEUCLIP} --batch-size 0", ["--batch-size", "0 in 1 process"]),
        (f"{NEUCLIP} --batch-size 32", ["--batch-size", "32", "16 samples"]),
        (f"{NEUCLIP} --accum-freq 3", ["--batch-size", "8", "--accum-freq 3", "16 samples"]),
        (f"{NEUCLIP} --accum-freq 0", ["--accum-freq", "0", "at least 1"]),
        (f"{NEUCLIP} --epochs -1", ["--epochs", "-1", "from 0"]),
        (f"{NEUCLIP} --log-every-n-steps 0", ["--log-every-n-steps", "0", "at least 1"]),
        (f"{NEUCLIP} --lr -1", ["--lr", "-1.0", "at least 0"]),
        (f"{NEUCLIP} --grad-clip-norm 0", ["--grad-clip-norm", "0.0", "every gradient is 0; leave it out not to clip"]),
        (f"{NEUCLIP} --lr-tau 0", ["--lr-tau", "0.0", "number > 0"]),
        (f"{NEUCLIP} --tau-init 0.02 --tau-min 0.03", ["--tau-init", "0.02", "--tau-min 0.03"]),
        (f"{NEUCLIP} --tau-min 0", ["--tau-min", "0.0", "(0, 1]"]),
        (f"{SHAPES} --loss sogclr --tau-min 0.03", ["--tau-min", "sogclr"]),
        (f"{NEUCLIP} --opt timm/adamw", ["--lr", "timm/adamw"]),
        ("--loss neuclip", ["--train-data", "--val-data"]),
        (f"{NEUCLIP} --train-data x.csv", ["--train-data", "'x.csv'", "--train-num-samples"]),
        (f"{NEUCLIP} --val-data x.csv", ["--val-data", "'x.csv'", "--val-num-samples"]),
        (f"{NEUCLIP} --train-num-samples 0", ["--train-num-samples", "0", "from 1"]),
        (f"{NEUCLIP} --val-num-samples -3", ["--val-num-samples", "-3", "from 1"]),
        (f"{NEUCLIP} --shapes-seed -1", ["--shapes-seed", "-1", "at least 0"]),
        ("--dataset-type shapes --loss neuclip", ["--train-num-samples", "shapes"]),
        ("--dataset-type shapes", ["--train-num-samples", "shapes"]),
        ("--dataset-type synthetic --loss neuclip", ["--train-num-samples", "synthetic", "at least 1"]),
        (
            "--dataset-type synthetic --train-num-samples 16 --shapes-seed 1 --loss neuclip",
            ["--shapes-seed", "1", "synthetic", "shapes"],
        ),
        ("--train-data x.parquet --loss neuclip", ["--train-data", "'x.parquet'", "--dataset-type"]),
        (
            "--dataset-type synthetic --train-num-samples 10000000000000 --loss fastclip-v3",
            ["--normalizer", "'table'", "10000000000000 rows", "74505.8 GiB"],
        ),
        (f"{HUGE} --loss neuclip --npn-prototypes 1000000000", ["--npn-prototypes: 1000000000 of", "GiB", "lower"]),
        (f"{SHAPES} --loss queue --queue-size 8", ["--queue-size: 8 holds nothing beside", "batch of 8 pairs"]),
        (
            f"{SHAPES} --loss queue --batch-size 10 --warmup 1",
            ["--queue-size: 16 samples in global batches of 10", "at most 8"],
        ),
        (f"{HUGE} --loss queue --queue-size 9000000000", ["--queue-size: 9000000000", "GiB", "lower it"]),
        (f"{NEUCLIP} --normalizer mlp --surrogate hinge", ["--surrogate: 'hinge'", "mlp", "'identity'"]),
        (f"{NEUCLIP} --negatives both", ["--negatives: 'both'", "prototypes", "'cross'"]),
        (f"{SHAPES} --loss amorlip --normalizer mlp", ["--normalizer: the loss 'amorlip' does not use it"]),
        (f"{SHAPES} --loss cyclip --rho 5", ["--rho: the loss 'cyclip' does not use it"]),
    ],
)
def test_command_line(refused, arguments, parts):
    line = refused(arguments)
    assert all(part in line for part in parts), line


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
    (folder / "n00000007/deeper/x.JPEG").rename(folder / "n00000007/deeper/x.txt")
    arguments = f"{NEUCLIP} --imagenet-val {folder}"
    assert f"--imagenet-val: '{folder}' has no image in the class folder 'n00000007'" in refused(arguments)
    shutil.rmtree(folder / "n00000007")
    assert f"--imagenet-val: '{folder}' has 999 class folders; " in refused(arguments)
    (folder / ".cache").mkdir()  # ImageFolder takes it for a class
    assert "has no image in the class folder '.cache'" in refused(arguments)


# Data


@pytest.fixture
def shard_folder(datasets):
    return shlex.split(datasets["shards"])[1].rpartition("/")[0]


def test_a_shard_that_is_damaged_or_missing(refused, shard_folder, tmp_path):
    whole = open(f"{shard_folder}/train-000000.tar", "rb").read()
    (tmp_path / "0.tar").write_bytes(whole[:700])  # within an image
    common = "--loss fastclip-v3 --workers 1 --dataset-type webdataset"
    line = refused(f"{common} --train-data {tmp_path}/0.tar")
    assert "--train-data" in line and f"{tmp_path}/0.tar" in line
    line = refused(f"{common} --train-data {tmp_path}/{{0,1}}.tar")
    assert "--train-data" in line and f"{tmp_path}/1.tar" in line
    line = refused(f"{common} --train-data {shard_folder}/train-000000.tar --val-data {tmp_path}/1.tar")
    assert "--val-data" in line and f"{tmp_path}/1.tar" in line


def test_remote_shards_without_sizes(refused):
    line = refused("--loss fastclip-v3 --dataset-type webdataset --train-data https://a.example/00.tar --workers 1")
    assert all(part in line for part in ("--train-data", "'https://a.example/00.tar'", "--shard-sizes", '{"00.tar": '))


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


def test_upsampling_factors_and_a_variable_in_the_path(refused, datasets, monkeypatch):
    """OpenCLIP fills in ${NAME} from WDS_NAME only without factors."""
    folder = datasets["shards"].split()[1].partition("/train-")[0]
    monkeypatch.setenv("WDS_SHARDS", folder)
    common = f"{datasets['shards'].replace(folder, '${SHARDS}')} --loss neuclip --workers 1 --dataset-resampled"
    line = refused(f"{common} --train-data-upsampling-factors 1")
    assert "--train-data: '${SHARDS}/train-" in line and line.endswith("write the paths out")


def test_upsampling_factors(refused, datasets):
    common = f"{datasets['shards']} --loss neuclip --workers 1 --train-data-upsampling-factors"
    line = refused(f"{common} 1::2 --dataset-resampled")
    assert "--train-data-upsampling-factors" in line and "'1::2'" in line
    line = refused(f"{common} lots --dataset-resampled")
    assert "--train-data-upsampling-factors" in line and "'lots'" in line
    two = common.replace(".tar", ".tar::/nothing/train-{000000..000001}.tar", 1)
    for factors in ("0::0", "-1::2", "nan::2", "inf::1"):
        line = refused(two.replace("--train-data-up", "--dataset-resampled --train-num-samples 48 --train-data-up")
                       + f"={factors}")
        assert f"--train-data-upsampling-factors: '{factors}'" in line and "not all 0" in line, line


def test_csv(refused, datasets, tmp_path):
    (tmp_path / "comma.csv").write_text("filepath,title\na.png,a\n")
    (tmp_path / "empty.csv").write_text("filepath\ttitle\n")
    (tmp_path / "nothing.csv").write_text("")
    common = "--loss neuclip --workers 0"
    for flag, before in (("--train-data", common), ("--val-data", f"{common} {datasets['csv']}")):
        line = refused(f"{before} {flag} {tmp_path}/comma.csv")
        parts = [r"--csv-separator: '\t' does not separate 'filepath,title'", f"{tmp_path}/comma.csv", "give ','"]
        assert all(part in line for part in parts), line
        for name in ("none.csv", "nothing.csv"):
            line = refused(f"{before} {flag} {tmp_path}/{name}")
            assert flag in line and f"{tmp_path}/{name}" in line
    line = refused(f"{common} --train-data {tmp_path}/comma.csv --csv-separator , --csv-caption-key text")
    assert all(part in line for part in ("--csv-caption-key", "'text'", "'filepath', 'title'")), line
    line = refused(f"{common} {datasets['csv']} --csv-separator ,")
    assert all(part in line for part in ("--train-data", "train.csv", "--csv-separator ','")), line
    line = refused(f"{common} {datasets['csv']} --csv-separator ((")
    assert all(part in line for part in ("--train-data", "train.csv", "--csv-separator '(('")), line
    line = refused(f"{common} --train-data {tmp_path}/empty.csv")
    assert "--train-data" in line and "no rows" in line
    line = refused(f"{common} {datasets['csv']} --val-data {tmp_path}/empty.csv")
    assert f"--val-data: '{tmp_path}/empty.csv' has no lines" in line


def test_validation_shards_without_a_pair(refused, datasets, tmp_path):
    with tarfile.open(tmp_path / "val.tar", "w") as tar:
        for name in ("0.json", "1.json"):
            (tmp_path / name).write_text('{"caption": "a"}')
            tar.add(tmp_path / name, name)
    line = refused(f"{datasets['shards']} --loss neuclip --workers 1 --val-data {tmp_path}/val.tar --val-num-samples 2")
    assert "--val-data: none of the first 2 samples can be used" in line and "no caption .txt but .json" in line


# Experiments and checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, datasets):
    """Path of a checkpoint by the loss that it was trained with."""
    folder = tmp_path_factory.mktemp("trained")
    paths = {}
    for name in ("neuclip", "fastclip-v3", "clip", "siglip", "isogclr"):
        loss = LOSSES.get(name, f"--loss {name}")
        assert not run_main(ext_main, f"{datasets['csv']} {loss} --workers 0 --epochs 1 --name {name}", folder)
        paths[name] = f"{folder}/{name}/checkpoints/epoch_1.pt"
    return paths


def test_an_experiment_that_exists(refused, run, checkpoints):
    run("old", f"{NEUCLIP} --npn-prototypes 8")
    for extra in ("", f"--resume {checkpoints['neuclip']}"):
        for loss in ("", "--loss neuclip"):
            line = refused(f"{SHAPES} {loss} --name old {extra}")
            assert all(part in line for part in ("--name", "'old'", "--resume latest"))


@pytest.mark.parametrize(
    "saved, arguments, parts",
    [
        ("fastclip-v3", LOSSES["neuclip"], ["--loss fastclip-v3 --normalizer table", "--loss neuclip"]),
        ("neuclip", f"--loss neuclip {AS_FASTCLIP}", ["--normalizer table"]),
        ("fastclip-v3", f"--loss neuclip {AS_FASTCLIP}", ["--loss fastclip-v3", "--loss neuclip"]),
        ("clip", LOSSES["neuclip"], ["not trained with --loss neuclip"]),
        ("neuclip", "--loss clip", ["--loss neuclip", "not with --loss clip"]),
        ("neuclip", "", ["--loss neuclip", "not with OpenCLIP's own loss"]),
        # The models of these train other tensors.
        ("isogclr", LOSSES["neuclip"], ["--loss isogclr", "--loss neuclip"]),
        ("siglip", LOSSES["neuclip"], ["not trained with --loss neuclip"]),
        ("neuclip", "--siglip", ["--loss neuclip", "not with OpenCLIP's own loss"]),
    ],
)
def test_a_checkpoint_of_another_loss(refused, datasets, checkpoints, saved, arguments, parts):
    line = refused(f"{datasets['csv']} --workers 0 {arguments} --resume {checkpoints[saved]}")
    assert all(part in line for part in ["--resume", checkpoints[saved], "--pretrained PATH", *parts]), line


@pytest.mark.parametrize(
    "loss, flags, part",
    [
        ("fastclip-v3", "--surrogate hinge", "--surrogate: hinge, but the table of"),
        ("fastclip-v3", "--negatives both", "--negatives: both, but"),
        ("neuclip", "--surrogate hinge", None),  # no state depends on it
    ],
)
def test_a_table_of_other_gaps(refused, datasets, checkpoints, tmp_path, loss, flags, part):
    arguments = f"{datasets['csv']} --workers 0 {LOSSES[loss]} {flags} --epochs 2 --resume {checkpoints[loss]}"
    if part is None:
        assert not run_main(ext_main, f"{arguments} --name y", tmp_path)
    else:
        assert part in refused(arguments)


def test_the_bias_that_siglip_adds(fails, datasets, checkpoints):
    common = f"{datasets['csv']} --workers 0 --epochs 2"
    for loss, path in (("clip", checkpoints["siglip"]), ("siglip", checkpoints["clip"])):
        line = fails(f"{common} --loss {loss} --resume {path}")
        assert f"--resume: {path}: OpenCLIP could not load the checkpoint" in line and "logit_bias" in line
    line = fails(f"{common} {LOSSES['neuclip']} --pretrained {checkpoints['siglip']}")
    assert f"--pretrained: {checkpoints['siglip']}: OpenCLIP could not load weights" in line


def test_a_checkpoint_of_other_settings(refused, datasets, checkpoints):
    common = f"{datasets['csv']} --workers 0 --loss neuclip --resume {checkpoints['neuclip']}"
    line = refused(f"{common} --npn-prototypes 30")
    assert all(part in line for part in ("--npn-prototypes: 30", checkpoints["neuclip"], "give 20")), line
    line = refused(f"{common} --npn-prototypes 20 --npn-opt sgd")
    assert all(part in line for part in ("--npn-opt: sgd", checkpoints["neuclip"], "give adagrad")), line


@pytest.mark.parametrize("loss", ["fastclip-v3", "neuclip"])
def test_a_checkpoint_of_other_data(refused, datasets, checkpoints, loss, tmp_path):
    header, *lines = open(shlex.split(datasets["csv"])[1]).read().splitlines()
    for name, changed in (("fewer", lines[:-1]), ("other", [*lines[:-1], f"{lines[-1]}!"])):
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *changed]))
        line = refused(
            f"--train-data {tmp_path}/{name}.csv --workers 0 {LOSSES[loss]} --resume {checkpoints[loss]}"
        )
        parts = ["--resume", checkpoints[loss], "48 rows", f"--train-data has {len(changed)}"]
        assert all(part in line for part in parts), line


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


def test_a_checkpoint_that_cannot_be_read(refused, run, datasets, checkpoints, tmp_path):
    common = f"{datasets['csv']} {LOSSES['neuclip']} --workers 0 --epochs 1"
    whole = open(checkpoints["neuclip"], "rb").read()
    (tmp_path / "torn.pt").write_bytes(whole[: len(whole) // 2])
    for name, part in (("torn.pt", "not a complete checkpoint"), ("none.pt", "does not exist")):
        for loss in (common, SHAPES):
            line = refused(f"{loss} --resume {tmp_path}/{name}")
            assert all(text in line for text in ("--resume", f"{tmp_path}/{name}", part)), line
    experiment = run("killed", common)
    latest = experiment.path / "checkpoints" / "epoch_1.pt"
    latest.write_bytes(whole[: len(whole) // 2])
    line = refused(f"{common} --name killed --resume latest")
    assert str(latest) in line and "not a complete checkpoint" in line


# OpenCLIP


def not_installed(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    "version, parts",
    [
        (lambda name: "2.24.0", ["2.24.0", ">=2.26,<4.0 or >=4.2,<4.3"]),
        (lambda name: "4.0.0", ["4.0.0", ">=2.26,<4.0 or >=4.2,<4.3"]),
        (not_installed, ["not installed", "pip install"]),
    ],
)
def test_an_unsupported_open_clip(refused, monkeypatch, version, parts):
    monkeypatch.setattr(importlib.metadata, "version", version)
    line = refused(NEUCLIP)
    assert all(part in line for part in ["open_clip_torch", *parts]), line


IN_OPEN_CLIP = [seam for seam in seams() if not hasattr(builtins, seam.path)]


@pytest.mark.parametrize("seam", IN_OPEN_CLIP, ids=lambda seam: seam.path)
def test_a_missing_seam(refused, monkeypatch, seam):
    # Of logging, which two seams have, the module's name for it.
    monkeypatch.delattr(f"{seam.module}.{seam.path.removesuffix('.info')}")
    line = refused(NEUCLIP)
    assert f"open_clip_torch {open_clip.__version__} has no {seam.module}.{seam.path}" in line


def test_training_code_that_cannot_be_imported(refused, monkeypatch):
    monkeypatch.delitem(sys.modules, "training_ext.seams")
    monkeypatch.delattr(training_ext, "seams")
    monkeypatch.delattr(open_clip_train.main, "main")
    line = refused(NEUCLIP)
    assert all(part in line for part in (open_clip.__version__, "'main'", "open_clip_train.main", "pip install")), line


# What is found while training: logs are there already


@pytest.fixture
def stopped(tmp_path, capsys):
    """stopped(arguments) -> the one line after which a run ends, and the folder of its checkpoints."""

    def stopped(arguments: str):
        capsys.readouterr()
        assert run_main(ext_main, f"{arguments} --name stopped", tmp_path / "logs") == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error and error.count("open_clip_ext: error: ") == 1, error
        line = error.strip().splitlines()[-1]
        assert line.startswith("open_clip_ext: error: ")
        return line, tmp_path / "logs" / "stopped" / "checkpoints"

    return stopped


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("loss", ["neuclip", "fastclip-v3"])
def test_a_sample_beyond_the_recorded_size(
    refused, stopped, datasets, shard_folder, tmp_path, workers, loss, monkeypatch
):
    (tmp_path / "sizes.json").write_text('{"train-000003.tar": 7}')
    line = refused(f"{datasets['shards']} {LOSSES[loss]} --shard-sizes {tmp_path}/sizes.json --workers {workers}")
    assert f"{shard_folder}/train-000003.tar' holds 8 samples where --shard-sizes" in line
    monkeypatch.setattr("training_ext.core.shards._to_check", lambda paths, recorded: set())  # as of remote shards
    line, folder = stopped(
        f"{datasets['shards']} {LOSSES[loss]} --workers {workers} --epochs 1 --shard-sizes {tmp_path}/sizes.json"
    )
    parts = ["--train-data", f"{shard_folder}/train-000003.tar", "recorded size of 7", "--shard-sizes"]
    assert all(part in line for part in parts), line
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize("log_every, accumulated", [(1, 1), (100, 1), (100, 2)])
def test_a_batch_that_is_not_finite(stopped, datasets, monkeypatch, log_every, accumulated):
    """The text of the second step of the second of three epochs."""
    encode, calls = open_clip.CLIP.encode_text, []
    steps = 6 // accumulated
    bad = (steps + 1) * accumulated * (1 if accumulated == 1 else 2) + 1

    def broken(self, *args, **kwargs):
        features = encode(self, *args, **kwargs)
        calls.append(None)
        return features * (float("nan") if len(calls) == bad else 1)

    monkeypatch.setattr(open_clip.CLIP, "encode_text", broken)
    line, folder = stopped(
        f"{datasets['shapes']} {LOSSES['fastclip-v3']} --workers 0 --epochs 3 --log-every-n-steps {log_every} "
        f"--accum-freq {accumulated}"
    )
    assert f"step {steps + 2}: text_features is not finite" in line
    assert [path.name for path in folder.iterdir()] == ["epoch_1.pt"]
    if log_every == 1:
        assert len(calls) == bad


@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_a_loss_of_open_clips_that_is_not_finite(stopped, loss):
    line, folder = stopped(f"{SHAPES} --loss {loss} --lr 1e30 --warmup 0 --epochs 2")
    assert "step 2: the loss is nan" in line and "the likely cause is --lr 1e+30" in line
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "loss, when", [("neuclip --npn-prototypes 8", "step 1"), ("clip", "epoch 0"), ("siglip", "epoch 0")]
)
def test_a_last_step_that_breaks_the_parameters(stopped, monkeypatch, loss, when):
    encode = open_clip.CLIP.encode_text

    def broken(self, *args, **kwargs):
        features = encode(self, *args, **kwargs)
        if features.requires_grad:
            features.register_hook(lambda gradient: gradient * float("inf"))
        return features

    monkeypatch.setattr(open_clip.CLIP, "encode_text", broken)
    line, folder = stopped(f"{SHAPES} --loss {loss} --batch-size 16 --warmup 0")
    assert f"{when}: positional_embedding is not finite" in line
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "cause, named",
    [
        (f"{FASTCLIP} --normalizer table --lr 1e29", "--lr 1e+29"),
        (f"{SHAPES} --loss sogclr --tau-init 1e-39", "--tau-init 1e-39"),
        (f"{FASTCLIP} --wd 1e29", "--wd 1e+29"),
        (f"{FASTCLIP} --image-mean 1e29", "--image-mean 1e+29"),
    ],
)
def test_the_likely_cause_of_what_is_not_finite(stopped, cause, named):
    line, _ = stopped(f"{cause} --epochs 3")
    assert "not finite" in line and f"the likely cause is {named}; usual is" in line, line


def test_no_advice_that_is_followed_already():
    flags = f"{SHAPES} --loss sogclr --lr 1e-3"
    assert likely_cause(parse_args(flags.split())) == "lower --lr (0.001), or give --grad-clip-norm 1.0"
    assert likely_cause(parse_args(f"{flags} --grad-clip-norm 1".split())) == "lower --lr (0.001)"


def test_a_full_disk(stopped):
    """One MiB for what is more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        line, folder = stopped(NEUCLIP)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    needed = re.search(r"needs (\S+) MiB", line)
    assert str(folder / "epoch_1.pt") in line and float(needed[1]) > 1, line
    assert not list(folder.iterdir())


def test_an_interrupted_run(tmp_path, capsys, monkeypatch):
    """Ctrl-C during the second step with OpenCLIP's own loss, whose order of the data cannot be repeated."""
    encode, calls = open_clip.CLIP.encode_text, []

    def interrupted(self, *args, **kwargs):
        features = encode(self, *args, **kwargs)
        calls.append(None)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return features

    monkeypatch.setattr(open_clip.CLIP, "encode_text", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert run_main(ext_main, f"{SHAPES} --loss clip --name stopped", tmp_path / "logs") == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.strip().splitlines()[-1].startswith("open_clip_ext: interrupted")
    assert not list((tmp_path / "logs/stopped/checkpoints").iterdir())


def test_what_open_clip_refuses_itself(stopped, monkeypatch):
    monkeypatch.setattr(open_clip_train.main, "remote_sync", lambda *args: False)
    line, _ = stopped(f"{NEUCLIP} --remote-sync there --remote-sync-protocol fsspec")
    assert "its own output above" in line


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
