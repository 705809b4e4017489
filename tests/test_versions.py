"""Other OpenCLIPs than the installed one, each in a folder of its own that comes first on the path.

They are installed without their dependencies. A few tests of the training run with each, and a training ends with the
same losses as with the installed one.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from open_clip_ext.data import Scenes
from open_clip_ext.metrics_file import read_metrics

TRAINING = Path(__file__).parent / "training_ext"
WHEEL = "OPEN_CLIP_WHEEL"  # of OpenCLIP's main branch, which is not on PyPI
VERSIONS = [
    "2.29.0", "2.32.0", pytest.param(WHEEL, id="wheel")
]
CHOSEN = (
    "test_midepoch.py::test_a_run_stopped_at_a_step_equals_an_uninterrupted_one[neuclip-csv-0---precision bf16-8]",
    "test_midepoch.py::test_a_run_stopped_at_a_step_equals_an_uninterrupted_one[queue-shards-0--4]",
    "test_midepoch.py::test_a_run_stopped_at_a_step_equals_an_uninterrupted_one[isogclr-csv-0---accum-freq 2-7]",
    "test_training.py::test_open_clips_own_losses_train_as_open_clip_trains_them[]",
    "test_statistics_recovery.py::test_what_is_transferred[moments]",
    "test_hooks.py::test_every_name_is_a_seam_of_the_host",
    "test_before_first_step.py::test_a_trial_has_neither_weights_nor_processes_nor_files",
    "test_midepoch.py::test_two_processes[fastclip-v3-shards---workers 1-4-1]",
    "test_captions.py::test_lines_of_a_picture_are_one_sample",
    "test_validation.py::test_open_clips_numbers_where_no_two_similarities_are_equal",
    "test_validation.py::test_any_caption_of_an_image_counts[csv--0]",
    "test_bad_data.py::test_a_csv_with_numbered_lines_and_no_name_for_them",
    "test_bad_data.py::test_empty_captions_are_counted[fastclip-v3]",
)
TRAIN = (
    "import sys; from pathlib import Path; from conftest import ext_main, run_main; "
    "sys.exit(run_main(ext_main, sys.argv[1], Path(sys.argv[2])))"
)
FLAGS = "--dataset-type shapes --train-num-samples 48 --loss fastclip-v3 --lr 1e-3 --workers 0 --epochs 2 --name"

pytestmark = pytest.mark.slow


def environment(*first: Path) -> dict[str, str]:
    """With `first` on the path before what is installed."""
    root = TRAINING.parents[1]
    path = map(str, [*first, root, root / "examples" / "data", TRAINING])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", params=VERSIONS)
def other(request, tmp_path_factory) -> dict[str, str]:
    """The environment of another OpenCLIP."""
    package = f"open_clip_torch=={request.param}"
    if request.param == WHEEL and not (package := os.environ.get(WHEEL, "")):
        pytest.skip(f"{WHEEL} in the environment names no wheel of OpenCLIP's main branch")
    folder = tmp_path_factory.mktemp("open_clip")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), package]
    subprocess.run(pip, check=True)
    return environment(folder)


def train(folder: Path, environment: dict[str, str]) -> list[float]:
    """The loss of every step of two epochs."""
    subprocess.run([sys.executable, "-c", TRAIN, f"{FLAGS} run", str(folder)], env=environment, check=True)
    return [line["objective_learnable"] for line in read_metrics(folder / "run", "train")]


@pytest.fixture(scope="module")
def losses(tmp_path_factory) -> list[float]:
    return train(tmp_path_factory.mktemp("installed"), environment())


def core_losses(folder: Path, environment: dict[str, str]) -> list[float]:
    """The loss of every step of the core alone, each of all pairs of whole images, since it seeds no order."""
    lines = ["filepath\ttitle"]
    for row, (image, caption) in enumerate(Scenes(16, image_size=48)):
        image.save(folder / f"{row}.png")
        lines.append(f"{folder}/{row}.png\t{caption}")
    (folder / "train.csv").write_text("\n".join(lines))
    flags = "--bare --loss fastclip-v3 --batch-size 16 --epochs 4 --workers 0 --lr 1e-3 --aug-cfg scale=(1.0,1.0)"
    flags += f" --train-data {folder}/train.csv --name run"
    subprocess.run([sys.executable, "-c", TRAIN, flags, str(folder)], env=environment, check=True)
    log = (folder / "run" / "out.log").read_text()
    return [float(loss) for loss in re.findall(r"Objective_learnable: (\S+) \(", log)]


def run_tests(names: list[str], environment: dict[str, str]) -> str:
    """The end of what pytest says of tests that must pass."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    command += [str(TRAINING / name) for name in names]
    ended = subprocess.run(command, env=environment, cwd=TRAINING.parents[1], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-5000:]
    return ended.stdout[-5000:]


def test_chosen_tests_of_the_training(other):
    assert f"{len(CHOSEN)} passed" in run_tests(list(CHOSEN), other)


def test_the_losses_are_those_of_the_installed_open_clip(other, losses, tmp_path):
    assert len(losses) == 12
    # Models of other versions round otherwise, and the task loop decays other weights.
    assert train(tmp_path, other) == pytest.approx(losses, rel=1e-4)


def test_the_core_trains_with_the_losses_of_the_installed_open_clip(other, tmp_path):
    expected, found = (tmp_path / name for name in ("installed", "other"))
    expected.mkdir()
    found.mkdir()
    losses = core_losses(expected, environment())
    assert len(losses) == 4 and core_losses(found, other) == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("other", [WHEEL], indirect=True)
def test_the_loop_of_tasks(other):
    assert "skipped" not in run_tests(["test_tasks.py"], other)
