"""Tiny data sets and runs of the command in this process."""

import functools
import gc
import logging
import multiprocessing
import os
import re
from pathlib import Path

import open_clip
import pytest
import torch
from make_shards import main as make_shards
from open_clip_train import params
from pair import Pair
from stop import Killed, StopAt

from open_clip_ext.data import Scenes
from open_clip_ext.losses import GlobalContrastiveLoss
from open_clip_ext.main import main as ext_main
from open_clip_ext.metrics_file import read_metrics
from training_ext.core import hosts
from training_ext.core.rows import RowLoader
from training_ext.openclip.loading import load_plain

torch.set_num_threads(1)
# A fifth of the time of ViT-shapes-tiny, most of which goes into the optimizer's steps on the token embedding.
open_clip.add_model_config(Path(__file__).parent / "model_configs")
# Its list of merges takes a sixth of a short run, and the captions of the scenes' classes a third of an evaluation.
open_clip.tokenizer.SimpleTokenizer.encode = functools.cache(open_clip.tokenizer.SimpleTokenizer.encode)
open_clip.factory.SimpleTokenizer = functools.lru_cache(open_clip.factory.SimpleTokenizer)
CPU = "--device cpu" if hasattr(params.parse_args([]), "device") else ""  # not in OpenCLIP 2.26, which finds it
# "--device cuda:0 --no-set-device-rank" in OPEN_CLIP_DEVICE trains all tests on a GPU.
DEVICE = os.environ.get("OPEN_CLIP_DEVICE", CPU)
if "cuda" in DEVICE:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # since most tests compare two runs
TINY = f"--model ViT-test --precision fp32 {DEVICE} --batch-size 8 --warmup 2 --log-every-n-steps 1"
SHIPPED = TINY.replace("ViT-test", "ViT-shapes-tiny")  # for processes of their own, which have no other tiny model
LOSSES = {
    "clip": "--loss clip",
    "fastclip-v3": "--loss fastclip-v3 --gamma-decay-epochs 2 --rho 5",
    "sogclr": "--loss sogclr --tau-init 0.005",
    "isogclr": "--loss isogclr --tau-lr 1e-3",
    "fastclip-v2": "--loss fastclip-v2 --gamma-decay-epochs 2 --tau-lr 1e-3",
    "queue": "--loss queue --queue-size 20 --rho 5",
    "amorlip": "--loss amorlip --amor-online-every 2 --amor-ema 0.9",
    "cyclip": "--loss cyclip",
    "dcl": "--loss dcl --consistency 0.25",
    "joint": "--loss neuclip --normalizer mlp --npn-joint --rho 5",
    "neuclip": "--loss neuclip --npn-prototypes 20 --npn-updates 2 --npn-restart-every 5 --rho 5",
}


def run_main(main, arguments: str, folder: Path) -> int:
    """Run a command line with its logs below `folder`; OpenCLIP adds log handlers and never takes them away."""
    logging.root.handlers.clear()
    others = set(multiprocessing.active_children())
    try:
        return main([*TINY.split(), *arguments.split(), "--logs", str(folder)])
    finally:
        for handler in logging.root.handlers:
            handler.close()
        logging.root.handlers.clear()
        # Loader workers persist until their loader goes; the next run's workers must not inherit their pipes.
        if workers := set(multiprocessing.active_children()) - others:
            for worker in workers:
                worker.terminate()
            gc.collect()


def given_to_epoch(given: tuple) -> tuple:
    """Model, loss, epoch, optimizer and scaler of the arguments of the host's train_one_epoch."""
    if hosts.installed().HAS_TASKS:
        (state, *_) = given
        loss = getattr(state.task, "loss", None)
        return state.task.trainable_module, loss, state.epoch, state.optimizer, state.scaler
    model, _, loss, epoch, optimizer, scaler, *_ = given
    return model, loss, epoch, optimizer, scaler


def objective_of(line: dict) -> str:
    """The name of the loss's value, which says what can be compared with it."""
    return next(name for name in line if name.startswith("objective_") or name.endswith("_loss"))


class Experiment:
    def __init__(self, folder: Path, name: str):
        self.path = folder / name

    @property
    def log(self) -> str:
        return (self.path / "out.log").read_text()

    def logged(self, name: str | None = None) -> list[tuple[int, float]]:
        """(epoch, value) of every logged step, by default of what the loss minimises."""
        return [
            (line["epoch"], line[name or objective_of(line)])
            for line in read_metrics(self.path, "train")
            if name is None or name in line
        ]

    def open_clips_losses(self) -> list[tuple[str, str]]:
        """(epoch, loss) of every line of OpenCLIP's own: of a run without --loss, or with --log-all."""
        return re.findall(r"Train Epoch: (\d+) .* Loss: (\S+) \(", self.log)

    def checkpoint(self, epoch: int) -> dict:
        return load_plain(self.path / "checkpoints" / f"epoch_{epoch}.pt")


