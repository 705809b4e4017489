"""The command lines of `wrong_flags`: wrong values by each flag's type, and those that take more to say."""

import argparse
import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from wrong_flags import Case

SHAPES = "--dataset-type shapes --train-num-samples 16 --workers 0 --epochs 1"
CSV = "--train-data {data}/train.csv --val-data {data}/train.csv --workers 0 --epochs 1"
SHARDS = "--dataset-type webdataset --train-data {data}/shards/train-{000000..000001}.tar --workers 1 --epochs 1"
EVALUATE = "--dataset-type shapes --val-num-samples 8 --workers 0"
LOSS = "--loss fastclip-v3"

WRONG = {
    int: ("many", "", "1.5", "-1", "0", "99999999999999999999"),
    float: ("many", "", "nan", "inf", "-inf", "-1", "0", "1e300"),
    str: ("nonsense", ""),
    bool: ("yes",),
}
VALUES = {"--csv-separator": (";", "")}  # in place of those of its type
# What stands before a flag so that it matters, where the common flags do not do.
CONTEXT = {
    "--epochs-cooldown": "--lr-scheduler const-cooldown",
    "--lr-cooldown-end": "--lr-scheduler const-cooldown --epochs-cooldown 1",
    "--lr-cooldown-power": "--lr-scheduler const-cooldown --epochs-cooldown 1",
    "--momentum": "--opt timm/momentum --lr 0.1",
    "--lock-image-unlocked-groups": "--lock-image",
    "--lock-text-unlocked-layers": "--lock-text --lock-text-freeze-layer-norm",
    "--remote-sync": "--name x --remote-sync-protocol fsspec",
    "--remote-sync-frequency": "--name x --remote-sync-protocol fsspec --remote-sync there",
    "--remote-sync-protocol": "--name x --remote-sync there",
    "--distill-pretrained": "--distill-model ViT-test",
    "--osr-transfer": "--osr-epochs 1",
    "--osr-surrogate": "--osr-epochs 1",
    "--val-frequency": "--val-num-samples 8",
    "--keep-best": "--val-num-samples 8",
    "--osr-save": "--osr-epochs 1",
}
DATA = {
    "--same-key": CSV, "--several-captions": CSV, "--captions-field": SHARDS,
    "--csv-separator": CSV, "--csv-img-key": CSV, "--csv-caption-key": CSV, "--train-data": "--workers 0 --epochs 1",
    "--val-data": f"{CSV.partition(' --val-data')[0]} --workers 0 --epochs 1",
    "--train-data-upsampling-factors": f"{SHARDS} --dataset-resampled", "--shard-sizes": SHARDS,
    "--dataset-type": "--train-num-samples 16 --workers 0 --epochs 1",
}
# Flags of which a loss of ours makes no use at all run with OpenCLIP's.
OPEN_CLIPS = ("--distill-model", "--distill-pretrained", "--horovod", "--siglip")
OURS = (
    "--loss", "--shard-sizes", "--tau-min", "--tau-start", "--normalizer", "--temperature", "--surrogate",
    "--encoder-objective",
)
PARSED = ("many", "yes", "1.5", "", "inf", "-inf", "0", "1e300", "99999999999999999999")  # alike for every loss
# Of the values above, those that are good ones.
RIGHT = {
    **dict.fromkeys(
        (
            "--amor-beta", "--amor-ema", "--amor-positive-weight", "--amor-reinit-every", "--beta1", "--beta2",
            "--coca-caption-loss-weight", "--coca-contrastive-loss-weight", "--consistency", "--cyclip-crossmodal",
            "--cyclip-inmodal", "--epochs", "--epochs-cooldown", "--force-patch-dropout",
            "--lock-image-unlocked-groups", "--lr", "--lr-cooldown-end", "--lock-text-unlocked-layers",
            "--margin", "--mixing", "--momentum", "--npn-initial-accumulator", "--npn-max-rise",
            "--npn-restart-every", "--npn-updates", "--npn-wd", "--osr-epochs", "--rho", "--rho-annealed-from",
            "--save-frequency", "--seed", "--shapes-seed", "--split-rows-above",
            "--tau-net-dropout", "--val-frequency", "--warmup", "--wd", "--workers", "--zeroshot-frequency",
        ),
        ("0",),
    ),
    "--image-mean": ("-1", "0"),
    "--rho-annealed": ("-1", "0"),
    **dict.fromkeys(("--cache-dir", "--logs", "--name", "--remote-sync", "--osr-save"), ("nonsense",)),
    **dict.fromkeys(("--wandb-notes", "--wandb-project-name"), ("nonsense", "")),
    **dict.fromkeys(("--pretrained", "--report-to", "--val-data"), ("",)),
}


