"""OpenCLIP's own flags keep working with our losses."""

from types import SimpleNamespace

import open_clip
import pytest
import torch
from conftest import ext_main
from open_clip_train import params
from open_clip_train.main import main as open_clip_main

from training_ext.flags.params import Parser, parse_args

DATA = "--dataset-type shapes --train-num-samples 32 --workers 0 --epochs 1 --lr 1e-3"
LOSSES = {"neuclip": "--loss neuclip --npn-prototypes 20 --rho 5", "fastclip-v3": "--loss fastclip-v3 --rho 5"}


@pytest.fixture
def seen(monkeypatch):
    """What the trained model and torch were asked to do in the latest step."""
    seen = SimpleNamespace(clipped=0)
    forward, clip = open_clip.CLIP.forward, torch.nn.utils.clip_grad_norm_

    def call(self, *args, **kwargs):
        device = self.logit_scale.device.type
        if device != "meta":  # the trial before the run
            seen.model, seen.autocast = self, torch.is_autocast_enabled(device)
        return forward(self, *args, **kwargs)

    def clip_grad_norm(*args, **kwargs):
        seen.clipped += 1
        return clip(*args, **kwargs)

    monkeypatch.setattr(open_clip.CLIP, "forward", call)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_grad_norm)
    return seen


@pytest.mark.parametrize(
    "loss, flags",
    [
        ("neuclip", "--precision amp_bf16 --grad-checkpointing"),
        ("fastclip-v3", "--precision amp_bfloat16 --lock-image --lock-image-unlocked-groups 1"),
        ("neuclip", "--precision bf16 --grad-clip-norm 1.0"),
        ("neuclip", "--precision pure_bf16 --lock-text --lock-text-freeze-layer-norm"),
        ("fastclip-v3", "--precision pure_bf16 --lock-image"),
        ("fastclip-v3", "--precision amp --grad-clip-norm 1.0"),
        ("neuclip", "--precision fp16 --local-loss --gather-with-grad"),
        ("fastclip-v3", "--precision pure_fp16 --force-patch-dropout 0.25"),
        ("fastclip-v3", "--lock-text --lock-text-freeze-layer-norm --lock-text-unlocked-layers 1 --skip-scheduler"),
        ("neuclip", "--lr-scheduler const-cooldown --epochs-cooldown 1"),
    ],
)
def test_a_flag(run, seen, loss, flags):
    experiment = run("x", f"{DATA} {LOSSES[loss]} {flags}")
    checkpoint = experiment.checkpoint(1)
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())
    state = checkpoint["open_clip_ext"]["state"]
    assert state["steps"] == 4
    kept = [value for key, value in state.items() if key in ("state.weight", "state.log_u")]
    assert kept[0].dtype == torch.float32 and kept[0].isfinite().all()
    precision = flags.split()[1] if "--precision" in flags else "fp32"
    types = {"bf16": torch.bfloat16, "pure_bf16": torch.bfloat16, "fp16": torch.float16, "pure_fp16": torch.float16}
    assert seen.model.visual.conv1.weight.dtype == types.get(precision, torch.float32)
    assert seen.autocast == precision.startswith("amp")
    assert seen.model.transformer.grad_checkpointing == ("--grad-checkpointing" in flags)
    assert getattr(seen.model.visual.patch_dropout, "prob", 0) == (0.25 if "--force-patch-dropout" in flags else 0)
    assert seen.clipped == (4 if "--grad-clip-norm" in flags else 0)
    rates = [0.5, 1, 1, 0.5]  # two steps of warm-up, two of a cosine
    if "--skip-scheduler" in flags:
        rates = [1, 1, 1, 1]
    elif "const-cooldown" in flags:  # linear to 0
        rates = [0.5, 1, 0.5, 0.25]
    assert [1e3 * rate for _, rate in experiment.logged("lr")] == pytest.approx(rates)


@pytest.mark.slow
def test_torchcompile(run, seen):
    test_a_flag(run, seen, "neuclip", "--torchcompile")


@pytest.mark.skipif(not hasattr(params.parse_args([]), "torchscript"), reason="this OpenCLIP has no --torchscript")
def test_a_scripted_model_resumes(run):
    """Its checkpoint also has the attention mask, which is a constant."""
    common = f"{DATA} {LOSSES['neuclip']} --torchscript"
    run("x", common)
    resumed = run("x", f"{common.replace('--epochs 1', '--epochs 2')} --resume latest")
    assert resumed.checkpoint(2)["open_clip_ext"]["state"]["steps"] == 8


def test_an_abbreviation_means_what_it_means_to_open_clip(monkeypatch):
    """Each beginning of each flag that tells it from OpenCLIP's others; flags of ours have no abbreviation."""
    parsers, parse = [], Parser.parse_args
    monkeypatch.setattr(Parser, "parse_args", lambda self, *rest: parsers.append(self) or parse(self, *rest))
    parse_args([])
    (made,) = parsers
    ours = {flag for action in made._ours for flag in action.option_strings}
    theirs = {flag for action in made._actions for flag in action.option_strings} - ours
    for flag in theirs | ours:
        for abbreviation in {flag[:length] for length in range(3, len(flag))} - theirs - ours:
            found = {name for _, name, *_ in made._get_option_tuples(abbreviation)}
            assert found == {other for other in theirs if other.startswith(abbreviation)}, abbreviation


SYNTHETIC = "--dataset-type synthetic --train-num-samples 16 --workers 0 --epochs 1 --lr 1e-3"


@pytest.mark.parametrize(
    "flags",
    [
        "--warmup 100 --wd -1 --eps 0 --report-to nonsense --zeroshot-frequency -1",
        "--epochs 0",
        "--batch-size 32",
        "--accum-freq 3",
        "--batch-size 1 --grad-clip-norm 0 --train-num-samples 15 --resume latest",
        "--lr-scheduler const-cooldown --epochs-cooldown 2 --lr 0",
        "--epochs 4 --save-frequency 2 --delete-previous-checkpoint --distill-model ViT-test",
        "--train-data= --val-data=",
    ],
)
def test_without_loss_all_that_open_clip_accepts_is_accepted(run, flags):
    theirs, ours = (run(name, f"{SYNTHETIC} {flags}", main) for name, main in (("a", open_clip_main), ("b", ext_main)))
    files = sorted(path.name for path in (theirs.path / "checkpoints").iterdir())
    assert files == sorted(path.name for path in (ours.path / "checkpoints").iterdir())
    for name in files:
        one, other = (torch.load(run.path / "checkpoints" / name, "cpu")["state_dict"] for run in (theirs, ours))
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("loss", ["clip", "fastclip-v3"])
@pytest.mark.parametrize(
    "flags, warning",
    [
        ("--warmup 100", "--warmup: 100 steps, but the training has 2, so the learning rate ends at 2 % of --lr"),
        ("--lr 0", "--lr: 0, so the weights do not change"),
        ("--epochs 0", "--epochs: 0 epoch(s) of 2 optimizer step(s), so nothing is trained"),
    ],
)
def test_a_training_that_is_defined_is_warned_of_once(run, loss, flags, warning):
    log = run("x", f"{SYNTHETIC} {LOSSES.get(loss, '--loss clip')} {flags}").log
    assert log.count(warning) == 1 and log.count(warning.split()[0]) == 1
    assert ("epoch_0.pt" in log) is False
