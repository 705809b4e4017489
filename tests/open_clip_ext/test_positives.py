"""Several positives: `clip-chunked` against UniCL's equation, and every loss with keys that all differ, or do not.

The global losses' numbers are in test_global_contrastive.py, test_prototypes.py and test_queue.py, several processes in
test_distributed.py.
"""

import pytest
import torch
from numerics import unit

from open_clip_ext import create_loss, equations
from open_clip_ext.kernels import streaming

BATCH = 12
LOSSES = {
    "clip-chunked": {},
    "fastclip-v0": dict(num_samples=20, gamma_schedule="constant"),
    "fastclip-v3": dict(num_samples=20, gamma_schedule="constant"),
    "isogclr": dict(num_samples=20),
    "tempnet": dict(num_samples=20, tau_net_prototypes=4),
    "dcl": {},
    "neuclip": dict(npn_prototypes=10, npn_restart_every=2),
    "queue": dict(queue_size=30),
}
ALONE = torch.arange(BATCH) - 5  # keys that all differ, some of them negative
SHARED = torch.tensor([3, -1, 3, 0, 3, 7, 0, -1, 8, 9, 10, 3])


def steps(name, **keys):
    """Values and gradients of three steps in float32, and the normalizer's state after them."""
    loss = create_loss(name, **LOSSES[name])
    loss.set_epoch(0)
    generator, results = torch.Generator().manual_seed(0), []
    for _ in range(3):
        image, text = (unit(generator, BATCH, 8).float().requires_grad_() for _ in range(2))
        scale = torch.tensor(12.0, requires_grad=True)
        index = torch.randperm(20, generator=generator)[:BATCH]
        value = loss(image, text, scale, index=index, **keys)
        found = torch.autograd.grad(value, [image, text, scale], allow_unused=True)
        results += [value.detach(), *(one for one in found if one is not None)]
    state = loss.full_state()
    return results, [state[name] for name in sorted(state) if name.startswith("state.")]


@pytest.mark.parametrize("tile", [(512, 1024), (5, 8)])
@pytest.mark.parametrize("key", [SHARED, torch.zeros(BATCH).long()], ids=["shared", "one key"])
def test_clip_with_several_positives_is_unicl(tile, key, monkeypatch):
    """Value and gradients, of a whole batch and summed over the calls of an accumulated step."""
    monkeypatch.setattr(streaming, "CPU_TILE", tile)
    generator = torch.Generator().manual_seed(0)
    given = [unit(generator, BATCH, 8).requires_grad_() for _ in range(2)]
    given.append(torch.tensor(12.0).double().requires_grad_())
    expected = equations.unicl(*given[:2], 1 / given[2], key)
    gradients = torch.autograd.grad(expected, given)
    for count in (1, 3):
        loss, totals = create_loss("clip-chunked", accum_freq=count), [torch.zeros_like(one) for one in given]
        loss.one_batch_per_step = True
        for part in torch.arange(BATCH).chunk(count):
            is_own = torch.isin(torch.arange(BATCH), part)[:, None]
            value = loss(*(torch.where(is_own, side, side.detach()) for side in given[:2]), given[2], positive_key=key)
            for total, more in zip(totals, torch.autograd.grad(value, given), strict=True):
                total += more
        torch.testing.assert_close([value.detach(), *totals], [expected.detach(), *gradients], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_keys_that_all_differ_change_nothing(name):
    """To the last bit, beside `key`, with which the negatives are counted: their number's logarithm may be rounded
    otherwise than without keys."""
    keys = {} if name == "clip-chunked" else dict(key=ALONE)
    for actual, expected in zip(steps(name, positive_key=ALONE), steps(name, **keys), strict=True):
        assert len(actual) == len(expected) and all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("name", ["fastclip-v3", "neuclip", "queue"])
def test_a_positive_is_no_negative(name):
    """The estimates are those of `key`, whichever positives are beside an anchor. With one key for all there are no
    negatives, and no gradient."""
    (_, state), (_, expected) = (steps(name, **{keys: SHARED}) for keys in ("positive_key", "key"))
    assert all(map(torch.equal, state, expected))
    results, _ = steps(name, positive_key=torch.zeros(BATCH).long())
    assert all(one.isfinite().all() for one in results)
    assert not any(one.any() for one in results if one.dim() == 2)
