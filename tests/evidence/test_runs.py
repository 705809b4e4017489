"""Which run comes next, what a run leaves behind, and the tables of its results."""

import json
import math
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from zero_shot_folder import write_zero_shot

# In place of a training: what it would leave in its folder.
TRAINING = """
mkdir -p {folder}/checkpoints
printf '{{"epoch": 1, "image_to_text_R@1": {r1}, "text_to_image_R@1": {r1}, "image_to_text_R@5": 0.5,
 "text_to_image_R@5": 0.5, "image_to_text_R@10": 0.5, "text_to_image_R@10": 0.5,
 "image_to_text_mean_rank": 2.0, "text_to_image_mean_rank": 2.0,
 "clip_val_loss": NaN}}' | tr -d '\\n' > {folder}/checkpoints/results.jsonl
echo '{{"stage": "train", "epoch": 0, "step": 1, "tau": 0.04}}' > {folder}/metrics.jsonl
echo '{{"stage": "train", "epoch": 0, "step": 2, "tau": 0.06}}' >> {folder}/metrics.jsonl
"""


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


def test_a_cell_with_data_flags_and_measures_of_its_own(evidence):
    grid, run, report = evidence
    ours = "folder: emoji, flags: '--pretrained {logs}/s{seed}.pt', measures: ['R@10, old'], beside: ['peak, MiB']"
    family = "comparisons: {kept: {cell: short, pairs: [[queue, clip]]}, main: {cell: main, pairs: [[queue, clip]]}}"
    text = Path("grid.yaml").read_text().replace("untuned: true", f"untuned: true, {ours}") + family
    Path("grid.yaml").write_text(text)
    small = grid.Grid(Path("grid.yaml"))
    one = grid.Run("short", "clip", 7, "--lr 1e-3")
    words = run.command(one, small.flags(one, {}), Namespace(data=Path("icons"), logs=Path("there")), False, False)
    told = dict(zip(words, words[1:], strict=False))
    assert told["--pretrained"] == "there/s7.pt" and told["--val-data"] == "icons/emoji/val-000000.tar"
    assert told["--train-data"].startswith("icons/emoji/train-")
    results = [
        line(cell="short", method=method, seed=seed, peak_mib=1000.0, **{"old_R@10": 10.0 + gain * seed})
        for method, gain in (("clip", 0), ("queue", 1))
        for seed in (1, 2, 3)
    ]
    # Differences 1, 2 and 3 points: 4.303 / sqrt(3) = 2.48.
    assert "| kept | `queue` - `clip` | 3, paired | +2.0 ± 2.5, p 0.0742 |" in report.declared(small, results)
    header = "| cell | run | seeds | R@10, old, % | peak, MiB |\n|---|---|---|---|---|\n"
    assert f"{header}| `short` | clip | 3 | 10.0 | 1,000 |" in report.scores(small, results)


def test_one_correction_over_all_measures(evidence):
    grid, _, report = evidence
    about = "cell: short, pairs: [[queue, clip], [never run, clip]]"
    families = f"comparisons: {{each: {{{about}}}, all: {{{about}, over measures: true}}}}"
    text = Path("grid.yaml").read_text().replace("untuned: true", "untuned: true, measures: [R@1, 'R@10, old']")
    Path("grid.yaml").write_text(text + families)
    results = [
        line(0.1 + gain * seed / 100, cell="short", method=method, seed=seed, **{"old_R@10": 10.0 + gain * (9 + seed)})
        for method, gain in (("clip", 0), ("queue", 1))
        for seed in (1, 2, 3)
    ]
    # Differences of 1, 2 and 3 points, and of 10, 11 and 12: t = 3.46 and 19.05, p = 0.0742 and 0.0027; times 2, or the
    # smaller times 4 and the larger times 3.
    told = report.declared(grid.Grid(Path("grid.yaml")), results)
    assert "| each | `queue` - `clip` | 3, paired | +2.0 ± 2.5, p 0.1484 | +11.0 ± 2.5, p 0.0055 |" in told
    assert "| all | `queue` - `clip` | 3, paired | +2.0 ± 2.5, p 0.2225 | +11.0 ± 2.5, p 0.0110 |" in told


def test_the_most_memory_is_that_of_the_run_itself(evidence):
    """This process has imported torch; the run has not."""
    _, run, _ = evidence
    process = subprocess.Popen(["sleep", "0.5"])
    _, _, peak = run.wait({process.pid: Namespace(process=process)})
    assert 0.1 < peak < 50


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
    two = report.paired(*({seed: line(value) for seed, value in enumerate(values[method][:2])} for method in values))
    assert report.difference(two) == "-1.5, 2 seeds"  # no interval
    assert Path("table.md").read_text() in text and Path("table.png").stat().st_size > 10_000
    # 17 % after two epochs of 3,200 samples, straight from 0: 10 % after 2 * 3,200 * 10 / 17.
    assert report.crossing(line(0.17, epochs=2), 10) == pytest.approx(2 * 3200 * 10 / 17)
    assert report.crossing(line(0.17, epochs=2), 20) is None
    assert report.paired({0: line(0.2)}, {0: line(0.1), 1: line(0.3)}) == (pytest.approx(10), None, 1)
    assert report.paired({0: line(0.2)}, {1: line(0.1)}) is None


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