def parser() -> argparse.ArgumentParser:
    """The command's own, with every flag."""
    from training_ext.flags import params

    made = []
    parse = params.Parser.parse_args

    def capture(self, *args, **kwargs):
        made.append(self)
        return parse(self, *args, **kwargs)

    with patch.object(params.Parser, "parse_args", capture):
        params.parse_args([])
    return made[0]


def loss_with(flag: str) -> str:
    """The first loss that has an option."""
    from open_clip_ext import InputError, factory

    name = flag.removeprefix("--").replace("-", "_")
    option = next((option for option in factory.all_options() if option.name == name), None)
    if option is None:
        return "--loss clip" if flag in OPEN_CLIPS else LOSS
    value = option.choices[0] if option.choices else option.type(1)
    for preset in factory.presets():
        for normalizer in (None, *factory.PARTS["normalizer"]):
            for more in ({}, {"encoder_objective": "compositional"}, {"temperature": "individual"}):
                given = {name: value, "normalizer": normalizer, **(more if normalizer else {})}
                try:
                    settings = factory.resolve_options(preset, given, 2)
                except InputError as error:
                    if "does not use it" in str(error) or "does not use" in str(error):
                        continue
                    settings = {name: value}
                if name in settings:
                    parts = {key: part for key, part in given.items() if part is not None and key != name}
                    parts_of = " ".join(f"--{key.replace('_', '-')} {part}" for key, part in parts.items())
                    return f"--loss {preset} {parts_of}".strip()
    raise AssertionError(f"no loss has {flag}")


def generated() -> list[Case]:
    cases = []
    for action in parser()._actions:
        flag = action.option_strings[-1]
        if flag in ("--help", "--list-losses"):
            continue
        kind = bool if action.nargs == 0 else action.type or str
        if not isinstance(kind, type):
            kind = type(kind("1"))
        loss = "" if flag == "--loss" else loss_with(flag)
        before = f"{DATA.get(flag, SHAPES)} {loss} {CONTEXT.get(flag, '')}"
        for value in VALUES.get(flag, WRONG[kind]):
            right = value in RIGHT.get(flag, ())
            cases.append(Case(flag, value, f"{before} {shlex.quote(f'{flag}={value}')}", is_right=right))
    return cases


