"""The code in docs/ runs as it stands, and does what the text says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from documents import ROOT, code
from ports import free_ports

from open_clip_ext import create_loss
from open_clip_ext.data import Scenes
from open_clip_ext.main import train
from open_clip_ext.presets import PRESETS
from training_ext.data.settings import PRETRAINED, SCRATCH, setting_for

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
FIRST_OF = {"log_lambda": "log_lambda_image_mean", "npn_l2_log": "npn_l2_log_before"}  # of names that the page abridges
LOOP, INFERENCE = "docs/custom-loop.md", "docs/inference.md"


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """loop(heading) -> what the first block and then the heading's have defined, and the state between them."""
    monkeypatch.chdir(tmp_path)

    def run(heading: str) -> tuple[dict, dict]:
        names: dict = {}
        exec("\n".join(code(None, LOOP)), names)
        between = {name: names[name].state_dict() for name in ("loss", "optimizer")}
        exec("\n".join(code(heading, LOOP)), names)
        return names, between

    return run


def equal(one, other) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_what_pages_name_is_there():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
    folders = "examples|docs|tests|benchmarks|open_clip_ext|training_ext"
    for page in pages:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"
        for link, anchor in re.findall(r"\]\(([^)#\s:]*\.md)?#([^)\s]+)\)", text):
            target = (page.parent / link if link else page).read_text()
            headings = re.findall(r"^#+ (.*)$", target, re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{page.name}: {link}#{anchor}"
        for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
    index = (ROOT / "docs/README.md").read_text()
    docs = [str(page.relative_to(ROOT / "docs")) for page in pages if page.is_relative_to(ROOT / "docs")]
    assert [name for name in docs if f"({name})" not in index] == ["README.md"]


def test_shards_in_commands_are_quoted():
    """Or the shell would expand the braces into several arguments."""
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        commands = re.sub(r"'[^'\n]*'", "QUOTED", "\n".join(re.findall(r"^    .*", page.read_text(), re.MULTILINE)))
        assert not re.search(r"\{\d+\.\.\d+\}", commands), page.name


def test_the_table_of_settings_is_that_of_the_code():
    """Which the dry run and make_shards print."""
    rows = [line.split(" | ") for line in (ROOT / "docs/settings.md").read_text().splitlines()]
    rows = [row for row in rows if row[0] in ("| scratch", "| pretrained")]
    assert len(rows) == len(SCRATCH) + len(PRETRAINED)
    for row, setting in zip(rows, SCRATCH + PRETRAINED, strict=True):
        start, pairs, batch, flags, *_ = row
        for number, unit in re.findall(r"(\d[\d,]*)(M|B|)", pairs.partition("(")[0]):
            n = int(number.replace(",", "")) * {"": 1, "M": 10**6, "B": 10**9}[unit]
            assert setting_for(n, start == "| pretrained") is setting
            command = setting.command(n, 1000)
            first = re.search("`(--loss [^`]*)`", flags)[1] + " --lr-tau 0.002" * ("`--lr-tau` by the" in flags)
            assert command == first and f"{setting.largest_batch(n):,}" in batch
            assert bool(setting.note) == ("**unknown**" in flags)


def test_the_page_of_logs_has_the_name_of_every_number():
    named = set(re.findall(r"`([\w-]+)`", (ROOT / "docs/logs.md").read_text()))
    losses = [(name, {}) for name, preset in PRESETS.items() if not preset.is_open_clip]
    losses += [("neuclip", {"npn_objective": "l2-log"}), ("fastclip-v3", {"surrogate": "hinge", "consistency": 0.5})]
    for name, options in losses:
        loss = create_loss(name, num_samples=64, epochs=1, **options)
        loss.set_epoch(0)
        image, text = torch.nn.functional.normalize(torch.randn(2, 8, 4, requires_grad=True), dim=2)
        reference = {"dist_image_features": image.detach(), "dist_text_features": text.detach()}
        more = reference if loss.takes_reference else {}
        values = loss(image, text, torch.tensor(100.0), index=torch.arange(8), output_dict=True, **more)
        for number in {*values, *loss.diagnostics()}:
            shown = re.sub("(log_lambda|npn_l2_log)_.*", lambda match: FIRST_OF[match[1]], number)
            assert re.sub("^(objective_[a-z]+)_.*", r"\1", shown) in named, (name, number)


def test_every_section_is_tried():
    headings = re.findall(r"^## (.*)$", (ROOT / LOOP).read_text(), re.MULTILINE)
    tests = Path(__file__).read_text()
    assert all(f'"{heading}"' in tests for heading in headings)


def test_evaluation(loop):
    names, before = loop("Evaluation")
    assert names["recall"] > 0.2  # of 1,000
    assert equal(names["loss"].state_dict(), before["loss"])


def test_gradient_accumulation(loop):
    """The gradient is that of the whole batch. Bound: two orders of float32 sums, amplified by 1 / tau."""
    names, _ = loop("Gradient accumulation")
    assert names["loss"].steps == 3 * 20 + 10
    model, loss = names["model"], names["loss"]
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.0)
    state, rows = loss.state_dict(), torch.arange(60)
    names["accumulated_step"](rows)
    accumulated = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    loss.load_state_dict(state)
    names["train_step"](rows)
    assert accumulated["logit_scale"] != 0
    for name, parameter in model.named_parameters():
        assert (parameter.grad - accumulated[name]).abs().max() <= 1e-4 * parameter.grad.abs().max(), name


