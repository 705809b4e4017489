"""examples/evidence: which run comes next, what a run leaves behind, and the intervals."""

import io
import json
import math
import re
import signal
import sys
from argparse import Namespace
from pathlib import Path
from statistics import mean

import pytest
import torch
from PIL import Image
from zero_shot_folder import write_zero_shot

EVIDENCE = Path(__file__).parent.parent / "examples" / "evidence"
MODULES = ("grid", "run", "report", "gallery", "interpolate", "xbm")
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
# In place of a training: what it would leave in its folder.
TRAINING = """
mkdir -p {folder}/checkpoints
printf '{{"epoch": 1, "image_to_text_R@1": {r1}, "text_to_image_R@1": {r1}, "image_to_text_R@5": 0.5,
 "text_to_image_R@5": 0.5, "image_to_text_R@10": 0.5, "text_to_image_R@10": 0.5,
 "clip_val_loss": NaN}}' | tr -d '\\n' > {folder}/checkpoints/results.jsonl
echo '{{"stage": "train", "epoch": 0, "step": 1, "tau": 0.04}}' > {folder}/metrics.jsonl
echo '{{"stage": "train", "epoch": 0, "step": 2, "tau": 0.06}}' >> {folder}/metrics.jsonl
"""


@pytest.fixture
def evidence(monkeypatch, tmp_path):
    """The modules grid, run and report, and a small grid in an empty folder."""
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(EVIDENCE))
    monkeypatch.setenv("PYTHONPATH", str(EVIDENCE.parent.parent))
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


def call(module, monkeypatch, arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--grid", "grid.yaml", "--results", "results.jsonl", *arguments.split()])
    module.main()


def line(recall: float = 0.1, epochs: int = 1, **more) -> dict:
    """A result; R@1 grows by the same in each epoch."""
    names = [f"{way}_R@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5)]
    metrics = [{**dict.fromkeys(names, recall * e / epochs), "epoch": e} for e in range(1, epochs + 1)]
    about = {"rows": 3200, "diverged": None, "tau": 0.05, "zero_shot": {}, "cpu_seconds": 3600, "wall_seconds": 60}
    return {"by_epoch": metrics, "candidate": "--lr 1e-3", **about, **more}


def test_order_and_choice(evidence):
    grid, _, _ = evidence
    small = grid.Grid(Path("grid.yaml"))
    results, begun = {}, set()
    first = small.next_run(results, begun, None, 100)
    second = small.next_run(results, {first}, None, 100)
    assert [first.name, second.name] == ["tune-clip-lr-1e-3-s100", "tune-clip-lr-2e-3-s100"]
    # clip is not tuned yet, so queue's tuning comes before clip's seed 0.
    assert small.next_run(results, {first, second}, None, 100).name == "tune-queue-lr-1e-3-s100"
    results = {first.name: line(0.1), second.name: line(0.2)}
    main = small.next_run(results, set(), None, 100)
    assert main.name == "main-clip-s0" and "--epochs 2" in small.flags(main, results)
    assert small.flags(main, results).endswith("--warmup 2 --seed 0 --loss clip --lr 2e-3")
    results[first.name]["by_epoch"][-1].update({"image_to_text_R@5": 0.5, "text_to_image_R@5": 0.5})
    assert small.chosen(main, results) == "--lr 1e-3"  # R@1 and R@5 together decide
    results[first.name] = line(0.1)
    results[second.name]["diverged"] = "step 3: the loss is not finite"
    assert small.chosen(main, results) == "--lr 1e-3"
    assert small.next_run(results, set(), "queue", 100).method == "queue"
    # 16 rows are half a step of 32 pairs, an hour each: the main run does not fit, the tuning run does.
    assert small.next_run(results, set(), None, 0.6).name == "tune-queue-lr-1e-3-s100"
    assert small.next_run(results, set(), None, 0.4) is None
    assert small.next_run(results, set(), None, 100, ["plain"]).name == "plain-clip-s0"


def test_a_gallery_of_icons_that_no_run_has_used(evidence, monkeypatch):
    """Of 5 new images one is a near duplicate of a training row, one of an earlier one, and one has a caption again."""
    import gallery
    from webdataset import TarWriter

    data = Path("data")
    data.mkdir()
    image = {shade: Image.new("RGB", (32, 32), (shade, 100, 200)) for shade in (0, 64, 70, 128, 160, 192)}
    image[192].putpixel((0, 0), (0, 0, 0))
    shards = [[(0, "a")], [(255, "b")], [(1, "c"), (64, "d"), (70, "e"), (128, "d"), (160, "f"), (192, "a")]]
    image[1], image[255] = image[0].copy(), Image.new("RGB", (32, 32))
    image[1].putpixel((3, 3), (30, 110, 200))
    for number, shard in enumerate(shards):
        with TarWriter(str(data / f"train-{number:06}.tar"), encoder=False) as tar:
            for shade, caption in shard:
                buffer = io.BytesIO()
                image[shade].save(buffer, "png")
                tar.write({"__key__": f"set_{shade}", "png": buffer.getvalue(), "txt": caption.encode()})
    cells = "cells: {isolation: {shards: 1, gallery: fresh/gallery}, large: {shards: 2}}"
    Path("cells.yaml").write_text(f"{cells}\nrecipe: x\nbatch: 1\nwarmup: 0\nmethods: {{}}\norder: []\n")
    monkeypatch.setattr(sys, "argv", ["", "--data", "data", "--grid", "cells.yaml", "--samples", "3"])
    gallery.main()
    found = list(gallery.samples(data / "fresh" / "gallery-000000.tar"))
    assert [sample["__key__"] for sample in found] == ["set_64", "set_160", "set_192"]
    assert json.loads((data / "fresh" / "sizes.json").read_text()) == {"gallery-000000.tar": 3}
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "4"])
    with pytest.raises(SystemExit, match="2"):
        gallery.main()


