"""Saving the loss's state from two processes: called by both, and by process 0 alone."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from numerics import unit
from ports import free_ports

from open_clip_ext import create_loss, distributed

ROWS = 16
DIVIDED = {
    "fastclip-v3": {},
    "isogclr": {},
    "neuclip": {"npn_prototypes": 8, "npn_split": True},
}
WHOLE = {"queue": {"queue_size": 16}, "neuclip": {"npn_prototypes": 8}}


def stepped(name, settings, rank):
    loss = create_loss(name, num_samples=ROWS, epochs=1, **settings)
    loss.set_epoch(0)
    step(loss, rank)
    return loss


def step(loss, rank):
    generator = torch.Generator().manual_seed(rank)
    image, text = (unit(generator, 4, 6).float() for _ in range(2))
    loss(image, text, torch.tensor(10.0), index=torch.arange(4) + 4 * rank)


def process(rank, port, folder):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name, settings in WHOLE.items():
        loss = stepped(name, settings, rank)
        if rank == 0:
            create_loss(name, num_samples=ROWS, epochs=1, **settings).load_state_dict(loss.state_dict())
        step(loss, rank)
    losses = []
    for name, settings in DIVIDED.items():
        loss = stepped(name, settings, rank)
        losses.append(loss)
        state = loss.state_dict()
        if rank == 0:
            torch.save(state, f"{folder}/{name}.pt")
    distributed.SOON = distributed.AT_LAST = timedelta(seconds=0.5)
    dist.barrier()
    try:
        if rank == 0:
            for loss in losses:
                with pytest.raises(RuntimeError, match="process 0 waits for process 1; every process must call it"):
                    loss.state_dict()
        else:
            step(loss, rank)  # goes on, and loses process 0
    except RuntimeError:
        assert rank == 1
    os._exit(0)  # a group of which one is gone is not taken down


@pytest.mark.slow
def test_every_process_must_call_where_state_is_divided(tmp_path):
    mp.start_processes(process, (free_ports(), tmp_path), nprocs=2, start_method="fork")
    for name in DIVIDED:
        state = torch.load(tmp_path / f"{name}.pt", weights_only=True)["_extra_state"]
        if name == "fastclip-v3":
            assert state["state.log_u"][:8].isfinite().all()
