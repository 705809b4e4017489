"""What all tests share: which run only on demand, and which stay together."""

import pytest
import torch

from open_clip_ext.distributed import ShardedRows

# Fixtures that take seconds to make: the tests that use one run in one process, which makes it once.
MADE_ONCE = ("pair", "several", "trained", "plugin")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in MADE_ONCE:
            if name in item.fixturenames:
                item.add_marker(pytest.mark.xdist_group(name))
                break


@pytest.fixture
def float64_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and temperatures per sample in float64, where rounding hides nothing."""
    monkeypatch.setattr(ShardedRows, "DTYPE", torch.float64)
