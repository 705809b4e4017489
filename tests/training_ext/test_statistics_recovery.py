"""The recovery of optimizer statistics moves what TuneCLIP's Algorithm 1 moves, and nothing else."""

import json
import math
from collections.abc import Callable
from copy import deepcopy

import open_clip
import pytest
import torch
from conftest import LOSSES, Experiment, ext_main, given_to_epoch, objective_of, run_main
from safetensors.torch import save_file
from stop import Killed
from torch.nn.functional import normalize

from open_clip_ext.distributed import plain_name
from open_clip_ext.metrics_file import read_metrics
from open_clip_ext.recovery import FrozenWeights
from training_ext.components.recovery.recovery import FIRST_EPOCH
from training_ext.core import hosts
from training_ext.core.rows import RowLoader, pair_of
from training_ext.flags.params import parse_args

TUNE = "--loss tuneclip --lr 1e-3"
@pytest.fixture(scope="session")
def pretrained(tmp_path_factory) -> str:
    """A file of weights, whose temperature is 0.05."""
    folder = tmp_path_factory.mktemp("pretrained")
    command = "--dataset-type shapes --train-num-samples 48 --loss fastclip-v3 --lr 1e-3 --tau-init 0.05 --workers 0"
    assert not run_main(ext_main, f"{command} --epochs 1 --name pre", folder)
    return str(folder / "pre/checkpoints/epoch_1.pt")


class Epoch:
    """What OpenCLIP's epoch was given."""

    def __init__(self, model, loss, number, optimizer, scaler):
        self.number = number
        self.weights = {plain_name(name): tensor.clone() for name, tensor in model.state_dict().items()}
        names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
        self.moments = {names[p]: deepcopy(state) for p, state in optimizer.state.items()}
        self.lrs = [group["lr"] for group in optimizer.param_groups]
        self.scaler = deepcopy(scaler.state_dict()) if scaler else None
        run = getattr(getattr(loss, "args", [loss])[0], "__self__", None)  # not of OpenCLIP's own loss
        self.loss = None if run is None else run.training.loss
        self.loss_state = {} if self.loss is None else self.loss.full_state()
        self.normalizer = getattr(self.loss, "normalizer", None)
        self.gamma: float | None = None


@pytest.fixture
def epochs(monkeypatch) -> list[Epoch]:
    """Every epoch of OpenCLIP, the recovery's included, as it begins."""
    seen = []
    original = hosts.installed().main().train_one_epoch

    def recorded(*given, **kwargs):
        seen.append(epoch := Epoch(*given_to_epoch(given)))
        result = original(*given, **kwargs)
        epoch.gamma = getattr(epoch.normalizer, "current_gamma", None)  # set at the epoch's first batch
        return result

    monkeypatch.setattr(hosts.installed().main(), "train_one_epoch", recorded)
    return seen