def test_a_torn_last_line_is_dropped_and_replaced(evidence):
    grid, _, _ = evidence
    path = Path("results.jsonl")
    assert grid.read_results(path) == {}
    grid.append_result(path, {"run": "a"})
    path.write_text(path.read_text() + '{"run": "b", "ta')
    assert list(grid.read_results(path)) == ["a"]
    grid.append_result(path, {"run": "c"})
    assert path.read_text() == '{"run": "a"}\n{"run": "c"}\n'


def test_runs_leave_one_line_each_and_do_not_run_again(evidence, monkeypatch, capsys):
    _, run, _ = evidence
    begun = []

    def command(one, flags, args, resumed, compiled):
        begun.append((one.name, resumed))
        r1 = 0.2 if one.candidate == "--lr 2e-3" else 0.1
        return ["sh", "-c", TRAINING.format(folder=args.logs / one.name, r1=r1)]

    monkeypatch.setattr(run, "command", command)
    monkeypatch.setattr(run, "zero_shot", lambda grid, checkpoint, data: {})
    Path("evidence-logs/tune-queue-lr-1e-3-s100").mkdir(parents=True)  # of an interrupted run
    call(run, monkeypatch, "--data . --jobs 2 --torchcompile")
    lines = [json.loads(text) for text in Path("results.jsonl").read_text().splitlines()]
    (same,) = [result for result in lines if result["run"].startswith("short")]
    lines.remove(same)
    assert len(begun) == 8 and sorted(name for name, _ in begun) == sorted(result["run"] for result in lines)
    assert [name for name, resumed in begun if resumed] == ["tune-queue-lr-1e-3-s100"]
    results = {result["run"]: result for result in lines}
    assert results["tune-queue-lr-1e-3-s100"]["wall_seconds"] is None
    one = results["main-clip-s1"]
    copied = {"run": "short-clip-lr-2e-3-s0", "cell": "short", "same_as": "main-clip-s0"}
    assert same == {**results["main-clip-s0"], **copied}
    assert one["candidate"] == "--lr 2e-3" and one["tau"] == 0.05 and one["seed"] == 1 and one["compiled"]
    # The same flags as main's, not compiled as its cell says.
    assert results["plain-clip-s0"]["flags"] == results["main-clip-s0"]["flags"]
    assert not results["plain-clip-s0"]["compiled"] and "same_as" not in results["plain-clip-s0"]
    assert one["by_epoch"][0]["clip_val_loss"] is None and one["cpu_seconds"] < 5
    assert "{data}/train-{000000..000000}.tar" in one["flags"]  # no path of this machine
    call(run, monkeypatch, "--data . --jobs 2 --torchcompile")
    assert len(begun) == 8
    assert "0.0 h left" in capsys.readouterr().out