def written() -> list[Case]:
    """Values that a type does not tell, and pairs that contradict each other."""
    ours = f"{SHAPES} {LOSS}"
    shards = f"{SHARDS} {LOSS}"
    wrong = {
        "--opt": ["lion", "timm/nonsense", "timm/", "timm/adahessian --lr 0.1"],
        "--beta1": ["1.0", "0.9 --opt timm/adamw --lr 0.1"],
        "--beta2": ["1.0"],
        "--lr-scheduler": ["linear", "const-cooldown", "const-cooldown --epochs-cooldown 3"],
        "--lr": ["0.1 --opt timm/lbfgs"],
        "--model": [
            "ViT-B-23", "local-dir:{data}/none", "local-dir:{data}/folder", "local-dir:", "hf-hub:",
        ],
        "--device": ["gpu", "cuda:99", "cpu:x", "meta", "mps"],
        "--force-image-size": ["4", "16 16 16", "33.5", "100000"],
        "--force-context-length": ["1"],
        "--force-patch-dropout": ["1.0"],
        "--image-mean": ["0.5 0.5", "0.5 0.5 nan"],
        "--image-std": ["0.5 0.5", "0.5 0.5 0"],
        "--aug-cfg": ["scale", "nonsense=1", "scale=2", "scale=(0.5,"],
        "--report-to": ["wandb", "wandb,tensorboard", "all"],
        "--trace": [""],
        "--horovod": [""],
        "--copy-codebase": [""],
        "--use-bnb-linear": ["SwitchBackLinearGlobal"],
        "--pretrained-image": [""],
        "--logs": ["{data}/text.pt", "{data}/text.pt/below", "/proc/logs"],
        "--name": ["../x", "/x", ".", "x/../..", "a/b/../../..", "x" * 300],
        "--cache-dir": ["{data}/text.pt"],
        "--pretrained": [
            "{data}/torn.pt", "{data}/foreign.pt", "{data}/list.pt", "{data}/text.pt", "{data}/none.pt",
            "{data}/folder",
            "{data}/ours/checkpoints/epoch_2.pt --model ViT-shapes-tiny", "openai", "{data}/none.safetensors",
            "{data}/text.safetensors", "{data}/text.npz",
        ],
        "--resume": [
            "{data}/torn.pt", "{data}/foreign.pt", "{data}/list.pt", "{data}/text.pt", "{data}/none.pt",
            "{data}/folder", "{data}/weights.pt", "{data}/epoch.pt --epochs 4", "{data}/no-optimizer.pt --epochs 4",
            "{data}/ours/checkpoints/epoch_2.pt", "{data}/ours/checkpoints/epoch_2.pt --epochs 1",
            "{data}/ours/checkpoints/epoch_2.pt --epochs 4 --model ViT-shapes-tiny",
            "{data}/ours/checkpoints/epoch_2.pt --epochs 4 --opt timm/sgd --lr 0.1",
            "{data}/ours/checkpoints/epoch_2.pt --epochs 4 --lock-text",
            "latest", "https://", "nonsense://x",
        ],
        "--tau-min": ["0.03 --temperature individual --tau-start 0.02", "0.03 --tau-init 0.02"],
        "--tau-start": ["2 --temperature individual", "0.02 --temperature individual --tau-max 0.01"],
        "--train-num-samples": ["15 --batch-size 16", "1099511627777"],
        "--batch-size": ["1", "17", "9 --accum-freq 2"],
        "--remote-sync": ["there", "nonsense://x --remote-sync-protocol fsspec", "there --resume latest --name x"],
        "--lock-text-unlocked-layers": ["99 --lock-text"],
        "--lock-text": [""],
        "--imagenet-val": ["{data}/none", "{data}/folder", "{data}/text.pt"],
        "--imagenet-v2": ["{data}/none", "{data}/folder"],
        "--keep-best": ["image_to_text_R@1 --val-frequency 0", "imagenet-zeroshot-val-top1"],
        "--osr-save": ["{data}/none/x --osr-epochs 1", "{data}/folder --osr-epochs 1", "x", "x.pt --osr-epochs 1"],
        "--osr-load": ["{data}/torn.pt", "{data}/list.pt", "{data}/text.pt", "{data}/folder"],
        "--osr-epochs": ["-1", "nan"],
        "--dist-url": ["nonsense"],
        "--dist-backend": ["nonsense"],
        "--distill-model": ["ViT-test"],
        "--loss": ["nonsense", "siglip --rho 3"],
    }
    cases = [Case(flag, value, f"{ours} {flag} {value}") for flag, values in wrong.items() for value in values]
    data = {
        "--train-data": [
            "{data}/none.csv", "{data}/text.pt", "{data}/folder", "{data}/none-{0..3}.tar", "{data}/{0..3.tar",
            "{data}/none.csv --dataset-type csv", "{data}/text.pt --dataset-type csv --csv-img-key filepath",
            "{data}/text.pt --dataset-type webdataset",
        ],
        "--val-data": ["{data}/none.csv --train-data {data}/train.csv", "{data}/folder --train-data {data}/train.csv"],
        "--csv-img-key": ["nonsense --train-data {data}/train.csv"],
        "--csv-separator": [", --train-data {data}/train.csv"],
    }
    common = f"{LOSS} --workers 0 --epochs 1"
    cases += [Case(flag, value, f"{common} {flag} {value}") for flag, values in data.items() for value in values]
    sharded = {
        "--train-data-upsampling-factors": ["1", "1::2 --dataset-resampled", "many --dataset-resampled"],
        "--shard-sizes": ["{data}/none", "{data}/folder", "{data}/text.pt", "{data}/list.json"],
        "--workers": ["3"],
    }
    cases += [Case(flag, value, f"{shards} {flag} {value}") for flag, values in sharded.items() for value in values]
    other = "{data}/clip/checkpoints/epoch_2.pt --epochs 4"
    cases.append(Case("--resume", other, f"{SHAPES} --loss sogclr --resume {other}"))
    evaluated = {"--resume": ["{data}/torn.pt", "{data}/foreign.pt", "{data}/list.pt"], "--model": ["ViT-B-23"]}
    cases += [
        Case(flag, value, f"{EVALUATE} {LOSS} {flag} {value}")
        for flag, values in evaluated.items() for value in values
    ]
    return cases