@pytest.fixture(scope="session", autouse=True)
def cache_of_shard_sizes(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def run(tmp_path):
    """run(name, arguments, main) -> Experiment; the run must succeed."""

    def run(name: str, arguments: str, main=ext_main) -> Experiment:
        assert not run_main(main, f"{arguments} --name {name}", tmp_path / "logs")
        return Experiment(tmp_path / "logs", name)

    return run


@pytest.fixture
def killed(tmp_path, monkeypatch):
    """killed(name, arguments, batch) -> the experiment, which saved nothing when it died."""

    def killed(name: str, arguments: str, batch: int) -> Experiment:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(RowLoader, "__iter__", StopAt(batch, signal=0))
            run_main(ext_main, f"{arguments} --name {name}", tmp_path / "logs")
        return Experiment(tmp_path / "logs", name)

    return killed


class Told:
    """Rows and keys of every call of the loss, and whether keys are of positives."""

    def __init__(self) -> None:
        self.calls: list = []
        self.positives: set[bool] = set()
        self.clear = self.calls.clear

    def __call__(self) -> list[torch.Tensor | None]:
        """All of them, one after the other; None for what the loss was not told."""
        return [None if parts[0] is None else torch.cat(parts) for parts in zip(*self.calls, strict=True)]


@pytest.fixture
def told(monkeypatch) -> Told:
    told, forward = Told(), GlobalContrastiveLoss.forward

    def call(self, *args, index=None, **kwargs):
        told.calls.append((index, kwargs.get("positive_key", kwargs.get("key"))))
        told.positives.add("positive_key" in kwargs)
        return forward(self, *args, index=index, **kwargs)

    monkeypatch.setattr(GlobalContrastiveLoss, "forward", call)
    return told


@pytest.fixture(scope="session")
def pair():
    """pair(arguments, folder): run a command in two processes that train together, see `Pair`."""
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture(scope="session")
def three():
    """As `pair`, of three processes."""
    three = Pair(3)
    yield three
    three.close()


@pytest.fixture
def ends(tmp_path, capsys):
    """ends(arguments, main, code) -> the one line of the error with which a command ends."""

    def ends(arguments: str, main=ext_main, code: int = 2) -> str:
        capsys.readouterr()
        assert run_main(main, arguments, tmp_path / "logs") == code
        ends.stderr = capsys.readouterr().err.strip()
        assert "Traceback" not in ends.stderr and ends.stderr.count("open_clip_ext: error: ") == 1, ends.stderr
        return ends.stderr.splitlines()[-1].removeprefix("open_clip_ext: error: ")

    return ends


@pytest.fixture
def fails(ends, tmp_path):
    """fails(arguments) -> the line after which a run ends that OpenCLIP has begun; no file may be left."""

    def fails(arguments: str) -> str:
        before = set(tmp_path.rglob("*"))
        line = ends(f"{arguments} --name fails")
        assert set(tmp_path.rglob("*")) == before
        return line

    return fails


@pytest.fixture
def refused(ends, tmp_path):
    """refused(arguments) -> the only line of stderr; nothing may be written."""

    def refused(arguments: str) -> str:
        def snapshot():
            return {path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")}

        before = snapshot()
        line = ends(arguments)
        assert all("Counting samples" in other for other in ends.stderr.splitlines()[:-1]), ends.stderr
        assert snapshot() == before
        return line

    return refused


def write_pairs(folder: Path, per_shard: int) -> dict[str, str]:
    """Flags of the same scenes as a csv and as six shards; beside these is one for validation."""
    sizes = f"--num-samples {6 * per_shard} --val-samples {per_shard} --samples-per-shard {per_shard} --image-size 48"
    assert not make_shards(f"shapes --out {folder}/shards {sizes}".split())
    (folder / "images").mkdir()
    lines = ["filepath\ttitle"]
    for row, (image, caption) in enumerate(Scenes(6 * per_shard, image_size=48)):
        image.save(folder / "images" / f"{row}.png")
        lines.append(f"{folder}/images/{row}.png\t{caption}")
    (folder / "train.csv").write_text("\n".join(lines))
    shards = f"--train-data {folder}/shards/train-{{000000..000005}}.tar"
    return {"csv": f"--train-data {folder}/train.csv", "shards": shards}


@pytest.fixture(scope="session")
def datasets(tmp_path_factory) -> dict[str, str]:
    """Command lines of 48 training pairs, by kind of data set."""
    pairs = write_pairs(tmp_path_factory.mktemp("data"), 8)
    shards = f"{pairs['shards']} --dataset-type webdataset"
    return {
        "csv": pairs["csv"],
        "shards": shards,
        "resampled": f"{shards} --dataset-resampled --train-num-samples 48",
        "shapes": "--dataset-type shapes --train-num-samples 48",
        "synthetic": "--dataset-type synthetic --train-num-samples 48",
    }
