"""OpenCLIP's own flags keep working with our losses."""

import pytest
import torch

DATA = "--dataset-type shapes --train-num-samples 32 --workers 0 --epochs 1 --lr 1e-3"
LOSSES = {"neuclip": "--loss neuclip --npn-prototypes 20 --rho 5", "fastclip-v3": "--loss fastclip-v3 --rho 5"}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "flags",
    [
        "--precision amp_bf16",
        "--precision amp_bfloat16",
        "--precision bf16",
        "--precision pure_bf16",
        "--precision amp",
        "--precision fp16",
        "--precision pure_fp16",
        "--grad-checkpointing",
        "--lock-image",
        "--lock-image --lock-image-unlocked-groups 1",
        "--lock-text --lock-text-freeze-layer-norm",
        "--lock-text --lock-text-freeze-layer-norm --lock-text-unlocked-layers 1",
        "--grad-clip-norm 1.0",
        "--local-loss --gather-with-grad",
        "--skip-scheduler",
        "--lr-scheduler const-cooldown --epochs-cooldown 1",
        "--force-patch-dropout 0.25",
    ],
)
def test_a_flag(run, loss, flags):
    experiment = run("x", f"{DATA} {LOSSES[loss]} {flags}")
    checkpoint = experiment.checkpoint(1)
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())
    state = checkpoint["optimizer"]["open_clip_ext"]["state"]
    assert state["steps"] == 4
    kept = [value for key, value in state.items() if key in ("state.weight", "state.log_u")]
    assert kept[0].dtype == torch.float32 and kept[0].isfinite().all()
    said = "--local-loss makes no difference" in experiment.log
    assert said == ("--local-loss" in flags)


@pytest.mark.slow
def test_torchcompile(run):
    test_a_flag(run, "neuclip", "--torchcompile")


def test_a_scripted_model_resumes(run):
    """Its checkpoint also has the attention mask, which is a constant."""
    common = f"{DATA} {LOSSES['neuclip']} --torchscript"
    run("x", common)
    resumed = run("x", f"{common.replace('--epochs 1', '--epochs 2')} --resume latest")
    assert resumed.checkpoint(2)["optimizer"]["open_clip_ext"]["state"]["steps"] == 8
