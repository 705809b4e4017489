"""Every loss: gradient accumulation takes the steps of the whole batch."""

import open_clip
import pytest
import torch

from open_clip_ext import list_losses
from open_clip_ext.losses.accumulation import FirstCall

EVERY = [preset.name for preset in list_losses()]
# One of each normalizer, temperature, surrogate and objective
PARTS = "neuclip fastclip-v0 fastclip-v2 isogclr tuneclip queue amorlip cyclip siglip-chunked tempnet scent".split()
DATA = "--dataset-type shapes --train-num-samples 72 --workers 0 --epochs 1 --lr 1e-3"
FORMS = {"accumulated": "--batch-size 12 --accum-freq 2", "plain": "--batch-size 24"}
# Steps in proportion to the gradients: AdamW would scale those that are rounding errors up to whole steps.
BY_GRADIENTS = "--opt timm/sgd --momentum 0.9 --lr 0.1 --wd 0 --warmup 0 --save-frequency 1"


def options(name, folder=None):
    small = {
        "neuclip": "--npn-prototypes 40 --rho 5", "queue": "--queue-size 40 --rho 5",
        "drrho-clip": f"--distill-model ViT-test --distill-pretrained {folder}/reference.pt",
    }
    return f"{DATA} --loss {name} {small.get(name, '')}"


def finite(checkpoint):
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())
    return checkpoint


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_chunked_loss_trains_as_open_clips(run, name):
    """Three steps on all pairs, so that the two orders of the data have the same batches."""
    common = f"{DATA} {BY_GRADIENTS} --batch-size 72 --epochs 3 --aug-cfg scale=(1.0,1.0)"
    own, chunked = (
        run(loss, f"{common} --loss {loss}").checkpoint(3)["state_dict"] for loss in (name, f"{name}-chunked")
    )
    torch.manual_seed(0)  # as --seed does before the model is made
    start = open_clip.create_model("ViT-test", init_logit_bias=-10).state_dict()
    for key, value in own.items():
        moved = (value - start[key]).abs().max()
        # A float32 has 2**-24, and each step sums over thousands.
        assert moved > 0 and (chunked[key] - value).abs().max() <= 1e-3 * moved, key


def test_siglips_bias_moves_in_16_bits(run):
    """From -10, where the spacing of bfloat16's numbers is 0.06."""
    flags = f"{DATA} --loss siglip-chunked --precision pure_bf16 --batch-size 24 --lr 1e-3 --warmup 0"
    bias = run("x", flags).checkpoint(1)["state_dict"]["logit_bias"]
    assert bias.dtype == torch.float32 and 0 < abs(bias + 10) < 0.06


@pytest.mark.parametrize("name", PARTS)
def test_accumulation_takes_the_steps_of_the_whole_batch(run, name, monkeypatch):
    """Three steps on the same pairs in the same order; but for the last bits weights and tables are equal. The loss is
    computed once in each."""
    computed, compute = [], FirstCall.of
    monkeypatch.setattr(FirstCall, "of", lambda *args: computed.append(1) or compute(*args))
    accumulated, plain = (
        run(form, f"{options(name)} {BY_GRADIENTS} {FORMS[form]}") for form in ("accumulated", "plain")
    )
    assert len(computed) == 3
    checkpoints = [finite(experiment.checkpoint(1)) for experiment in (accumulated, plain)]
    states = [checkpoint["open_clip_ext"]["state"] for checkpoint in checkpoints]
    assert states[0]["steps"] == states[1]["steps"] == 3
    torch.manual_seed(0)  # as --seed does before the model is made
    (ours, whole), start = (checkpoint["state_dict"] for checkpoint in checkpoints), open_clip.create_model("ViT-test")
    moved = max((whole[key] - value).abs().max() for key, value in start.state_dict().items())
    assert moved > 1e-3
    assert ("logit_bias" in whole) == (name == "siglip-chunked")
    for key, value in whole.items():
        # Float32 encoders' similarities err by some 1e-6, and a gradient's weights, exponentials, by that over tau.
        assert (ours[key] - value).abs().max() < 1e-4 * moved, key
    for key in ("state.log_u", "temperature.log_s"):
        if key in states[1]:
            torch.testing.assert_close(states[0][key], states[1][key], rtol=1e-4, atol=1e-3)
