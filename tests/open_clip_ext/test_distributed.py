"""Several processes compute what one process computes on the concatenated batch.

Where the bounds come from. In float64, tables included, two orders of summation differ by some 1e-16 of the largest
term. The network's updates and the steps amplify that by some powers of ten: 1e-9 leaves room for them. In float32 one
process loses digits too, how many depends on the temperature and the processor. The test measures that loss, over
several batches that differ by float32's rounding, and allows several processes a small multiple of it.
"""

import os
import re
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from collectives import CollectiveCounter
from numerics import unit
from open_clip.loss import ClipLoss
from ports import free_ports

from open_clip_ext import create_loss, distributed, row_files
from open_clip_ext.distributed import GATHER
from open_clip_ext.kernels import prototype_gradient, streaming
from open_clip_ext.row_state import ShardedRows

ROWS = 101
# Small steps of the network and temperatures far from 0, so that rounding is not amplified beyond FLOAT64.
TABLE = dict(num_samples=ROWS, gamma=0.4, gamma_schedule="constant")
NPN = dict(npn_prototypes=80, npn_restart_every=2, npn_updates=3, npn_lr=0.05)
COMPLETE = {**NPN, "npn_prototypes": 30}
INDIVIDUAL = dict(temperature="individual", num_samples=ROWS, tau_start=0.1, tau_lr=0.001)
LOSSES = {
    "table": ("fastclip-v3", TABLE),
    "scent": ("scent", dict(num_samples=ROWS, gamma_exponent=1.0)),
    "tempnet": ("tempnet", dict(num_samples=ROWS, tau_min=0.05, tau_max=0.5, tau_net_prototypes=30, tau_net_lr=1e-3)),
    "reference": ("drrho-clip", TABLE),
    "keys": ("fastclip-v3", TABLE),
    "queue, keys": ("queue", dict(queue_size=80, mixing=0.3)),
    "prototypes, keys": ("neuclip", COMPLETE),
    "split, keys": ("neuclip", {**NPN, "npn_split": True}),
    "table, positives": ("isogclr", dict(num_samples=ROWS, tau_start=0.1)),
    "queue, positives": ("queue", dict(queue_size=80, mixing=0.3)),
    "split, positives": ("neuclip", {**NPN, "npn_split": True}),
    "clip-chunked, positives": ("clip-chunked", {}),
    "individual": ("fastclip-v2", {**TABLE, "tau_lr": 0.01, "surrogate": "hinge", "margin": 1.0}),
    "queue": ("queue", dict(queue_size=80, encoder_objective="unified", mixing=0.3, consistency=0.7)),
    "dcl, unscaled": ("dcl", dict(consistency=0.3)),
    "growing": ("neuclip", NPN),
    "complete": ("neuclip", COMPLETE),
    "split, growing": ("neuclip", {**NPN, "npn_prototypes": 83, "npn_split": True}),
    "split, complete": ("neuclip", {**COMPLETE, "npn_split": True}),
    "split, joint": ("neuclip", dict(npn_prototypes=30, npn_joint=True, npn_split=True)),
    "split, hinge": ("neuclip", {**NPN, "npn_split": True, "surrogate": "hinge", "margin": 0.3}),
    "split, individual": ("neuclip", {**NPN, **INDIVIDUAL, "npn_split": True}),
    "joint": ("neuclip", dict(npn_prototypes=30, npn_joint=True)),
    "mlp": ("neuclip", dict(normalizer="mlp", npn_restart_every=2, npn_updates=2)),
    "unified individual": ("neuclip", {**NPN, **INDIVIDUAL, "consistency": 0.7}),
    "fastclip code, individual": ("fastclip-v2", {**TABLE, "tau_start": 0.05, "tau_lr": 0.01, "fastclip_code": True}),
    "views": ("isogclr", dict(num_samples=ROWS, negatives="views", tau_start=0.05)),
    "tuneclip": ("tuneclip", dict(num_samples=ROWS, gamma_schedule="constant", margin=1.0)),
    "cyclip": ("cyclip", dict(cyclip_inmodal=0.7)),
    "clip-chunked": ("clip-chunked", {}),
    "siglip-chunked": ("siglip-chunked", {}),
}
ONE_OF_EACH_STATE = ["table", "individual", "tempnet", "queue, keys", "split, keys", "mlp", "clip-chunked"]
ACCUMULATIONS = {2: (1, 4), 3: (2,), 4: (1,)}  # by the number of processes
# Three divides neither the 101 rows nor 80 or 83 prototypes.
WORLDS = [3, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 4))]
GLOBAL_BATCH, DIMENSION, STEPS, MORE_STEPS = 48, 8, 4, 2
FLOAT64 = dict(rtol=1e-9, atol=1e-10)
# The first steps of AdaGrad and Adam are lr times a sign, which float32 decides where the true gradient is near zero.
SMOOTH = dict(npn_opt="adagrad", npn_lr=0.05, npn_initial_accumulator=1.0)
JITTERS, FLOAT32_FACTOR = 5, 8


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
        self.logit_bias = torch.nn.Parameter(torch.tensor(-1.5), requires_grad=False)

    def forward(self, image, text):
        features = [self.encoders[name](x) for name, x in (("image", image), ("text", text))]
        return *(torch.nn.functional.normalize(x, dim=1) for x in features), self.logit_scale.exp(), self.logit_bias


