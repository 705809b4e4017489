"""The examples that run the command several times, at a size of seconds."""

import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import open_clip
import pytest
import torch
from tqdm import tqdm
from zero_shot_folder import write_zero_shot

import open_clip_ext

EXAMPLES = Path(__file__).parent.parent / "examples"
open_clip.add_model_config(open_clip_ext.MODEL_CONFIGS)


@pytest.fixture
def example(monkeypatch, tmp_path):
    """example(name, arguments): run its main in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))

    def call(name: str, arguments: list[str]):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        __import__(name).main()

    return call


def test_a_sheet_of_samples(example, monkeypatch, tmp_path):
    from make_shards import main as make_shards

    assert not make_shards("shapes --out shards --num-samples 6 --val-samples 0 --samples-per-shard 6".split())
    drawn = []
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import sheet

    monkeypatch.setattr(sheet, "draw", lambda samples, columns, path: drawn.extend(samples))
    example("sheet", ["shards/train-000000.tar", "--samples", "4"])
    assert len({caption for _, caption in drawn}) > 1 and all(image.size == drawn[0][0].size for image, _ in drawn)
    monkeypatch.undo()
    sheet.draw(drawn, 3, tmp_path / "sheet.png")
    assert len(drawn) == 4 and (tmp_path / "sheet.png").stat().st_size > 5_000


def test_the_demo_tells_what_it_compared(example, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    def train(runs, name, flags, epochs, size, script):
        loss, seed = name.split("-")
        recall = {"clip": 0.1, "minibatch": 0.2, "queue": 0.3}[loss] + int(seed) / 100
        lines = [
            {"epoch": e, "image_to_text_R@1": recall * e / epochs, "text_to_image_R@1": recall * e / epochs}
            for e in range(1, epochs + 1)
        ]
        folder = runs.logs / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints/results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs.bar.update(epochs * size)
        return folder

    monkeypatch.setattr(demo.Runs, "train", train)
    monkeypatch.setattr(demo, "make_data", lambda args: ({"train": "t", "test": "v"}, {"train": 7706, "test": 1000}))
    example("demo", ["--wheel", "icons.whl", "--seeds", "2"])
    told = capsys.readouterr().out
    assert "1,000 held-out icons" in told and "4 epochs of 7,706 icons at a batch of 32" in told
    # Five seeds, 5.6, 5.75, 6.6, 4.95, 6.35: mean 5.85, standard deviation 0.651, times 2.776 sqrt(1.2) is 1.98.
    assert "batch's own estimates  20.5 ± 1.3 (seeds 20.0, 21.0)     [3.9, 7.8]     10.9 ± " in told
    assert "the batch's own estimates by 2.8 ± 1.2 and above clip by 2.6 ± 1.5 (95 %)" in told
    assert "open_clip_ext.make_shards FOLDER --out SHARDS" in told.splitlines()[-1]
    assert Path("demo/curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_fine_tuning(example, tmp_path, capsys):
    torch.save(open_clip.create_model("ViT-shapes-tiny").state_dict(), tmp_path / "weights.pt")
    arguments = "--samples 128 --epochs 1 --osr-epochs 0.5 --seeds 1 --jobs 1 --pretrained weights.pt".split()
    arguments += ["--variants", "recovery + HGCL", "HGCL, table only"]
    example("finetune", arguments)
    results = json.loads(Path("finetune/results.json").read_text())
    assert list(results) == ["recovery + HGCL", "HGCL, table only"]
    assert [metrics["epoch"] for metrics in results["recovery + HGCL"][0]] == [0, 1]
    assert results["recovery + HGCL"][0][0] == results["HGCL, table only"][0][0]
    assert Path("finetune/curves.png").stat().st_size > 10_000
    assert "the pretrained model" in capsys.readouterr().out
    example("finetune", arguments)  # nothing runs again
    assert json.loads(Path("finetune/results.json").read_text()) == results
    with pytest.raises(SystemExit, match="other flags"):
        example("finetune", [*arguments, "--lr", "1e-3"])


def test_fine_tuning_pairs_its_seeds(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import finetune

    ends = {"clip": (0.5, 0.6, 0.7), "recovery + GCL": (0.6, 0.8, 1.0)}  # differences of 10, 20 and 30
    results = {
        variant: [[{"top1": value} for value in (0.9, 0.4, end)] for end in seeds] for variant, seeds in ends.items()
    }
    finetune.report(results, {"top1": "zero-shot, %"})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["last", "epoch", "80.0", "(20.0)"] in lines
    assert "recovery + GCL +20.0 ± 24.8".split() in lines and not any("clip +" in " ".join(line) for line in lines)


@pytest.mark.slow
def test_fine_tuning_on_icons(example, tmp_path):
    from make_shards import main as make_shards

    for name, size in (("mono", 8), ("emoji", 130)):
        arguments = f"shapes --out icons/{name} --num-samples {size} --val-samples 8 --samples-per-shard 100"
        assert not make_shards(arguments.split())
    Path("icons/emoji/val-000000.tar").rename("icons/emoji/test-000000.tar")
    write_zero_shot(tmp_path / "icons/mono/zeroshot-concepts")
    write_zero_shot(tmp_path / "icons/emoji/zeroshot-emoji")
    torch.save(open_clip.create_model("ViT-icons-tiny").state_dict(), "weights.pt")
    arguments = "--icons icons --epochs 1 --osr-epochs 1 --seeds 1 --jobs 1 --pretrained weights.pt".split()
    example("finetune", [*arguments, "--variants", "recovery + HGCL", "GCL, no recovery"])
    results = json.loads(Path("finetune/results.json").read_text())
    for (metrics,) in results.values():
        assert [one["epoch"] for one in metrics] == [0, 1]
        assert all(0 <= one["zeroshot-data-top1"] <= 1 and one["num_samples"] == 8 for one in metrics)
        assert all(0 <= one["zeroshot-emoji-top1"] <= 1 for one in metrics)
    flags = Path("finetune/logs/gcl-no-recovery-0.flags").read_text()
    assert "--train-data icons/emoji/train-{000000..000001}.tar --train-num-samples 130 " in flags


def test_pictures_in_a_folder_with_a_space(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import same_caption

    folder = tmp_path / "my data"
    folder.mkdir()
    (folder / "val.csv").touch()  # the pictures are there already
    flags = shlex.split(same_caption.write_pictures(folder, 1))
    assert flags == ["--train-data", f"{folder}/train.csv", "--val-data", f"{folder}/val.csv"]


def test_after_one_has_failed_no_other_run_begins(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from command import results_of

    begun = []
    ended = Event()

    def run(number):
        begun.append(number)
        if number == 1:
            sys.exit("run 1 failed")
        return number

    with pytest.raises(SystemExit, match="run 1 failed"), ThreadPoolExecutor(1) as pool:
        jobs = {number: pool.submit(run, number) for number in range(2)}
        jobs |= {number: pool.submit(ended.wait) for number in range(2, 40)}
        try:
            results_of(jobs)
        finally:
            ended.set()
    assert begun == [0, 1] and sum(job.cancelled() for job in jobs.values()) >= 37  # one may have begun
    with ThreadPoolExecutor(2) as pool:
        assert results_of({name: pool.submit(str, name) for name in range(3)}) == {0: "0", 1: "1", 2: "2"}


@pytest.mark.parametrize(
    "name, arguments, part",
    [
        ("demo", "--wheel icons.whl --folder full", "'full' has files, and not from this demo"),
        ("compare", "methods --seeds 0", "'0' is not an integer of at least 1"),
        ("finetune", "--icons full", "'full' has no emoji/sizes.json"),
        ("finetune", "--variants", "--variants: expected at least one argument"),
        ("sheet", "none.tar", "'none.tar' cannot be read"),
        ("plot", "full", "full: no metrics.jsonl"),
        ("plot", "full --out nowhere/curves.png", "--out: there is no folder 'nowhere'"),
        ("plot", "full --out curves.xyz", "--out: 'curves.xyz' does not end in .png"),
        ("plot", "recovering", "recovering: no step of the training has been logged yet"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(example, capsys, name, arguments, part):
    run = Path("full/logs/neuclip/epoch_30.pt")
    run.parent.mkdir(parents=True)
    run.write_text("a week's work")
    Path("recovering").mkdir()
    Path("recovering/metrics.jsonl").write_text('{"stage": "recovery", "epoch": 0, "step": 1, "steps": 2}\n')
    with pytest.raises(SystemExit) as ended:
        example(name, arguments.split())
    assert ended.value.code == 2 and part in capsys.readouterr().err.splitlines()[-1]
    assert run.read_text() == "a week's work"


def test_a_training_that_goes_on_is_not_begun_twice(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import fcntl

    from command import Runs

    with open(tmp_path / "x.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="x is still being trained in"):
            Runs(tmp_path, tqdm(disable=True)).train("x", "--loss clip", 1, 1)


def test_trainings_end_with_the_example(tmp_path):
    training = "import os, time; print(os.getpid(), file=open('pid', 'w'), flush=True); time.sleep(600)"
    (tmp_path / "several.py").write_text(
        f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n"
        "from concurrent.futures import ThreadPoolExecutor\nfrom pathlib import Path\nimport command\n"
        "command.end_with_trainings()\nwith ThreadPoolExecutor(1) as pool:\n"
        f"    job = pool.submit(command.run, [sys.executable, '-c', {training!r}], Path('x'), print)\n"
        "    command.results_of({0: job})\n"
    )
    several = subprocess.Popen([sys.executable, "several.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text().endswith("\n")):
        assert several.poll() is None
        time.sleep(0.05)
    several.terminate()
    assert "ended by SIGTERM" in several.communicate(timeout=600)[1] and several.returncode == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_comparison_pairs_its_seeds(monkeypatch):
    """Means, differences with Student's interval, and where a run crosses the level."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import compare

    def run(first, last, zero_shot, **more):
        def metrics(epoch, value):
            return {"epoch": epoch, "image_to_text_R@1": value - 0.1, "text_to_image_R@1": value + 0.1}

        return [metrics(1, first), metrics(2, last) | {"shapes-zeroshot-top1": zero_shot, "tau": 0.05, **more}]

    # Differences of 10, 20 and 30: mean 20, deviation 10, interval 4.303 * 10 / sqrt(3).
    runs = {"clip": [(0.2, 0.3), (0.2, 0.3), (0.3, 0.4)], "ours": [(0.2, 0.4), (0.4, 0.5), (0.1, 0.7)]}
    results = {
        compare.Cell(variant, 100, 8, seed): run(*ends, 0.9, **({"normalizer_mse": 2.0} if variant == "ours" else {}))
        for variant, seeds in runs.items()
        for seed, ends in enumerate(seeds)
    }
    lines = compare.table(results, 200).splitlines()[4:]
    assert lines == [
        "| 100 | 8 | clip | 23.3 | 43.3 | 90.0 |  | 0.050 | 30.0, 30.0, 40.0 |  |  | -, -, 1.5 |",
        "| 100 | 8 | ours | 43.3 | 63.3 | 90.0 | 2.00 | 0.050 | 40.0, 50.0, 70.0 | +20.0 ± 24.8 | +0.0 ± 0.0 "
        "| 1.8, 0.9, 1.4 |",
    ]
    # Without clip the first variant is the baseline; one seed has no interval.
    alone = {cell: epochs for cell, epochs in results.items() if cell.seed == 0}
    renamed = {compare.Cell("first" if cell.variant == "clip" else "ours", 100, 8, 0): alone[cell] for cell in alone}
    assert "R@1 - first" in (text := compare.table(renamed, 200)) and "| +10.0 | +0.0 |" in text


