"""What `memory` says a loss keeps is what it keeps."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from open_clip_ext import create_loss

DIMENSION, BATCH = 64, 8


def kept(found, seen: set[int]) -> int:
    """Bytes of all tensors and their gradients below an object, each once."""
    if id(found) in seen:
        return 0
    seen.add(id(found))
    if isinstance(found, Tensor):
        return found.nbytes + (0 if found.grad is None else kept(found.grad, seen))
    if isinstance(found, dict):
        return sum(kept(value, seen) for value in found.values())
    if isinstance(found, (list, tuple)):
        return sum(kept(value, seen) for value in found)
    if isinstance(found, (nn.Module, torch.optim.Optimizer)) or type(found).__module__.startswith("open_clip_ext"):
        return kept(getattr(found, "__dict__", {}), seen)
    return 0


@pytest.mark.parametrize(
    "name, options",
    [
        ("neuclip", {"npn_prototypes": 1024}),
        ("neuclip", {"npn_prototypes": 1024, "npn_opt": "adam"}),
        ("neuclip", {"normalizer": "mlp", "mlp_width": 4.0}),
        ("queue", {"queue_size": 4096}),
        ("amorlip", {"amor_online_every": 1, "mlp_width": 4.0}),
        ("cyclip", {}),
    ],
)
def test_the_loss_keeps_what_it_says(name, options):
    torch.manual_seed(0)
    loss = create_loss(name, epochs=2, steps_per_epoch=2, **options)
    scale = torch.tensor(14.0, requires_grad=True)
    for epoch in range(2):
        loss.set_epoch(epoch)
        for _ in range(2):
            image, text = (normalize(torch.randn(BATCH, DIMENSION), dim=1).requires_grad_() for _ in range(2))
            loss(image, text, scale).backward()
    said = sum(loss.memory(DIMENSION, 1).values())
    # A few numbers per pair of the last batch, and the online error's anchors, are not counted.
    assert said <= kept(loss, set()) <= 1.02 * said + 40_000
    assert said > 10 * 40_000 or name == "cyclip" and said == 0