def equal(one, other) -> bool:
    """Equal to the last bit, through dicts."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one.cpu(), other.cpu()) if isinstance(one, torch.Tensor) else one == other


@pytest.fixture
def killed(monkeypatch) -> Callable[[int | None], list[int]]:
    """killed(at): from now on the epoch with that number dies at its start; the numbers of the epochs begun."""
    original = hosts.installed().main().train_one_epoch

    def from_now_on(at: int | None) -> list[int]:
        begun = []

        def epoch_or_death(*given, **kwargs):
            begun.append(given_to_epoch(given)[2])
            if begun[-1] == at:
                raise Killed
            return original(*given, **kwargs)

        monkeypatch.setattr(hosts.installed().main(), "train_one_epoch", epoch_or_death)
        return begun

    return from_now_on


@pytest.mark.parametrize(
    "flags, surrogate",
    [("", lambda gap: gap), ("--osr-surrogate hinge", lambda gap: (gap + 0.1).clamp(min=0) ** 2)],
    ids=["identity", "hinge"],
)
def test_algorithm_1_in_float64(run, datasets, pretrained, monkeypatch, tmp_path, flags, surrogate):
    """u, m and v of two epochs, from the paper's equations by loops over pairs."""
    batches = []
    original = RowLoader.__iter__

    def recorded(self):
        for batch in original(self):
            batches.append([tensor.clone() for tensor in (*pair_of(batch), self.latest()["index"])])
            yield batch

    monkeypatch.setattr(RowLoader, "__iter__", recorded)
    path = tmp_path / "recovered.state"
    flags = f"{flags} --pretrained {pretrained} --osr-epochs 2 --osr-save {path} --epochs 1 --workers 0"
    run("x", f"{datasets['shapes']} --train-num-samples 24 {TUNE} {flags}")
    saved = torch.load(path, "cpu", weights_only=True)
    monkeypatch.undo()

    model = open_clip.create_model("ViT-test", pretrained=pretrained, output_dict=True).double().train()
    parameters = {name: p for name, p in model.named_parameters() if name != "logit_scale"}
    m, v = ({name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2))
    u = torch.full((24, 2), math.nan, dtype=torch.float64)
    steps = 6
    for step, (images, tokens, rows) in enumerate(batches[:steps]):
        gamma = 0.9 + 0.1 * 0.5 * (1 + math.cos(math.pi * (step // 3) / 4))
        image, text, scale = model(images.double(), tokens).values()
        s = normalize(image, dim=1) @ normalize(text, dim=1).T
        total = 0.0
        for i, row in enumerate(rows.tolist()):
            for side, similarities in enumerate((s[i], s[:, i])):
                gaps = [similarities[j] - s[i, i] for j in range(8) if j != i]
                phi = 1e-14 + sum(torch.exp(surrogate(gap) * scale.detach()) for gap in gaps) / 7
                old = u[row, side]
                u[row, side] = phi.detach() if old.isnan() else (1 - gamma) * old + gamma * phi.detach()
                total = total + phi / u[row, side].item() / scale.detach() / 8
        gradients = torch.autograd.grad(total, parameters.values())
        for name, gradient in zip(parameters, gradients, strict=True):
            m[name] = 0.9 * m[name] + 0.1 * gradient
            v[name] = 0.98 * v[name] + 0.02 * gradient**2

    assert saved["moments"].keys() == parameters.keys()
    largest = max(tensor.abs().max() for tensor in m.values())
    for name, state in saved["moments"].items():
        assert state["step"] == steps
        assert torch.allclose(state["exp_avg"].double(), m[name], rtol=1e-3, atol=1e-5 * largest), name
        assert torch.allclose(state["exp_avg_sq"].double(), v[name], rtol=1e-3, atol=1e-7 * largest**2), name
    # d log u / d similarity is 2 (gap + margin) / tau, at most 2 * 2.1 / 0.05, and a float32 encoder errs by some 1e-6.
    assert torch.allclose(saved["loss_state"]["state.log_u"].double(), u.log(), atol=1e-4)


OURS = ("neuclip", "amorlip", "isogclr", "fastclip-v2")
ANY_LOSS = {
    "tuneclip": TUNE,
    "clip": "--loss clip --lr 1e-3",
    **{name: f"{LOSSES[name]} --lr 1e-3" for name in OURS},
}


@pytest.mark.parametrize("loss", ["tuneclip", "clip", "neuclip", "amorlip", "isogclr"])
def test_weights_stand_still_and_statistics_move(run, datasets, pretrained, epochs, loss):
    """1.5 epochs of 6 steps are 9; the training takes over what they left."""
    run("x", f"{datasets['shapes']} {ANY_LOSS[loss]} --pretrained {pretrained} --osr-epochs 1.5 --epochs 1 --workers 0")
    first, second, training = epochs
    assert [epoch.number for epoch in epochs] == [FIRST_EPOCH, FIRST_EPOCH + 1, 0]
    assert equal(training.weights, first.weights) and equal(second.weights, first.weights)
    assert set(first.lrs) == {0.0} and 0.0 not in training.lrs
    assert not first.moments and second.moments
    assert {int(state["step"]) for state in training.moments.values()} == {9}
    assert not equal(training.moments, second.moments)
    if training.loss_state:
        assert training.loss_state["steps"] == 9
        assert not equal(training.loss_state, first.loss_state)
    if "temperature.tau" in training.loss_state:  # these stand still, too
        assert equal(training.loss_state["temperature.tau"], first.loss_state["temperature.tau"])
        assert training.loss_state["temperature.first_moment"].ne(first.loss_state["temperature.first_moment"]).any()


@pytest.mark.parametrize(
    "loss, flags",
    [
        ("tuneclip", "--precision amp"), ("clip", "--precision amp_bf16 --accum-freq 2"),
        ("tuneclip", "--accum-freq 2"), ("clip", "--skip-scheduler --grad-clip-norm 1"),
    ],
)
def test_with_what_openclip_offers(run, datasets, pretrained, epochs, loss, flags):
    flags = f"{flags} --osr-epochs 1 --epochs 1 --workers 0"
    run("x", f"{datasets['shapes']} {ANY_LOSS[loss]} --pretrained {pretrained} {flags}")
    recovery, training = epochs
    assert equal(training.weights, recovery.weights)
    steps = 3 if "accum" in flags else 6
    # A gradient scaler leaves out the steps at which its scale was too large.
    counted = {int(state["step"]) for state in training.moments.values()}
    assert counted == {steps} if "amp " not in flags else max(counted) in range(1, 7)
    assert 0.0 not in training.lrs


@pytest.mark.parametrize("transfer", ["moments", "table", "none"])
def test_what_is_transferred(run, datasets, pretrained, epochs, transfer):
    flags = f"--osr-epochs 2 --osr-transfer {transfer} --epochs 1 --workers 0"
    run("x", f"{datasets['shapes']} {TUNE} --pretrained {pretrained} {flags}")
    training = epochs[-1]
    assert training.number == 0 and len(epochs) == (1 if transfer == "none" else 3)
    assert bool(training.moments) == (transfer in ("both", "moments"))
    unvisited = training.loss_state["state.log_u"] == -math.inf
    assert not unvisited.any() if transfer in ("both", "table") else unvisited.all()
    assert training.loss_state["steps"] == (12 if transfer in ("both", "table") else 0)
    assert training.gamma == pytest.approx(0.95)  # the schedule's third epoch, whatever is transferred


def test_gamma_runs_on_one_clock(run, datasets, pretrained, epochs):
    flags = f"--train-num-samples 16 --pretrained {pretrained} --osr-epochs 4.5 --epochs 2 --workers 0"
    run("x", f"{datasets['shapes']} {TUNE} {flags}")
    expected = [0.9 + 0.05 * (1 + math.cos(math.pi * epoch / 4)) for epoch in range(4)] + [0.9] * 3
    assert [epoch.gamma for epoch in epochs] == pytest.approx(expected)


IN_SHARDS = pytest.param("neuclip", "shards", marks=pytest.mark.slow)


@pytest.mark.parametrize("loss, data", [("tuneclip", "shapes"), ("clip", "shapes"), IN_SHARDS])
def test_loaded_statistics_are_those_recovered(run, datasets, pretrained, epochs, tmp_path, loss, data):
    """A run that loads them goes on as the run that recovered them, to the last bit where OpenCLIP's data repeat."""
    path = tmp_path / "recovered.state"
    workers = "--workers 0" if data == "shapes" else "--workers 2"
    num_samples = "" if data == "shapes" else "--train-num-samples 48"
    common = f"{datasets[data]} {num_samples} {ANY_LOSS[loss]} --pretrained {pretrained} --epochs 2 {workers}"
    one = run("one", f"{common} --osr-epochs 1.5 --osr-save {path}")
    after_recovery = epochs[2]
    epochs.clear()
    other = run("other", f"{common} --osr-load {path}")
    assert [epoch.number for epoch in epochs] == [0, 1]
    assert equal(epochs[0].moments, after_recovery.moments)
    assert equal(epochs[0].loss_state, after_recovery.loss_state)
    assert epochs[0].gamma == after_recovery.gamma
    assert one.logged()[-12:] == other.logged()
    assert equal(one.checkpoint(2)["state_dict"], other.checkpoint(2)["state_dict"])


NETWORK = pytest.param("neuclip", "", marks=pytest.mark.slow)


@pytest.mark.parametrize("loss, more", [NETWORK, ("fastclip-v2", "--token-head 0.3"), ("clip", "")])
def test_an_interrupted_recovery_goes_on(run, datasets, pretrained, killed, tmp_path, loss, more):
    """Killed in its second epoch, and again in the training's first: the end is that of an uninterrupted run."""
    recovery = "--osr-epochs 3 --epochs 2 --workers 0"
    common = f"{datasets['shapes']} --train-num-samples 24 {ANY_LOSS[loss]} {more} --pretrained {pretrained} {recovery}"
    whole = run("whole", common)

    flags = f"{common} --name broken --osr-save {tmp_path}/x.state"  # exists when the third run starts
    for at, first in ((FIRST_EPOCH + 1, FIRST_EPOCH), (0, FIRST_EPOCH + 1)):
        seen = killed(at)
        with pytest.raises(Killed):
            run_main(ext_main, f"{flags} --resume latest", tmp_path / "logs")
        assert seen[0] == first and seen[-1] == at
        assert [path.name for path in (tmp_path / "logs/broken/checkpoints").iterdir()] == ["epoch_0_step_0.pt"]
    seen = killed(None)
    assert not run_main(ext_main, f"{flags} --resume latest", tmp_path / "logs")
    assert seen == [0, 1]  # the recovery was complete

    broken = Experiment(tmp_path / "logs", "broken")
    assert whole.logged()[-6:] == broken.logged()[-6:]
    assert equal(whole.checkpoint(2)["state_dict"], broken.checkpoint(2)["state_dict"])
    assert equal(whole.checkpoint(2)["optimizer"]["state"], broken.checkpoint(2)["optimizer"]["state"])
    assert not [*broken.path.rglob("*_step_*.pt")] and (tmp_path / "x.state").exists()


def test_an_optimizer_that_moves_at_learning_rate_0(datasets, pretrained, ends, monkeypatch):
    """Found after its first step, not after epochs."""
    original = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        steps.append(1)
        with torch.no_grad():
            self.param_groups[1]["params"][3].view(-1)[0] += 1e-6
        return result

    steps = []
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    line = ends(f"{datasets['shapes']} {TUNE} --pretrained {pretrained} --osr-epochs 1 --epochs 1 --workers 0")
    assert len(steps) == 1
    assert "--opt: adamw moves the weights (" in line and "--osr-epochs 0" in line


def test_standing_weights_sees_the_last_bit():
    model = torch.nn.BatchNorm1d(4)
    weights = FrozenWeights(model)
    digest = weights.digest()
    with torch.no_grad():
        model.bias[2] = -0.0  # equal to 0.0, but not the same bits
        model.running_mean += 1
    assert FrozenWeights(model).digest() != digest
    assert weights.restore() is None
    assert equal(model.running_mean, torch.zeros(4)) and not model.bias.signbit().any()
    assert FrozenWeights(model).digest() == digest
    model.weight.data[0] += 1e-6
    assert weights.restore() == "weight"
    assert FrozenWeights(model).digest() == digest


def test_weights_that_are_not_finite(datasets, pretrained, tmp_path, ends):
    state = torch.load(pretrained, weights_only=True)["state_dict"]
    state["text_projection"][0, 0] = math.inf
    torch.save(state, tmp_path / "broken.pt")
    command = f"{datasets['shapes']} {TUNE} --pretrained {tmp_path}/broken.pt --osr-epochs 1 --epochs 1 --workers 0"
    line = ends(f"{command} --log-every-n-steps 100")
    assert "is not finite" in line and "--opt" not in line


def test_an_optimizer_whose_moments_stay_zero(datasets, pretrained, ends):
    command = f"{datasets['shapes']} {TUNE} --pretrained {pretrained} --osr-epochs 1 --epochs 1 --workers 0"
    assert "--opt: timm/laprop leaves its moments 0" in ends(f"{command} --opt timm/laprop --eps 1e-8")


def test_a_hinge_that_leaves_nothing_to_do(run, datasets, pretrained, epochs, monkeypatch):
    """Every negative is a margin below its positive: the moments are 0, and rightly so."""
    monkeypatch.setattr("open_clip_ext.surrogates.PowerHinge.slope", lambda self, gap: torch.zeros_like(gap))
    flags = f"--pretrained {pretrained} --osr-epochs 1 --osr-surrogate hinge --epochs 1 --workers 0"
    run("x", f"{datasets['shapes']} {TUNE} {flags}")
    assert not any(state["exp_avg"].any() for state in epochs[-1].moments.values())


def test_distillation_is_recovered_too(run, datasets, pretrained, epochs):
    """OpenCLIP's own loss with a teacher; its epoch needs the other model."""
    teacher = f"--distill-model ViT-test --distill-pretrained {pretrained}"
    flags = f"--pretrained {pretrained} --osr-epochs 1 --epochs 1 --workers 0"
    run("x", f"{datasets['shapes']} --loss clip {teacher} {flags}")
    assert {int(state["step"]) for state in epochs[-1].moments.values()} == {6}


@pytest.mark.parametrize("flags", ["--epochs 2 --save-frequency 0", "--epochs 2 --save-most-recent"])
def test_the_file_of_the_recovery_goes_with_the_last_checkpoint(run, datasets, pretrained, flags):
    experiment = run("x", f"{datasets['shapes']} {TUNE} --pretrained {pretrained} --osr-epochs 1 {flags} --workers 0")
    files = {path.name for path in (experiment.path / "checkpoints").iterdir()}
    assert files == {"epoch_2.pt"} | ({"epoch_1.pt", "epoch_latest.pt"} if "recent" in flags else set())


def test_the_log_shows_progress_and_what_is_left(run, datasets, pretrained):
    flags = f"--pretrained {pretrained} --osr-epochs 1.5 --epochs 1 --workers 0"
    experiment = run("x", f"{datasets['shapes']} {TUNE} {flags}")
    log = experiment.log
    lines = [line for line in log.splitlines() if "/s left " in line]
    assert len(lines) == 6 + 3 + 6 and lines[-1].endswith(" left 0s")
    for number, shown in (0, "Recovery 1/2 1/6 "), (8, "Recovery 2/2 3/3 "), (9, "Epoch 0 1/6 "):
        assert shown in lines[number]
    assert str(FIRST_EPOCH) not in log
    recovered = read_metrics(experiment.path, "recovery")
    assert [line["samples"] for line in recovered] == [8 * step for step in range(1, 10)]
    assert {line["lr"] for line in recovered} == {0.0}
    # Their values cannot be compared: the recovery has the identity in place of the training's hinge.
    assert {objective_of(line) for line in recovered} == {"objective_fixed"}
    assert {objective_of(line) for line in read_metrics(experiment.path, "train")} == {"objective_fixed_hinge"}
    assert "Recovering optimizer statistics for 1.5 epochs" in log


def test_orders_of_the_data_differ(run, datasets, pretrained):
    """In each epoch of the recovery and in the training's first; the same weights tell batches apart by their loss."""
    flags = f"--pretrained {pretrained} --osr-epochs 2 --epochs 1 --workers 0"
    lines = read_metrics(run("x", f"{datasets['shapes']} {ANY_LOSS['clip']} {flags}").path)
    first_losses = {line[objective_of(line)] for line in lines if line["step"] == 1}
    assert len(first_losses) == len([line for line in lines if line["step"] == 1]) == 3


@pytest.mark.slow
def test_two_processes(datasets, pretrained, pair, tmp_path):
    """Recovered by two processes, loaded by one."""
    path = tmp_path / "recovered.state"
    common = f"{datasets['shapes']} {TUNE} --pretrained {pretrained} --epochs 1 --workers 0"
    ended = pair(f"{common} --val-num-samples 16 --osr-epochs 1.5 --name two --osr-save {path}", tmp_path)
    assert [process.code for process in ended] == [0, 0], ended
    assert "Eval Epoch: 0" in Experiment(tmp_path, "two").log
    saved = torch.load(path, "cpu", weights_only=True)
    assert {int(state["step"]) for state in saved["moments"].values()} == {5}  # 3 + round(1.5) steps of 16
    assert saved["loss_state"]["state.log_u"].shape == (48, 2)
    assert not run_main(ext_main, f"{common} --osr-load {path} --name one", tmp_path)


@pytest.mark.parametrize("kind", ["bare weights", "hub folder", "resumed weights"])
def test_where_weights_come_from(run, datasets, pretrained, epochs, tmp_path, kind):
    """All that OpenCLIP takes: each is evaluated first, recovered, and trained from."""
    model = open_clip.create_model("ViT-test", pretrained=pretrained)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if kind == "hub folder":
        config = {"model_cfg": open_clip.get_model_config("ViT-test"), "preprocess_cfg": {}}
        (tmp_path / "hub").mkdir()
        (tmp_path / "hub/open_clip_config.json").write_text(json.dumps(config))
        save_file(weights, tmp_path / "hub/open_clip_model.safetensors")
        given = f"--model local-dir:{tmp_path}/hub"
    else:
        torch.save(weights, tmp_path / "weights.pt")
        given = f"--{'pretrained' if kind == 'bare weights' else 'resume'} {tmp_path}/weights.pt"
    flags = f"{TUNE} --workers 0 --epochs 1 --val-num-samples 8 --osr-epochs 0.5"
    experiment = run("x", f"{datasets['shapes']} {given} {flags}")
    assert equal(epochs[-1].weights, weights) and epochs[0].number == FIRST_EPOCH
    assert "Eval Epoch: 0" in experiment.log
    if kind != "resumed weights":
        assert parse_args(f"{given} --loss tuneclip --train-data x.tar".split()).osr_epochs == 5


def test_defaults_are_the_papers():
    """TuneCLIP, Table 6, where nothing is given; what is given counts."""
    args = parse_args("--loss tuneclip --pretrained openai --model ViT-B-32 --train-data x.tar".split())
    settings = "lr beta1 beta2 wd lr_scheduler warmup epochs osr_epochs margin margin_power gamma gamma_decay_epochs"
    assert [getattr(args, name) for name in settings.split()] == [
        1e-5, 0.9, 0.98, 0.02, "cosine", 0, 5, 5.0, 0.1, 2.0, 0.9, 4,
    ]
    assert args.precision == parse_args([]).precision in ("amp", "amp_bf16") and args.osr_transfer == "both"
    given = "--lr 5e-4 --beta2 0.95 --wd 0.2 --warmup 10000 --epochs 32 --osr-epochs 0 --gamma 0.5"
    args = parse_args(f"--loss tuneclip --pretrained openai --model ViT-B-32 --train-data x.tar {given}".split())
    values = [5e-4, 0.9, 0.95, 0.2, 10000, 32, 0.0, 0.5]
    assert [getattr(args, n) for n in "lr beta1 beta2 wd warmup epochs osr_epochs gamma".split()] == values
    assert parse_args("--loss tuneclip --train-data x.tar".split()).osr_epochs == 0  # nothing to recover from scratch
    args = parse_args("--loss fastclip-v3 --pretrained openai --train-data x.tar".split())
    assert (args.osr_epochs, args.wd, args.epochs) == (0, 0.2, 32)


@pytest.fixture(scope="module")
def recovered(pretrained, tmp_path_factory):
    """(command line, file): what a recovery of half an epoch gave."""
    folder = tmp_path_factory.mktemp("recovered")
    path = folder / "recovered.state"
    command = f"--dataset-type shapes --train-num-samples 48 --workers 0 --epochs 1 --pretrained {pretrained}"
    assert not run_main(ext_main, f"{command} --loss tuneclip --osr-epochs 0.5 --osr-save {path} --name x", folder)
    return command, path


@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--loss clip", ["another loss", "tuneclip", "clip"]),
        ("--loss tuneclip --normalizer queue", ["another loss", "--normalizer table", "--normalizer queue"]),
        ("--loss tuneclip --train-num-samples 40", ["another data", "48 rows", "40 rows"]),
        ("--loss tuneclip --shapes-shifted", ["another data", "48 rows"]),
        ("--loss tuneclip --beta2 0.95", ["another optimizer", "0.98", "0.95"]),
        ("--loss tuneclip --opt timm/adamw --eps 1e-6", ["another optimizer", "adamw with", "timm/adamw"]),
        ("--loss tuneclip --force-quick-gelu", ["another model", "--force-quick-gelu True"]),
        ("--loss tuneclip --osr-epochs 2", ["--osr-epochs", "2", "0.5"]),
        # Known only when the model is there
        ("--loss tuneclip --tau-init 0.06", ["another weights"]),
        ("--loss tuneclip --lock-image", ["another trained parameters"]),
    ],
)
def test_statistics_of_something_else_are_refused(recovered, ends, flags, parts):
    command, path = recovered
    line = ends(f"{command} {flags} --osr-load {path}")
    assert all(part in line for part in [*parts, "--osr"]), line


SMALL = "--dataset-type shapes --train-num-samples 16 --workers 0 --epochs 1"


def test_statistics_of_another_reference_model_are_refused(pretrained, run, tmp_path, ends):
    weights = torch.load(pretrained, weights_only=True)["state_dict"]
    torch.save({**weights, "visual.proj": -weights["visual.proj"]}, tmp_path / "other.pt")
    command = f"{SMALL} --loss drrho-clip --lr 1e-3 --distill-model ViT-test --pretrained {pretrained}"
    run("x", f"{command} --distill-pretrained {pretrained} --osr-epochs 0.5 --osr-save {tmp_path}/x.state")
    line = ends(f"{command} --distill-pretrained {tmp_path}/other.pt --osr-load {tmp_path}/x.state")
    assert "x.state' was recovered with another reference model" in line


def test_files_that_are_none(refused, recovered, pretrained, tmp_path):
    command, path = recovered
    torn = tmp_path / "torn.state"
    torn.write_bytes(path.read_bytes()[:-1000])
    newer = tmp_path / "newer.state"
    content = torch.load(path, weights_only=True)
    torch.save({**content, "format": 99}, newer)
    before, within = tmp_path / "before.state", tmp_path / "within.state"
    torch.save({**content, "format": 1, "done": 0}, before)
    torch.save({**content, "format": 1, "done": 1, "position": {"batches": 2, "of": 3}}, within)
    for file, part in [
        (tmp_path / "absent", "there is no file"), (tmp_path, "there is no file"), (torn, "cannot be read"),
        (pretrained, "was not written by --osr-save"), (newer, "another open_clip_ext (format 99)"),
        (before, "of an interrupted recovery (epoch 0 of 1)"), (within, "of an interrupted recovery"),
    ]:
        line = refused(f"{command} --loss tuneclip --osr-load {file}")
        assert "--osr-load" in line and str(file) in line and part in line


def test_a_complete_file_of_an_earlier_version_is_loaded(recovered, run, tmp_path):
    command, path = recovered
    content = torch.load(path, weights_only=True)
    later = {name: content.pop(name) for name in ("rows", "states")}
    torch.save({**content, "format": 1, "done": 1}, tmp_path / "earlier.state")
    assert later == {"rows": None, "states": {}}
    experiment = run("x", f"{command} --loss tuneclip --osr-load {tmp_path}/earlier.state")
    assert "=> loaded the recovered statistics" in experiment.log


def test_where_a_file_must_not_be(refused, recovered, tmp_path):
    command, path = recovered
    torch.save(open_clip.create_model("ViT-test").state_dict(), tmp_path / "bare.pt")
    for resume in ("", "--resume latest --name new", f"--resume {tmp_path}/bare.pt"):  # none goes on with anything
        line = refused(f"{command} --loss tuneclip --osr-epochs 1 --osr-save {path} {resume}")
        assert str(path) in line and "exists" in line


def test_an_interrupted_recovery_of_something_else(datasets, pretrained, killed, tmp_path, ends):
    killed(FIRST_EPOCH + 1)
    common = f"{datasets['shapes']} --loss tuneclip --pretrained {pretrained} --epochs 1 --workers 0 --name x"
    with pytest.raises(Killed):
        run_main(ext_main, f"{common} --osr-epochs 2", tmp_path / "logs")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for flags, part in [
        ("--osr-epochs 3", "give --osr-epochs 2"), ("--osr-epochs 2 --osr-surrogate hinge", "has identity; give that"),
    ]:
        line = ends(f"{common} {flags} --resume latest")
        assert part in line and "epoch_0_step_0.pt" in line
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    killed(None)
    (tmp_path / "notes.txt").write_text("not statistics")
    saved = f"--osr-save {tmp_path}/notes.txt --resume latest"
    assert not run_main(ext_main, f"{common} --osr-epochs 2 {saved}", tmp_path / "logs")
    assert (tmp_path / "notes.txt").read_text() == "not statistics"
    assert f"'{tmp_path}/notes.txt' exists and is left as it is" in Experiment(tmp_path / "logs", "x").log