ACCUMULATING = """
import copy, os, torch
import torch.distributed as dist
from contextlib import nullcontext
from torch import nn

dist.init_process_group("gloo")
{first}
{accumulation}
model.load_state_dict(start)
ddp = nn.parallel.DistributedDataParallel(model)
rank, calls = dist.get_rank(), 0

def model(*batch):  # four micro-batches, of which the last synchronizes
    global calls
    calls += torch.is_grad_enabled()
    with nullcontext() if calls % 4 == 0 else ddp.no_sync():
        return ddp(*batch)

optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
rows = torch.arange(48) * 2 + rank
new = copy.deepcopy(loss)
for _ in range(2):
    loss = copy.deepcopy(new)
    accumulated_step(rows, size=12)
accumulated = [parameter.grad.clone() for parameter in ddp.parameters()]
loss = copy.deepcopy(new)
optimizer.zero_grad()
loss(*ddp(images[rows], texts[rows]), index=rows).backward()
for parameter, own in zip(ddp.parameters(), accumulated, strict=True):
    assert (parameter.grad - own).abs().max() <= 1e-4 * parameter.grad.abs().max()
dist.barrier()
os._exit(0)  # gloo's threads may abort while Python shuts down and DistributedDataParallel still lives
"""


@pytest.mark.slow
def test_gradient_accumulation_over_processes(tmp_path):
    """Micro-batches without synchronization, and one with it: the gradient is that of the global batch."""
    first = "\n".join(code(None, LOOP)).partition("for epoch in range(epochs):")[0]
    accumulation = "\n".join(code("Gradient accumulation", LOOP)).partition("loss.set_epoch(epochs)")[0]
    first += "start = model.state_dict()\nloss.set_epoch(0)"
    in_two_processes(ACCUMULATING.format(first=first, accumulation=accumulation), tmp_path)


def test_mixed_precision(loop):
    names, _ = loop("Mixed precision")
    names["loss"].raise_if_not_finite()
    assert names["loss"].steps == 4 * 20
    exec("\n".join(code("Evaluation", LOOP)), names)
    assert names["recall"] > 0.2


def test_saving(loop, tmp_path):
    names, before = loop("Saving")
    assert equal(names["loss"].state_dict(), before["loss"])
    assert equal(names["optimizer"].state_dict()["state"], before["optimizer"]["state"])
    assert (tmp_path / "state.pt").exists()