class WithLoss(torch.nn.Module):
    """Model and loss in one module."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, image, text, **more):
        return self.loss(*self.model(image, text), **more)


def train(name, rank, world, accum_freq=1, start=None):
    """SGD steps as OpenCLIP's loop takes them: gradients of the first, values, and parameters and state after the last.

    Args:
        start: what an earlier call returned, to resume from for MORE_STEPS.
    """
    loss = create_loss(LOSSES[name][0], accum_freq=accum_freq, **LOSSES[name][1])
    loss.set_epoch(0)
    model = Model().double()
    steps = range(STEPS)
    if start is not None:
        loss.load_full_state(start["state"])
        model.load_state_dict(start["parameters"])
        steps = range(STEPS, STEPS + MORE_STEPS)
    model.logit_scale.requires_grad_(loss.trains_logit_scale)
    model.logit_bias.requires_grad_(loss.takes_bias)
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.002 if "unscaled" in name or "joint" in name else 0.1)
    first, values = None, []
    for step in steps:
        image, text, index = global_batch(step)
        local = local_part(rank, world)
        micro = list(zip(image[local].chunk(accum_freq), text[local].chunk(accum_freq), strict=True))
        optimizer.zero_grad()
        with torch.no_grad():
            held = [model(*pair)[:2] for pair in micro]
        for number, pair in enumerate(micro):
            *own, scale, bias = wrapped(*pair)
            with_own = [*held[:number], own, *held[number + 1 :]]
            features = [torch.cat(parts) for parts in zip(*with_own, strict=True)]
            value = loss(*features, scale, bias, index=index[local], **more_of(name, loss, image[local], text[local]))
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


def global_batch(step):
    """Inputs of both encoders and rows, the same on every process."""
    generator = torch.Generator().manual_seed(step)
    image, text = (unit(generator, GLOBAL_BATCH, 10) for _ in range(2))
    index = torch.randperm(ROWS, generator=generator)[:GLOBAL_BATCH]
    if step == 1:
        index[0] = index[-1]  # the same row on two processes
    return image, text, index


def more_of(name, loss, image, text):
    """A reference model's features, where the loss takes them: the inputs, which are unit vectors. Keys: one of four,
    by signs of the image, which rounding leaves alone."""
    if "keys" in name or "positives" in name:
        key = (image[:, 0] > 0).long() + 2 * (image[:, 1] > 0)
        return dict(key=key) if "keys" in name else dict(positive_key=key)
    return dict(dist_image_features=image, dist_text_features=text) if loss.takes_reference else {}


def local_part(rank, world):
    return slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)


def first_gradients(name, rank, world, dtype, jitter=None):
    """Gradients of the first step, every parameter's.

    Args:
        jitter: seed of a noise on the inputs, as large as float32's rounding of them.
    """
    preset, settings = LOSSES[name]
    smooth = SMOOTH if preset == "neuclip" and not settings.get("npn_joint") else {}
    loss = create_loss(preset, **{**settings, **smooth})
    loss.set_epoch(0)
    model = Model().to(dtype)
    model.logit_scale.requires_grad_(loss.trains_logit_scale)
    model.logit_bias.requires_grad_(loss.takes_bias)
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    image, text, index = global_batch(0)
    if jitter is not None:
        generator = torch.Generator().manual_seed(jitter)
        image, text = (x * (1 + 2**-24 * torch.randn(x.shape, generator=generator)) for x in (image, text))
    local = local_part(rank, world)
    inputs = image[local].to(dtype), text[local].to(dtype)
    loss(*wrapped(*inputs), index=index[local], **more_of(name, loss, *inputs)).backward()
    return {key: p.grad for key, p in model.named_parameters() if p.requires_grad}


def train_within(name, rank, world):
    """As `train`, with the loss in the module that DistributedDataParallel wraps."""
    loss = create_loss(LOSSES[name][0], **LOSSES[name][1])
    loss.set_epoch(0)
    model = Model().double()
    model.logit_scale.requires_grad_(loss.trains_logit_scale)
    model.logit_bias.requires_grad_(loss.takes_bias)
    wrapped = torch.nn.parallel.DistributedDataParallel(WithLoss(model, loss))
    lr = 0.002 if "unscaled" in name or "joint" in name else 0.1
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    values = []
    for step in range(STEPS):
        image, text, index = (tensor[local_part(rank, world)] for tensor in global_batch(step))
        optimizer.zero_grad()
        values.append(wrapped(image, text, index=index, **more_of(name, loss, image, text)))
        values[-1].backward()
        optimizer.step()
    return {"values": torch.stack(values).detach(), "state": loss.full_state()}


def distance(gradients, exact):
    """The largest difference, relative to each parameter's largest gradient."""
    return max(((gradients[key] - g).abs().max() / g.abs().max()).item() for key, g in exact.items())


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
                loss(*model(image, text))
                loss.eval()
                for other in range(world):
                    part = slice(other * GLOBAL_BATCH // world, (other + 1) * GLOBAL_BATCH // world)
                    with patch("open_clip_ext.losses.amorlip.world_size", lambda: world):
                        (loss(*model(image[part], text[part])) / world).backward()
                loss.train()
            gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad})
    return {"gradients": gradients, "state": loss.full_state()}


