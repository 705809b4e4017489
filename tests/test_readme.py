"""The code of README and docs/extending.md runs as it stands."""

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import open_clip
import pytest
import torch
from documents import code

from open_clip_ext import MODEL_CONFIGS, InputError, factory
from open_clip_ext.data import Scenes
from open_clip_ext.normalizers import NORMALIZERS, MovingAverageTable, Normalizer

ROOT = Path(__file__).parents[1]
TINY = (
    "--dataset-type shapes --train-num-samples 32 --model ViT-shapes-tiny --device cpu --precision fp32 --batch-size 8 "
    "--workers 0 --epochs 1 --warmup 2 --lr 1e-3 --rho 5 --log-every-n-steps 1"
)


def run(command, folder, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_loop(tmp_path):
    (script,) = code("In your own loop")
    assert len([line for line in script.splitlines() if line.strip()]) <= 32
    done = run([sys.executable, "-c", script], tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    found = [float(value) for value in re.findall(r"([\d.]+)%", done.stdout)]
    assert len(found) == 5 and found[-1] > 40 > found[0]
    assert (tmp_path / "state.pt").exists()


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """The package of docs/extending.md, installed in a folder of its own."""
    source, installed = (tmp_path_factory.mktemp(name) for name in ("source", "installed"))
    page = "docs/extending.md"
    sections = ("A preset", "A normalizer", "State per sample", "A loss without parts", "A component")
    (source / "pyproject.toml").write_text(code(None, page)[0])
    (source / "my_losses.py").write_text("\n\n".join(code(section, page)[0] for section in sections))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(installed), str(source)], check=True)
    return installed


def command(arguments: str) -> list[str]:
    return [sys.executable, "-m", "open_clip_ext.main", *arguments.split()]


@pytest.mark.slow
def test_another_packages_loss(plugin, tmp_path):
    path = f"{ROOT}{os.pathsep}{plugin}"
    shared = f"{TINY} --loss shared --logs logs --name shared --shared-keep 0.99"
    lines = [shared, f"{shared} --epochs 2 --resume latest", f"{TINY} --loss gentle --queue-size 16 --name gentle"]
    lines.append(f"{TINY} --loss pairwise --lr-tau 1e-3 --name pairwise".replace("--rho 5", ""))
    average = f"{TINY} --loss average --average-visits 2 --split-rows-above 0 --name average"
    lines += [average, f"{average} --epochs 2 --resume latest"]
    script = "import sys; from open_clip_ext.main import train; [train(line.split()) for line in sys.argv[1:]]"
    done = run([sys.executable, "-c", script, *lines], tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    ended = run(command(f"{lines[0]} --log-every-n-steps 1 --name ended --tau-floor 0.9"), tmp_path, PYTHONPATH=path)
    assert ended.returncode == 2 and "--tau-floor: tau is 0.07 after step 1" in ended.stderr, ended.stderr
    saved = torch.load(tmp_path / "logs/shared/checkpoints/epoch_2.pt", weights_only=True)
    assert saved["open_clip_ext"]["state"]["state.log_mean"].shape == (2, 1)
    saved = torch.load(tmp_path / "logs/average/checkpoints/epoch_2.pt", weights_only=True)
    assert saved["open_clip_ext"]["state"]["state.rows"]["table"] == 0
    refused = run(command(f"{TINY} --loss neuclip --normalizer shared"), tmp_path, PYTHONPATH=path)
    assert refused.returncode == 2 and "--encoder-objective: 'unified' needs a normalizer" in refused.stderr


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("shared", "no_such_module:Shared", "cannot be imported: ModuleNotFoundError"),
        ("shared", "collections:OrderedDict", "must be a subclass of .*Normalizer with that name"),
        ("mine", "open_clip_ext.normalizers:Queue", "must be a subclass of .*Normalizer with that name"),
        ("table", "test_readme:Table", "the name is taken"),
        ("queue", "open_clip_ext.normalizers:Queue", None),
    ],
)
def test_a_broken_package_is_named_in_one_line(monkeypatch, name, value, message):
    point = EntryPoint(name, value, "open_clip_ext.normalizers")
    monkeypatch.setattr(factory, "entry_points", lambda group: [point])
    monkeypatch.setitem(sys.modules, "test_readme", SimpleNamespace(Table=type("Table", (MovingAverageTable,), {})))
    table = dict(NORMALIZERS)

    def load():
        factory.add_entry_points("open_clip_ext.normalizers", table, Normalizer)

    if message is None:
        load()
        assert table == NORMALIZERS
    else:
        with pytest.raises(InputError, match=f"entry point {name!r} of {value}.*{message}"):
            load()
        assert table == NORMALIZERS


@pytest.mark.slow
def test_fine_tuning_from_the_start_to_the_retrieval(tmp_path):
    """The commands of README with a tiny model: each one's output is what the next reads."""
    open_clip.add_model_config(MODEL_CONFIGS)
    torch.save(open_clip.create_model("ViT-shapes-tiny").state_dict(), tmp_path / "START.pt")
    for seed, name in enumerate(("train", "val", "test")):
        lines = ["filepath,title"]
        for row, (image, caption) in enumerate(Scenes(16, seed, image_size=48)):
            image.save(tmp_path / f"{name}-{row}.png")
            lines.append(f'{name}-{row}.png,"{caption}"')
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    block = code("The command")[0].replace("\\\n", "").replace("ViT-B-32", "ViT-shapes-tiny")
    commands = [shlex.split(line)[1:] for line in block.splitlines()]
    tiny = "--device cpu --workers 0 --batch-size 8".split()
    training = [*tiny, *"--precision fp32 --osr-epochs 1 --log-every-n-steps 1".split()]
    for command, more in zip(commands, (training, tiny, tiny), strict=True):
        done = run([sys.executable, *command, *more], tmp_path, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr
    recalls, differences = done.stdout.split("test.csv, 16 images: recall")[1].split("difference to START")
    for label in ("START", "tuned/best", "between"):
        assert re.search(f"^{label} +\\d", recalls, re.MULTILINE), label
        assert re.search(f"^{label} +\\S", differences, re.MULTILINE) or label == "START"


@pytest.mark.slow
def test_two_views_of_digits():
    pytest.importorskip("sklearn")
    arguments = ["examples/two_views.py", "--epochs", "3", "--loss", "isogclr"]
    done = run([sys.executable, *arguments], ROOT, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    before, after = (float(value) for value in re.findall(r"([\d.]+)%", done.stdout))
    assert after > before + 5
