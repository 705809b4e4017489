"""A fine-tuning is evaluated from before its first step, and says when it makes the model worse."""

import json
import math
import re
from functools import wraps

import open_clip
import pytest
import torch
from conftest import ext_main, run_main
from open_clip_train import train as open_clip_train

from open_clip_ext.data import Scenes
from open_clip_ext.data.scenes import COLOURS
from open_clip_ext.metrics_file import read_metrics
from training_ext.components.keep_best import BEST
from training_ext.components.scenes.classification import CAPTIONS, KINDS, classify_scenes, example, kind_of
from training_ext.core import hosts
from training_ext.core.component import Components
from training_ext.data.metrics import SCENES, evaluated_metrics, is_better, num_items, open_clip_metrics
from training_ext.flags.params import parse_args

FLAGS = "--dataset-type shapes --train-num-samples 32 --val-num-samples 16 --workers 0"
TUNE = "--loss tuneclip --osr-epochs 1"
RECALL = "image_to_text_R@1"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("pretrained")
    assert not run_main(ext_main, f"{FLAGS} --loss clip --lr 1e-3 --epochs 1 --name pre", folder)
    return str(folder / "pre/checkpoints/epoch_1.pt")


@pytest.fixture
def evaluations(monkeypatch):
    """evaluations(values): what OpenCLIP's evaluation is to find, one number after the other."""

    def set_to(values: list[float]) -> list[int]:
        rest, at = list(values), []

        @wraps(open_clip_train.evaluate)  # by whose names components see whether they can run
        def evaluate(model, data, epoch, args, tb_writer=None, tokenizer=None):
            at.append(epoch)
            value = rest.pop(0)
            return {RECALL: value, "clip_val_loss": 1 - value, "epoch": epoch, "num_samples": 400}

        monkeypatch.setattr(hosts.installed().main(), "evaluate", evaluate)
        monkeypatch.setattr(open_clip_train, "evaluate", evaluate)
        return at

    return set_to


def test_the_starting_point_is_evaluated_before_a_recovery(run, pretrained):
    experiment = run("x", f"{FLAGS} {TUNE} --lr 1e-2 --pretrained {pretrained} --epochs 2")
    results = [json.loads(line) for line in (experiment.path / "checkpoints/results.jsonl").read_text().splitlines()]
    assert [result["epoch"] for result in results] == [0, 1, 2]
    assert {RECALL, SCENES} <= results[0].keys()
    log = experiment.log
    order = "Eval Epoch: 0 shapes", "Recovery 1/1 1/4 ", "Epoch 0 1/4 "
    places = [log.index(text) for text in order]
    assert places == sorted(places)


def test_the_log_says_what_is_below_the_start(run, pretrained, evaluations):
    """Of 400 captions a share of 0.5 has a standard error of 0.025."""
    at = evaluations([0.5, 0.4, 0.6, 0.49])
    log = run("x", f"{FLAGS} --loss clip --lr 1e-3 --pretrained {pretrained} --epochs 3").log
    assert at == [0, 1, 2, 3]
    below = [line for line in log.splitlines() if "these are worse than before training" in line]
    assert len(below) == 1 and "WARNING" in below[0]
    assert "After epoch 1 these are worse than before training by more than a standard error" in below[0]
    assert f"standard error: {RECALL} 0.4000 (was 0.5000 +- 0.0250)" in below[0]
    assert "After epoch 2 no metric is worse than before training" in log
    assert "After epoch 3 no metric is worse than before training" in log


def test_a_resumed_run_knows_its_start_and_its_best(run, pretrained, evaluations):
    """In its folder, and where what the first run kept is damaged; elsewhere it has a best of its own."""
    flags = f"{FLAGS} --loss fastclip-v3 --lr 1e-3 --rho 5 --pretrained {pretrained} --keep-best {RECALL}"
    evaluations([0.5, 0.7])
    first = run("x", f"{flags} --epochs 1").path
    best = {"epoch": 1, RECALL: 0.7, "clip_val_loss": pytest.approx(0.3)}
    at = evaluations([0.6, 0.4])
    experiment = run("x", f"{flags} --epochs 3 --resume latest")
    assert at == [2, 3]
    assert "After epoch 2 no metric is worse than before training" in experiment.log
    assert "After epoch 3 these are worse than before training" in experiment.log
    assert torch.load(experiment.path / BEST, weights_only=True)["metrics"] == best
    (first / BEST).write_bytes(b"torn")
    evaluations([0.6])
    assert "best.pt' cannot be read" in run("x", f"{flags} --epochs 4 --resume latest").log
    assert torch.load(experiment.path / BEST, weights_only=True)["metrics"][RECALL] == 0.6
    evaluations([0.3])
    other = run("y", f"{flags} --epochs 2 --resume {first}/checkpoints/epoch_1.pt")
    assert torch.load(other.path / BEST, weights_only=True)["metrics"][RECALL] == 0.3
    assert f"from here on; earlier ones stay in '{first / BEST}'" in other.log
    assert "from here on" not in experiment.log


