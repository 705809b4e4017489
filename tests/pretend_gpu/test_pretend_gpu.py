"""Every loss trains on a pretended GPU: no tensor on the wrong device, no wait in a step, nothing that NCCL refuses.

`pretend` says what this can show and what only a GPU can.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from variations import PRESETS, choices, is_default, variations

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAULTS = {  # what finds each
    "a table in host memory": "same device",
    "a hidden bool": "Waits: the host waits for the device in aten::_local_scalar_dense",
    "a mask": "nonzero",
    "a copy from host memory": "Waits: the host waits for the device in a copy to cuda",
    "a collective in host memory": "Refused: c10d::allreduce_ of a tensor in host memory",
    "a collective of a transposed matrix": "Refused: c10d::allreduce_ of a tensor that is not contiguous",
    "a collective of 16-bit integers": "Refused: c10d::allreduce_ of torch.int16",
    "a send": "Refused: c10d::send makes a communicator",
    "a collective of one process": "AssertionError: processes 0 and 1 differ",
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of PyTorch; a GPU is not needed"),
    pytest.mark.skipif(shutil.which("cc") is None and not os.environ.get("CI"), reason="needs a C compiler, cc"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """With the library in front of the driver."""
    library = tmp_path_factory.mktemp("library") / "libcuda.so.1"
    compiler = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    subprocess.run([*compiler, "-o", str(library), str(HERE / "libcuda.c")], check=True)
    return {
        **os.environ, "LD_PRELOAD": str(library), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request, environment) -> dict[str, str]:
    """What `scenarios` wrote of each preset that was asked for, and of the planted faults."""
    folder = tmp_path_factory.mktemp("pretend_gpu")
    asked = [item.callspec.params.get("work") for item in request.session.items if hasattr(item, "callspec")]
    work = [name for name in (*PRESETS, "planted") if name in asked]
    command = [sys.executable, str(HERE / "scenarios.py"), str(folder), *work]
    subprocess.run(command, env=environment, check=True)
    return {name: (folder / name).read_text() if (folder / name).exists() else "the process died" for name in work}


@pytest.mark.parametrize("work", PRESETS)
def test_a_loss_trains_and_saves_on_a_pretended_gpu(outcomes, work):
    assert outcomes[work].startswith("["), outcomes[work]


@pytest.mark.parametrize("work", ["planted"])
def test_each_planted_fault_is_found(outcomes, work):
    found = json.loads(outcomes[work])
    assert found.keys() == FAULTS.keys()
    for fault, message in FAULTS.items():
        assert message in found[fault], f"{fault}: {found[fault] or 'not found'}"


def test_every_choice_of_a_flag_is_tried():
    given = [pair for preset in PRESETS for settings in variations(preset) for pair in settings.items()]
    assert [choice for choice in choices() if choice not in given and not is_default(*choice)] == []


@pytest.mark.parametrize(
    "model, batch, accum_freq, checkpointing",
    [("ViT-B-32", 64, 1, False), ("ViT-B-16", 16, 2, True), ("RN50", 32, 1, False)],
)
def test_the_predicted_memory_of_a_step(environment, model, batch, accum_freq, checkpointing):
    """Within 1 % of what the same step takes with CUDA's autocast and attention, weights and moments included."""
    command = [sys.executable, str(HERE / "step_memory.py"), model, str(batch), str(accum_freq), str(checkpointing)]
    ended = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    predicted, pretended = json.loads(ended.stdout.splitlines()[-1])
    assert 0.99 < predicted / pretended < 1.01, (predicted, pretended)
