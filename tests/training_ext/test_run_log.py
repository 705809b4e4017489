"""What a training says: one short line a step, all numbers in a file, and a summary."""

import errno
import logging
import re
from argparse import Namespace
from math import inf, nan

import pytest
from conftest import LOSSES, ext_main, run_main

from open_clip_ext.metrics_file import MetricsFile, read_metrics
from open_clip_ext.retrieval import SIDES
from open_clip_ext.surrogates import PowerHinge
from training_ext.components import log as run_log
from training_ext.components.bad_samples import component as skips
from training_ext.components.log import Log, duration
from training_ext.components.summary import summary
from training_ext.core import hosts
from training_ext.core.epoch import Epoch, Evaluation
from training_ext.core.training import Training
from training_ext.flags.params import parse_args

FLAGS = "--dataset-type shapes --train-num-samples 48 --workers 0 --epochs 1"
PREFIX = len("2026-11-22,05:02:51 | INFO | ")


def test_the_line_of_a_large_training_fits(monkeypatch, caplog):
    """The millionth step of some, with every number at its longest."""
    args = Namespace(
        loss="neuclip", log_all=None, rank=0, save_logs=False, batch_size=4096, accum_freq=1, world_size=1, epochs=33,
        log_every_n_steps=1,
    )
    now = iter([0.0, 3600.0, 3600.0])
    monkeypatch.setattr(run_log, "time", Namespace(monotonic=lambda: next(now), time=lambda: 0.0))
    log = Log(args)
    log.training = Training([log], None, loss=Namespace(value_name="objective_learnable"))
    caplog.set_level(logging.INFO)
    first = 32 * 99_999
    loader = Namespace(first=49_999, num_batches=99_999)
    data = {"train": Namespace(dataloader=loader)}
    numbers = {
        "lr": 3.9e-05, hosts.installed().SCALE: 19.53, "objective_learnable": -12.3456, "normalizer_mse": 0.312,
        "minibatch_mse": 0.871,
    }

    def train(epoch):
        for name, number in numbers.items():
            epoch.writer.add_scalar(f"train/{name}", number, 32 * 99_999 + 50_999)
        log.step_done(51_000)

    log.epoch(Epoch(train, 32, 33, 32, data, first, 0, *(None,) * 5, args, None, None), train)
    line = caplog.messages[0]
    # 1,001 steps of 4,096 in an hour, and 48,999 to go.
    assert line == "Epoch 32 51000/99999 loss -12.35 lr 3.9e-05 tau 0.0512 error 0.31/0.87 1139/s left 48h57m"
    assert len(line) + PREFIX <= 120


@pytest.mark.parametrize(
    "rank, effective, warned", [(117.0, 30.0, True), (116.0, 30.0, False), (125.5, 20.0, False), (117.0, None, True)]
)
def test_a_model_that_has_learned_nothing(rank, effective, warned, caplog):
    """Chance's rank of 250 is 125.5 with a standard error of 4.6; 31 negatives with equal weights count as 31."""
    args = parse_args(f"{FLAGS} --model ViT-test --loss queue --lr 0.1 --batch-size 32 --report-to none".split())
    args.rank, args.save_logs, args.world_size = 0, False, 1
    log = Log(args)
    log._losses, log._numbers = [0.2], {} if effective is None else {"effective_negatives": effective}
    metrics = {f"{side}_mean_rank": max(rank, 117.0 * (side != SIDES[0])) for side in SIDES}
    log.evaluated(Evaluation(3, None, {}), {**metrics, "num_samples": 250})
    line = "After epoch 3 the model has learned nothing: the mean ranks among 250 pairs are 117.0 and 117.0, chance"
    assert [message.startswith(line) for message in caplog.messages] == [True] * warned
    assert not warned or caplog.messages[0].endswith("; the likely cause is --lr 0.1; usual is 1e-5 to 1e-3")


@pytest.mark.parametrize("similarity, warnings", [(-0.2, 1), (-0.05, 0)])
def test_negatives_beyond_the_margin_are_told_once(run, monkeypatch, similarity, warnings):
    """The gaps to the positives are the same for all pairs."""
    original = PowerHinge.value
    monkeypatch.setattr(PowerHinge, "value", lambda self, gap: original(self, gap.fill_(similarity)))
    experiment = run("x", f"{FLAGS} --loss tuneclip --tau-init 0.05 --osr-epochs 0 --epochs 2")
    assert experiment.log.count("Hardly any negative is within --margin 0.1 of its positive") == warnings


def test_durations():
    assert [duration(seconds) for seconds in (0, 59.4, 59.6, 725, 3600)] == ["0s", "59s", "1m00s", "12m05s", "1h00m"]