def test_a_best_may_be_zero_and_no_nan_is_one(run, pretrained, evaluations, tmp_path):
    """A training that starts anew, since the first ended before its first checkpoint, has a best of its own."""
    flags = f"{FLAGS} --loss fastclip-v3 --lr 1e-3 --rho 5 --keep-best clip_val_loss"
    evaluations([math.nan, 1.0])
    experiment = run("x", f"{flags} --epochs 2 --without log")  # which ends a run with NaN
    evaluations([0.6])
    assert not run_main(ext_main, f"{flags} --epochs 3 --name x --resume latest", tmp_path / "logs")
    assert torch.load(experiment.path / BEST, weights_only=True)["metrics"]["clip_val_loss"] == 0.0
    for path in experiment.path.glob("checkpoints/*.pt"):
        path.unlink()
    evaluations([0.6])
    assert not run_main(ext_main, f"{flags} --epochs 1 --name x --resume latest", tmp_path / "logs")
    assert torch.load(experiment.path / BEST, weights_only=True)["metrics"]["clip_val_loss"] == pytest.approx(0.4)


def test_weights_alone_begin_a_training_of_their_own(run, pretrained, evaluations):
    """What the training that they come from started at, or its best, is not looked at."""
    flags = f"{FLAGS} --loss clip --lr 1e-3 --keep-best {RECALL}"
    evaluations([0.5, 0.9])
    folder = run("x", f"{flags} --pretrained {pretrained} --epochs 1").path
    weights = folder / "checkpoints/weights.pt"
    torch.save(torch.load(folder / BEST, weights_only=True)["state_dict"], weights)
    evaluations([0.6, 0.7])
    other = run("y", f"{flags} --resume {weights} --epochs 1")
    assert read_metrics(other.path, "eval")[0][RECALL] == 0.6
    assert torch.load(other.path / BEST, weights_only=True)["metrics"]["epoch"] == 1


def test_the_best_weights_are_not_a_training_to_resume(run, pretrained, refused, tmp_path):
    experiment = run("x", f"{FLAGS} --loss clip --lr 1e-3 --epochs 1 --keep-best {RECALL}")
    line = refused(f"{FLAGS} --loss fastclip-v3 --lr 1e-3 --resume {experiment.path / BEST} --epochs 1")
    assert "--resume" in line and "give it as --pretrained" in line


@pytest.mark.parametrize(
    "values, best, metric",
    [([0.5, 0.4, 0.6, 0.5], 2, RECALL), ([0.5, 0.4, 0.6, 0.5], 2, "clip_val_loss"), ([0.5, 0.4, 0.5, 0.2], 0, RECALL)],
)
def test_the_best_weights_are_kept(run, pretrained, evaluations, tmp_path, values, best, metric):
    """As they were at their evaluation, in a file that OpenCLIP loads and `--resume latest` does not pick."""
    evaluations(values)
    experiment = run("x", f"{FLAGS} --loss clip --lr 1e-3 --pretrained {pretrained} --epochs 3 --keep-best {metric}")
    path = experiment.path / BEST
    trained = torch.load(pretrained, weights_only=True) if best == 0 else experiment.checkpoint(best)
    model = open_clip.create_model("ViT-test", pretrained=str(path))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained["state_dict"][name].cpu()), name
    assert torch.load(path, weights_only=True)["metrics"]["epoch"] == best
    latest = hosts.installed().main().get_latest_checkpoint(str(experiment.path / "checkpoints"), remote=False)
    assert latest.endswith("epoch_3.pt")
    assert not list(experiment.path.rglob("*.partial"))
    evaluations([0.5] * 3)
    run("next", f"{FLAGS} {TUNE} --pretrained {path} --epochs 1")