def test_a_row_names_the_commit_that_pip_installed(evidence, monkeypatch, tmp_path):
    _, run, _ = evidence
    folder = tmp_path / "open_clip_ext-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: open-clip-ext\nVersion: 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run.commit() is None
    for origin, commit in (({"vcs_info": {"vcs": "git", "commit_id": "abc"}}, "abc"), ({"dir_info": {}}, None)):
        (folder / "direct_url.json").write_text(json.dumps({"url": "file:///clone", **origin}))
        assert run.commit() == commit


def test_a_run_that_diverges_is_a_result_and_one_that_fails_is_not(evidence, monkeypatch):
    _, run, _ = evidence
    message = "open_clip_ext: error: step 30: the loss is not finite; training cannot go on from here"

    def command(one, flags, args, resumed, compiled):
        text = message if one.candidate == "--lr 1e-3" else "No space left"
        folder = args.logs / one.name
        return ["sh", "-c", f"mkdir -p {folder}; touch {folder}/out.log; echo '{text}'; exit 2"]

    monkeypatch.setattr(run, "command", command)
    with pytest.raises(SystemExit, match="No space left\n\ntune-clip-lr-2e-3-s100 ended with code 2"):
        call(run, monkeypatch, "--data .")
    (result,) = map(json.loads, Path("results.jsonl").read_text().splitlines())
    assert result["diverged"].startswith("step 30") and result["tau"] is None and result["by_epoch"] == []


