"""A resumed run uses the settings that it is given, says what has changed, and keeps the recipe from before."""

import pytest
import yaml
from conftest import LOSSES

from training_ext.flags import params, recipes

SGD = "--opt timm/lookahead_sgdw --lr 1e-3 --momentum"


@pytest.mark.parametrize(
    "loss, before, after, change",
    [
        (
            "fastclip-v3", "--skip-scheduler", "--skip-scheduler --wd 0.5 --beta1 0.5 --eps 1e-4 --lr 2e-3 --rho 6",
            "--lr 0.0005 -> 0.002, --beta1 0.9 -> 0.5, --eps 1e-06 -> 0.0001, --wd 0.2 -> 0.5",
        ),
        ("neuclip", "", "", "--npn-lr 0.008827348295047496 -> 0.01248375567"),  # sqrt(6 / 77,000), then of 12 steps
        ("clip", "--wd 0", "--wd 0.5", "--wd 0.0 -> 0.5"),
        ("fastclip-v3", f"{SGD} 0.9", f"{SGD} 0.5 --grad-clip-norm 1 --tau-init 0.05", "--momentum 0.9 -> 0.5"),
    ],
)
def test_what_is_given_is_used_and_told(run, datasets, loss, before, after, change):
    common = f"{datasets['shapes']} {LOSSES[loss]} --workers 0"
    first = run("x", f"{common} {before} --epochs 1")
    done = run("x", f"{common} {before} --epochs 1 --resume latest").log.split("=> resuming")[1]  # as a requeued job
    assert "WARNING" not in done and "Nothing is left to train: " in done.splitlines()[-1]
    recipe = (first.path / "recipe.yaml").read_text()
    resumed = run("x", f"{common} {after} --epochs 2 --resume latest")
    new = run("new", f"{common} {after} --epochs 2")
    settings = [
        [{**group, "steps": None} for group in experiment.checkpoint(2)["optimizer"]["param_groups"]]
        for experiment in (resumed, new)
    ]
    assert settings[0] == settings[1]
    (told,) = [line for line in resumed.log.splitlines() if "Changed since the checkpoint: " in line]
    assert change in told and "--epochs 1 -> 2" in told and "batch" not in told
    assert ("0.05 (of a start, not used)" in told) == ("--tau-init" in after)
    assert ("--rho 5.0 -> 6.0" in told) == ("--rho" in after)
    assert ("--grad-clip-norm unset -> 1.0" in told) == ("--grad-clip-norm" in after)
    assert (resumed.path / "recipe_1.yaml").read_text() == recipe
    assert yaml.safe_load((resumed.path / "recipe.yaml").read_text())["flags"]["epochs"] == 2


def test_only_flags_are_named_as_flags(datasets):
    args = params.parse_args(f"{datasets['shapes']} {LOSSES['clip']}".split())
    before = recipes.Recipe("x", {"wd": 0.2}, global_batch_size=64)
    new = {"global_batch_size": 32, "flags": {"wd": 0.5}}
    assert before.changes(new, args) == "global batch 64 -> 32, --wd 0.2 -> 0.5"


def test_a_run_that_saved_nothing_changes_nothing(run, killed, datasets):
    common = f"{datasets['shapes']} {LOSSES['sogclr']} --workers 0 --epochs 2"
    first = run("x", common)
    (first.path / "checkpoints/epoch_2.pt").unlink()
    killed("x", f"{common} --resume latest --wd 0.5", 3)
    assert "Changed since the checkpoint: --wd 0.2 -> 0.5" in first.log
    resumed = run("x", f"{common} --resume latest")
    assert resumed.log.count("Changed since") == 1 and not list(resumed.path.glob("recipe_*"))