@pytest.mark.slow
def test_an_evaluation_more_changes_nothing(run, pretrained, datasets):
    """OpenCLIP's own loss, whose order of data comes from generators that an evaluation uses too."""
    flags = f"{FLAGS} --lr 1e-3 --epochs 2 --pretrained {pretrained}"
    watched = run("watched", f"{flags} --loss clip --log-all")
    own = run("own", flags)
    assert "Eval Epoch: 0" in watched.log and "Eval Epoch: 0" not in own.log
    assert len(own.open_clips_losses()) == 8 and watched.open_clips_losses() == own.open_clips_losses()
    for name, tensor in own.checkpoint(2)["state_dict"].items():
        assert torch.equal(tensor, watched.checkpoint(2)["state_dict"][name]), name


def test_training_from_scratch_has_no_start(run):
    experiment = run("x", f"{FLAGS} --loss fastclip-v3 --lr 1e-3 --epochs 1")
    assert "Eval Epoch: 0" not in experiment.log and "before training" not in experiment.log
    assert [line["epoch"] for line in read_metrics(experiment.path, "eval")] == [1]


def test_metrics_known_and_their_directions():
    args = parse_args(f"{FLAGS} --imagenet-val x --imagenet-v2 y --loss clip".split())
    args.val_data = "shapes"
    never = parse_args(f"{FLAGS} --loss clip --imagenet-val x --zeroshot-frequency 0".split())
    assert evaluated_metrics(never, Components.of(never)) == []
    names = evaluated_metrics(args, Components.of(args))
    assert {RECALL, "text_to_image_mean_rank", "clip_val_loss", SCENES, "imagenet-zeroshot-val-top1"} <= set(names)
    assert "imagenetv2-zeroshot-val-top5" in names
    assert is_better(RECALL, 0.6, 0.5) and not is_better(RECALL, 0.5, 0.5)
    assert is_better("clip_val_loss", 0.4, 0.5) and is_better("text_to_image_mean_rank", 1.0, 2.0)


class Knowing(torch.nn.Module):
    """Embeds a scene's image as its own kind, every fifth as another, and a caption as the kind it is of."""

    def __init__(self, scenes: Scenes):
        super().__init__()
        self.scenes, self.seen = scenes, 0

    def forward(self, image=None, text=None):
        if image is None:
            return {"text_features": self.encode_text(text)}
        rows = []
        for _ in image:
            kind = KINDS.index(kind_of(self.scenes.scene(self.seen)))
            rows.append((kind + 1) % 180 if self.seen % 5 == 0 else kind)
            self.seen += 1
        return {"image_features": torch.eye(180)[rows]}

    def encode_text(self, tokens, normalize=True):
        return torch.eye(180)[tokens]


def test_only_a_fraction_of_the_images_has_a_standard_error():
    metrics = {"zeroshot-data-top1": 0.5, "zeroshot-data-balanced": 0.5, "zeroshot-data-images": 1010}
    assert num_items("zeroshot-data-top1", metrics, {}) == 1010
    assert num_items("zeroshot-data-balanced", metrics, {}) is None  # a mean over classes, perhaps of 1,000 and 10


def test_zero_shot_classification_counts():
    scenes = Scenes(30, seed=3, image_size=16, transform=lambda image: torch.zeros(3, 16, 16), tokenizer=lambda t: t)

    def tokenizer(captions):
        kinds = []
        for caption in captions:
            colours = sorted(word for word in caption.replace(",", "").split() if word in COLOURS)
            background = re.search(r"(\w+) background", caption)[1]
            kinds.append(KINDS.index((*colours, background)))
        return torch.tensor(kinds)

    args = parse_args("--device cpu --precision fp32".split())
    metrics = classify_scenes(Knowing(scenes), torch.utils.data.DataLoader(scenes, batch_size=7), args, tokenizer)
    assert metrics == {SCENES: 24 / 30}


def test_examples_of_a_kind_differ_in_all_else():
    for kind in (KINDS[0], KINDS[7], KINDS[179]):
        captions = {example(kind, number) for number in range(CAPTIONS)}
        assert len(captions) == CAPTIONS
        assert {"small", "large"} <= set(" ".join(captions).split())


def test_the_generative_loss_is_a_metric_of_coca():
    flags = "--loss clip --train-data a.tar --val-data b.tar --model"
    found = [open_clip_metrics(parse_args([*flags.split(), name])) for name in ("coca_ViT-B-32", "ViT-B-32")]
    assert ["val_generative_loss" in names for names in found] == [True, False]
