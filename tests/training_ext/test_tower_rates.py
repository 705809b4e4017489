"""The component tower_rates: which parameters get which rate, over the schedule, and what is refused."""

from argparse import Namespace

import open_clip
import pytest
import torch

from training_ext.components.tower_rates import TowerRates

DATA = "--with tower_rates --dataset-type synthetic --train-num-samples 16 --workers 0 --warmup 0 --epochs 1"
RATES = "--lr 1e-3 --lr-image 1e-4 --lr-text 4e-3"
TEXT = {"context_length": 8, "vocab_size": 30, "width": 8, "heads": 2, "layers": 1}
VISION = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16}


def of(**flags):
    return TowerRates(Namespace(**{"lr": 1e-3, "lr_image": None, "lr_text": None, **flags}))


@pytest.mark.parametrize("kind", [open_clip.CLIP, open_clip.CustomTextCLIP])
def test_every_parameter_has_its_towers_rate(kind):
    model = kind(embed_dim=16, vision_cfg=VISION, text_cfg=TEXT)
    model.head = torch.nn.Linear(2, 2)
    names = {parameter: name for name, parameter in model.named_parameters()}
    given = [
        {"params": [p for p in names if p.ndim < 2], "lr": 1e-3, "weight_decay": 0.0},
        {"params": [p for p in names if p.ndim >= 2], "lr": 5e-4, "weight_decay": 0.2, "lr_scale": 0.5},
    ]
    groups = of(lr_image=1e-4, lr_text=4e-3).param_groups(given, names)
    assert sorted(names[p] for group in groups for p in group["params"]) == sorted(names.values())
    for group in groups:
        decay = 0.5 if group["weight_decay"] else 1.0
        for name in map(names.get, group["params"]):
            rest = name.startswith(("head.", "logit_"))
            factor = 1.0 if rest else 0.1 if name.startswith("visual.") else 4.0
            assert group.get("lr_scale", 1.0) == pytest.approx(decay * factor), name
            assert group["lr"] == pytest.approx(1e-3 * decay * factor)
    only_image = of(lr_image=1e-4).param_groups(given, names)
    assert len(only_image) == len(groups)  # so that a run resumes with the other flag, too


@pytest.mark.parametrize("schedule, factor", [("const", 1.0), ("cosine", 0.5)])
@pytest.mark.parametrize("loss", ["clip", "neuclip --npn-prototypes 8 --lr-tau 3e-4"])
def test_schedules_multiply_the_rates(run, loss, schedule, factor):
    path = run("rates", f"{DATA} {RATES} --loss {loss} --lr-scheduler {schedule}")  # two steps
    groups = [group for group in path.checkpoint(1)["optimizer"]["param_groups"] if group["params"]]
    rates = [1e-4, 4e-3, 3e-4 if "neuclip" in loss else 1e-3]  # the last: logit_scale's
    assert {round(group["lr"] / factor, 9) for group in groups} == {*rates}


@pytest.mark.parametrize(
    "flags, message",
    [
        ("", "--with: tower_rates has no effect without its flags: --lr-image, --lr-text"),
        ("--lr-image 0", "--lr-image: 0.0 is out of range; it must be a number > 0; for none give --lock-image"),
        ("--lr-image 1e-4 --lock-image", "--lr-image: has no effect with --lock-image; leave one of the two out"),
        ("--lr-text 1e-4 --lock-text", "--lr-text: has no effect with --lock-text; leave one of the two out"),
        ("--lr-text 1e-4 --lr 0", "--lr-text: has no effect with --lr 0, whose schedule it follows; give another"),
    ],
)
def test_refusals(refused, flags, message):
    assert refused(f"{DATA} --loss clip {flags}") == message


def test_resuming_needs_the_component(run, ends):
    path = run("rates", f"{DATA} {RATES} --loss clip").path / "checkpoints" / "epoch_1.pt"
    line = ends(f"--bare --loss clip --dataset-type synthetic --train-num-samples 16 --resume {path} --name without")
    assert "with the component tower_rates; train with it" in line
