"""No step waits for the device: on the meta device, whose tensors have no values, any wish to see one raises."""

from contextlib import nullcontext

import pytest
import torch

from open_clip_ext import create_loss, list_losses

LOSSES = {preset.name: {} for preset in list_losses() if not preset.is_open_clip}
FEW = dict(npn_prototypes=40, npn_updates=2)  # the ten of a step are alike
LOSSES |= {
    "neuclip": dict(FEW, npn_restart_every=2),
    "neuclip, hinge": dict(FEW, surrogate="hinge"),
    "neuclip, mlp": dict(normalizer="mlp", npn_updates=2, npn_restart_every=2),
    "neuclip, joint": dict(npn_prototypes=40, npn_joint=True),
    "neuclip, individual": dict(FEW, temperature="individual", mixing=0.5),
    "queue": dict(queue_size=40, consistency=0.25),
    "sogclr, both sides": dict(negatives="both"),
}


@pytest.fixture(autouse=True)
def without_autocast(monkeypatch):
    """The meta device has none."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())


def make(name: str, device: str = "meta"):
    return create_loss(name.split(",")[0], num_samples=100, epochs=4, device=device, **LOSSES[name])


def train(loss, device: str, epochs: range) -> None:
    for epoch in epochs:
        loss.set_epoch(epoch)
        for _ in range(2):
            image, text, *others = torch.nn.functional.normalize(torch.randn(4, 16, 8, device=device), dim=2)
            image.requires_grad_()
            reference = dict(zip(("dist_image_features", "dist_text_features"), others, strict=True))
            # A scale on the CPU is as good as a number.
            scale = torch.tensor(20.0, device=device if epoch else "cpu", requires_grad=epoch > 0)
            index = torch.arange(16, device=device)
            loss(image, text, scale, index=index, **(reference if loss.takes_reference else {})).backward()
            assert image.grad.device.type == device
            loss.diagnostics()


@pytest.mark.parametrize("name", LOSSES)
def test_no_step_waits_for_the_device(name):
    """Of a new loss, and of one with a state from the CPU."""
    new, loaded, theirs = make(name), make(name), make(name, "cpu")
    new.steps = 1  # the first step checks more, and may wait
    train(new, "meta", range(3))
    train(theirs, "cpu", range(2))
    loaded.load_full_state(theirs.full_state())
    train(loaded, "meta", range(1, 3))
    with pytest.raises(RuntimeError):  # as a step would that waits
        torch.empty((), device="meta").item()


@pytest.mark.parametrize("name", ["fastclip-v3", "neuclip"])
def test_a_compiled_step_has_a_graph_before_the_loss_and_one_for_its_features(name):
    """Left to itself, torch.compile makes 18 graphs of a step of fastclip-v3 and 29 of neuclip's."""
    torch._dynamo.reset()
    graphs, loss, scale = [], make(name, "cpu"), torch.tensor(20.0, requires_grad=True)
    encoder = torch.nn.Linear(6, 8)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def step(pictures, captions, index):
        image, text = (torch.nn.functional.normalize(encoder(given), dim=1) for given in (pictures, captions))
        loss(image, text, scale * 1.0, index=index).backward()

    loss.set_epoch(0)
    for _ in range(3):
        step(torch.randn(16, 6), torch.randn(16, 6), torch.randperm(100)[:16])
    assert len(graphs) <= 2 and encoder.weight.grad.norm() > 0
    assert loss.steps == 3


@pytest.mark.parametrize("name", ["neuclip", "neuclip, hinge", "neuclip, individual"])
def test_an_update_of_the_network_is_one_graph(name):
    """torch.compile, which nothing here uses yet, finds nothing in it that it would have to leave to Python."""
    loss = create_loss("neuclip", num_samples=100, **LOSSES[name])
    image, text = (torch.nn.functional.normalize(torch.randn(2, 16, 8), dim=2))
    loss(image, text, torch.tensor(10.0), index=torch.arange(16))
    network, seen = loss.normalizer, []
    network.update = lambda batch: seen.append(batch)
    loss(image, text, torch.tensor(10.0), index=torch.arange(16))
    with torch.no_grad():
        set_gradient, _ = network._updates(seen[0])
        alpha, gradient = set_gradient(), network.network.gradients["weight"].clone()
        network.network.gradients["weight"].zero_()
        compiled = torch.compile(set_gradient, fullgraph=True, backend="eager")()
    torch.testing.assert_close(compiled, alpha)
    torch.testing.assert_close(network.network.gradients["weight"], gradient)
    assert gradient.abs().max() > 0