@pytest.mark.slow
def test_comparing(example):
    data = "--dataset-type shapes --train-num-samples {n} --val-num-samples 16"
    network = "neuclip"
    example(
        "compare",
        ["leverage", *"--jobs 1 --rows 96 --batches 8 --samples 192 --seeds 1".split()]
        + ["--data", data, "--flags", "--workers 0 --wd 0.3", "--variants", "clip", network],
    )
    runs = json.loads(Path("compare/leverage-small.json").read_text())
    assert [(run["variant"], run["n"], run["batch"]) for run in runs] == [("clip", 96, 8), (network, 96, 8)]
    assert runs[0]["epochs"][-1]["epoch"] == 2
    flags = Path("compare/logs/neuclip-n96-b8-s0.flags").read_text()
    assert flags.index("--wd 0.1") < flags.index("--wd 0.3")
    assert [path.name for path in Path("compare/logs").glob("*/checkpoints/*.pt")] == ["epoch_2.pt"] * 2
    assert "normalizer_mse" in runs[1]["epochs"][-1] and "normalizer_mse" not in runs[0]["epochs"][-1]
    text = Path("compare/leverage-small.md").read_text()
    assert f"| 96 | 8 | {network} |" in text and "leverage" in text
    assert Path("compare/leverage-small.png").stat().st_size > 10_000