def test_a_run_that_another_command_has_is_left_to_it(evidence, monkeypatch, capsys):
    import fcntl

    _, run, _ = evidence
    Path("evidence-logs").mkdir()
    monkeypatch.setattr(run, "command", lambda *_: pytest.fail("it began"))
    with open("evidence-logs/tune-queue-lr-1e-3-s100.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        call(run, monkeypatch, "--data . --only queue")
    assert capsys.readouterr().out.startswith("tune-queue-lr-1e-3-s100 still goes on elsewhere")


def test_a_training_that_outlives_its_command_is_not_begun_twice(evidence, monkeypatch):
    grid, run, _ = evidence
    args = Namespace(logs=Path("."))
    monkeypatch.setattr(run, "command", lambda *_: ["sleep", "60"])
    one = grid.Run("main", "clip", 0)
    started = run.start(one, "flags", args, False)
    started.lock.close()  # as when the command is killed
    assert run.start(one, "flags", args, False) is None
    started.process.kill()
    started.process.wait()
    with pytest.raises(SystemExit, match="main-clip-s0 has begun with other flags"):
        run.start(one, "other flags", args, False)


def test_paired_interval_and_crossing(evidence, monkeypatch, capsys):
    grid, _, report = evidence
    # Differences 1, 2 and 6 points: mean 3, standard deviation sqrt(7), t 4.303: 4.303 * sqrt(7 / 3) = 6.573.
    values = {"clip": (0.10, 0.12, 0.11), "queue": (0.11, 0.14, 0.17)}
    for method, recalls in values.items():
        for seed, value in enumerate(recalls):
            concepts = {"zeroshot-concepts": 0.2 - value}
            about = {"run": f"{method}{seed}", "cell": "main", "method": method, "seed": seed}
            one = line(value, epochs=2, zero_shot=concepts, **about)
            grid.append_result(Path("results.jsonl"), one)
    tried = line(0.1, run="t", cell="tune", method="queue", seed=100, candidate="--lr 7e-3")
    grid.append_result(Path("results.jsonl"), tried)
    monkeypatch.setattr(report, "PAIRS", (("queue", "clip"),))
    call(report, monkeypatch, "--out table")
    text = capsys.readouterr().out
    # 5 runs of 1 step of 32 samples, an hour each; the results above have other names.
    assert "| `main` | 16 | 2 | 2 | 0 of 5 | 5.0 |" in text
    assert "| +3.0 ± 6.6, 3 seeds | 6.0 | -3.0 ± 6.6, 3 seeds |" in text
    # t = 3 / sqrt(7 / 3) with 2 degrees of freedom: p = 1 - t / sqrt(2 + t^2) = 0.1885, twice by Holm's correction.
    assert "| `queue` - `clip` | +3.0 ± 6.6, 3 seeds | 0.3770 | -3.0 ± 6.6, 3 seeds | 0.3770 |" in text
    # With 3 degrees of freedom: p = 1 - 2 / pi (a + sin a cos a) with tan a = t / sqrt(3); t^2 is 15 and 1200.
    angles = [math.atan(math.sqrt(square / 3)) for square in (15, 1200)]
    less, more = (1 - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle)) for angle in angles)
    assert report.p_values([[1, 2, 3, 4], [9.5, 10.5, 10.5, 9.5]]) == pytest.approx([less, 2 * more])
    assert "`--lr 7e-3` | **10.0** | 10.0 |" in text
    assert Path("table.md").read_text() in text and Path("table.png").stat().st_size > 10_000
    # 17 % after two epochs of 3,200 samples, straight from 0: 10 % after 2 * 3,200 * 10 / 17.
    assert report.crossing(line(0.17, epochs=2), 10) == pytest.approx(2 * 3200 * 10 / 17)
    assert report.crossing(line(0.17, epochs=2), 20) is None
    assert report.paired({0: line(0.2)}, {0: line(0.1), 1: line(0.3)}) == (pytest.approx(10), None, 1)
    assert report.paired({0: line(0.2)}, {1: line(0.1)}) is None


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading of a page."""
    section = (EVIDENCE.parent.parent / "docs" / page).read_text().split(f"{heading}\n", 1)[1]
    rows = re.split(r"^\|[-|]+\|$", section, maxsplit=1, flags=re.MULTILINE)[1].lstrip("\n").split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]


def main_runs(grid, report) -> tuple:
    declared, results = grid.Grid(EVIDENCE / "grid.yaml"), grid.read_results(EVIDENCE / "results.jsonl").values()
    return declared, report.by_method(list(results), declared, "main")


def test_the_pages_differences_follow_from_the_results(evidence):
    grid, _, report = evidence
    rows = report.goals(*main_runs(grid, report)).replace(", 5 seeds", "").splitlines()
    told = [row for row in rows if "±" in row]
    assert [f"| {' | '.join(row)} |" for row in table("evidence/icons.md", "## Differences")] == told


def test_the_pages_scores_follow_from_the_results(evidence):
    """R@1, zero-shot accuracy, both by seed, and tau."""
    grid, _, report = evidence
    _, runs = main_runs(grid, report)
    methods = ("clip", "neuclip", "fastclip-v3", report.BY_RULE, "minibatch", "queue, unified", "cyclip")
    rows = table("evidence/icons.md", "# Icons: each method with its tuned flags")
    for method, (_, flags, recall, zero_shot, by_seed, tau, _) in zip(methods, rows, strict=True):
        seeds = [runs[method][seed] for seed in sorted(runs[method])]
        assert set(seeds[0]["candidate"].split()) <= set(flags.strip("`").split())
        values = [[value(run) for run in seeds] for value in (report.last_recall, report.concepts)]
        assert [recall, zero_shot] == [f"{mean(each):.1f}" for each in values], method
        assert by_seed == "; ".join(", ".join(f"{one:.1f}" for one in each) for each in values), method
        assert tau == f"{mean(run['tau'] for run in seeds):.3f}", method


def test_the_batch_sizes_scores_follow_from_the_results(evidence):
    grid, _, report = evidence
    _, runs = main_runs(grid, report)
    methods = ("clip", "clip, batch 128", "clip, batch 256", "neuclip", "queue, unified", "neuclip, batch 128")
    for method, row in zip(methods, table("evidence/batch-size.md", "# Icons: batch size"), strict=True):
        seeds = range(5 if "seeds 0 to 4" in row[0] else 2)
        for text, value in ((row[3], report.last_recall), (row[5], report.concepts)):
            assert text == ", ".join(f"{value(runs[method][seed]):.1f}" for seed in seeds), method


def test_sentences_of_readme_and_results_follow_from_the_results(evidence):
    grid, _, report = evidence
    _, runs = main_runs(grid, report)
    readme, results = ((EVIDENCE.parent.parent / page).read_text() for page in ("README.md", "docs/results.md"))
    pairs = ("neuclip", "clip"), ("queue, unified", "clip"), ("neuclip, batch 128", "clip, batch 256")
    for ours, theirs in pairs:
        value, half, n = report.paired(runs[ours], runs[theirs])
        assert n == 5 and all(f"{value:.1f} ± {half:.1f}" in page for page in (readme, results)), ours
    value, half, _ = report.paired(runs["clip, batch 256"], runs["clip"])
    assert f"{value:.1f} ± {half:.1f}" in results
    for ours, theirs in report.PAIRS:
        if len(runs[ours].keys() & runs[theirs].keys()) == 5 and "queue" not in ours and ours != "minibatch":
            told = [report.paired(runs[ours], runs[theirs], value) for value in (report.last_recall, report.concepts)]
            row = "; ".join(f"{value:+.1f} ± {half:.1f}" for value, half, _ in told)
            assert row in results or (ours, theirs) == (report.BY_RULE, "fastclip-v3"), (ours, theirs)


def test_what_the_pages_admit_follows_from_the_grid(evidence):
    """Runs that never ran, rows without a commit, compiled ones, the run that was given up, and the lead by length."""
    grid, _, report = evidence
    declared, runs = main_runs(grid, report)
    results = grid.read_results(EVIDENCE / "results.jsonl")
    missing = [run for run in declared.runs if run.name not in results]
    assert (len(missing), len(declared.runs)) == (61, 200) and len(results) == 139
    assert {run.method for run in missing} >= {"dcl", "queue, tau 0.03"}
    assert not any(one.get("commit") for one in results.values())
    assert sum(bool(one.get("compiled")) for one in results.values()) == 17
    half, short, long = (report.by_method(list(results.values()), declared, cell) for cell in ("half", "short", "long"))
    leads = [report.paired(short["neuclip"], half["clip"]), report.paired(runs["neuclip"], runs["clip"]),
             report.paired(long["neuclip"], long["clip"])]
    assert [(f"{value:.1f}", seeds) for value, _, seeds in leads] == [("0.6", 2), ("4.8", 5), ("7.0", 1)]
    given_up = runs["queue, compositional"][0]
    names = ("docs/evidence/icons.md", "docs/results.md")
    pages = [" ".join((EVIDENCE.parent.parent / name).read_text().split()) for name in names]
    assert f"seed 0: {report.last_recall(given_up):.1f}; {report.concepts(given_up):.1f}" in pages[0]
    assert "its lead is 0.6, 4.8 and 7.0 after 4, 8 and 16" in pages[0] and "61 of 200 runs never ran" in pages[0]
    methods = ("clip, accum 4", "clip", "neuclip")
    recalls = [mean(report.last_recall(short[method][seed]) for seed in (0, 1)) for method in methods]
    assert "R@1 {:.1f}, where `clip` has {:.1f} at 32 and `neuclip` {:.1f} (two seeds)".format(*recalls) in pages[1]
    seconds = [short[method][1]["cpu_seconds"] for method in methods]
    assert [f"{time / seconds[1]:.1f}" for time in seconds] == ["1.1", "1.0", "1.4"]


def test_the_smaller_grids_tables_follow_from_the_results(evidence):
    grid, _, report = evidence
    declared = grid.Grid(EVIDENCE / "small.yaml")
    results = list(grid.read_results(EVIDENCE / "small.jsonl").values())
    page = (EVIDENCE.parent.parent / "docs/evidence/small.md").read_text()
    assert {one["commit"] for one in results} == {results[0]["commit"]} and not any(one["compiled"] for one in results)
    for text in (report.scores(declared, results), report.declared(declared, results)):
        assert text.strip() in page
    hours = sum(one["cpu_seconds"] or 0 for one in results) / 3600
    assert f"declares {len(declared.runs)} runs; {len(results)} ran, in {hours:.1f} hours" in page
    runs = report.by_method(results, declared, "replication")
    told = " ".join((EVIDENCE.parent.parent / "docs/results.md").read_text().split())
    for other in ("cyclip", "fastclip-v3", "amorlip", "neuclip", "dcl", "clip"):
        both = (runs["queue, consistency"], runs[other])
        of_both = ([report.last_recall(one[seed]) for seed in sorted(one)] for one in both)
        value, half, _ = report.tested(*of_both, other != "clip")
        assert f"{value:.1f} ± {half:.1f}" in told.partition("eight fresh seeds")[2], other
    runs = report.by_method(results, declared, "isolation")
    value, half, seeds = report.paired(runs["queue, tau 0.03"], runs["control, tau 0.03"])
    for name in ("README.md", "docs/results.md"):
        assert seeds == 5 and f"{value:.1f} ± {half:.1f}" in (EVIDENCE.parent.parent / name).read_text()
    runs, clip = report.by_method(results, declared, "rules"), "clip, seeded order"
    names = ("evidence/small", "results", "neighbours")
    pages = {name: " ".join((EVIDENCE.parent.parent / f"docs/{name}.md").read_text().split()) for name in names}
    for ours, theirs, names in (
        ("queue", clip, ("evidence/small", "results")),
        ("queue, consistency", clip, ("evidence/small",)),
        ("neuclip, mixing", clip, ("evidence/small",)),
        ("fastclip-v3, gamma 1", clip, ("evidence/small",)),
        ("queue, consistency", "fastclip-v3, gamma 1", ("results",)),
        ("queue, consistency", "neuclip, mixing", ("results",)),
        ("queue", "xbm, later", ("evidence/small", "neighbours")),
        ("xbm, later", clip, ("evidence/small", "neighbours")),
    ):
        value, half, _ = report.paired(runs[ours], runs[theirs])
        assert all(f"{abs(value):.1f} ± {half:.1f}" in pages[name] for name in names), (ours, theirs, value, half)
    sets = [("isolation", "clip"), ("main", "clip"), ("replication", "clip"), ("rules", clip)]
    leads = []
    for cell, theirs in sets:
        runs = report.by_method(results, declared, cell)
        recalls = [mean(map(report.last_recall, runs[method].values())) for method in ("queue", theirs)]
        leads = sorted([*leads, recalls[0] - recalls[1]])
    assert f"by {leads[0]:.1f} to {leads[-1]:.1f} in four sets of seeds" in pages["results"]
    larger = report.by_method(results, declared, "batch")
    at32 = list(map(report.last_recall, report.by_method(results, declared, "main")["clip"].values()))
    for batch, pages in ((256, ("README.md", "docs/results.md", "docs/settings.md")), (128, ("docs/results.md",))):
        at_larger = list(map(report.last_recall, larger[f"clip, batch {batch}"].values()))
        value, half, _ = report.tested(at32, at_larger, False)
        for name in (*pages, "docs/evidence/small.md"):
            assert f"{value:.1f} ± {half:.1f}" in (EVIDENCE.parent.parent / name).read_text(), (batch, name)


def test_declared_comparisons_by_hand(evidence):
    """Paired by seed, and Welch's where the order differs; Holm's correction counts what did not run."""
    _, _, report = evidence
    ours, theirs = [5.0, 6.0, 7.0, 6.0, 6.0], [4.0, 4.0, 6.0, 5.0, 5.0]
    difference, half, p = report.tested(ours, theirs, True)
    assert difference == pytest.approx(1.2) and half == pytest.approx(2.776 * math.sqrt(0.2 / 5), rel=1e-3) and p < 0.01
    difference, half, p = report.tested(ours, theirs, False)
    assert difference == pytest.approx(1.2) and half == pytest.approx(2.31 * math.sqrt(0.24), rel=5e-3)  # 7.8 degrees
    assert report.holm([0.01, 0.03], 4) == pytest.approx([0.04, 0.09]) and report.holm([0.5]) == [0.5]


def test_the_control_with_queued_negatives(evidence):
    """XBM: OpenCLIP's loss at first, then the softmax over the batch and the latest pairs; kept in the state."""
    import xbm
    from open_clip.loss import ClipLoss

    pairs = torch.nn.functional.normalize(torch.randn(2, 6, 4, generator=torch.manual_seed(0)), dim=2)
    first, second = pairs[:, :3].requires_grad_(), pairs[:, 3:]
    scale, loss = torch.tensor(10.0), xbm.XBM(xbm_size=2)
    torch.testing.assert_close(loss(*first, scale), ClipLoss()(*first, scale))
    again = xbm.XBM(xbm_size=2)
    again.load_full_state(loss.full_state())
    image, text = (10 * mine @ torch.cat([of[3:], of[1:3]]).T for mine, of in zip(second, pairs.flip(0), strict=True))
    expected = (torch.logsumexp(both, dim=1) - both.diagonal() for both in (image, text))
    torch.testing.assert_close(again(*second, scale), sum(expected).mean() / 2)
    later = xbm.XBM(xbm_size=2, xbm_start=1)
    later.set_epoch(0)
    torch.testing.assert_close([later(*batch, scale) for batch in (first, second)][1], ClipLoss()(*second, scale))


