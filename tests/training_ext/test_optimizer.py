"""The temperature's own optimizer group and its schedules."""

import math

import open_clip
import pytest
import torch
from open_clip_train.scheduler import assign_learning_rate

from training_ext.core.temperature import TemperatureGroup


class Setup:
    def __init__(self, schedule: str, tau: float = 0.07):
        self.weight, self.bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
        self.logit_scale = torch.nn.Parameter(torch.tensor(-math.log(tau)))
        groups = [
            {"params": [self.bias, self.logit_scale], "weight_decay": 0.0},
            {"params": [self.weight], "weight_decay": 0.2},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3)
        self.temperature = TemperatureGroup(self.optimizer, self.logit_scale, 1e-4, schedule, model_lr=1e-3)

    def set_tau(self, tau: float) -> None:
        with torch.no_grad():
            self.logit_scale.fill_(-math.log(tau))

    def rates(self, steps: int = 1, new_lr: float = 1e-3) -> list[float]:
        """The temperature's learning rate in each of the next steps, without gradients."""
        rates = []
        for _ in range(steps):
            self.temperature.assign(assign_learning_rate, self.optimizer, new_lr)
            rates.append(self.optimizer.param_groups[-1]["lr"])
            self.optimizer.step()
        return rates


FULL, THIRD = pytest.approx(1e-4), pytest.approx(1e-4 / 3)


def test_a_group_of_its_own_comes_last():
    setup = Setup("model")
    groups = setup.optimizer.param_groups
    assert [[id(p) for p in group["params"]] for group in groups] == [
        [id(setup.bias)], [id(setup.weight)], [id(setup.logit_scale)]
    ]
    assert [group["weight_decay"] for group in groups] == [0.0, 0.2, 0.0]
    assert groups[-1]["lr"] == 1e-4 and groups[-1]["betas"] == groups[0]["betas"]


def test_model_schedule_keeps_the_ratio():
    setup = Setup("model", tau=0.02)
    for lr in (1e-5, 1e-3, 4e-4, 0.0):
        assert setup.rates(new_lr=lr) == [pytest.approx(lr / 10)]
        assert [group["lr"] for group in setup.optimizer.param_groups[:2]] == [lr, lr]


def test_fastclip_schedule_follows_tau_every_100_steps_and_not_the_model():
    setup = Setup("fastclip")
    assert setup.rates(10, new_lr=1e-9) == [FULL] * 10
    setup.set_tau(0.0299)
    assert setup.rates(92) == [FULL] * 90 + [THIRD] * 2  # it looks after step 100
    setup.set_tau(0.0301)
    assert setup.rates(99) == [THIRD] * 98 + [FULL]


def test_fastclip_schedule_needs_no_schedule_of_the_model():
    """With --skip-scheduler OpenCLIP never calls `assign`."""
    setup = Setup("fastclip")
    setup.set_tau(0.0299)
    for _ in range(100):
        setup.optimizer.step()
    assert setup.optimizer.param_groups[-1]["lr"] == THIRD
    assert Setup("fastclip", tau=0.02).optimizer.param_groups[-1]["lr"] == THIRD


def test_fastclip_schedule_looks_at_a_temperature_that_was_loaded_later(run, datasets, tmp_path):
    common = f"{datasets['shapes']} --loss fastclip-v3 --rho 5 --lr 1e-3 --workers 0 --epochs 1"
    weights = run("a", f"{common} --tau-init 0.02").checkpoint(1)["state_dict"]
    torch.save(weights, tmp_path / "weights.pt")
    schedule = "--lr-tau-scheduler fastclip --lr-tau 1e-6"
    trained = run("b", f"{common} {schedule} --resume {tmp_path}/weights.pt")
    group = trained.checkpoint(1)["optimizer"]["param_groups"][-1]
    assert group["tau_is_low"] and group["lr"] == pytest.approx(1e-6 / 3)


@pytest.mark.parametrize("tau, rate", [(0.0301, FULL), (0.0299, THIRD)])
def test_fastclip_schedule_looks_at_the_start(tau, rate):
    assert Setup("fastclip", tau).rates(2) == [rate] * 2


def test_a_resumed_group_decides_as_an_uninterrupted_one():
    whole = Setup("fastclip", tau=0.02)
    whole.rates(50)
    whole.set_tau(0.07)  # what a resumed run would see at its start
    state = {key: value for key, value in whole.optimizer.state_dict().items()}
    resumed = Setup("fastclip", tau=0.07)
    resumed.optimizer.load_state_dict(state)
    assert resumed.rates(60) == whole.rates(60) == [THIRD] * 50 + [FULL] * 10


def test_a_reference_model_leaves_the_temperature_alone(run, datasets, tmp_path):
    """OpenCLIP builds it by the same function as the trained model, after it."""
    torch.manual_seed(1)
    reference = open_clip.create_model("ViT-test")
    torch.save(reference.state_dict(), tmp_path / "reference.pt")
    common = f"{datasets['shapes']} --loss fastclip-v3 --rho 5 --lr-tau 0.1 --tau-init 0.05 --workers 0 --epochs 1"
    teacher = f"--reference-gap --distill-model ViT-test --distill-pretrained {tmp_path}/reference.pt"
    saved = run("x", f"{common} {teacher}").checkpoint(1)
    (group,) = [group for group in saved["optimizer"]["param_groups"] if "tau_is_low" in group]
    assert [int(saved["optimizer"]["state"][number]["step"]) for number in group["params"]] == [6]
    assert saved["state_dict"]["logit_scale"].item() != pytest.approx(-math.log(0.05), abs=0.05)
    resumed = run("x", f"{common} {teacher} --resume latest --epochs 2").checkpoint(2)
    assert [int(resumed["optimizer"]["state"][number]["step"]) for number in group["params"]] == [12]
