"""One's own classes, in the command and in the training; and which model a checkpoint is of."""

import io
import json
import logging
import shutil
from argparse import Namespace
from pathlib import Path

import open_clip
import pytest
import torch
from conftest import LOSSES, run_main
from PIL import Image
from safetensors.torch import save_file

from open_clip_ext import InputError
from open_clip_ext.evaluate import main as evaluate
from open_clip_ext.main import main as train
from training_ext.components.own_classes import OwnClasses
from training_ext.openclip.loading import warn_once
from training_ext.scoring.folders import Shards
from training_ext.tools.evaluation.models import find_checkpoint


@pytest.fixture(scope="module")
def classes(evalset, tmp_path_factory) -> Path:
    """The shards' images as class folders."""
    shards = evalset / "wds_evalset-colour_test"
    folder = tmp_path_factory.mktemp("own") / "colours"
    names = (shards / "classnames.txt").read_text().splitlines()
    for number, sample in Shards("--data", str(shards)).samples(lambda number: True):
        # The folders' order is that of the classes.
        path = folder / f"{sample.target}_{names[sample.target]}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.image)
    for name in ("classnames.txt", "zeroshot_classification_templates.txt"):
        (folder / name).write_text((shards / name).read_text())
    return folder


def own_line(path: Path) -> dict:
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    return line


def score(checkpoint: Path, data: Path, out: Path, *more: str) -> dict:
    command = f"--checkpoint {checkpoint} --zeroshot-data {data} --out {out} --device cpu --workers 0"
    assert not evaluate([*command.split(), *more])
    return own_line(out)


def test_class_folders_and_shards_are_the_same(classes, evalset, checkpoints, tmp_path, capsys):
    one = score(checkpoints[0], classes, tmp_path / "one.jsonl")
    other = score(checkpoints[0], evalset / "wds_evalset-colour_test", tmp_path / "other.jsonl")
    assert one["key"] == "zeroshot-data/colours" and one["samples"] == 42
    assert one["metrics"] == pytest.approx(other["metrics"])
    assert one["metrics"]["main_metric"] is None  # in no average
    out = capsys.readouterr().out
    assert f"accuracy {100 * one['metrics']['acc1']:.2f}, balanced accuracy" in out
    with Image.open(tmp_path / "one-colours.png") as picture:
        assert picture.size[0] > 400


@pytest.mark.parametrize("loss", ["", "fastclip-v3"])
def test_after_each_epoch_with_any_loss(loss, classes, datasets, tmp_path):
    flags = f"{LOSSES[loss] if loss else ''} {datasets['shapes' if loss else 'csv']} --epochs 2 --workers 0"
    best = "--keep-best zeroshot-data-balanced" if loss else ""
    assert not run_main(train, f"{flags} --lr 1e-2 --name run --zeroshot-data {classes} {best}", tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run/checkpoints/results.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for epoch, line in enumerate(lines, 1):
        found = score(tmp_path / f"run/checkpoints/epoch_{epoch}.pt", classes, tmp_path / f"{epoch}.jsonl")["metrics"]
        assert line["zeroshot-data-top1"] == pytest.approx(found["acc1"])
        assert line["zeroshot-data-balanced"] == pytest.approx(found["mean_per_class_recall"])
    if best:
        assert find_checkpoint(str(tmp_path / "run/best.pt"), None).label == "run/best"
        kept = torch.load(tmp_path / "run/best.pt", weights_only=True)["metrics"]
        assert kept["zeroshot-data-balanced"] == max(line["zeroshot-data-balanced"] for line in lines)


@pytest.mark.parametrize("long", [False, True])
def test_classes_of_one_name(long, classes, checkpoints, evalset, tmp_path, caplog):
    """Also where the context of the model cuts them to the same, in the command and at a training's start."""
    caplog.set_level(logging.WARNING)
    folders, shards = tmp_path / "own", tmp_path / "shards"
    shutil.copytree(classes, folders)
    shutil.copytree(evalset / "wds_evalset-colour_test", shards)
    names = (folders / "classnames.txt").read_text().splitlines()
    before = "the longer " * 100 if long else ""
    equal = [before + (name if long else names[min(row, 1)]) for row, name in enumerate(names[:3])]
    for folder in (folders, shards):
        caplog.clear()
        warn_once.cache_clear()
        (folder / "classnames.txt").write_text("\n".join([*equal, *names[3:]]))
        score(checkpoints[0], folder, tmp_path / f"{folder.name}.jsonl")
        (told,) = caplog.messages
        later, earlier = (1, 0) if long else (2, 1)
        first = f"first number {later + 1}, {equal[later][:60]!r}, like number {earlier + 1}, "
        assert f"{2 if long else 1} of the {len(names)} classes of '{folder}' are" in told and first in told
        caplog.clear()
        warn_once.cache_clear()
        flags = Namespace(zeroshot_data=str(folder), val_frequency=1, model="ViT-test", cache_dir=None)
        OwnClasses(Namespace(**vars(flags), force_context_length=None)).check_plan([])
        assert caplog.messages == [told]


def test_an_image_that_breaks_later_does_not_end_the_training(datasets, tmp_path):
    stream = io.BytesIO()
    Image.effect_noise((48, 48), 50).save(stream, "PNG")
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "1.png").write_bytes(stream.getvalue()[:900])  # its header is whole
    flags = f"{LOSSES['clip']} {datasets['shapes']} --epochs 1 --workers 0 --lr 1e-3 --name run"
    assert not run_main(train, f"{flags} --zeroshot-data {tmp_path}/data", tmp_path)
    assert "--zeroshot-data was not evaluated after epoch 1: --zeroshot-data: the image of" in (
        tmp_path / "run/out.log"
    ).read_text()
    assert (tmp_path / "run/checkpoints/epoch_1.pt").exists()


