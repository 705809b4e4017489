"""Every benchmark runs, at a size of seconds, and writes what it measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = {
    "loss": "--losses fastclip-v3 neuclip queue --batch-sizes 16 --dims 8 --dtypes float32 bfloat16 -m 8",
    "network": "--batch-sizes 8 -m 16 --dim 4 --updates 2",
    "rows": "--rows 100 1000 --batch-size 8",
    "step_time": "--losses fastclip-v3 --batch-size 4 --num-samples 50 --precision amp_bf16",
    "end_to_end": "--losses fastclip-v3 --samples 48 --batch-size 2 --rounds 2 --workers 0",
}


def numbers(value) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(name, tmp_path):
    path = tmp_path / "results.json"
    flags = [*SMALL[name].split(), "--device", "cpu", "--threads", "1", "--seconds", "0", "--json", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *flags]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    written = json.loads(path.read_text())
    assert {"device", "threads", "torch"} == written["machine"].keys()
    for result in written["results"]:
        assert len(numbers(result)) >= 3 and all(number >= 0 for number in numbers(result)), result
        name_of_row = next(iter(result.values()))
        assert str(name_of_row).split(",")[0] in run.stdout.replace(",", "")