def with_open_clip(cases: list[Case]) -> list[Case]:
    """The same with OpenCLIP's own loss, where the flag is OpenCLIP's."""
    return [
        replace(case, value=f"{case.value} (clip)", arguments=case.arguments.replace(LOSS, "--loss clip"))
        for case in cases
        if f"{LOSS} " in case.arguments and case.flag not in OURS and case.value not in PARSED
    ]


def all_cases() -> list[Case]:
    cases = [*generated(), *written()]
    return [*cases, *with_open_clip(cases)]


def make_data(folder: Path) -> None:
    """Data sets and checkpoints, good and bad."""
    child = os.fork()
    if child == 0:
        try:
            _make_data(folder)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def _make_data(folder: Path) -> None:
    import torch
    from conftest import TINY
    from make_shards import main as make_shards

    from open_clip_ext.data import Scenes
    from open_clip_ext.main import main

    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    shards = f"shapes --out {folder}/shards --num-samples 32 --val-samples 8 --samples-per-shard 16 --image-size 32"
    assert not make_shards(shards.split())
    (folder / "images").mkdir()
    lines = ["filepath\ttitle"]
    for row, (image, caption) in enumerate(Scenes(16, image_size=32)):
        image.save(folder / "images" / f"{row}.png")
        lines.append(f"{folder}/images/{row}.png\t{caption}")
    (folder / "train.csv").write_text("\n".join(lines))
    for name, loss in (("ours", LOSS), ("clip", "--loss clip")):
        assert not main([*TINY.split(), *f"{SHAPES} --epochs 2 {loss} --logs {folder} --name {name}".split()])
    whole = (folder / "ours/checkpoints/epoch_2.pt").read_bytes()
    (folder / "torn.pt").write_bytes(whole[: len(whole) // 2])
    checkpoint = torch.load(folder / "ours/checkpoints/epoch_2.pt", weights_only=True)
    torch.save([1, 2], folder / "list.pt")
    torch.save({"a": torch.ones(2)}, folder / "foreign.pt")
    torch.save({"state_dict": checkpoint["state_dict"]}, folder / "weights.pt")
    torch.save({**checkpoint, "epoch": "two"}, folder / "epoch.pt")
    torch.save({key: value for key, value in checkpoint.items() if key != "optimizer"}, folder / "no-optimizer.pt")
    (folder / "text.pt").write_text("not a checkpoint")
    (folder / "sizes.json").write_text(json.dumps({"train-000000.tar": 16, "train-000001.tar": 16}))
    (folder / "list.json").write_text("[1]")
    for name in ("text.safetensors", "text.npz"):
        (folder / name).write_text("no weights")
    (folder / "folder").mkdir()
