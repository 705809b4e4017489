"""Several processes compute what one process computes on the concatenated batch."""

import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from open_clip.loss import ClipLoss
from ports import free_ports
from reference import unit

from open_clip_ext import create_loss, streaming
from open_clip_ext.collectives import CollectiveCounter
from open_clip_ext.distributed import ShardedRows
from open_clip_ext.normalizers import prototype_gradient

ROWS = 101
LOSSES = {
    "table": ("fastclip-v3", dict(num_samples=ROWS, gamma=0.4, gamma_schedule="constant")),
    "individual": (
        "fastclip-v2",
        dict(num_samples=ROWS, gamma=0.4, gamma_schedule="constant", tau_lr=0.01, surrogate="hinge", margin=1.0),
    ),
    "queue": ("queue", dict(queue_size=80, encoder_objective="unified", mixing=0.3)),
    "growing": ("neuclip", dict(npn_prototypes=80, npn_restart_every=2)),
    "complete": ("neuclip", dict(npn_prototypes=30, npn_restart_every=2)),
    # AdaGrad's first steps are lr times signs: at the paper's lr of 1.0 rounding decides some of them.
    "split, growing": ("neuclip", dict(npn_prototypes=83, npn_restart_every=2, npn_split=True, npn_lr=0.05)),
    "split, complete": ("neuclip", dict(npn_prototypes=30, npn_restart_every=2, npn_split=True, npn_lr=0.05)),
    "split, joint": ("neuclip", dict(npn_prototypes=30, npn_joint=True, npn_split=True)),
    "split, hinge": ("neuclip", dict(npn_prototypes=80, npn_split=True, npn_lr=0.05, surrogate="hinge", margin=0.3)),
    "split, individual": (
        "neuclip",
        dict(
            npn_prototypes=80, npn_split=True, npn_lr=0.05, npn_initial_accumulator=1.0, temperature="individual",
            num_samples=ROWS, tau_lr=0.01,
        ),
    ),
    "split, compositional": (
        "neuclip", dict(npn_prototypes=30, npn_split=True, npn_lr=0.05, encoder_objective="compositional")
    ),
    "joint": ("neuclip", dict(npn_prototypes=30, npn_joint=True)),
    "mlp": ("neuclip", dict(normalizer="mlp", npn_restart_every=2, npn_updates=2)),
    "unified individual": ("neuclip", dict(npn_prototypes=80, temperature="individual", num_samples=ROWS, tau_lr=0.01)),
    "unscaled": ("fastclip-v0", dict(num_samples=ROWS, gamma=0.4, gamma_schedule="constant")),
    "both sides": ("sogclr", dict(num_samples=ROWS, negatives="both")),
    "tuneclip": ("tuneclip", dict(num_samples=ROWS, gamma_schedule="constant", margin=1.0)),
    "cyclip": ("cyclip", dict(cyclip_inmodal=0.7)),
}
ACCUMULATIONS = (1, 2, 4)
GLOBAL_BATCH, DIMENSION, STEPS, MORE_STEPS = 48, 8, 5, 2


def encoders():
    generator = torch.Generator().manual_seed(1)
    image = torch.nn.Linear(10, DIMENSION)
    text = torch.nn.Linear(10, DIMENSION)
    with torch.no_grad():
        for parameter in [*image.parameters(), *text.parameters()]:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return torch.nn.ModuleDict({"image": image, "text": text})


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoders = encoders()
        self.logit_scale = torch.nn.Parameter(torch.tensor(2.5))

    def forward(self, image, text):
        features = [self.encoders[name](x) for name, x in (("image", image), ("text", text))]
        return *(torch.nn.functional.normalize(x, dim=1) for x in features), self.logit_scale.exp()