def test_the_terminal_is_spared_what_the_files_have(tmp_path, capsys):
    command = f"{FLAGS} {LOSSES['fastclip-v3']} --val-num-samples 8 --report-to tensorboard --name x"
    assert not run_main(ext_main, command, tmp_path)
    shown = capsys.readouterr().err
    log = (tmp_path / "x/out.log").read_text()
    assert "ResidualAttentionBlock" in log and "  wd: 0.2" in log
    assert "ResidualAttentionBlock" not in shown and "  wd: 0.2" not in shown
    assert "Model:" not in shown and " parameters; its structure and all flags: " in shown
    assert not re.search(r"^INFO:root", shown, re.MULTILINE)  # the same line again, in another form
    assert "metrics.jsonl; error is the estimated log-normalizers' / the minibatch's" in shown
    assert "Train Epoch" not in log and max(map(len, re.findall(r".* Epoch 0 \d.*", log))) <= 120
    steps = read_metrics(tmp_path / "x", "train")
    assert [(line["epoch"], line["step"], line["samples"]) for line in steps] == [(0, i, 8 * i) for i in range(1, 7)]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "x/tensorboard"))
    events.Reload()
    names = {tag.removeprefix("train/") for tag in events.Tags()["scalars"] if tag.startswith("train/")}
    means = {f"{name}_epoch_avg" for name in names}  # of an epoch, by OpenCLIP 4
    assert {"loss", "objective_learnable", "gamma", "samples_per_second"} <= names <= steps[-1].keys() | means
    (evaluated,) = read_metrics(tmp_path / "x", "eval")
    assert evaluated["epoch"] == 1 and evaluated["image_to_text_R@1"] >= 0
    assert log.count("effective_negatives") == 1  # taken once, and shown at the epoch's end


def test_a_full_disk_ends_the_file_and_not_the_training(run, monkeypatch):
    written = MetricsFile.add

    def add(self, line):
        if line["step"] == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(self, line)

    monkeypatch.setattr(MetricsFile, "add", add)
    monkeypatch.setattr(skips, "FILE", "missing/data.jsonl")
    experiment = run("x", f"{FLAGS} {LOSSES['queue']}")
    assert experiment.log.count(f"No more lines are added to {experiment.path}/metrics.jsonl: No space left") == 1
    assert f"No line was added to {experiment.path}/missing/data.jsonl: No such file" in experiment.log
    assert "Epoch 0 6/6" in experiment.log and len(experiment.logged()) == 2
    assert " error " not in experiment.log.split("Epoch 0 1/6")[1]  # of normalizers; so few steps have none


@pytest.mark.parametrize("loss", ["clip", "amorlip"])
def test_the_summary(run, loss):
    experiment = run("x", f"{FLAGS} {LOSSES[loss]} --val-num-samples 8")
    end = experiment.log.split("Done: ")[1]
    assert end.startswith(f"1 epoch(s) of {loss}; this run took ")
    assert f"open_clip_ext.evaluate --checkpoint {experiment.path}/checkpoints/epoch_1.pt --data FOLDER --out" in end
    assert ("normalizers_report" in end) == (loss != "amorlip")
    (evaluated,) = read_metrics(experiment.path, "eval")
    value = f"{evaluated['image_to_text_R@1']:.4f}"
    # One more of 8 right and wrong: (8 p + 1) / 10.
    p = (8 * evaluated["image_to_text_R@1"] + 1) / 10
    error = (p * (1 - p) / 8) ** 0.5
    assert re.search(rf"image_to_text_R@1 +{value} +{value} +1 +{error:.4f} +0.1250$", end, re.MULTILINE)
    line = rf"After epoch 1: R@1 image_to_text {value[:5]} ± {error:.3f}, text_to_image .*, chance 0.12$"
    assert re.search(line, experiment.log, re.MULTILINE)


def test_the_best_of_the_summary(tmp_path):
    folder = tmp_path / "logs/x"
    folder.mkdir(parents=True)
    file = MetricsFile(folder)
    for epoch, (recall, value) in enumerate([(0.1, 3.0), (0.3, inf), (0.2, 2.0), (0.2, nan)]):
        metrics = {"image_to_text_R@1": recall, "clip_val_loss": value, "top1": nan}
        file.add({"stage": "eval", "epoch": epoch, "step": 0, **metrics})
    file.close()
    args = Namespace(
        logs=str(tmp_path / "logs"), name="x", epochs=3, loss="queue", same_key=None, same_caption=False,
        positives=None, zeroshot_data="my classes", skip_scheduler=False, dataset_type="auto", val_data="val.csv",
        csv_separator=",", given_flags={"csv_separator", "val_data"},
    )
    text = list(summary(args, 61.0))
    data = "--zeroshot-data 'my classes' --val-data val.csv --csv-separator ,"
    assert any(line.endswith(f"epoch_3.pt {data} --out scores.jsonl") for line in text)
    assert text[-1].startswith("  (--lr then follows its schedule over all N epochs")
    lines = [line.split() for line in text]
    assert lines[0][-1] == "1m01s"
    assert ["image_to_text_R@1", "0.2000", "0.3000", "1"] in lines
    assert ["clip_val_loss", "not", "finite", "2.0000", "2"] in lines
    assert ["top1", "not", "finite"] in lines
