"""The updates as one CUDA graph: what it repeats is what the network's updates do, bit for bit, on a CPU's stand-in."""

import copy
import logging

import pytest
import torch
from recorded_graph import RecordedGraph, capture
from torch import Tensor
from torch.nn.functional import normalize

from open_clip_ext import create_loss
from open_clip_ext.normalizers import Prototypes, update_graph
from open_clip_ext.normalizers.npn import NPN
from open_clip_ext.side_model import OPTIMIZERS
from open_clip_ext.surrogates import PowerHinge

UNDO_IF, ADAGRAD = NPN._undo_if, torch.optim.Adagrad
NETWORK = dict(npn_prototypes=40, npn_updates=3, npn_restart_every=7)
DIMENSION, STEPS, NOT_FINITE = 8, 40, 15


class OnDevice(Tensor):
    device = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """Capture on the CPU, with the branches and the AdaGrad of a GPU; gpu(loss) says whose network is captured."""
    monkeypatch.setattr(update_graph, "DEVICE", "cpu")
    for name, stand_in in {"CUDAGraph": RecordedGraph, "graph": capture, "Stream": lambda device: None}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(RecordedGraph, "replays", 0)
    monkeypatch.setattr(NPN, "_undo_if", lambda self, undo, before: UNDO_IF(self, undo.as_subclass(OnDevice), before))
    monkeypatch.setitem(OPTIMIZERS, "adagrad", lambda named, **settings: ADAGRAD(named, foreach=True, **settings))

    def captures(loss):
        states = loss.normalizer.network.optimizer.state
        monkeypatch.setattr(RecordedGraph, "host", lambda: [state["step"] for state in states.values()])

    return captures


def step(loss, number: int, size: int, dtype: torch.dtype, keyed: bool) -> dict[str, Tensor]:
    """Value, gradients, numbers for the log and state after a step."""
    generator = torch.Generator().manual_seed(number)
    # Close to each other, so that a large step of the network makes it worse.
    image, text = normalize(1 + torch.randn(2, size, DIMENSION, generator=generator, dtype=dtype), dim=2)
    if number == NOT_FINITE:
        image[0, 0] = torch.nan
    inputs = [image.requires_grad_(), text.requires_grad_(), torch.tensor(10.0 + number, requires_grad=True)]
    value = loss(*inputs, **({"key": torch.arange(size) // 2} if keyed else {}))
    value.backward()
    gradients = {str(number): tensor.grad for number, tensor in enumerate(inputs)}
    return {"value": value, **gradients, **loss.diagnostics(), **loss.full_state()}


def changed(loss, number: int, **settings):
    """The loss after what may come between two steps; each leaves the graph that was captured without its tensors."""
    if number == 10:  # the state of a checkpoint, in a new loss and in one that has trained
        new = create_loss("neuclip", **NETWORK, **settings)
        new.load_full_state(loss.full_state())
        return new
    if number == 13:
        loss.load_full_state(loss.full_state())
    if number == 18:
        loss.normalizer.network.set_lr(0.5)
    if number == 26:
        loss.normalizer.surrogate = PowerHinge(margin=1.0)
    if number == 32:
        return copy.deepcopy(loss)
    if number == 36:
        loss.normalizer.network.reset_optimizer()
    return loss


def differences(expected: dict, actual: dict) -> list[str]:
    """Names of what is not equal to the last bit, NaN included."""
    assert actual.keys() == expected.keys()
    pairs = {name: (torch.as_tensor(value), torch.as_tensor(actual[name])) for name, value in expected.items()
             if isinstance(value, (Tensor, int, float))}
    return [name for name, (one, other) in pairs.items() if not torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))]


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("lr, max_rise", [(0.01, 1e300), (100.0, 0.0)])
def test_a_graph_repeats_the_updates_to_the_last_bit(gpu, lr, max_rise, keyed, caplog):
    """Over restarts every 7 steps, a batch that is not finite, updates that are undone, another size of batch in steps
    21 to 23, another type from 28 on, and what `changed` does."""
    settings = dict(npn_lr=lr, npn_max_rise=max_rise)
    eager, graphed = (create_loss("neuclip", **NETWORK, **settings, npn_graph=graph) for graph in (False, True))
    undone, replayed, steps = 0, [], []
    for number in range(STEPS):
        eager, graphed = changed(eager, number, **settings), changed(graphed, number, **settings, npn_graph=True)
        size, dtype = 24 if 21 <= number < 24 else 16, torch.float64 if number >= 28 else torch.float32
        before = eager.normalizer.weight.clone() if number else None
        expected = step(eager, number, size, dtype, keyed)
        if number:
            gpu(graphed)
        replays = RecordedGraph.replays
        actual = step(graphed, number, size, dtype, keyed)
        replayed += [number] * (RecordedGraph.replays - replays)
        steps.append((expected, actual))
        if number % 7 and number not in (1, 2, NOT_FINITE, 28):  # by then all prototypes are in use, in this type
            undone += torch.equal(before, eager.normalizer.weight)
    # Afterwards, as the next step must not write into what an earlier one returned.
    assert [(number, *names) for number, pair in enumerate(steps) if (names := differences(*pair))] == []
    # The first of its kind runs without a graph: with all 40 prototypes, a new loss, a state, a rate, a size, ...
    first_of_kind = {0, 1, 2, 10, 13, 18, 21, 24, 26, 28, 32, 36}
    assert replayed == [number for number in range(STEPS) if number not in first_of_kind]
    assert not caplog.records and (undone > 0) == (max_rise == 0), undone  # no rise reaches 1e300


def test_updates_without_a_graph_where_none_can_be_captured(gpu, monkeypatch, caplog):
    """On a CPU, or where a capture fails in its middle; said once."""
    for reason, device in (("on cpu", "cuda"), ("operation not permitted when stream is capturing", "cpu")):
        caplog.clear()
        monkeypatch.setattr(update_graph, "DEVICE", device)
        monkeypatch.setattr(NPN, "_undo_if", UNDO_IF)  # which looks at a value
        eager, graphed = (create_loss("neuclip", **NETWORK, npn_graph=graph) for graph in (False, True))
        for number in range(6):
            if number:
                gpu(graphed)
            expected, actual = (step(loss, number, 16, torch.float32, False) for loss in (eager, graphed))
            assert differences(expected, actual) == []
        assert [(record.levelno, record.message) for record in caplog.records] == [
            (logging.WARNING, f"npn_graph: no CUDA graph ({reason}); the network is updated without one")
        ]
    assert RecordedGraph.replays == 0


@pytest.mark.parametrize(
    "device, settings, graph",
    [
        ("cuda", {}, True), ("cpu", {}, False), ("cuda", {"npn_graph": False}, False),
        ("cuda", {"npn_split": True}, False), ("cuda", {"npn_opt": "adam"}, False),
        ("cuda", {"npn_joint": True}, False),
    ],
)  # fmt: skip
def test_a_graph_is_captured_by_default_on_a_gpu(device, settings, graph):
    normalizer = Prototypes(**settings)
    normalizer.split = bool(normalizer.npn_split)
    assert normalizer._has_graph(torch.device(device)) == graph
