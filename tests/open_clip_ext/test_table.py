"""The moving-average table: schedule, first visits, equal rows."""

import math

import pytest
import torch
from numerics import unit

from open_clip_ext import InputError, create_loss
from open_clip_ext.equations import fastclip_gamma
from open_clip_ext.row_state import ShardedRows


@pytest.mark.parametrize(
    "schedule, epoch, expected",
    [
        ("cosine", 0, 1.0),
        ("cosine", 5, 0.5 * (1 + math.cos(math.pi * 0.5)) * 0.8 + 0.2),
        ("cosine", 10, 0.2),
        ("cosine", 30, 0.2),
        ("constant", 0, 0.2),
        ("constant", 30, 0.2),
    ],
)
def test_gamma_schedule(schedule, epoch, expected):
    if schedule == "cosine":
        assert fastclip_gamma(epoch, 0.2, 10) == pytest.approx(expected)
    length = {"gamma_decay_epochs": 10} if schedule == "cosine" else {}
    loss = create_loss("fastclip-v3", num_samples=4, gamma=0.2, gamma_schedule=schedule, **length)
    loss.set_epoch(epoch)
    assert loss.normalizer.current_gamma == pytest.approx(expected)


@pytest.mark.parametrize("name", ["sogclr", "isogclr"])
def test_rows_on_the_host_stay_there(name):
    """Where a loss goes to another device its rows go along, but not these; and type changes do not touch them."""
    beside, on_host = (create_loss(name, num_samples=4, rows_on=where) for where in ("device", "host"))
    meta = torch.device("meta")
    tables = [part for part in on_host.to(meta).modules() if isinstance(part, ShardedRows)]
    assert tables and all(table.rows.device.type == "cpu" for table in tables)
    moved = [part for part in beside.to(meta).modules() if isinstance(part, ShardedRows)]
    assert all(table.rows.device == meta for table in moved)


def test_decay_takes_half_of_the_epochs_unless_given():
    assert create_loss("fastclip-v3", num_samples=4, epochs=30).normalizer.gamma_decay_epochs == 15
    assert create_loss("fastclip-v3", num_samples=4, epochs=1).normalizer.gamma_decay_epochs == 1


def test_the_order_of_the_batch_does_not_matter_to_rows_that_repeat():
    generator = torch.Generator().manual_seed(0)
    e1, e2 = unit(generator, 8, 16).float(), unit(generator, 8, 16).float()
    index = torch.tensor([3, 1, 3, 0, 3, 2, 1, 4])
    tables = []
    for order in (torch.arange(8), torch.randperm(8, generator=generator)):
        loss = create_loss("fastclip-v3", num_samples=6, gamma=0.4, gamma_schedule="constant")
        for _ in range(2):
            loss(e1[order], e2[order], torch.tensor(20.0), index=index[order])
        tables.append(loss.full_state()["state.log_u"])
    torch.testing.assert_close(*tables)
    assert (tables[0][5] == -math.inf).all()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(gamma=0.0), "gamma: 0.0"),
        (dict(gamma=1.5), "gamma: 1.5"),
        (dict(gamma_schedule="linear"), "gamma_schedule: 'linear' is not one of cosine, constant"),
        (dict(gamma_decay_epochs=0), "gamma_decay_epochs: 0"),
        (dict(npn_lr=1.0), "npn_lr: the loss 'fastclip-v3'"),
        (dict(rho=-1.0), "rho: -1.0"),
        (dict(num_samples=None), "num_samples: 'table' keeps state per sample"),
        (dict(num_samples=0), "num_samples: 0"),
        (dict(nonsense=1), "nonsense: no loss has this setting"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(InputError, match=message):
        create_loss("fastclip-v3", **{"num_samples": 4, "epochs": 4, **options})
