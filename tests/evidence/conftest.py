"""The scripts of examples/evidence, which import one another by their own names."""

import signal
import sys
from pathlib import Path

import pytest

EVIDENCE = Path(__file__).parents[2] / "examples" / "evidence"
MODULES = ("grid", "run", "report", "gallery", "interpolate", "xbm", "gpu", "gpu_training")
GRID = """
recipe: --model ViT-shapes-tiny --device cpu --precision fp32 --workers 0 --batch-size 8 --log-every-n-steps 1
batch: 8
warmup: 2
cells:
  tune: {rows: 16, shards: 1, epochs: 1, gallery: val}
  main: {rows: 16, shards: 1, epochs: 2, gallery: val}
  short: {rows: 16, shards: 1, epochs: 2, gallery: val, untuned: true}
  plain: {rows: 16, shards: 1, epochs: 2, gallery: val, compiled: false}
methods:
  clip: {flags: --loss clip, tau: learned, step_ms: 3600000, untuned: --lr 2e-3, candidates: [--lr 1e-3, --lr 2e-3]}
  queue: {flags: --loss queue, tau: learned, step_ms: 3600000, candidates: [--lr 1e-3]}
order:
  - {cell: tune, methods: [clip], seeds: [100]}
  - {cell: main, methods: [clip], seeds: [0]}
  - {cell: tune, methods: [queue], seeds: [100]}
  - {cell: main, methods: [queue, clip], seeds: [0, 1]}
  - {cell: short, methods: [clip], seeds: [0]}
  - {cell: plain, methods: [clip], seeds: [0]}
"""


@pytest.fixture
def evidence(monkeypatch, tmp_path):
    """The modules grid, run and report, and a small grid in an empty folder."""
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(EVIDENCE))
    monkeypatch.setenv("PYTHONPATH", str(EVIDENCE.parents[1]))
    monkeypatch.chdir(tmp_path)
    Path("grid.yaml").write_text(GRID)
    Path("sizes.json").write_text("{}")
    import grid
    import report
    import run

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield grid, run, report
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name in MODULES:
        sys.modules.pop(name, None)