def test_leverage_is_read_between_the_batches_of_clip(example):
    import compare

    def result(variant, batch, value):
        metrics = {"epoch": 1, "image_to_text_R@1": value, "text_to_image_R@1": value}
        return compare.Cell(variant, 100, batch, 0), [metrics]

    results = dict([
        result("clip", 8, 0.2), result("clip", 32, 0.4), result("clip", 128, 0.8),
        result("ours", 8, 0.3), result("ours", 32, 0.8), result("ours", 64, 0.9), result("ours", 4, 0.1),
    ])
    lines = compare.leverage(results).splitlines()[2:]
    assert lines == [
        "| ours | 4 | 10.0 | less than all |  |",
        "| ours | 8 | 30.0 | 16 | 2.0 |",
        "| ours | 32 | 80.0 | 128 | 4.0 |",
        "| ours | 64 | 90.0 | more than all |  |",
    ]


@pytest.mark.parametrize("cells", ["batches", "sizes", "many variants"])
def test_every_form_of_a_comparison_is_drawn(example, cells):
    import argparse

    import compare

    variants = [f"variant {number}" for number in range(15 if cells == "many variants" else 2)]
    rows, batches = ([100, 200] if cells == "sizes" else [100]), ([8] if cells == "many variants" else [8, 16])
    results = {}
    for number, variant in enumerate(variants):
        for n in rows:
            for batch in batches:
                epochs = [
                    {"epoch": epoch, "image_to_text_R@1": 0.01 * (number + epoch), "text_to_image_R@1": 0.5}
                    | ({"normalizer_mse": 2.0} if number else {})  # which not every method has
                    for epoch in (1, 2)
                ]
                for seed in (0, 1):
                    results[compare.Cell(variant, n, batch, seed)] = epochs
    compare.draw(results, argparse.Namespace(experiment="methods", size="small"), Path("drawn.png"))
    assert Path("drawn.png").stat().st_size > 10_000
    assert compare.table(results, 100).count("\n| ") == 1 + len(variants) * len(rows) * len(batches)