def test_a_run_against_the_best_interpolation_of_another(evidence):
    """Between two shares the line counts, and at least as much of the new kind is asked for."""
    import interpolate

    clip = [(0.0, 30.0), (10.0, 28.0), (20.0, 20.0), (24.0, 10.0)]
    assert interpolate.best_old(clip, 15.0) == 24.0
    assert interpolate.best_old(clip, 10.0) == 28.0
    bent = [(0.0, 30.0), (20.0, 20.0), (15.0, 26.0)]  # more of both at the last share than on the line
    assert interpolate.best_old(bent, 12.0) == 26.0
    ends = [(15.0, 25.0), (10.0, 27.0)]
    curves = {"clip": {0: clip, 1: clip}, "recovery + GCL": {seed: [(0.0, 30.0), end] for seed, end in enumerate(ends)}}
    assert interpolate.differences(curves, "recovery + GCL") == [1.0, -1.0]


def test_the_interpolations_table_follows_from_the_scores(evidence):
    import interpolate

    page = (EVIDENCE.parent.parent / "docs/evidence/fine-tuning.md").read_text()
    curves = interpolate.read_curves(EVIDENCE / "interpolated.jsonl")
    *table, gcl, hgcl = interpolate.report(curves)
    assert len(table) == 8 and "\n".join(table) in page
    page = " ".join(page.split())
    for variant, told in (("recovery + GCL", "3.8 ± 0.7"), ("recovery + HGCL", "-0.8 ± 1.1")):
        kept = [curves[variant][seed][-1][1] - curves["clip"][seed][-1][1] for seed in range(3)]
        assert told in interpolate.shown(kept) and told in page
    assert "-0.0 ± 1.8 (p 0.953; by seed -0.3, +0.8, -0.6)" in gcl and "0.0 ± 1.8 (-0.3, +0.8 and -0.6 by seed)" in page
    assert "-8.8 ± 0.4 (p 0.000; by seed -8.7, -8.9, -8.6)" in hgcl
    assert "8.8 ± 0.4 below (-8.7, -8.9 and -8.6 by seed)" in page


@pytest.mark.slow
def test_a_real_run(evidence, monkeypatch, tmp_path):
    _, run, _ = evidence
    from make_shards import main as make_shards

    arguments = f"shapes --out {tmp_path}/data --num-samples 16 --val-samples 8 --samples-per-shard 16"
    assert not make_shards(arguments.split())
    write_zero_shot(tmp_path / "data" / "zeroshot-concepts")
    call(run, monkeypatch, "--data data --only queue")
    lines = [json.loads(text) for text in Path("results.jsonl").read_text().splitlines()]
    assert [one["run"] for one in lines] == ["tune-queue-lr-1e-3-s100", "main-queue-s0", "main-queue-s1"]
    assert [metrics["epoch"] for metrics in lines[1]["by_epoch"]] == [1, 2]
    assert 0.05 < lines[1]["tau"] < 0.08 and lines[1]["cpu_seconds"] > 1
    assert lines[0]["zero_shot"] == {}
    assert round(3 * lines[1]["zero_shot"]["zeroshot-concepts"], 6) in (0, 1, 2, 3)
