"""Every benchmark runs, at a size of seconds, and writes what it measured."""

import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from open_clip_ext.normalizers import prototypes
from open_clip_ext.normalizers import sharded_prototypes as sharded

ROOT = Path(__file__).parents[1]
SMALL = {
    "loss": "--losses fastclip-v3 neuclip queue amorlip drrho-clip --batch-sizes 16 --dims 8 -m 8 "
    "--dtypes float32 bfloat16",
    "network": "--batch-sizes 8 -m 16 --dim 4 --updates 2 --also graph bfloat16",
    "operations": "--batch-sizes 8 --processes 1 8 --dim 4 -m 16 --num-samples 100 --losses clip fastclip-v3 neuclip",
    "parity": "--losses fastclip-v3 neuclip --batch-size 8 --dim 8 -m 16 --num-samples 50 --steps 2",
    "precision": "--batch-size 8 -m 16 --dim 4 --taus 0.07 0.01",
    "rows": "--rows 100 1000 --batch-size 8",
    "step_time": "--losses fastclip-v3 drrho-clip --batch-size 4 --num-samples 50 --precision amp_bf16",
    "end_to_end": "--losses fastclip-v3 --samples 48 --batch-size 2 --rounds 1 --workers 0",
}
SLOW = ("end_to_end", "loss", "operations", "step_time")
ROWS = {"loss": 10, "network": 1, "operations": 6, "parity": 4, "precision": 2, "rows": 2, "step_time": 2}
ROWS["end_to_end"] = 2


def numbers(value) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SMALL])
def test_a_benchmark_runs(name, tmp_path, monkeypatch, capsys):
    path = tmp_path / "results.json"
    flags = [*SMALL[name].split(), "--device", "cpu", "--threads", "1", "--seconds", "0", "--json", str(path)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
    runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
    written = json.loads(path.read_text())
    assert {"device", "threads", "torch", "tf32"} == written["machine"].keys()
    assert len(written["results"]) == ROWS[name]
    for result in written["results"]:
        assert all(math.isfinite(number) and number >= 0 for number in numbers(result)), result
        for summary in (result, *(value for value in result.values() if isinstance(value, dict))):
            if "base_seconds" in summary:
                assert summary["ratio"] == pytest.approx(summary["seconds"] / summary["base_seconds"])
                low, high = summary["quartiles"]
                assert low <= high
        assert all(value > 0 for key, value in result.items() if key.endswith("bytes"))
    assert len(capsys.readouterr().out.strip().splitlines()) >= ROWS[name] + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch, name, operations, megabytes",
    [
        (64, "clip-chunked", 75, 5), (64, "queue", 225, 40),
        (512, "fastclip-v3", 160, 50), (512, "neuclip", 620, 90),
        (4096, "fastclip-v3", 320, 600), (4096, "neuclip", 960, 720),
    ],
)  # fmt: skip
def test_a_step_on_eight_gpus_asks_for_no_more(batch, name, operations, megabytes):
    """The launches of a step, and its memory beyond the features."""
    from operations import at

    (found,) = at(8, batch, 512, 4096, 1_000_000, [name])
    assert found["operations"] <= operations and found["MB"] <= megabytes, found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
def test_saving(tmp_path):
    flags = ["--rows", "100000", "--processes", "1", "2", "--losses", "fastclip-v3", "--json", "saving.json"]
    command = [sys.executable, str(ROOT / "benchmarks/saving.py"), *flags]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    results = json.loads((tmp_path / "saving.json").read_text())
    forms = [(result["processes"], result["form"]) for result in results]
    assert forms == [(1, "one file"), (1, "files"), (2, "one file"), (2, "files")]
    for result in results:
        assert 8 * 100_000 < result["file_bytes"] < 8 * 100_000 + 10_000  # two float32 a row
        assert result["save_seconds"] > 0 and result["resume_seconds"] > 0
        assert result["save_memory"] > 0 or result["form"] == "files"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
def test_startup(tmp_path):
    flags = ["--listed", "20", "--scanned", "10", "--samples", "20", "--json", "startup.json"]
    command = [sys.executable, str(ROOT / "benchmarks/startup.py"), *flags]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    results = json.loads((tmp_path / "startup.json").read_text())
    assert [result["rows"] for result in results] == [2_000] * 4 + [200] * 2
    assert ["Counting samples" in result["progress"] for result in results] == [True, False, False, False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes, batch, dim, m, faster",
    [(2, 128, 512, 4096, True), (2, 64, 512, 1024, False), (8, 16, 512, 2000, True), (8, 16, 512, 1500, False)],
)
def test_prototypes_are_split_where_a_step_is_counted_to_be_faster(processes, batch, dim, m, faster, monkeypatch):
    """At small batches, where but for the launches what is counted of the prototypes decides."""
    from operations import at

    monkeypatch.setattr(prototypes, "is_split_faster", lambda *given, **more: True)
    split, whole = at(processes, batch, dim, m, 1_000_000, ["neuclip", "neuclip, not split"])
    saved = 1e9 * (whole["GB"] - split["GB"]) / sharded.MEMORY
    monkeypatch.setattr(sharded, "LAUNCHES", 0.0)
    counted = sharded.is_split_faster(processes, m, dim, updates=10, pairs=processes * batch, has_kernels=False)
    assert (saved > 13 * sharded.COLLECTIVE) == counted == faster


