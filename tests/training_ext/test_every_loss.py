"""Every loss runs: by the command on two processes, and with gradient accumulation."""

import os

import open_clip
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import run_main
from ports import free_ports

from open_clip_ext import list_losses
from open_clip_ext.main import main

EVERY = [preset.name for preset in list_losses()]
DATA = "--dataset-type shapes --train-num-samples 72 --workers 0 --epochs 1 --lr 1e-3"
# 24 pairs a step on one process and on two.
TWO_PROCESSES = "--batch-size 12 --dist-backend gloo"
FORMS = {"accumulated": "--batch-size 12 --accum-freq 2", "plain": "--batch-size 24"}
# Steps in proportion to the gradients: AdamW would scale those that are rounding errors up to whole steps.
BY_GRADIENTS = "--opt timm/sgd --momentum 0.9 --lr 0.1 --wd 0 --warmup 0 --save-frequency 1"


def options(name, folder=None):
    small = {
        "neuclip": "--npn-prototypes 40 --rho 5", "queue": "--queue-size 40 --rho 5",
        "drrho-clip": f"--distill-model ViT-test --distill-pretrained {folder}/reference.pt",
    }
    return f"{DATA} --loss {name} {small.get(name, '')}"


def process(rank, port, folder):
    torch.set_num_threads(1)
    for number, name in enumerate(EVERY):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port + number), WORLD_SIZE="2")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        flags = "--ddp-static-graph --use-bn-sync" if number % 2 else ""
        assert not run_main(main, f"{options(name, folder)} {TWO_PROCESSES} {flags} --name {name}", folder)
        dist.destroy_process_group()


def finite(checkpoint):
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())
    return checkpoint


@pytest.mark.slow
def test_two_processes(tmp_path):
    torch.save(open_clip.create_model("ViT-test").state_dict(), tmp_path / "reference.pt")
    mp.start_processes(process, (free_ports(len(EVERY)), tmp_path), nprocs=2, start_method="spawn")
    for name in EVERY:
        checkpoint = finite(torch.load(tmp_path / name / "checkpoints/epoch_1.pt", weights_only=True))
        if name not in ("clip", "siglip"):
            assert checkpoint["optimizer"]["open_clip_ext"]["state"]["steps"] == 3, name


@pytest.mark.parametrize("name", [name for name in EVERY if name != "drrho-clip"])
def test_accumulation_takes_the_steps_of_the_whole_batch(run, name):
    """Three steps on the same pairs in the same order; but for the last bits weights and tables are equal."""
    accumulated, plain = (
        run(form, f"{options(name)} {BY_GRADIENTS} {FORMS[form]}") for form in ("accumulated", "plain")
    )
    checkpoints = [finite(experiment.checkpoint(1)) for experiment in (accumulated, plain)]
    if name in ("clip", "siglip"):  # OpenCLIP's accumulation has other gradients
        return
    states = [checkpoint["optimizer"]["open_clip_ext"]["state"] for checkpoint in checkpoints]
    assert states[0]["steps"] == states[1]["steps"] == 3
    torch.manual_seed(0)  # as --seed does before the model is made
    (ours, whole), start = (checkpoint["state_dict"] for checkpoint in checkpoints), open_clip.create_model("ViT-test")
    moved = max((whole[key] - value).abs().max() for key, value in start.state_dict().items())
    assert moved > 1e-3
    for key, value in whole.items():
        # A float32 has 2**-24, and each step sums over thousands.
        assert (ours[key] - value).abs().max() < 1e-5 * moved, key
    for key in ("state.log_u", "temperature.log_s"):
        if key in states[1]:
            torch.testing.assert_close(states[0][key], states[1][key], rtol=1e-4, atol=1e-3)