def check_table(rank, world):
    table = ShardedRows(11, 2, fill=-1.0)
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


def check_early(early, rank, world):
    """A table and a loss that were made before torch.distributed started, as where a trainer starts it."""
    table, loss = early
    table.load(torch.arange(22.0).view(11, 2))
    assert len(table.rows) == len(range(rank, 11, world)) + 1
    assert torch.equal(table.lookup(torch.tensor([9, 2])), torch.tensor([[18.0, 19.0], [4.0, 5.0]]))
    generator = torch.Generator().manual_seed(rank)
    loss(unit(generator, 4, 8), unit(generator, 4, 8), torch.tensor(10.0))
    assert loss.normalizer.split == (world > 1)
    state = loss.state_dict()
    if rank > 0:
        with pytest.raises(ValueError, match=f"state: process {rank}'s"):
            loss.load_state_dict(state)
    with patch.object(dist, "is_initialized", lambda: False):
        if world > 1:
            with pytest.raises(RuntimeError, match=f"among {world} processes, but now there are 1"):
                table.lookup(torch.tensor([0]))


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
        "sogclr": {GATHER: 4, "all_reduce": 1},
        "isogclr": {GATHER: 5, "all_reduce": 2},
        "neuclip": {GATHER: 3},
        "queue": {GATHER: 3},
        "cyclip": {GATHER: 2},
        "amorlip": {},  # a step without stage I
    }
    theirs = sent(ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world))
    assert theirs.calls["all_gather"] == 2 and theirs.bytes["all_gather"] == (world - 1) * 2 * 8 * 32 * 4
    for name, expected in calls.items():
        paper = {"amor_denominator": "target"} if name == "amorlip" else {}
        loss = create_loss(name, num_samples=ROWS, epochs=1, **paper)
        loss.set_epoch(0)
        counter = sent(loss, index=torch.arange(8) + 8 * rank)
        assert counter.calls == expected, (name, dict(counter.calls))
        assert counter.sent < 0.75 * theirs.sent, name


