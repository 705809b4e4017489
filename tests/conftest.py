"""What all tests share: which are slow by their parameters, and in which order they run."""

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from open_clip_ext.row_state import ShardedRows

TESTS = Path(__file__).parent
# The same examples in every run, and however long one takes.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# Whole files go to one process or another, which makes their fixtures once. Those that take longest go first.
LONGEST = (
    "pretend_gpu/test_pretend_gpu.py",
    "training_ext/test_statistics_recovery.py",
    "training_ext/test_midepoch.py",
    "open_clip_ext/test_distributed.py",
    "training_ext/test_every_loss.py",
    "training_ext/test_training.py",
    "training_ext/test_report.py",
    "training_ext/test_openclip_flags.py",
)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        # Processes that load data take seconds to start; of csv files they stay in the fast tests.
        if given.get("workers") and "csv" not in item.name:
            item.add_marker(pytest.mark.slow)

    def order(item: pytest.Item) -> int:
        path = item.path.relative_to(TESTS).as_posix()
        return LONGEST.index(path) if path in LONGEST else len(LONGEST)

    items.sort(key=order)


def pytest_collection_finish() -> None:
    """Each run of the command ends with a collection, which took half of a short run over all that is imported here."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def float64_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and temperatures per sample in float64, where rounding hides nothing."""
    monkeypatch.setattr(ShardedRows, "DTYPE", torch.float64)
