"""A feature can be taken out: its flags are gone, and a training runs without it."""

import pytest
from conftest import LOSSES, ext_main, run_main

from training_ext import run
from training_ext.flags.params import parse_args

FEATURES = run.FEATURES


@pytest.mark.parametrize("feature", [None, *FEATURES], ids=lambda feature: getattr(feature, "__name__", "all"))
def test_a_training_without_a_feature(datasets, tmp_path, monkeypatch, feature):
    left = () if feature is None else tuple(other for other in FEATURES if other is not feature)
    monkeypatch.setattr(run, "FEATURES", left)
    given = vars(parse_args([]))
    for other in FEATURES:
        assert all((option.name in given) == (other in left) for option in other.options)
    common = f"{datasets['shapes']} --val-num-samples 8 {LOSSES['neuclip']} --workers 0 --epochs 1 --name x"
    assert run_main(ext_main, common, tmp_path) == 0
    assert (tmp_path / "x/checkpoints/epoch_1.pt").exists()
