"""The choice between fused kernels and single operations; `fused_cases.py` has the kernels."""

import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_chunked import inputs

from open_clip_ext import create_loss
from open_clip_ext.kernels import choice

CASES = Path(__file__).with_name("fused_cases.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which comes with PyTorch for CUDA")
def test_the_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]


def fail(*args):
    raise RuntimeError("compiler's words\nno such instruction")


@pytest.mark.parametrize(
    "deviation, reason", [(fail, "RuntimeError: no such instruction"), (lambda *args: 1.0, "differ by 1"),
                          (lambda *args: float("nan"), "differ by nan")],
)  # fmt: skip
def test_kernels_that_fail_are_left_out_with_one_warning(deviation, reason, monkeypatch, caplog):
    module = ModuleType("fused")
    module.deviation, module.BOUND = deviation, 0.01
    monkeypatch.setitem(sys.modules, "open_clip_ext.kernels.fused", module)
    monkeypatch.setattr("open_clip_ext.kernels.fused", module, raising=False)
    monkeypatch.setattr(choice, "is_possible", lambda *args: True)
    monkeypatch.setattr(choice, "_eager", False)
    given = inputs("clip-chunked", 8, 16, 0.1, torch.float32)
    values = [create_loss("clip-chunked", kernels=kernels)(*given) for kernels in ("auto", "auto", "eager")]
    assert values[0] == values[1] == values[2]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and reason in caplog.text
