"""A loss, or its network's updates, as one CUDA graph: what it repeats is what they do, bit for bit, on a CPU's
stand-in."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from recorded_graph import RecordedGraph, Streams
from torch import Tensor
from torch.nn.functional import normalize

from open_clip_ext import create_loss, step_graph
from open_clip_ext.errors import InputError
from open_clip_ext.losses import NonFiniteError
from open_clip_ext.normalizers import Prototypes
from open_clip_ext.normalizers.npn import NPN
from open_clip_ext.side_model import OPTIMIZERS
from open_clip_ext.surrogates import PowerHinge

UNDO_IF, ADAGRAD = NPN._undo_if, torch.optim.Adagrad
NETWORK = dict(npn_prototypes=40, npn_updates=3, npn_restart_every=7)
DIMENSION, STEPS, NOT_FINITE, ROWS = 8, 40, 15, 50


class OnDevice(Tensor):
    device = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """Capture on the CPU, with the branches and the AdaGrad of a GPU; gpu(loss) says whose network is captured."""
    monkeypatch.setattr(step_graph, "DEVICE", "cpu")
    step_graph.capture_stream.cache_clear()
    streams = Streams()
    stand_ins = {
        "CUDAGraph": RecordedGraph, "graph": streams.capture, "Stream": streams.new, "stream": streams.use,
        "current_stream": lambda device: streams.current, "default_generators": (streams.generator,),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(RecordedGraph, "replays", 0)
    monkeypatch.setattr(NPN, "_undo_if", lambda self, undo, before: UNDO_IF(self, undo.as_subclass(OnDevice), before))
    monkeypatch.setitem(OPTIMIZERS, "adagrad", lambda named, **settings: ADAGRAD(named, foreach=True, **settings))

    def captures(loss):
        states = loss.normalizer.network.optimizer.state
        monkeypatch.setattr(RecordedGraph, "host", lambda: [state["step"] for state in states.values()])

    captures.streams = streams
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
    assert gpu.streams.made == 1  # of many captures
    assert not caplog.records and (undone > 0) == (max_rise == 0), undone  # no rise reaches 1e300


def test_updates_without_a_graph_where_none_can_be_captured(gpu, monkeypatch, caplog):
    """On a CPU, or where a capture fails in its middle; said once."""
    for reason, device in (("on cpu", "cuda"), ("operation not permitted when stream is capturing", "cpu")):
        caplog.clear()
        monkeypatch.setattr(step_graph, "DEVICE", device)
        monkeypatch.setattr(NPN, "_undo_if", UNDO_IF)  # which looks at a value
        eager, graphed = (create_loss("neuclip", **NETWORK, npn_graph=graph) for graph in (False, True))
        for number in range(6):
            if number:
                gpu(graphed)
            expected, actual = (step(loss, number, 16, torch.float32, False) for loss in (eager, graphed))
            assert differences(expected, actual) == []
        assert gpu.streams.current == 0 and not gpu.streams.generator.capturing and gc.isenabled()
        graph = graphed.normalizer.update_graph
        assert not (graph.result or graph._inputs or graph._held or (device == "cpu" and graph.graph.calls))
        assert [(record.levelno, record.message) for record in caplog.records] == [
            (logging.WARNING, f"npn_graph: no CUDA graph ({reason}); steps go on without one")
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


def features(number: int, size: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    image, text = normalize(1 + torch.randn(2, size, DIMENSION, generator=generator, dtype=dtype), dim=2)
    if number == NOT_FINITE:
        image[0, 0] = torch.nan
    # With rows that occur twice.
    return [one.to(device) for one in (image, text, torch.randint(ROWS, (size,), generator=generator))]


def step_of_loss(loss, number: int, size: int, dtype: torch.dtype, given: set[str], device: str) -> dict:
    """Value, gradients, numbers for the log and state after a step of `accum_freq` calls."""
    image, text, index = features(number, size, dtype, device)
    if number % 10 == 0:
        loss.set_epoch(number // 10)
    more = {"index": index} if loss.needs_index else {}
    more |= {name: index // 2 for name in ("key", "positive_key") if name in given}
    if "reference" in given:
        names = ("dist_image_features", "dist_text_features")
        more |= dict(zip(names, features(-1 - number, size, dtype, device)[:2], strict=True))
    total = {}
    for call in range(loss.accum_freq):
        inputs = [image.clone().requires_grad_(), text.clone().requires_grad_(),
                  *(torch.tensor(one, device=device, requires_grad=True) for one in (10.0 + number, -1.0))]
        value = loss(*inputs, **more)
        value.backward()
        gradients = {f"{call}.{at}": tensor.grad for at, tensor in enumerate(inputs) if tensor.grad is not None}
        total |= {f"{call}": value} | gradients
        if number % 4 == 0:  # an evaluation between two steps
            with torch.no_grad():
                loss.eval()(image[:6], text[:6], 20.0, **{name: tensor[:6] for name, tensor in more.items()})
                loss.train()
    return total | loss.diagnostics() | loss.full_state()


class CountedGraph(torch.cuda.CUDAGraph):
    """A GPU's own, whose replays are counted with the stand-in's."""

    def replay(self) -> None:
        RecordedGraph.replays += 1
        super().replay()


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WITHOUT_STATE = ("clip-chunked", "siglip-chunked", "dcl")
NETWORK_OF_LOSS = NETWORK | dict(npn_lr=0.1)
LOSSES = {
    "clip-chunked": {}, "siglip-chunked": {}, "clip-chunked, positives": {"given": {"positive_key"}},
    "isogclr": {}, "fastclip-v0": {}, "fastclip-v2": {}, "fastclip-v3": {},
    "tuneclip": {}, "dcl": {}, "scent": {}, "drrho-clip": {"given": {"reference"}},
    "fastclip-v3, keys": {"given": {"key"}}, "fastclip-v3, positives": {"given": {"positive_key"}},
    "fastclip-v3, accumulated": {"accum_freq": 2}, "fastclip-v3, terms": {"consistency": 0.25, "mixing": 0.1},
    "isogclr, views": {"negatives": "views"}, "neuclip": NETWORK_OF_LOSS,
    "neuclip, keys": NETWORK_OF_LOSS | {"given": {"key"}}, "neuclip, no updates": NETWORK_OF_LOSS | {"npn_updates": 0},
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("name", LOSSES)
def test_a_graph_repeats_the_loss_to_the_last_bit(name, device, request, monkeypatch, caplog):
    gpu = request.getfixturevalue("gpu") if device == "cpu" else lambda loss: None
    if device == "cuda":
        monkeypatch.setattr(torch.cuda, "CUDAGraph", CountedGraph)
    settings = {"num_samples": ROWS, "epochs": 3, "device": device} | LOSSES[name]
    given = settings.pop("given", set())
    loss_name = name.partition(",")[0]
    eager, graphed = (create_loss(loss_name, **settings, loss_graph=graph) for graph in (False, True))
    replayed, steps = [], []
    for number in range(30):
        if number == 13:
            for loss in (eager, graphed):
                loss.load_full_state(copy.deepcopy(eager.full_state()))
        if number == 17:
            eager, graphed = copy.deepcopy(eager), copy.deepcopy(graphed)
        size, dtype = 24 if number in (5, 6, 7) else 16, torch.float64 if number >= 24 else torch.float32
        expected = step_of_loss(eager, number, size, dtype, given, device)
        if hasattr(getattr(graphed, "normalizer", None), "network"):
            gpu(graphed)
        replays = RecordedGraph.replays
        actual = step_of_loss(graphed, number, size, dtype, given, device)
        replayed += [number] * (RecordedGraph.replays - replays)
        steps.append((expected, actual))
    assert [(number, *names) for number, pair in enumerate(steps) if (names := differences(*pair))] == []
    messages = []
    for loss in (eager, graphed):
        with pytest.raises(NonFiniteError) as error:
            loss.raise_if_not_finite()
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    # The first of its kind runs without a graph: a new loss, a size, an epoch, a state, a copy, a type.
    first_of_kind = {0, 5, 8, 10, 17, 20, 24} | ({13} if loss_name not in WITHOUT_STATE else set())
    if loss_name == "neuclip":  # steps without all 40 prototypes, and restarts
        first_of_kind |= {1, 2, 3, 7, 14, 21, 28}
    if device == "cuda":  # where a table's count moves to the device; neuclip's updates have a graph of their own
        assert set(range(30)) - set(replayed) <= first_of_kind | {1, 14}
    else:
        assert replayed == [number for number in range(30) if number not in first_of_kind]
    assert not caplog.records


def test_a_step_does_not_change_what_the_backward_pass_of_an_earlier_one_gives(gpu):
    gradients = []
    for graph in (False, True):
        loss = create_loss("fastclip-v3", num_samples=ROWS, epochs=3, loss_graph=graph)
        loss.set_epoch(0)
        batches = [features(number, 16, torch.float32, "cpu") for number in range(4)]
        values = [loss(image.requires_grad_(), text, 10.0, index=index) for image, text, index in batches]
        sum(values).backward()
        gradients.append(torch.stack([image.grad for image, *_ in batches]))
    assert torch.equal(*gradients) and RecordedGraph.replays == 3


def test_a_step_does_not_keep_the_autograd_graph_of_an_earlier_ones_features(gpu):
    class Encoder(torch.autograd.Function):
        @staticmethod
        def forward(ctx, features):
            return features.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    loss, nodes = create_loss("dcl", loss_graph=True), []
    for number in range(5):
        image, text, _ = features(number, 16, torch.float32, "cpu")
        image = Encoder.apply(image.requires_grad_())
        nodes.append(weakref.ref(image.grad_fn))
        loss(image, text, 10.0).backward()
    del image
    assert RecordedGraph.replays == 4 and [node() for node in nodes] == [None] * 5


@pytest.mark.parametrize(
    "loss, settings, part",
    [("queue", {}, "queue"), ("fastclip-v3", {"rows_on": "host"}, "table"),
     ("neuclip", {"npn_joint": True}, "prototypes"),
     ("neuclip", {"npn_opt": "adam"}, "prototypes"), ("tempnet", {}, "network")],
)  # fmt: skip
def test_a_loss_whose_steps_differ_is_refused_a_graph(loss, settings, part):
    with pytest.raises(InputError, match=f"loss_graph: with '{part}'"):
        create_loss(loss, num_samples=ROWS, epochs=3, loss_graph=True, **settings)