def test_what_is_wrong_is_found_before_the_training(classes, datasets, tmp_path, capsys):
    shutil.copytree(next(path for path in classes.iterdir() if path.is_dir()), tmp_path / "data/a")
    (tmp_path / "data/b").mkdir()
    (tmp_path / "data/b/1.jpg").write_bytes(b"<html>")
    for more, message in (
        (f"--zeroshot-data {tmp_path}/data", f"'{tmp_path}/data/b/1.jpg' cannot be read: it is not one of JPEG, PNG"),
        (f"--zeroshot-data {classes} --val-frequency 0", "--zeroshot-data: has no effect with --val-frequency 0"),
    ):
        capsys.readouterr()
        assert run_main(train, f"{LOSSES['clip']} {datasets['shapes']} --name run {more}", tmp_path / "logs") == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "logs").exists()


def test_the_same_data_in_another_place_have_the_same_score(classes, checkpoints, tmp_path):
    for place in ("a", "b"):
        shutil.copytree(classes, tmp_path / place / "val")
    before = score(checkpoints[0], tmp_path / "a/val", tmp_path / "own.jsonl")
    assert score(checkpoints[0], tmp_path / "b/val", tmp_path / "own.jsonl") == before
    (tmp_path / "b/val/classnames.txt").unlink()
    assert score(checkpoints[0], tmp_path / "b/val", tmp_path / "own.jsonl") != before


def test_the_model_of_a_checkpoint(checkpoints, classes, tmp_path, refused):
    found = find_checkpoint(str(checkpoints[0]), None)
    assert (found.model, found.label, found.flags, found.has_logit_bias) == ("ViT-test", "run/epoch_1", {}, False)
    expected = score(checkpoints[0], classes, tmp_path / "expected.jsonl")["metrics"]
    weights = torch.load(checkpoints[0], weights_only=True)["state_dict"]
    weights = {name.removeprefix("module."): value for name, value in weights.items()}
    other = tmp_path / "other"
    other.mkdir()
    save_file(weights, other / "weights.safetensors")
    with pytest.raises(InputError, match="--model: there is no params.txt"):
        find_checkpoint(str(other / "weights.safetensors"), None)
    found = score(other / "weights.safetensors", classes, other / "1.jsonl", "--model", "ViT-test")["metrics"]
    assert found == pytest.approx(expected)
    # Trained with SigLIP's loss, the model has one parameter more.
    torch.save({**weights, "logit_bias": torch.tensor(-10.0)}, other / "siglip.pt")
    found = score(other / "siglip.pt", classes, other / "2.jsonl", "--model", "ViT-test")["metrics"]
    assert found == pytest.approx(expected)
    good = f"--checkpoint {other}/siglip.pt --zeroshot-data {classes} --out {tmp_path}/3.jsonl --model"
    assert refused(f"{good} ViT-shapes-tiny").startswith("--model: 'ViT-shapes-tiny' with the weights of '")
    assert refused(f"{good} ViT-none").endswith("OpenCLIP does not know it")
    line = refused(f"{good} ViT-B-32 --pretrained no")
    assert "--pretrained: 'no' is not a tag of 'ViT-B-32', which has openai" in line
    (other / "siglip.pt").write_bytes(b"torn")
    assert "is not a complete checkpoint" in refused(f"{good} ViT-test")


def test_the_training_s_flags_are_those_of_the_evaluation(checkpoints, tmp_path):
    (tmp_path / "epoch_1.pt").write_bytes(checkpoints[0].read_bytes())
    (tmp_path / "params.txt").write_text(
        "model: ViT-B-16-SigLIP\npretrained: webli\nforce_image_size: [48]\nimage_std: None\nname: run\n"
    )
    found = find_checkpoint(str(tmp_path / "epoch_1.pt"), None)
    assert found.label == f"{tmp_path.name}/epoch_1" and found.flags["force_image_size"] == [48]
    # The preprocessing of the weights that it was fine-tuned from.
    assert found.flags["image_mean"] == found.flags["image_std"] == (0.5, 0.5, 0.5)
    assert found.flags["image_resize_mode"] == "squash" and "name" not in found.flags
    assert find_checkpoint(str(tmp_path / "epoch_1.pt"), "ViT-test").flags == {}
    found = find_checkpoint(str(tmp_path / "epoch_1.pt"), "ViT-B-16-SigLIP", "webli")
    assert found.flags["image_mean"] == (0.5, 0.5, 0.5)
    assert open_clip.get_model_config(found.model)
    with open(tmp_path / "params.txt", "a") as file:
        file.write("image_mean: {1, 2}\n")  # what no flag can be, and no JSON has
    assert find_checkpoint(str(tmp_path / "epoch_1.pt"), None).flags["image_mean"] == "{1, 2}"


@pytest.mark.parametrize(
    "model, warned",
    [("ViT-B-32", "give --model ViT-B-32-quickgelu"), ("ViT-B-32-quickgelu", None), ("ViT-B-16-SigLIP", None)],
)
def test_weights_of_another_activation(model, warned, checkpoints, tmp_path, caplog):
    path = Path(shutil.copy(checkpoints[0], tmp_path / "weights.pt"))
    find_checkpoint(str(path), model, "webli" if "SigLIP" in model else "openai")
    assert [record.message.rsplit(", ", 1)[1] for record in caplog.records] == ([warned] if warned else [])


def test_a_script_is_named(tmp_path, refused):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "openai.pt")
    line = refused(f"--checkpoint {tmp_path}/openai.pt --model ViT-B-32 --zeroshot-data {tmp_path} --out x.jsonl")
    assert "is a TorchScript archive" in line
