"""A run that is stopped at any step and resumed equals an uninterrupted one."""

import os
import signal

import pytest
from conftest import LOSSES, Experiment, ext_main, run_main
from test_training import same

from training_ext.data import RowLoader

METRICS = ("Loss", "Tau", "Normalizer_mse", "Effective_negatives", "Lr")


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """stopped(name, arguments, batch) -> the experiment, stopped by SIGTERM while its batch-th batch is trained on."""
    original = RowLoader.__iter__

    def stopped(name: str, arguments: str, batch: int) -> Experiment:
        seen = []

        def counted(self):
            for item in original(self):
                seen.append(None)
                if len(seen) == batch:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield item

        with monkeypatch.context() as patch:
            patch.setattr(RowLoader, "__iter__", counted)
            assert run_main(ext_main, f"{arguments} --name {name}", tmp_path / "logs") == 143
        assert len(seen) >= batch
        return Experiment(tmp_path / "logs", name)

    return stopped


RESUMED = [
    ("neuclip", "csv", 0, "", 8),
    ("fastclip-v3", "csv", 2, "", 9),
    ("neuclip", "shards", 2, "", 3),
    ("fastclip-v3", "shards", 0, "", 8),
    ("neuclip", "resampled", 2, "--accum-freq 2", 7),
    ("fastclip-v3", "resampled", 0, "", 1),
    ("neuclip", "shapes", 2, "--precision bf16", 6),
    ("fastclip-v3", "shapes", 0, "--accum-freq 2 --lr-tau-scheduler model", 9),
    ("sogclr", "shapes", 0, "", 2),
    ("queue", "shards", 0, "", 4),
    ("isogclr", "csv", 0, "--accum-freq 2", 7),
    ("fastclip-v2", "shards", 2, "", 10),
    ("amorlip", "shapes", 0, "--accum-freq 2", 10),
    ("joint", "shapes", 0, "", 9),
    ("cyclip", "shapes", 0, "", 9),
    ("fastclip-v3", "synthetic", 0, "--opt timm/sgd --momentum 0.9 --lr 0.1", 9),
]


@pytest.mark.parametrize("loss, data, workers, extra, batch", RESUMED)
def test_a_run_stopped_at_a_step_equals_an_uninterrupted_one(run, stopped, datasets, loss, data, workers, extra, batch):
    common = f"{datasets[data]} {LOSSES[loss]} --workers {workers} --epochs 2 --force-patch-dropout 0.25 {extra}"
    whole = run("whole", common)
    stopped("resumed", common, batch)
    resumed = run("resumed", f"{common} --resume latest")
    assert "=> going on after step" in resumed.log
    for metric in METRICS:
        assert resumed.logged(metric) == whole.logged(metric), metric
    same(resumed.checkpoint(2), whole.checkpoint(2))
    assert {path.name for path in (resumed.path / "checkpoints").iterdir()} == {"epoch_1.pt", "epoch_2.pt"}