GPU_PARTS = {  # and what the figures of each look like
    "parity": r"^ *fastclip-v3 .*e[-+]",
    "steps": r"^ *neuclip .*\d\.\d\d",
    "memory": r"^ViT-shapes-tiny +4 +neuclip .*\d\.\d\d",
    "loss": r"^ *queue .*\d\.\d\d",
    "kernels": r"^ *global .* True\n(.*\n)*.*\n *fastclip-v3, fused .*\d\.\d\d",
    "ahead": r"^ *fastclip-v3, fused .*\d\.\d\d.*\n *fastclip-v3, eager .*\d\.\d\d",
    "network": r"graph: RuntimeError: none was captured\n(.*\n)*^ *16 .* equal ",
    "trainings": r"^fastclip-v3 32 losses; unequal from none on none on\n.*-second 0 of .*\n.*-graph 0 of ",
    "loss_graph": r"^ *fastclip-v3, loss graph .*\d\.\d\d.*\n(.*\n)*.*fastclip-v3, loss graph .*\d\.\d\d",
    "processes": r"gloo, neuclip --npn-split:\n.* 8/8 loss \d",
    "icons": r"batch 16, fastclip-v3 --rho 6.5:\n.*Eval Epoch: 1 .*\d\.\d\d",
    "rows": r"^ *10,000 .*\d\.\d\d",
}


@pytest.mark.slow
@pytest.mark.parametrize("part", GPU_PARTS)
def test_the_script_for_a_gpu(part, tmp_path):
    """Each part shows its figures; at tiny sizes, on a CPU."""
    environment = {**os.environ, "TINY": "1", "PYTHON": sys.executable, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), part]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert re.search(GPU_PARTS[part], done.stdout, re.M), done.stdout
    assert any(tmp_path.iterdir())


@pytest.mark.parametrize("parts, failed", [(["rows", "parity"], 2), (["decide"], 2)])
def test_parts_of_the_script_that_fail_are_counted(parts, failed, tmp_path):
    """And do not stop the others; `decide` keeps all that they print."""
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), *parts]
    environment = {**os.environ, "TINY": "1", "PYTHON": "false", "OUT": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == failed == done.stdout.count(": failed\n"), done.stdout
    if parts == ["decide"]:
        assert {path.name for path in tmp_path.iterdir()} == {"decide.txt", "decide.tgz"}
        assert (tmp_path / "decide.txt").read_text() == done.stdout


@pytest.mark.slow
def test_what_is_sent_is_counted(tmp_path):
    path = tmp_path / "results.json"
    flags = ["--processes", "1", "2", "--batch-size", "4", "--dim", "8", "--prototypes", "8", "--rows", "100"]
    command = [sys.executable, str(ROOT / "benchmarks" / "communication.py"), *flags, "--json", str(path)]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    results = {(r["loss"], r["processes"]): r for r in json.loads(path.read_text()) if "loss" in r}
    assert results["clip", 1]["bytes"] == 0 and results["fastclip-v3", 1]["calls"] == 0
    assert 0 < results["fastclip-v3", 2]["bytes"] < results["clip", 2]["bytes"]


@pytest.mark.slow
def test_killed_trainings_end_equal(tmp_path):
    """One kill of each of two cases: a recovery, and two processes."""
    command = [sys.executable, str(ROOT / "benchmarks" / "kills.py"), "--kills", "2", "--cases", "4", "5"]
    shown = subprocess.check_output(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True)
    for line in shown.strip().splitlines()[-2:]:
        *_, kills, runs, equal = line.split()
        assert int(kills) == 1 and int(runs) == int(equal) >= 1


def test_a_call_is_timed_behind_a_kernel_that_sleeps_until_it_is_launched(monkeypatch):
    """A call's launch takes the host 15 ms and the device 2; one that waits for the device is told."""
    import measuring

    clock = {"host": 0.0, "device": 0.0}

    def run(host: float, device: float) -> None:
        clock["host"] += host
        clock["device"] = max(clock.values()) + device

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = max(clock.values())

        def query(self):
            return clock["host"] >= self.at

        def synchronize(self):
            clock["host"] = max(clock["host"], self.at)

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(measuring.torch.cuda, "Event", Event)
    monkeypatch.setattr(measuring.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(measuring.torch.cuda, "_sleep", lambda cycles: run(0.0, cycles / measuring.CYCLES))
    gpu = measuring.torch.device("cuda")
    assert measuring.ahead(lambda: run(0.015, 0.002), gpu) == pytest.approx(0.002)
    times = measuring.alternate({"one": lambda: run(0.015, 0.002)}, gpu, least=2, seconds=0.0, is_ahead=True)
    assert times["one"] == pytest.approx([0.002, 0.002])
    with pytest.raises(RuntimeError, match="waits for the GPU"):
        measuring.ahead(lambda: clock.update(host=max(clock.values())), gpu)