def test_rows_in_files(loop, tmp_path):
    names, before = loop("Rows in files")
    assert equal(names["loss"].state_dict(), before["loss"])
    assert isinstance(names["state"]["_extra_state"]["state.log_u"], dict)
    assert (tmp_path / "step_20.rows/table_0_part_0_of_1.safetensors").stat().st_size > 8 * names["n"]


def test_recovery(loop):
    names, _ = loop("Recovery of optimizer statistics")
    assert names["done"] == 2 and names["loss"].steps == (2 + 3) * 20
    steps = {int(state["step"]) for state in names["optimizer"].state.values()}
    assert steps == {100}


def in_two_processes(script: str, folder: Path) -> None:
    (folder / "train.py").write_text(script)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()), "WORLD_SIZE": "2"}
    group["CUDA_VISIBLE_DEVICES"] = ""  # here may be one GPU
    started = [
        subprocess.Popen(
            [sys.executable, "train.py"], cwd=folder, stderr=subprocess.PIPE, text=True,
            env={**ENVIRONMENT, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    errors = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors


@pytest.mark.slow
def test_several_processes(tmp_path):
    first = "\n".join(code(None, LOOP)).partition("for epoch in range(epochs):")[0]
    in_two_processes("\n".join([first, *code("Several processes", LOOP)]), tmp_path)
    state = torch.load(tmp_path / "state.pt", weights_only=True)["loss"]["_extra_state"]
    assert state["state.log_u"].isfinite().all() and state["temperature.tau"].shape == (1000, 2)


def test_accelerate(tmp_path):
    """On two processes; what `save_state` wrote has the rows of both."""
    pytest.importorskip("accelerate")
    first = "\n".join(code(None, LOOP)).partition("for epoch in range(epochs):")[0]
    in_two_processes("\n".join([first, *code("accelerate", LOOP), "accelerator.load_state('state')"]), tmp_path)
    state = torch.load(tmp_path / "state/custom_checkpoint_0.pkl", weights_only=True)["_extra_state"]
    assert state["state.log_u"].isfinite().all() and state["steps"] == 3 * 10


def test_pytorch_metric_learning(loop):
    pytest.importorskip("pytorch_metric_learning")
    names, _ = loop("pytorch-metric-learning")
    assert names["loss"].steps == 4 * 20
    exec("\n".join(code("Evaluation", LOOP)), names)
    assert names["recall"] > 0.2


CHECKS = """
assert image_features.shape == (1, 64) and abs(image_features.norm().item() - 1) < 1e-5
assert probabilities.shape == (1, 2) and abs(probabilities.sum().item() - 1) < 1e-5
for pretrained in (checkpoint, "model.safetensors"):
    other, _, others_preprocess = open_clip.create_model_and_transforms(name, pretrained=pretrained)
    assert torch.equal(preprocess(Image.open("picture.png")), others_preprocess(Image.open("picture.png")))
    for key, tensor in other.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), (pretrained, key)
assert torch.equal(tokenizer(captions), open_clip.get_tokenizer(name)(captions))
"""


@pytest.mark.slow
def test_inference(tmp_path):
    """In a process of its own, in which nothing else has told OpenCLIP about the model."""
    flags = "--dataset-type shapes --train-num-samples 16 --model ViT-shapes-tiny --device cpu --precision fp32 "
    flags += "--batch-size 8 --workers 0 --epochs 1 --warmup 1 --lr 1e-3 --loss queue --rho 5 --name NAME"
    trained = train([*flags.split(), "--logs", tmp_path / "logs"])
    assert trained.checkpoints == [tmp_path / "logs/NAME/checkpoints/epoch_1.pt"]
    next(iter(Scenes(1, image_size=48)))[0].save(tmp_path / "picture.png")
    headings = re.findall(r"^## (.*)$", (ROOT / INFERENCE).read_text(), re.MULTILINE)
    script = "\n".join(block for heading in headings for block in code(heading, INFERENCE)) + CHECKS
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