def check_a_state_of_the_first_alone(rank, world):
    """It fails, and the states that all processes ask for later do not."""
    table, soon = ShardedRows(11, 2, fill=0.0), timedelta(seconds=0.3)
    if rank == 0:
        with patch.multiple(distributed, SOON=soon, AT_LAST=soon), pytest.raises(RuntimeError, match="0 waits for"):
            table.gather()
    dist.barrier()
    with patch.object(distributed, "AT_LAST", timedelta(seconds=10)):
        for _ in range(2):
            assert (table.gather() is None) == (rank != 0)


def check_batches_of_processes(rank, world):
    image, text = (unit(torch.Generator(), 4 + rank, 8) for _ in range(2))
    if world > 1:
        with pytest.raises(ValueError, match=f"batches of {re.escape(str([4 + r for r in range(world)]))} pairs"):
            create_loss("queue", epochs=1)(image, text, torch.tensor(10.0))
        loss, tau = create_loss("fastclip-v1", num_samples=ROWS, epochs=1), torch.tensor(10.0)
        loss.set_epoch(0)
        with pytest.raises(ValueError, match=rf"processes \[{world - 2}, {world - 1}\] have the same rows"):
            loss(image[:4], text[:4], tau, index=torch.arange(4) + min(rank, world - 2))
        with pytest.raises(ValueError, match="index must be int64"):  # before it is sent
            loss(image[:4], text[:4], tau, index=torch.arange(4 + rank, dtype=torch.int32))
        for pairs in (4, 3):  # of all processes
            loss(image[:pairs], text[:pairs], tau, index=torch.arange(pairs) + rank)
        soon = timedelta(seconds=0.3)
        if rank == 1:  # the others would wait for it
            with patch.multiple(distributed, SOON=soon, AT_LAST=soon), pytest.raises(
                ValueError, match="process 1 has a batch of 2 pairs after 3, unlike process 0"
            ):
                loss(image[:2], text[:2], tau, index=torch.arange(2))
        dist.barrier()
        with patch.object(distributed, "AT_LAST", timedelta(seconds=10)):
            loss(image[:2], text[:2], tau, index=torch.arange(2))
        dist.barrier()  # process 0 keeps the store


def process(rank, world, port, folder):
    torch.set_num_threads(1)
    ShardedRows.DTYPE = torch.float32  # float64 in the process that has forked this one
    # Several parts, where one process has all in one.
    prototype_gradient.CPU_PROTOTYPES = 5
    streaming.CPU_PART, streaming.LEAST_ROWS, streaming.CPU_TILE = 1, 20, (3, 4)
    alone = torch.load(f"{folder}/alone.pt", weights_only=True)
    early = ShardedRows(11, 2, fill=-1.0), create_loss("neuclip", npn_split=True, epochs=1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        with patch.object(row_files, "CHUNK_ROWS", 2):
            check_table(rank, world)
        check_early(early, rank, world)
        check_what_is_sent(rank, world)
        with patch.object(ShardedRows, "DTYPE", torch.float64):
            torch.save(results_of(rank, world, alone), f"{folder}/{rank}.pt")
        check_a_state_of_the_first_alone(rank, world)
        check_batches_of_processes(rank, world)
    finally:
        dist.destroy_process_group()


def results_of(rank, world, alone):
    results = {}
    for name in LOSSES:
        for accum_freq in ACCUMULATIONS[world]:
            results[f"{name}, {accum_freq}"] = train(name, rank, world, accum_freq)
        results[f"{name}, float32"] = first_gradients(name, rank, world, torch.float32)
        results[f"{name}, resumed"] = train(name, rank, world, start=alone[name])
        if name in ONE_OF_EACH_STATE:
            results[f"{name}, within"] = train_within(name, rank, world)
    results["amorlip"] = amortize(rank, world)
    return results


@pytest.fixture(scope="module", autouse=True)
def float64_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedRows, "DTYPE", torch.float64)
        yield


