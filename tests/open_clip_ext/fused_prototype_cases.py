"""The kernels of the prototypes' updates in Triton's interpreter, on a CPU, against `equations` in float64 and against
single operations; `test_fused.py` runs them, as it does `fused_cases.py`."""

import pytest
import torch
from numerics import unit
from test_prototypes import (  # noqa: F401
    test_a_prototype_does_not_count_for_the_key_that_it_was_drawn_from,
    test_prototypes_follow_algorithm_1,
    test_updates_that_raise_the_objective_are_undone,
)

from open_clip_ext import create_loss
from open_clip_ext.kernels import fused_prototypes, streaming
from open_clip_ext.normalizers import prototypes
from open_clip_ext.objectives import NETWORK_OBJECTIVES

DIMENSION = 48


@pytest.fixture(autouse=True)
def updates(monkeypatch):
    """Those that were made by kernels."""
    made, kind = [], fused_prototypes.FusedPrototypeUpdate

    def make(*arguments, **options):
        made.append(kind(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(fused_prototypes, "FusedPrototypeUpdate", make)
    monkeypatch.setattr(prototypes, "fused_prototypes", lambda *args: fused_prototypes)
    yield made
    assert made


@pytest.mark.parametrize("objective", NETWORK_OBJECTIVES)
def test_the_check_of_the_networks_updates_passes(objective):
    deviation = fused_prototypes.deviation(NETWORK_OBJECTIVES[objective], torch.empty(2, 40, DIMENSION))
    assert 0 < deviation < 2**-14  # of 2^-9


def test_keys_need_not_lie_side_by_side():
    values, strided = [], (torch.arange(40) // 4).view(20, 2)[:, 0]
    for keys in (strided, strided.contiguous()):
        torch.manual_seed(0)
        loss = create_loss("neuclip", npn_prototypes=20, npn_lr=0.1)
        for _ in range(3):
            value = loss(*torch.nn.functional.normalize(torch.randn(2, 20, DIMENSION), dim=2), 5.0, key=keys)
        values.append(value)
    assert strided.stride() == (2,) and torch.equal(*values)


def test_updates_by_kernels_leave_the_state_of_single_operations(updates, monkeypatch):
    """With restarts, a batch that is not finite, and in parts of anchors."""
    monkeypatch.setattr(streaming, "CPU_PART", 1)
    monkeypatch.setattr(streaming, "LEAST_ROWS", 3)
    generator, losses = torch.Generator().manual_seed(0), []
    for kernels in (fused_prototypes, None):
        monkeypatch.setattr(prototypes, "fused_prototypes", lambda *args, kernels=kernels: kernels)
        generator.manual_seed(0)
        loss = create_loss("neuclip", npn_prototypes=20, npn_restart_every=4, npn_lr=0.1, npn_updates=2)
        for step in range(9):
            image, text = unit(generator, 10, DIMENSION), unit(generator, 10, DIMENSION)
            if step == 5:
                image[0, 0] = torch.nan
            loss(image, text, 5.0)
        losses.append(loss)
    assert len(updates) == 8 and len(updates[0].parts) == 2
    states = [loss.full_state() for loss in losses]
    assert states[0].keys() == states[1].keys() and states[0]["state.adagrad:weight:step"] == 18
    for name in ("state.weight", "state.adagrad:weight:sum", "state.ring"):
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-5, atol=1e-7)