def test_curves(example, tmp_path, capsys):
    """Of a run with an evaluation before the first step, and of one without an estimator."""
    from open_clip_ext.metrics_file import MetricsFile

    for name in ("queue", "clip"):
        (tmp_path / name).mkdir()
        file = MetricsFile(tmp_path / name)
        for epoch in range(3):
            recalls = {"image_to_text_R@1": 0.1, "text_to_image_R@1": 0.2}
            pairs = {} if epoch == 1 else {"num_samples": 200}
            file.add({"stage": "eval", "epoch": epoch, "step": 0, **recalls, **pairs})
            for step in (1, 5):
                line = {"stage": "train", "epoch": epoch, "step": step, "steps": 5, "samples": 8 * (5 * epoch + step)}
                error = {"normalizer_mse": 0.5, "minibatch_mse": 0.7} if name == "queue" and step == 5 else {}
                file.add({**line, "tau": 0.05, "throughput": 100.0 * step, **error})
        file.close()
    example("plot", ["queue", "clip", "--out", "drawn.png"])
    assert capsys.readouterr().out == "drawn.png\n" and Path("drawn.png").stat().st_size > 10_000
    import plot

    found = plot.curves(plot.read_metrics("queue"))
    assert found["R@1"] == [(epoch * 0.04, pytest.approx(15.0)) for epoch in range(3)]
    assert found["chance"] == [(epoch * 0.04, 0.5) for epoch in (0, 2)]
    assert [error for _, error in found["R@1 standard error"]] == [pytest.approx(2.5, rel=0.05)] * 2
    assert found["error"] == [(pytest.approx(0.04 * epoch), 0.5) for epoch in (1, 2, 3)]
    assert [rate for _, rate in found["throughput"]] == [100, 300, 100, 300, 100, 500]
    # ImageNet is evaluated in every second epoch: the curve is that of the own classes alone.
    tops = [{"zeroshot-data-top1": 0.9}, {"zeroshot-data-top1": 0.9, "imagenet-zeroshot-val-top1": 0.1}]
    lines = [{"stage": "eval", "epoch": epoch, "step": 0, **tops[epoch % 2]} for epoch in range(4)]
    assert [value for _, value in plot.curves(lines)["top1"]] == [90.0] * 4
    resumed = [line for line in plot.read_metrics("queue") if line["epoch"] == 2]
    assert plot.curves(resumed)["R@1"] == [(pytest.approx(0.08), pytest.approx(15.0))]


def test_odd_names_of_runs_are_in_the_legend(example, monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    line = {"stage": "train", "epoch": 0, "step": 1, "steps": 5, "samples": 8, "throughput": 1.0}
    Path("metrics.jsonl").write_text(json.dumps({**line, "tau": 0.05}))
    for name in ("_under", "a $5 run"):
        Path(name).mkdir()
        Path(name, "metrics.jsonl").write_text(json.dumps(line))
    legends = []
    legend = Figure.legend
    monkeypatch.setattr(Figure, "legend", lambda *args, **kwargs: legends.append(legend(*args, **kwargs)))
    example("plot", ["_under", "a $5 run/metrics.jsonl", ".", "--out", "drawn.png"])
    texts = [text.get_text().replace("\\$", "$").strip() for text in legends[0].get_texts()]
    assert texts == ["_under", "a $5 run", tmp_path.name]


def test_a_sheet_shows_what_cannot_be_decoded(example, tmp_path, capsys):
    import webdataset

    with webdataset.TarWriter("odd.tar") as tar:
        tar.write({"__key__": "bad", "png": b"no image", "txt": "costs $5 and \\frac{ $6"})
        tar.write({"__key__": "without a caption", "png": b"no image"})
    example("sheet", ["odd.tar"])
    assert Path("sheet.png").stat().st_size > 1_000 and "'bad'" in capsys.readouterr().err