@pytest.fixture(scope="module")
def alone(float64_rows):
    return {name: train(name, 0, 1) for name in LOSSES}


@pytest.fixture(scope="module")
def resumed(alone):
    return {name: train(name, 0, 1, start=alone[name]) for name in LOSSES}


@pytest.fixture(scope="module", params=WORLDS)
def world(request):
    return request.param


@pytest.fixture(scope="module")
def several(world, alone, tmp_path_factory):
    """What each of several processes found."""
    folder = tmp_path_factory.mktemp("processes")
    torch.save(alone, folder / "alone.pt")
    mp.start_processes(process, (world, free_ports(), str(folder)), nprocs=world, start_method="fork")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def agree(actual, expected, has_state=True):
    for kind in ("gradients", "parameters"):
        for key, tensor in expected[kind].items():
            torch.testing.assert_close(actual[kind][key], tensor, **FLOAT64)
    torch.testing.assert_close(actual["values"], expected["values"], **FLOAT64)
    if has_state:
        same_state(actual["state"], expected["state"])


def same_state(actual, expected):
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(actual[key], value, **FLOAT64)


@pytest.mark.parametrize("name", LOSSES)
def test_accumulation_alone(name, alone):
    agree(train(name, 0, 1, accum_freq=4), alone[name])


@pytest.mark.parametrize("name", LOSSES)
def test_processes_agree_with_one(name, world, several, alone):
    """With gradient accumulation too."""
    for rank, results in enumerate(several):
        for accum_freq in ACCUMULATIONS[world]:
            agree(results[f"{name}, {accum_freq}"], alone[name], has_state=rank == 0)


@pytest.mark.parametrize("name", ONE_OF_EACH_STATE)
def test_the_loss_may_be_within_the_wrapped_model(name, several, alone):
    """DistributedDataParallel overwrites each process's buffers with process 0's, and averages gradients."""
    for rank, results in enumerate(several):
        within = results[f"{name}, within"]
        torch.testing.assert_close(within["values"], alone[name]["values"], **FLOAT64)
        if rank == 0:
            same_state(within["state"], alone[name]["state"])


@pytest.mark.parametrize("name", LOSSES)
def test_a_state_goes_from_one_process_to_several_and_back(name, world, several, resumed):
    for rank, results in enumerate(several):
        agree(results[f"{name}, resumed"], resumed[name], has_state=rank == 0)
    agree(train(name, 0, 1, start=several[0][f"{name}, {ACCUMULATIONS[world][0]}"]), resumed[name])


@pytest.mark.parametrize("name", LOSSES)
def test_processes_lose_no_more_in_float32_than_one(name, several):
    exact = first_gradients(name, 0, 1, torch.float64)
    lost = max(distance(first_gradients(name, 0, 1, torch.float32, seed), exact) for seed in range(JITTERS))
    assert 0 < lost < 1e-3
    for results in several:
        assert distance(results[f"{name}, float32"], exact) <= FLOAT32_FACTOR * lost


def test_amorlip_agrees_with_one(world, several):
    expected = amortize(0, world)
    for rank, results in enumerate(several):
        actual = results["amorlip"]
        for own, gradients in zip(actual["gradients"], expected["gradients"], strict=True):
            for key, tensor in gradients.items():
                torch.testing.assert_close(own[key], tensor, **FLOAT64)
        if rank == 0:
            same_state(actual["state"], expected["state"])
