"""The choice between fused kernels and single operations; `CASES` are of the kernels."""

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
from open_clip_ext.batch import Batch
from open_clip_ext.kernels import choice

CASES = ("fused_cases.py", "fused_prototype_cases.py")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which comes with PyTorch for CUDA")
@pytest.mark.parametrize("cases", CASES)
def test_the_kernels_in_the_interpreter(cases):
    path = Path(__file__).with_name(cases)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(path)]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which comes with PyTorch for CUDA")
@pytest.mark.parametrize("m", [1, 40, 3000, 16384])
@pytest.mark.parametrize("keyed", [False, True])
def test_the_kernel_of_any_number_of_prototypes_compiles(m, keyed, tmp_path, monkeypatch):
    """For a GPU that is not there; the interpreter does not see what the compiler refuses."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from open_clip_ext.kernels import fused_prototypes, prototype_kernels

    sizes = fused_prototypes.sizes_of(m)
    constants = {"UNIFIED": True, "BM": sizes["BM"]} | ({} if keyed else {"anchor_keys": None, "keys": None})
    types = {"anchor_keys": "*i64", "keys": "*i64"} | dict.fromkeys(("size", "start", "batch", "m"), "i32")
    names = prototype_kernels.weigh.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    source = ASTSource(
        prototype_kernels.weigh, signature, {(names.index(name),): value for name, value in constants.items()}
    )
    warps = {"num_warps": sizes["num_warps"]}
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=warps).asm["ptx"]


def with_fused(monkeypatch, deviation):
    """A stand-in for the module of the kernels."""
    module = ModuleType("fused")
    module.deviation, module.BOUND = deviation, 0.01
    monkeypatch.setitem(sys.modules, "open_clip_ext.kernels.fused", module)
    for name in ("is_large", "is_possible", "has_tf32"):
        monkeypatch.setattr(choice, name, lambda *args: True)
    monkeypatch.setattr(choice, "_usable", {})
    return module


def fail(*args):
    raise RuntimeError("compiler's words\nno such instruction")


@pytest.mark.parametrize(
    "deviation, reason", [(fail, "RuntimeError: no such instruction"), (lambda *args: 1.0, "differ by 1"),
                          (lambda *args: float("nan"), "differ by nan")],
)  # fmt: skip
def test_kernels_that_fail_are_left_out_with_one_warning(deviation, reason, monkeypatch, caplog):
    with_fused(monkeypatch, deviation)
    given = inputs("clip-chunked", 8, 16, 0.1, torch.float32)
    values = [create_loss("clip-chunked", kernels=kernels)(*given) for kernels in ("auto", "auto", "eager")]
    assert values[0] == values[1] == values[2]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and reason in caplog.text


@pytest.mark.parametrize("others", [True, False])
def test_all_processes_have_the_kernels_or_none(others, monkeypatch):
    """They exchange exponents, in units that the kernels choose."""
    module = with_fused(monkeypatch, lambda *args: 0.0)
    monkeypatch.setattr(choice, "all_gather", lambda here: torch.cat([here, torch.tensor([float(others)])]))
    batch = Batch.of_process(*torch.eye(16)[None, :8].expand(2, -1, -1), torch.tensor(0.1))
    for _ in range(2):
        assert choice.fused_kernels(batch, "auto", "clip") == (module if others else None)
