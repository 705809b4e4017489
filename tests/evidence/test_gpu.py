"""Trainings with their data on a device, on the CPU."""

import io
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch

import open_clip_ext

FLAGS = "--model ViT-icons-tiny --precision fp32 --wd 0.1 --epochs 2 --batch-size 16 --warmup 2 --lr 1e-3"


def random_pairs() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    arrays = {}
    for split, size in (("train", 70), ("val", 10), ("test", 10)):
        arrays[f"{split}_images"] = generator.integers(0, 256, (size, 32, 32), dtype=np.uint8)
        arrays[f"{split}_tokens"] = generator.integers(1, 1000, (size, 24)).astype(np.uint16)
    arrays |= {"zeroshot_images": arrays["test_images"], "zeroshot_labels": np.arange(10)}
    return arrays | {"zeroshot_tokens": np.stack([arrays["test_tokens"]] * 2, axis=1)}


def test_losses_share_start_and_order(evidence):
    """By seed; the temperature has its own rate, and 70 pairs are four steps of 16 in each of two epochs."""
    import gpu_training

    open_clip.add_model_config(open_clip_ext.MODEL_CONFIGS)
    data = {name: torch.from_numpy(array.astype(np.int64)) for name, array in random_pairs().items()}
    starts, orders = [], []
    for flags in ("clip-chunked --seed 0", "queue --queue-size 32 --lr-tau 0.1 --seed 0", "clip-chunked --seed 1"):
        training = gpu_training.Training(data, gpu_training.settings(f"{FLAGS} --loss {flags}"), graphs=False)
        starts.append(training.towers.model.visual.proj.detach().clone())
        orders.append([])
        forward = training.forward
        training.forward = lambda rows, forward=forward, order=orders[-1]: order.append(rows.clone()) or forward(rows)
        torch.manual_seed(len(orders))  # which neither start nor order depends on
        taus = [1 / float(scale) for scale in training.run()]
        # Adam's first step is its rate, in the warm-up's first of two steps half of it.
        rate = 0.1 if "lr-tau" in flags else 1e-3
        assert len(taus) == 8 and abs(np.log(taus[1] / taus[0])) == pytest.approx(rate / 2, rel=1e-2)
        assert 0 <= gpu_training.accuracy(training.towers, data) <= 1
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])
    assert all(map(torch.equal, orders[0], orders[1])) and not torch.equal(orders[0][0], orders[2][0])
    assert len(torch.cat(orders[0][:4]).unique()) == 64 and not torch.equal(orders[0][0], orders[0][4])


@pytest.mark.slow
def test_runs_beside_each_other(evidence):
    """Tuning first, then its choice; a training that fails is told and leaves no line; no time, no run."""
    stream = io.BytesIO()
    np.savez(stream, **random_pairs())
    Path("data.xz").write_bytes(lzma.compress(stream.getvalue(), preset=0))
    cells = "tune: {rows: 70, shards: 1, epochs: 1, gallery: val}, gpu: {rows: 70, shards: 1, epochs: 1, gallery: test}"
    clip, queue = ("{flags: --loss %s --batch-size 16, step_ms: 100, candidates: [--lr 1e-9, --lr 2e-2]}",
                   "{flags: --loss queue --batch-size 16 --queue-size 8, step_ms: 100, chosen: --lr 1e-3}")
    Path("gpu.yaml").write_text(
        f"recipe: --model ViT-icons-tiny --precision fp32 --wd 0.1\nbatch: 16\nwarmup: 2\ncells: {{{cells}}}\n"
        f"methods: {{clip: {clip % 'clip-chunked'}, queue: {queue}}}\n"
        "order: [{cell: tune, methods: [clip], seeds: [9]}, {cell: gpu, methods: [clip, queue], seeds: [0]}]\n"
    )
    script = Path(__file__).parents[2] / "examples" / "evidence" / "gpu.py"
    words = "--data data.xz --grid gpu.yaml --results gpu.jsonl --workers 2 --device cpu --commit abc --seconds"
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2])}

    def run(seconds: str) -> str:
        command = [sys.executable, str(script), *words.split(), seconds]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert "4 of 4 runs have no result; 0 were cut" in run("0.001") and not Path("gpu.jsonl").exists()
    told = run("300")
    assert "queue_size: 8 holds nothing beside a global batch of 16" in told and "1 of 4 runs have no result" in told
    lines = [json.loads(line) for line in Path("gpu.jsonl").read_text().splitlines()]
    assert sorted(line["run"] for line in lines[:2]) == ["tune-clip-lr-1e-9-s9", "tune-clip-lr-2e-2-s9"]
    grid, _, report = evidence
    best = max(lines[:2], key=grid.tuning_value)
    assert (lines[2]["run"], lines[2]["candidate"], lines[2]["commit"]) == ("gpu-clip-s0", best["candidate"], "abc")
    assert 0 < lines[2]["tau"] < 0.1 and 0 <= report.MEASURES["zero-shot, characters"](lines[2]) <= 100