def train(name, rank, world, accum_freq=1, start=None, dtype=torch.float64, number=STEPS):
    """SGD steps as OpenCLIP's loop takes them: gradients of the first, values, and parameters and state after the last.

    Args:
        start: what an earlier call returned, to go on from for MORE_STEPS.
        number: of steps otherwise.
    """
    loss = create_loss(LOSSES[name][0], accum_freq=accum_freq, **LOSSES[name][1])
    model = Model().to(dtype)
    steps = range(number)
    if start is not None:
        loss.load_full_state(start["state"])
        model.load_state_dict(start["parameters"])
        steps = range(STEPS, STEPS + MORE_STEPS)
    model.logit_scale.requires_grad_(loss.trains_logit_scale)
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.002 if "unscaled" in name or "joint" in name else 0.1)
    first, values = None, []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        image, text = (unit(generator, GLOBAL_BATCH, 10).to(dtype) for _ in range(2))
        index = torch.randperm(ROWS, generator=generator)[:GLOBAL_BATCH]
        if step == 1:
            index[0] = index[-1]  # the same row on two processes
        local = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
        micro = list(zip(image[local].chunk(accum_freq), text[local].chunk(accum_freq), strict=True))
        optimizer.zero_grad()
        with torch.no_grad():
            held = [model(*pair)[:2] for pair in micro]
        for number, pair in enumerate(micro):
            *own, scale = wrapped(*pair)
            with_own = [*held[:number], own, *held[number + 1 :]]
            features = [torch.cat(parts) for parts in zip(*with_own, strict=True)]
            value = loss(*features, scale, index=index[local])
            value.backward()
        values.append(value.detach())
        first = first or {key: parameter.grad.clone() for key, parameter in trained.items()}
        optimizer.step()
    return {
        "gradients": first,
        "parameters": {key: p.detach().clone() for key, p in model.named_parameters()},
        "values": torch.stack(values),
        "state": loss.full_state(),
    }


def amortize(rank, world, epochs=2, steps=3):
    """Gradients of AmorLIP's steps and its state, for `world` processes.

    Stage I sees the global batch, so that the networks are those of one process; stage II only a process's own pairs:
    the gradients are the mean over the parts of the batch of what one process gets for a part from the same networks.
    """
    loss = create_loss("amorlip", epochs=epochs, amor_online_every=2, amor_denominator="target", amor_positive_weight=1)
    model = Model().double()
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    gradients = []
    for epoch in range(epochs):
        loss.set_epoch(epoch)
        for step in range(steps):
            generator = torch.Generator().manual_seed(10 * epoch + step)
            image, text = unit(generator, GLOBAL_BATCH, 10), unit(generator, GLOBAL_BATCH, 10)
            model.zero_grad()
            if dist.is_initialized():
                part = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
                loss(*wrapped(image[part], text[part])).backward()
            else:
                with torch.no_grad():
                    loss(*model(image, text))
                loss.eval()
                for other in range(world):
                    part = slice(other * GLOBAL_BATCH // world, (other + 1) * GLOBAL_BATCH // world)
                    with patch("open_clip_ext.losses.amorlip.world_size", lambda: world):
                        (loss(*model(image[part], text[part])) / world).backward()
                loss.train()
            gradients.append({key: p.grad.clone() for key, p in model.named_parameters()})
    return {"gradients": gradients, "state": loss.full_state()}


def check_table(rank, world):
    table = ShardedRows(11, 2, fill=-1.0)
    table.CHUNK = 2
    index = torch.tensor([0, 3, 10, 5, 3])
    values = torch.arange(10.0).view(5, 2)
    values[4] = values[1]
    table.assign(index, values)
    assert torch.equal(table.lookup(index), values)
    assert torch.equal(table.lookup(torch.tensor([1, 9])), torch.full((2, 2), -1.0))
    whole = table.gather()
    assert (whole is None) == (rank != 0)
    expected = torch.full((11, 2), -1.0)
    expected[index] = values
    if rank == 0:
        assert torch.equal(whole, expected)
    other = ShardedRows(11, 2, fill=0.0)
    other.load(expected)
    assert torch.equal(other.lookup(torch.arange(11)), expected)


def check_what_is_sent(rank, world):
    """Calls and bytes of a step; all less than OpenCLIP's own exact loss sends."""

    def sent(loss, **more):
        generator = torch.Generator().manual_seed(rank)
        for _ in range(2):  # networks are sent at their start
            image, text = (unit(generator, 8, 32).float().requires_grad_() for _ in range(2))
            with CollectiveCounter() as counter:
                loss(image, text, torch.tensor(10.0, requires_grad=True), **more).backward()
        return counter

    # Embeddings once, L, rows and alpha; u, and temperatures with their moments.
    calls = {
        "sogclr": {"all_gather_into_tensor": 4, "all_reduce": 1},
        "isogclr": {"all_gather_into_tensor": 5, "all_reduce": 2},
        "neuclip": {"all_gather_into_tensor": 3},
        "queue": {"all_gather_into_tensor": 3},
        "cyclip": {"all_gather_into_tensor": 2},
        "amorlip": {},  # a step without stage I
    }
    theirs = sent(ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world))
    assert theirs.calls["all_gather"] == 2 and theirs.bytes["all_gather"] == (world - 1) * 2 * 8 * 32 * 4
    for name, expected in calls.items():
        paper = {"amor_denominator": "target"} if name == "amorlip" else {}
        loss = create_loss(name, num_samples=ROWS, epochs=1, **paper)
        counter = sent(loss, index=torch.arange(8) + 8 * rank)
        assert counter.calls == expected, (name, dict(counter.calls))
        assert counter.sent < 0.75 * theirs.sent, name


def process(rank, world, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    # Several parts, where one process has all in one.
    prototype_gradient.CPU_PROTOTYPES = 5
    streaming.CPU_PART, streaming.LEAST_ROWS, streaming.CPU_TILE = 1, 5, (3, 4)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        check_table(rank, world)
        check_what_is_sent(rank, world)
        alone = torch.load(f"{folder}/alone.pt", weights_only=True)
        results = {}
        for name in LOSSES:
            for accum_freq in ACCUMULATIONS:
                results[f"{name}, {accum_freq}"] = train(name, rank, world, accum_freq)
            results[f"{name}, float32"] = train(name, rank, world, dtype=torch.float32, number=1)
            results[f"{name}, resumed"] = train(name, rank, world, start=alone[name])
        results["amorlip"] = amortize(rank, world)
        torch.save(results, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone():
    return {name: train(name, 0, 1) for name in LOSSES}


@pytest.fixture(scope="module")
def resumed(alone):
    return {name: train(name, 0, 1, start=alone[name]) for name in LOSSES}


@pytest.fixture(scope="module")
def single():
    """In float32, the first step."""
    return {name: train(name, 0, 1, dtype=torch.float32, number=1) for name in LOSSES}


def agree(name, actual, expected, has_state):
    for kind in ("gradients", "parameters"):
        for key, tensor in expected[kind].items():
            torch.testing.assert_close(actual[kind][key], tensor, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(actual["values"], expected["values"], rtol=1e-5, atol=1e-6)
    if has_state:
        assert actual["state"].keys() == expected["state"].keys()
        for key, value in expected["state"].items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(actual["state"][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("accum_freq", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_accumulation_alone(name, accum_freq, alone):
    agree(name, train(name, 0, 1, accum_freq), alone[name], has_state=True)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes_agree_with_one(world, alone, single, resumed, tmp_path):
    """With accumulation too; and going on from a state that one process saved."""
    torch.save(alone, tmp_path / "alone.pt")
    mp.start_processes(process, (world, free_ports(), str(tmp_path)), nprocs=world, start_method="spawn")
    amortized = amortize(0, world)
    for rank in range(world):
        results = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        actual = results["amorlip"]
        for own, expected in zip(actual["gradients"], amortized["gradients"], strict=True):
            for key, tensor in expected.items():
                torch.testing.assert_close(own[key], tensor, rtol=1e-5, atol=1e-7)
        if rank == 0:
            assert actual["state"].keys() == amortized["state"].keys()
            for key, tensor in amortized["state"].items():
                if isinstance(tensor, torch.Tensor):
                    torch.testing.assert_close(actual["state"][key], tensor, rtol=1e-5, atol=1e-7)
        for name in LOSSES:
            for accum_freq in ACCUMULATIONS:
                agree(name, results[f"{name}, {accum_freq}"], alone[name], has_state=rank == 0)
            for key, expected in single[name]["gradients"].items():
                difference = (results[f"{name}, float32"]["gradients"][key] - expected).abs().max()
                # Individual temperatures start at 0.01, where an exponent of 100 carries an error of 1e-5.
                bound = 2e-3 if name == "split, individual" else 2e-5
                assert difference <= bound * expected.abs().max(), (name, key)
            agree(name, results[f"{name}, resumed"], resumed[name], has_state=rank == 0)
            if rank == 0:
                again = train(name, 0, 1, start=results[f"{name}, 1"])  # saved by several, resumed by one
                agree(name, again, resumed[name], has_state=True)
